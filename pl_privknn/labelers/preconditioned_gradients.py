"""Softmax regression from a few released full-batch gradients, with curvature from public examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_positive
from pl_privknn.labelers.statistics import (
    LEFT_BITS,
    RIGHT_BITS,
    NoisySum,
    StatisticsTeacher,
    fit_maximum_likelihood,
    not_too_long,
    step_for,
    whole_steps,
)
from pl_privknn.privacy.mechanisms.steps import clip_factors

# Clipping norms of the first releases, and of all later ones: gradients shrink as the model learns.
_NORMS = (1.0, 0.5, 0.5, 0.25)


class PreconditionedGradients(StatisticsTeacher):
    """Teacher that is a softmax regression from a few noisy full-batch gradients and public features.

    The gradient Σ (p_W(x) − y) xᵀ needs private records for its label part alone. Release t is the sum of the clipped
    gradients of all records at the model W_t, plus noise; over N that is G_t. With public examples it gives the
    moment E[y xᵀ] by M_t = E_public[p_{W_t}(x) xᵀ] − G_t. The next model maximises the likelihood with the mean of
    all M so far, weighted by the inverse of their variances (see
    :func:`~pl_privknn.labelers.statistics.fit_maximum_likelihood`). Gradients shrink as the model learns, and
    with them clipping norms and noise.

    Of attributes (``task="multilabel"``) the same goes for one logistic regression each, whose errors p − y a record
    has together: they are clipped as one gradient, after the public factor 2/√a that makes them as long at first,
    with a attributes, as the errors of classes are.

    **Cost.** T Gaussian releases compose to one Gaussian, exactly. **Sensitivity.** A sum of gradients clipped to C
    moves by C under ``add_remove`` and by 2C under ``replace_one``; the model at which they are taken is public.

    Args:
        *args: ``budget`` or ``noise_multiplier``.
        releases: T.
        clip_norms: C of each release, public constants; by default 1, 0.5, 0.5 and then 0.25.
        **kwargs: see :class:`~pl_privknn.labelers.statistics.StatisticsTeacher`.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import PreconditionedGradients
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PreconditionedGradients(noise_multiplier=4.0)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), 1e-5), 3)
        2.502
    """

    def __init__(
        self,
        *args: Any,
        releases: int = 6,
        clip_norms: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(releases, *args, **kwargs)
        if clip_norms is None:
            clip_norms = [*_NORMS, *_NORMS[-1:] * self.releases][: self.releases]
        self.clip_norms = [check_positive("clip_norms", norm) for norm in clip_norms]
        if len(self.clip_norms) != self.releases:
            raise ValueError(
                f"clip_norms={list(clip_norms)!r}: expected one for each of releases={self.releases}"
            )

    def sensitivity(self, release: int) -> float:
        """C, or 2C."""
        return self.clip_norms[release] * (1.0 if self.adjacency == "add_remove" else 2.0)

    def step(self, release: int) -> float:
        """2⁻³² for a clipping norm of 1."""
        return step_for(self.clip_norms[release], LEFT_BITS) * step_for(1.0, RIGHT_BITS)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ of the clipped gradients (p_W(x) − y) xᵀ, in steps."""
        total, clip_norm = torch.zeros(weights.shape, dtype=torch.int64), self.clip_norms[release]

        def errors_of(inputs: Tensor, labels: Tensor) -> Tensor:
            errors = self.targets.expected(inputs @ weights.T) - self.targets.vectors(labels, len(weights))
            return errors * self.targets.error_scale(len(weights))

        if self._persons is not None:
            return total + self.sum_over_persons(errors_of, clip_norm, self.step(release))
        for inputs, labels in self.private_parts():
            errors = errors_of(inputs, labels)
            # The norm of an outer product is the product of the norms.
            norms = errors.norm(dim=1) * inputs.norm(dim=1)
            clipped = errors * clip_factors(norms, clip_norm)[:, None]
            left, right = (
                whole_steps(clipped, step_for(clip_norm, LEFT_BITS)),
                whole_steps(inputs, step_for(1.0, RIGHT_BITS)),
            )
            squares = left.square().sum(dim=1) * right.square().sum(dim=1)
            kept = not_too_long(squares, clip_norm, self.step(release))
            total += (torch.where(kept[:, None], left, 0.0).T @ right).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """Maximum likelihood at the mean of all moments."""
        total, precision = torch.zeros_like(releases[min(releases)].noisy), 0.0
        divisor = self.private_records * self.targets.error_scale(len(total))
        for number, taken in releases.items():
            expected = self.targets.expected(public @ taken.weights.T).T @ public / len(public)
            weight = self.clip_norms[number] ** -2
            total += weight * (expected - taken.noisy / divisor)
            precision += weight
        start, penalty = releases[max(releases)].weights, self.penalty(len(total))
        return fit_maximum_likelihood(public, total / precision, penalty, start, self.targets)
