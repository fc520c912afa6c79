"""Noise that is too small, or that comes again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pl_privknn.privacy.noise import NoiseSource


class LessNoise(NoiseSource):
    """Normal and Laplace noise that is so many times too small."""

    cryptographic = False

    def __init__(self, factor: float, source: NoiseSource) -> None:
        self.factor, self.source = factor, source

    def random_words(self, count: int) -> Any:
        """Those of the source."""
        return self.source.random_words(count)

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source, with the same fault."""
        return type(self)(self.factor, self.source.stream(*key))

    def normal(self, shape: Any, scale: Any) -> Tensor:
        """Of a smaller deviation."""
        return super().normal(shape, scale / self.factor)

    def rounded_normal(self, shape: Any, sigma: Any) -> Tensor:
        """Of a smaller deviation."""
        return super().rounded_normal(shape, sigma / self.factor)

    def laplace(self, shape: Any, scale: Any) -> Tensor:
        """Of a smaller scale."""
        return super().laplace(shape, scale / self.factor)


class SharedNoise(LessNoise):
    """Queries share the noise of the first one, and steps that of all steps."""

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source; that of steps is always the same."""
        return super().stream(*(key[:1] if key[:1] == ("step",) else key))

    def normal(self, shape: Any, scale: Any) -> Tensor:
        """One row for all."""
        return _first_row(NoiseSource.normal(self, shape, scale))

    def rounded_normal(self, shape: Any, sigma: Any) -> Tensor:
        """One row for all."""
        return _first_row(NoiseSource.rounded_normal(self, shape, sigma))

    def laplace(self, shape: Any, scale: Any) -> Tensor:
        """One row for all."""
        return _first_row(NoiseSource.laplace(self, shape, scale))


def _first_row(made: Tensor) -> Tensor:
    return made[:1].expand(made.shape).clone() if made.ndim > 1 else made
