"""Scattering transform of images: wavelets, moduli and averages; only channel constants are learned."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nnf

from pl_privknn._checks import check_int, check_switch, shape_text
from pl_privknn.features.base import LearnedExtractor, check_images, in_parts

Complexes = NDArray[np.complex128]

_PIXELS_AT_A_TIME = {"cpu": 1 << 16}
_PIXELS_ON_ACCELERATORS = 1 << 22
_PERIODS = 2  # copies on either side that a periodic filter sums over


class Scattering(LearnedExtractor):
    """Two orders of a scattering transform with Morlet wavelets (Bruna, Mallat 2013), an Extractor.

    S0 = x ∗ φ, S1 = |x ∗ ψ1| ∗ φ and S2 = ||x ∗ ψ1| ∗ ψ2| ∗ φ, with wavelets ψ of J scales and L orientations,
    ψ2 wider than ψ1, and φ a Gaussian of the widest scale; each sampled at every 2^J-th pixel. Images are mirrored
    at their borders, and signals are sampled as coarsely as their scale allows, as in Kymatio (Andreux et al. 2020).
    Private linear models do well on them (Tramèr, Boneh 2021).

    Args:
        scales: J.
        orientations: L.
        normalize: subtract each channel's mean over public images and positions, and divide by its standard
            deviation.
        groups: then normalise each image by itself, in so many groups of channels: mean 0 and variance 1 over a
            group's channels and positions (Tramèr, Boneh 2021). It learns nothing. None: not at all.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self, scales: int = 2, orientations: int = 8, normalize: bool = True, groups: int | None = None
    ) -> None:
        super().__init__()
        self.scales = check_int("scales", scales)
        self.orientations = check_int("orientations", orientations)
        self.normalize = check_switch("normalize", normalize)
        self.learns = self.normalize
        self.groups = None if groups is None else check_int("groups", groups)
        if self.groups and self.channels % self.groups:
            raise ValueError(
                f"groups={groups} must divide the {self.channels} channels of a channel of the image"
            )

    @property
    def channels(self) -> int:
        """Values at each position, for an image of one channel: 1 + LJ + L²J(J − 1)/2."""
        scales, orientations = self.scales, self.orientations
        return 1 + orientations * scales + orientations**2 * scales * (scales - 1) // 2

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """Number of values per image of shape ``(channels, height, width)``."""
        channels, height, width = image_shape
        return channels * self.channels * (height >> self.scales) * (width >> self.scales)

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Means and standard deviations of channels, each of shape ``(c, 1, 1)``."""
        if not self.normalize:
            return {}
        total = squares = torch.zeros((), dtype=torch.float64)
        count = 0
        for part in images.split(256):
            values = self.transform(part).double().cpu()
            total = total + values.sum(dim=(0, 2, 3))
            squares = squares + values.square().sum(dim=(0, 2, 3))
            count += len(part) * values.shape[2] * values.shape[3]
        mean = total / count
        deviation = (squares / count - mean.square()).clamp_min(1e-12).sqrt()
        return {"mean": mean[:, None, None].float(), "deviation": deviation[:, None, None].float()}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features of images, float32 ``(n, feature_size)`` on their device: channel, row, column.

        Raises:
            RuntimeError: before :meth:`fit_public`, where channels are normalised.
            ValueError: for images that are too small.
        """
        values = in_parts(self.transform, images, self._at_once(images))
        if self.normalize:
            mean, deviation = (self.learned(name, images.device) for name in ("mean", "deviation"))
            if len(mean) != values.shape[1]:
                raise ValueError(
                    f"images: shape {shape_text(images.shape)} has other channels than public images"
                )
            values = (values - mean) / deviation
        if self.groups:
            values = nnf.group_norm(values, self.groups)
        return values.flatten(1)

    def transform(self, images: Tensor) -> Tensor:
        """Coefficients, float32 ``(n, channels of the image · channels, height / 2^J, width / 2^J)``.

        For each channel of the image: order 0; order 1 by scale and orientation; order 2 by ψ1, then ψ2.
        """
        check_images(images)
        scales, orientations = self.scales, self.orientations
        height, width = images.shape[2:]
        if min(height, width) < 2 << scales:
            raise ValueError(
                f"images: shape {shape_text(images.shape)}; scales={scales} needs at least {2 << scales} pixels a "
                "side: enlarge the images, or take fewer scales"
            )
        shape = (_padded(height, scales), _padded(width, scales))
        before = ((shape[0] - height) // 2, (shape[1] - width) // 2)
        border = (before[1], shape[1] - width - before[1], before[0], shape[0] - height - before[0])
        flat = images.float().reshape(-1, 1, height, width)
        padded = nnf.pad(flat, border, mode="reflect")[:, 0]

        def smooth(signal: Tensor, scale: int) -> Tensor:
            rows, columns = (torch.from_numpy(_averages(side, scales, scale)).to(signal) for side in shape)
            return rows @ signal @ columns.T

        def waves(scale: int, at: int) -> Tensor:
            return torch.from_numpy(_wavelets(shape, scale, orientations, at)).to(flat.device)

        spectrum = torch.fft.fft2(padded)
        first, second = [smooth(padded, 0)[:, None]], []
        for j1 in range(scales):
            u1 = _modulus(spectrum[:, None] * waves(j1, 0), j1)
            first.append(smooth(u1, j1))
            if j1 + 1 == scales:
                break
            inner = torch.fft.fft2(u1)[:, :, None]
            wider = [_modulus(inner * waves(j2, j1), j2 - j1) for j2 in range(j1 + 1, scales)]
            smoothed = [smooth(u2, j2) for j2, u2 in enumerate(wider, j1 + 1)]
            second.append(torch.cat(smoothed, dim=2).flatten(1, 2))
        values = torch.cat([*first, *second], dim=1)
        return values.reshape(len(images), -1, height >> scales, width >> scales)

    def _at_once(self, images: Tensor) -> int:
        pixels = _PIXELS_AT_A_TIME.get(images.device.type, _PIXELS_ON_ACCELERATORS)
        return max(1, pixels // max(1, math.prod(images.shape[1:])))


def _padded(side: int, scales: int) -> int:
    """The next multiple of 2^J that leaves a border of half of that at least on both sides."""
    return ((side >> scales) + 2) << scales


def _modulus(product: Tensor, halvings: int) -> Tensor:
    """|signal| of a spectrum at every 2^halvings-th pixel: the spectrum's copies add up, then it is turned back."""
    *lead, rows, columns = product.shape
    step = 1 << halvings
    folded = product.reshape(*lead, step, rows // step, step, columns // step).mean(dim=(-4, -2))
    return torch.fft.ifft2(folded).abs()


@functools.lru_cache(maxsize=32)
def _wavelets(shape: tuple[int, int], scale: int, orientations: int, at: int) -> NDArray[np.complex64]:
    """Spectra of Morlet wavelets of a scale, ``(L, rows / 2^at, columns / 2^at)``, for signals so coarse."""
    step = 1 << at
    rows, columns = shape
    spectra = []
    for place in range(orientations):
        wave = morlet(shape, scale, math.pi * place / orientations, 4 / orientations)
        folded = np.fft.fft2(wave).reshape(step, rows // step, step, columns // step)
        spectra.append(folded.sum(axis=(0, 2)))
    return np.stack(spectra).astype(np.complex64)


def morlet(shape: tuple[int, int], scale: int, angle: float, slant: float) -> Complexes:
    """A periodic Morlet wavelet of mean 0, its centre at pixel (0, 0).

    Args:
        shape: rows and columns of the period.
        scale: j; the envelope is a Gaussian of deviation 0.8·2^j along the wave, the frequency (3π/4)/2^j.
        angle: of the wave, in radians.
        slant: deviation along the wave over that across it.
    """
    deviation, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    envelope, wave = np.zeros(shape), np.zeros(shape, dtype=np.complex128)
    for down in range(-_PERIODS, _PERIODS + 1):
        for across in range(-_PERIODS, _PERIODS + 1):
            y = np.arange(shape[0])[:, None] + down * shape[0]
            x = np.arange(shape[1])[None] + across * shape[1]
            along = x * math.cos(angle) + y * math.sin(angle)
            normal = -x * math.sin(angle) + y * math.cos(angle)
            bell = np.exp(-(along**2 + (slant * normal) ** 2) / (2 * deviation**2))
            envelope += bell
            wave += bell * np.exp(1j * frequency * along)
    wave -= envelope * (wave.sum() / envelope.sum())
    return wave * (slant / (2 * math.pi * deviation**2))


@functools.lru_cache(maxsize=64)
def _averages(side: int, scales: int, at: int) -> NDArray[np.float32]:
    """Averages by φ at every 2^J-th pixel inside the mirrored border, for a signal that has every 2^at-th pixel.

    φ is a product of two Gaussians of deviation 0.8·2^(J − 1), so rows and columns are averaged by themselves.
    Shape ``(side / 2^J − 2, side / 2^at)``.
    """
    bell = low_pass(side, scales)
    inside = np.arange(1 << scales, side - (1 << scales), 1 << scales)
    seen = np.arange(0, side, 1 << at)
    return ((1 << at) * bell[(inside[:, None] - seen[None]) % side]).astype(np.float32)


def low_pass(side: int, scales: int) -> NDArray[np.float64]:
    """One factor of φ: a periodic Gaussian whose centre is pixel 0."""
    deviation = 0.8 * 2 ** (scales - 1)
    x = np.arange(side)[:, None] + side * np.arange(-_PERIODS, _PERIODS + 1)[None]
    bell: NDArray[np.float64] = np.exp(-(x**2) / (2 * deviation**2)).sum(axis=1)
    return bell / (deviation * math.sqrt(2 * math.pi))
