"""What a private training asks for, stated before its first step."""

from __future__ import annotations

import dataclasses
from typing import Any

from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.training.adaptive_clipping import AdaptiveClipping
from pl_privknn.training.correlated_noise import BandedNoise
from pl_privknn.training.paid_accuracy import PaidAccuracy

# Plans of earlier runs do not have these.
_LATER = ("adaptive_clipping", "accuracy", "rates", "correlated_noise")


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What a training asks for, before anything is known of the budget; all of it public.

    Attributes:
        steps: number of steps, known beforehand.
        sampling_rate: Poisson rate of a step.
        batch_size: what the noisy sum of gradients is divided by.
        clip_norm: bound of each example's gradient.
        delta: δ of the guarantee.
        noise_multiplier: noise over ``clip_norm``, or None where ``target_epsilon`` decides.
        target_epsilon: ε that all steps together may cost, or None.
        adaptive_clipping: how ``clip_norm`` moves, which is then only the first; None where it stays.
        accuracy: what is released beside the steps, or None.
        rates: of groups of records, the largest of which is ``sampling_rate``; None where all have that one.
        correlated_noise: how noise of different steps hangs together, or None; ``sampling_rate`` is then that at
            which a step draws from its subset.
    """

    steps: int
    sampling_rate: float
    batch_size: int
    clip_norm: float
    delta: float
    noise_multiplier: float | None
    target_epsilon: float | None
    adaptive_clipping: AdaptiveClipping | None = None
    accuracy: PaidAccuracy | None = None
    rates: list[float] | None = None
    correlated_noise: BandedNoise | None = None

    def releases(self, steps: int) -> int:
        """In how many of so many steps, counted from the first, a record is at most."""
        return steps if self.correlated_noise is None else self.correlated_noise.releases(steps)

    def steps_of(self, releases: int, most: int) -> int:
        """How many steps so many releases are for, ``most`` at most: the last cycle may be cut off."""
        return min(most, releases * (1 if self.correlated_noise is None else self.correlated_noise.bands))

    def charges(self, mechanism: Gaussian, steps: int) -> list[Charge]:
        """What so many steps cost, and the accuracies beside them."""
        return [Charge(mechanism, self.releases(steps)), *self.accuracies(steps)]

    def accuracies(self, steps: int) -> list[Charge]:
        """What accuracies cost in so many steps."""
        return [] if self.accuracy is None else self.accuracy.charges(steps)

    def described(self) -> dict[str, Any]:
        """In plain types; what was not asked for is left out where older plans do not have it."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None or name not in _LATER}
