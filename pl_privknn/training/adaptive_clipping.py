"""A clipping norm that follows a quantile of the gradients' norms, paid for with every step."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pl_privknn._checks import check_open_unit, check_positive

# The paper's deviation of the counts is a twentieth of the batch; the gradients must keep most of the budget.
_LARGEST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping:
    """Moves the clipping norm to a quantile of the gradients' norms (Andrew et al. 2021).

    With each step goes a noisy count of the records whose gradients were not clipped. Sum and count are made of the
    same Poisson sample, so they are one release: two charges, each as if it had a sample of its own, would state too
    small an ε. Both are scaled so that a record moves them together by no more than the sum's bound, and the step's
    one Gaussian charge covers them; the gradients then have more noise than the charge says, by 1/√(1 − share).

    Args:
        quantile: share of the gradients that the norm shall leave unclipped.
        learning_rate: the norm is multiplied by exp(−learning_rate · (noisy share − quantile)).
        count_share: share of a step's budget (in 1/σ²) that goes to the count. By default that which gives the count
            a deviation of a twentieth of the expected batch size, as in the paper, and a tenth at most.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> from pl_privknn.training import AdaptiveClipping, PrivateTraining
        >>> training = PrivateTraining(
        ...     noise_multiplier=1.0, expected_batch_size=512, expected_records=60_000,
        ...     adaptive_clipping=AdaptiveClipping(quantile=0.5),
        ... )
        >>> round(epsilon_for_delta([Charge(Gaussian(1.0, 1.0, 512 / 60_000), 2360)], delta=1e-5), 2)
        2.36
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_share: float | None = None

    def __post_init__(self) -> None:
        check_open_unit("quantile", self.quantile)
        check_positive("learning_rate", self.learning_rate)
        if self.count_share is not None:
            check_open_unit("count_share", self.count_share)


class MovingNorm:
    """The clipping norm of the next step, a function of earlier releases alone.

    Args:
        chosen: how it moves.
        start: its first value.
        unit: the L2 sensitivity that a step is charged with.
        noise_multiplier: noise of a step over that sensitivity.
        batch_size: expected size of a batch.
    """

    def __init__(
        self, chosen: AdaptiveClipping, start: float, unit: float, noise_multiplier: float, batch_size: int
    ) -> None:
        share = chosen.count_share
        if share is None:
            share = min((10 * noise_multiplier / batch_size) ** 2, _LARGEST_SHARE)
        self.chosen, self.unit, self.value = chosen, unit, start
        self._of_sum, self._of_count = math.sqrt(1 - share), math.sqrt(share)

    def joined(self, total: Tensor, norms: Tensor) -> Tensor:
        """Sum of clipped gradients and count in one vector, which a record moves by ``unit`` at most.

        Args:
            total: each gradient clipped to ``value``, shape ``(p,)``.
            norms: of the gradients before, shape ``(b,)``.

        Returns:
            float64 ``(p + 1,)``.
        """
        # ± 1/2, and not 0 or 1: half the sensitivity for the same difference.
        count = (norms <= self.value).to(total).sum() - 0.5 * len(norms)
        scaled = [total * (self._of_sum / self.value), 2 * self._of_count * count.reshape(1)]
        return self.unit * torch.cat(scaled)

    def parted(self, noisy: Tensor) -> Tensor:
        """The gradient in what was released; moves the norm.

        Args:
            noisy: :meth:`joined` with noise, over the expected batch size.

        Returns:
            shape ``(p,)``.
        """
        scaled = noisy / self.unit
        gradient = scaled[:-1] * (self.value / self._of_sum)
        unclipped = float(scaled[-1]) / (2 * self._of_count) + 0.5
        self.value *= math.exp(-self.chosen.learning_rate * (unclipped - self.chosen.quantile))
        return gradient
