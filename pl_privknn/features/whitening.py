"""Linear transformation of features learned from public examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_int, check_non_negative

_TINY = 1e-9
# Wider features than this have their directions found by random projections; narrower ones by eigh, exactly.
_WIDE = 2048
_OVERSAMPLED = 50
# Singular values below this share of the largest one can't be told from products in double precision.
_RESOLVED = 1e-5


class PublicWhitening(nn.Module):
    """Centre features, project on leading principal directions, equalise these, and scale rows to unit length.

    Mean and directions come from public examples, so they cost no privacy. Fewer and levelled directions help
    noisy SGD, whose noise grows with the number of weights: a linear model on HOG features of Fashion-MNIST at
    ε = 0.1 gains two to three points of accuracy by it.

    Args:
        in_features: width of the features.
        components: how many directions to keep; None only centres.
        power: each kept direction is divided by its standard deviation to this power: 0 leaves principal
            components as they are, 1 whitens them in full.

    Raises:
        ValueError: for arguments out of range.
    """

    mean: Tensor
    directions: Tensor
    fitted: Tensor

    def __init__(self, in_features: int, components: int | None = None, power: float = 0.5) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.components = None if components is None else check_int("components", components)
        if self.components is not None and self.components > self.in_features:
            raise ValueError(
                f"components={components} must be at most the width of the features, {in_features}"
            )
        self.power = check_non_negative("power", power)
        width = self.components or 0
        self.register_buffer("mean", torch.zeros(self.in_features))
        self.register_buffer("directions", torch.zeros(self.in_features, width))
        self.register_buffer("fitted", torch.tensor(False))

    @property
    def out_features(self) -> int:
        """Width of the result."""
        return self.components or self.in_features

    @torch.no_grad()
    def fit(self, public: Tensor) -> PublicWhitening:
        """Learn from public features, shape ``(m, in_features)``; returns itself.

        Raises:
            ValueError: if the shape differs, or there are fewer than ``components`` examples.
        """
        if public.ndim != 2 or public.shape[1] != self.in_features or len(public) < 1:
            raise ValueError(
                f"public: shape {tuple(public.shape)}; expected (m, {self.in_features}) with m ≥ 1"
            )
        if self.components is not None and self.components > len(public):
            raise ValueError(
                f"components={self.components} needs at least as many public examples, there are {len(public)}"
            )
        values = public.to(self.mean.device)
        mean = values.mean(dim=0, dtype=torch.float64)
        self.mean.copy_(mean)
        if self.components is not None:
            if self.in_features > _WIDE:
                kept, variances = leading_directions((values - mean).float(), self.components)
                variances = variances.square() / len(values)
            else:
                centred = values - mean
                variances, vectors = torch.linalg.eigh(centred.T @ centred / len(values))
                kept = vectors.flip(1)[:, : self.components]
                variances = variances.flip(0)[: self.components]
            # A sign is arbitrary and differs between machines; fixed, so that runs can be repeated.
            kept = kept * torch.where(kept.sum(dim=0) < 0, -1.0, 1.0)
            deviations = variances.clamp_min(0).sqrt()
            floor = _TINY + 1e-3 * float(deviations[0])
            self.directions.copy_(kept / deviations.clamp_min(floor) ** self.power)
        self.fitted.fill_(True)
        return self

    def forward(self, features: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, out_features)``; a row depends on its own features alone.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        if not torch.compiler.is_compiling() and not bool(self.fitted):  # an export follows no values
            raise RuntimeError("PublicWhitening must learn from public features first: call fit(public)")
        centred = features.to(self.mean.device, self.mean.dtype) - self.mean
        if self.components is not None:
            centred = centred @ self.directions
        return centred / centred.norm(dim=1, keepdim=True).clamp_min(_TINY)


def leading_directions(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Right singular vectors ``(d, count)`` of the largest singular values, and these, ``(count,)``; always the same.

    By random projections (Halko, Martinsson, Tropp 2011) where few of many are wanted, by all otherwise. Each
    vector's largest entry is positive.
    """
    wanted = count + _OVERSAMPLED
    if 4 * wanted > min(values.shape):
        scales, found = _by_products(values, count)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, scales, found = torch.svd_lowrank(values.cpu(), wanted, niter=4)
    found, scales = found[:, :count], scales[:count]
    largest = found.gather(0, found.abs().argmax(dim=0, keepdim=True))
    return (found * largest.sign()).to(values), scales.to(values)


def _by_products(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest singular values and their right vectors, by an eigendecomposition: a tenth of the time of an SVD.

    Squares lose half of the digits, so that directions of next to no variance are left to the SVD.
    """
    wide = values.shape[1] > len(values)
    exact = (values if wide else values.T).double()
    squares, vectors = torch.linalg.eigh(exact @ exact.T)
    scales, vectors = squares.clamp_min(0).sqrt().flip(0)[:count], vectors.flip(1)[:, :count]
    if not bool((scales > _RESOLVED * scales[0]).all()):
        _, scales, transposed = torch.linalg.svd(values, full_matrices=False)
        return scales, transposed.T
    return scales, exact.T @ vectors / scales if wide else vectors
