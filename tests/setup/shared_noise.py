"""A noise source that draws the same noise again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.faulty import LessNoise
from pl_privknn.privacy.noise import NoiseSource


def _shared(name: str) -> Any:
    """Draw with one row shared by all, also for queries that are answered one by one."""

    def drawn(self: SharedNoise, shape: Any, scale: Any) -> Tensor:
        made: Tensor = getattr(NoiseSource, name)(self, shape, scale)
        if made.ndim > 1:
            return made[:1].expand(made.shape).clone()
        if name != "normal":
            return made
        first: Tensor = self.first.setdefault(len(made), made / scale)
        return first * scale

    return drawn


class SharedNoise(LessNoise):
    """Noise source that repeats the noise of the first query or step."""

    def __init__(self, factor: float, source: NoiseSource) -> None:
        super().__init__(factor, source)
        self.first: dict[int, Tensor] = {}

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source; that of steps is always the same."""
        return super().stream(*(key[:1] if key[:1] == ("step",) else key))

    normal = _shared("normal")
    rounded_normal = _shared("rounded_normal")
    laplace = _shared("laplace")
    rounded_laplace = _shared("rounded_laplace")
