"""Image operations on a batch, each example with a parameter of its own.

Images are float ``(n, channels, height, width)`` in [0, 1], parameters have shape ``(n,)``, results stay in
[0, 1]. The photometric operations are those of AutoAugment and RandAugment (Cubuk et al. 2019, 2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def warp(images: Tensor, matrices: Tensor, fill: float = 0.0) -> Tensor:
    """Affine warp with one matrix for each example, bilinear.

    Args:
        images: the batch.
        matrices: ``(n, 2, 3)``, from output to input, in units of pixels from the centre (x right, y down).
        fill: value outside the image.
    """
    height, width = images.shape[-2:]
    half = torch.tensor([width / 2, height / 2], device=images.device, dtype=images.dtype)
    # 16-bit matrix products, which autocast would choose here, would move images by whole pixels.
    with torch.autocast(images.device.type, enabled=False):
        linear = matrices[:, :, :2] * half / half[:, None]
        theta = torch.cat([linear, (matrices[:, :, 2] / half).unsqueeze(2)], dim=2)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return (F.grid_sample(images - fill, grid, align_corners=False) + fill).clamp(0, 1)


def shift(images: Tensor, dx: Tensor, dy: Tensor, fill: float = 0.0) -> Tensor:
    """Move each image by whole pixels: content goes right by ``dx`` and down by ``dy`` (int64).

    Args:
        images: the batch.
        dx: pixels to the right.
        dy: pixels down.
        fill: value of pixels that come from outside the image.
    """
    moved = images
    for axis, offset in ((-1, dx), (-2, dy)):
        length = images.shape[axis]
        source = torch.arange(length, device=images.device) - offset.unsqueeze(1)
        inside = (source >= 0) & (source < length)
        shape = [len(images), 1, length, 1] if axis == -2 else [len(images), 1, 1, length]
        index = source.clamp(0, length - 1).view(shape).expand_as(moved)
        moved = torch.where(inside.view(shape), moved.gather(axis, index), fill)
    return moved


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Mirror left and right where ``flipped`` (bool)."""
    return torch.where(_per_image(flipped), images.flip(-1), images)


def cut_out(images: Tensor, x: Tensor, y: Tensor, size: Tensor, fill: float = 0.0) -> Tensor:
    """Fill a square of side ``size`` centred at (``x``, ``y``), in pixels (DeVries & Taylor 2017)."""
    height, width = images.shape[-2:]
    columns = torch.arange(width, device=images.device) + 0.5
    rows = torch.arange(height, device=images.device) + 0.5
    in_columns = (columns - x.unsqueeze(1)).abs() < size.unsqueeze(1) / 2
    in_rows = (rows - y.unsqueeze(1)).abs() < size.unsqueeze(1) / 2
    return torch.where((in_rows.unsqueeze(2) & in_columns.unsqueeze(1)).unsqueeze(1), fill, images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor``: 0 is black, 1 changes nothing."""
    return (images * _per_image(factor)).clamp(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey: factor 0 is that grey, 1 changes nothing."""
    return _blend(images, _grey(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image: factor 0 is grey, 1 changes nothing. Images without three channels stay."""
    return _blend(images, _grey(images), factor) if images.shape[1] == 3 else images


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a 3×3 smoothed image: factor 0 is smooth, 1 changes nothing. The outermost pixels stay."""
    channels, height, width = images.shape[1:]
    if min(height, width) < 3:
        return images
    kernel = torch.ones(3, 3, device=images.device, dtype=images.dtype)
    kernel[1, 1] = 5
    smooth = images.clone()
    with torch.autocast(images.device.type, enabled=False):
        weight = (kernel / kernel.sum()).expand(channels, 1, 3, 3)
        smooth[..., 1:-1, 1:-1] = F.conv2d(images, weight, groups=channels)
    return _blend(images, smooth, factor)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the ``bits`` highest bits (whole numbers from 1 to 8) of pixels as 8-bit numbers."""
    step = _per_image(2.0 ** (8 - bits))
    return ((images * 255).round() / step).floor() * step / 255


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least ``threshold``."""
    return torch.where(images >= _per_image(threshold), 1 - images, images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel of each image to [0, 1]; constant channels stay."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-12), images).clamp(0, 1)


def equalize(images: Tensor) -> Tensor:
    """Flatten the histogram of each channel of each image, as Pillow does on 8-bit pixels."""
    pixels = (images * 255).round().long().flatten(2)
    histogram = torch.zeros(*pixels.shape[:2], 256, device=images.device, dtype=torch.int64)
    histogram.scatter_add_(2, pixels, torch.ones_like(pixels))
    largest = pixels.amax(dim=2, keepdim=True)
    step = (pixels.shape[2] - histogram.gather(2, largest)) // 255
    below = histogram.cumsum(2) - histogram
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    equalized = table.gather(2, pixels).to(images.dtype).view_as(images) / 255
    return torch.where((step > 0).unsqueeze(3), equalized, images)


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    weight = _per_image(factor)
    return (images * weight + other * (1 - weight)).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images
    luma = torch.tensor([0.2989, 0.587, 0.114], device=images.device, dtype=images.dtype)
    return (images * luma.view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
