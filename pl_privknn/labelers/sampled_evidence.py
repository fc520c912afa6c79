"""What noisy sums say of canaries that are drawn by chance: likelihood ratios of the sampled Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_privknn.labelers.canaries import Evidence
from pl_privknn.privacy.mechanisms import Gaussian

# The fault that is looked for by a likelihood of its own: noise of so much of what is stated.
_SUSPECTED = 0.5


class SampledEvidence(Evidence):
    """What noisy sums say of canaries that are drawn by chance, where an attacker knows whom else a step drew.

    Canaries' directions are at right angles, so that each is seen by itself: of a step x = b·l + noise, along its own
    direction, l the length of what it adds, b whether it was drawn. The score is the log-likelihood ratio of all
    steps, Σ log(1 − q + q·exp((l·x − l²/2) / σ²)): the best test there is, and far better than a plain sum of x where
    q is small, since a canary is not in most of the steps.

    Args:
        count: number of canaries m.
        mechanism: the release of one step.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers.sampled_evidence import SampledEvidence
        >>> from pl_privknn.privacy import Gaussian
        >>> evidence = SampledEvidence(2, Gaussian(sigma=1.0, l2_sensitivity=1.0, sampling_rate=0.1))
        >>> evidence.add_step(torch.tensor([3.0, 0.0]), torch.ones(2))
        >>> [round(score, 2) for score in evidence.scores().tolist()]
        [0.75, -0.04]
    """

    def __init__(self, count: int, mechanism: Gaussian) -> None:
        super().__init__(count)
        self.mechanism = mechanism
        self._odds, self._suspected, self._sum, self._squares = torch.zeros(4, count, dtype=torch.float64)
        self._lengths: list[Tensor] = []

    def add_step(self, along: Tensor, lengths: Tensor) -> None:
        """Take a sum, less what all others add, along each canary's direction, and the lengths, both ``(m,)``."""
        x, length = along.double(), lengths.double()
        self._odds += self._log_odds(x, length, self.mechanism.sigma)
        self._suspected += self._log_odds(x, length, _SUSPECTED * self.mechanism.sigma)
        self._sum += x
        self._squares += x.square()
        self._lengths.append(length.float())

    def _log_odds(self, x: Tensor, length: Tensor, sigma: float) -> Tensor:
        rate = self.mechanism.sampling_rate
        fits = (length * x - length.square() / 2) / sigma**2
        away = math.log1p(-rate) if rate < 1 else -math.inf
        return torch.logaddexp(torch.full_like(fits, away), math.log(rate) + fits)

    @property
    def lengths(self) -> Tensor:
        """Of what each canary would have added to each step, float32 ``(steps, m)``."""
        return torch.stack(self._lengths)

    def scores(self) -> Tensor:
        """Log-likelihood ratios, float64 ``(m,)``."""
        return self._odds

    def suspected(self) -> Tensor:
        """The same of half the stated noise, in which too little noise shows most, float64 ``(m,)``."""
        return self._suspected

    def contrast(self) -> Tensor:
        """How x differs between steps: nothing is left of noise that they share."""
        return self._squares - self._sum.square() / max(len(self._lengths), 1)
