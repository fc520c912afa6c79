"""One Gaussian release of the sums of features by class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_choice
from pl_privknn.labelers.statistics import (
    LEFT_BITS,
    RIGHT_BITS,
    NoisySum,
    StatisticsTeacher,
    fit_least_squares,
    fit_maximum_likelihood,
    step_for,
    whole_steps,
    within,
)

FITS = ("least_squares", "maximum_likelihood")


class SufficientStatistics(StatisticsTeacher):
    """Teacher that is a linear model from one noisy release of Σ y xᵀ, the sums of unit features by class.

    In least squares and in softmax regression labels enter by E[y xᵀ] alone. The other part, E[x xᵀ] or
    E[log Σ exp(Wx)], is taken from public examples, without noise (Mehta et al. 2022, arXiv:2211.13403).

    **Sensitivity.** A record adds x in its class's row and nothing elsewhere, so under ``add_remove`` the sum moves
    by |x| ≤ R = √(1 + bias²). Under ``replace_one`` it moves by √(|x|² + |x'|²) ≤ √2·R where the class changes and
    by |x − x'| ≤ 2 where it does not (the bias cancels), so by max(2, √2·R).

    **Attributes** (``task="multilabel"``): t = (2y − 1)/√a takes the place of y, with a attributes. Every record's t
    has length 1, whichever attributes it has, so the sum moves by R under ``add_remove`` and by 2R at most under
    ``replace_one``, and nothing is clipped. E[y xᵀ] follows from E[t xᵀ] and the public E[x].

    Args:
        *args: ``budget`` or ``noise_multiplier``.
        fit: ``"least_squares"`` or ``"maximum_likelihood"``.
        **kwargs: see :class:`~pl_privknn.labelers.statistics.StatisticsTeacher`.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import SufficientStatistics
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = SufficientStatistics(noise_multiplier=4.0)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), 1e-5), 3)
        0.926
    """

    def __init__(
        self,
        *args: Any,
        fit: str = "least_squares",
        **kwargs: Any,
    ) -> None:
        self.fitted_by = check_choice("fit", fit, FITS)
        super().__init__(1, *args, **kwargs)

    def sensitivity(self, release: int) -> float:
        """R, or max(2, √2·R), of attributes and of several records a person 2R; see the class."""
        longest = math.sqrt(1 + self.bias**2)
        if self.adjacency == "add_remove":
            return longest
        if self.records_per_person > 1:
            return 2 * longest
        return max(2.0, self.targets.farthest * longest)

    def step(self, release: int) -> float:
        """2⁻²⁴ for a bias below 2; of attributes, whose t are no whole numbers, 2⁻³²."""
        left, right = self._steps
        return left * right

    @property
    def _steps(self) -> tuple[float, float]:
        """Steps of labels and of x."""
        longest = max(1.0, self.bias)
        if not self.targets.centre:  # whole numbers already
            return 1.0, step_for(longest)
        return step_for(1.0, LEFT_BITS), step_for(longest, RIGHT_BITS)

    def _vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Y of classes, t of attributes, float64 ``(n, c)``, of length 1."""
        vectors = self.targets.vectors(labels, num_targets) - self.targets.centre
        return vectors * self.targets.error_scale(num_targets)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ y xᵀ in steps, the unit vector in x of length 1 at most and the bias the same for all."""
        total, (left, right) = torch.zeros(weights.shape, dtype=torch.int64), self._steps
        if self._persons is not None:
            longest = math.sqrt(1 + self.bias**2)
            return total + self.sum_over_persons(
                lambda _, labels: self._vectors(labels, len(weights)), longest, self.step(release)
            )
        for inputs, labels in self.private_parts():
            unit = inputs[:, :-1] if self.bias else inputs
            rows = torch.cat(
                [within(unit, 1.0, right), whole_steps(inputs[:, unit.shape[1] :], right)], dim=1
            )
            total += (within(self._vectors(labels, len(weights)), 1.0, left).T @ rows).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """The public fit."""
        num_targets = len(releases[0].noisy)
        moment = releases[0].noisy / (self.private_records * self.targets.error_scale(num_targets))
        moment = moment + self.targets.centre * public.mean(dim=0)
        penalty = self.penalty(num_targets)
        if self.fitted_by == "least_squares":
            return fit_least_squares(public, moment, penalty)
        return fit_maximum_likelihood(public, moment, penalty, targets=self.targets)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Those of the model; the scores of least squares estimate probabilities themselves."""
        if self.fitted_by == "maximum_likelihood":
            return self.targets.expected(scores)
        return self.targets.probabilities_of(scores)
