"""One free setting of a configuration, found for an ε: of any teacher, by its dotted path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pl_privknn.nested_settings import merged, put
from pl_privknn.privacy.accounting.calibration import Calibration, Parameter, calibrate
from pl_privknn.privacy.mechanisms import Adjacency, Charge

_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """The setting that is found for an ε.

    Attributes:
        parameter: its dotted path in the configuration.
        low: smallest value allowed.
        high: largest value allowed.
        rising: whether ε grows with it, as with a number of queries; ε falls with noise.
        whole: whether it is a whole number.
        exact: also search on the exact worst case (slower, a little less noise).
        tied: further settings, each a factor times the found one.
    """

    parameter: str
    low: float
    high: float
    rising: bool = False
    whole: bool = False
    exact: bool = False
    tied: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def middle(self) -> float:
        """Where a search starts."""
        return math.sqrt(self.low * self.high)

    def values(self, value: float) -> dict[str, float]:
        """The setting and those tied to it, by their dotted paths."""
        chosen = int(value) if self.whole else value
        tied = {path: float(f"{factor * value:.{_DIGITS}g}") for path, factor in self.tied.items()}
        return {self.parameter: chosen, **tied}

    def filled(self, document: Mapping[str, Any], value: float) -> dict[str, Any]:
        """A copy of a configuration with :meth:`values` in it."""
        copy = merged(document, None)
        for path, chosen in self.values(value).items():
            put(copy, path, chosen)
        return copy

    def search(
        self,
        document: Mapping[str, Any],
        charges: Callable[[Mapping[str, Any]], Sequence[Charge]],
        *,
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
    ) -> Calibration:
        """Find the setting with which a configuration keeps ε.

        Args:
            document: the configuration.
            charges: the most that a configuration may release.
            epsilon: target ε.
            delta: target δ.
            adjacency: neighbouring relation.

        Raises:
            ValueError: for settings that don't fit, or a target that can't be met.
        """
        return calibrate(
            lambda value: charges(self.filled(document, value)),
            Parameter(self.parameter, self.middle, self.low, self.high, self.rising, self.whole),
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            exact=False,
            exact_search=self.exact,
        )
