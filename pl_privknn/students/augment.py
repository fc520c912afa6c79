"""Augmentations of image batches, weak and strong."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pl_privknn._checks import check_finite, check_int


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


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


#: Operations of :class:`StrongAugmentation`.
OPERATIONS = ("identity", "rotate", "shear_x", "shear_y", "translate_x", "translate_y")


@dataclasses.dataclass(frozen=True)
class WeakAugmentation:
    """Weak augmentation: shifts by whole pixels, and optionally horizontal flips and cutout.

    Args:
        shift: largest shift in either direction, as a fraction of the side, and at least one pixel where it
            isn't 0. (FixMatch has 0.125 for photographs; centred objects want less.)
        flip: mirror half of the images. Off unless asked for: it turns digits and letters into others.
        fill: value of pixels from outside the image.
        cutout: side of the square that is cut out of each image, around a random pixel, as a fraction of the
            longer side; 0 cuts nothing.
        cutout_fill: value of pixels in that square, for instance the mean of public images; ``fill`` if None.

    Raises:
        ValueError: if ``shift``, ``fill``, ``cutout`` or ``cutout_fill`` lies outside [0, 1].

    Example:
        >>> import torch
        >>> from pl_privknn.students import WeakAugmentation
        >>> WeakAugmentation(flip=True)(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 1, 8, 8])
    """

    shift: float = 0.04
    flip: bool = False
    fill: float = 0.0
    cutout: float = 0.0
    cutout_fill: float | None = None

    def __post_init__(self) -> None:
        for name in ("shift", "fill", "cutout"):
            _check_unit(name, getattr(self, name))
        if self.cutout_fill is not None:
            _check_unit("cutout_fill", self.cutout_fill)

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augmented copies of ``images``, float ``(n, channels, height, width)`` in [0, 1].

        Args:
            images: the batch; not changed.
            generator: source of randomness; torch's default one for the batch's device if None.
        """
        if images.ndim != 4:
            raise ValueError(
                f"images: shape {tuple(images.shape)}; expected (n, channels, height, width), whose pixels "
                "move: leave augmentation out for vectors"
            )
        draws = _uniform((3, len(images)), images, generator)
        height, width = images.shape[-2:]
        dx, dy = (
            ((2 * reach + 1) * draw).floor().long() - reach
            for reach, draw in ((self._reach(width), draws[0]), (self._reach(height), draws[1]))
        )
        moved = shift(images, dx, dy, self.fill)
        if self.flip:
            moved = flip(moved, draws[2] < 0.5)
        if not self.cutout:
            return moved
        x, y = _uniform((2, len(images)), images, generator)
        # About the middle of a pixel, or between two, so that each square has as many pixels.
        side = max(1, round(self.cutout * max(height, width)))
        middle = 0.5 * (side % 2)
        size = torch.full_like(x, side)
        fill = self.fill if self.cutout_fill is None else self.cutout_fill
        return cut_out(moved, (x * width).floor() + middle, (y * height).floor() + middle, size, fill)

    def _reach(self, side: int) -> int:
        return max(1, int(self.shift * side)) if self.shift else 0


@dataclasses.dataclass(frozen=True)
class StrongAugmentation:
    """Strong augmentation: a weak one, then operations drawn for each example as in RandAugment, then cutout.

    Each example draws ``num_ops`` operations (with replacement) out of :data:`OPERATIONS`, each with a level of its
    own, uniform up to ``magnitude`` as in FixMatch (Sohn et al. 2020). For photographs that paper has
    ``magnitude=1``, ``cutout=0.5`` and ``shift=0.125``; the milder defaults here served better on small grey images.
    The operations of an example are joined into one warp, so that pixels are interpolated once. None mirrors or turns
    by more than 30 degrees.

    Args:
        num_ops: operations for each example.
        magnitude: scale of all levels, in [0, 1]; at 1 rotations reach 30 degrees, shears 0.3, translations
            0.3 of the side.
        cutout: largest side of the square that is cut out, as a fraction of the longer side; 0 cuts nothing.
        shift: see :class:`WeakAugmentation`.
        flip: see :class:`WeakAugmentation`.
        fill: value of pixels from outside the image and of the square.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import StrongAugmentation
        >>> StrongAugmentation(flip=True)(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 1, 8, 8])
    """

    num_ops: int = 2
    magnitude: float = 0.5
    cutout: float = 0.25
    shift: float = 0.04
    flip: bool = False
    fill: float = 0.0

    def __post_init__(self) -> None:
        check_int("num_ops", self.num_ops, 0)
        _check_unit("magnitude", self.magnitude)
        _check_unit("cutout", self.cutout)
        WeakAugmentation(self.shift, self.flip, self.fill)

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augmented copies of ``images``, float ``(n, channels, height, width)`` in [0, 1].

        Args:
            images: the batch; not changed.
            generator: source of randomness; torch's default one for the batch's device if None.
        """
        images = WeakAugmentation(self.shift, self.flip, self.fill)(images, generator)
        height, width = images.shape[-2:]
        matrices = torch.eye(3, device=images.device, dtype=images.dtype).repeat(len(images), 1, 1)
        for _ in range(self.num_ops):
            draws = _uniform((2, len(images)), images, generator)
            drawn = (draws[0] * len(OPERATIONS)).long().clamp(max=len(OPERATIONS) - 1)
            level = self.magnitude * (2 * draws[1] - 1)
            levels = {name: level * (drawn == number) for number, name in enumerate(OPERATIONS)}
            matrices = _matrices(levels, height, width) @ matrices
        images = warp(images, matrices[:, :2], self.fill)
        if not self.cutout:
            return images
        draws = _uniform((3, len(images)), images, generator)
        size = self.cutout * max(height, width) * draws[2]
        return cut_out(images, draws[0] * width, draws[1] * height, size, self.fill)


def _matrices(levels: dict[str, Tensor], height: int, width: int) -> Tensor:
    """Affine matrix, 3×3, of each example's operation: at most one of its levels isn't zero."""
    angle = levels["rotate"] * math.radians(30)
    cos, sin = angle.cos(), angle.sin()
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    rows = (
        (cos, 0.3 * levels["shear_x"] - sin, 0.3 * width * levels["translate_x"]),
        (0.3 * levels["shear_y"] + sin, cos, 0.3 * height * levels["translate_y"]),
        (zero, zero, one),
    )
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def _uniform(shape: tuple[int, ...], images: Tensor, generator: torch.Generator | None) -> Tensor:
    device = images.device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=device).to(images.device)


def _check_unit(name: str, value: float) -> None:
    if not 0 <= check_finite(name, value) <= 1:
        raise ValueError(f"{name}={value!r} must lie in [0, 1]")
