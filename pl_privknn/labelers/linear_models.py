"""Teachers that are linear models, fitted to released sums by public features."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import (
    check_choice,
    check_positive,
)
from pl_privknn.labelers.confidence import confident_weights, scale_without_public
from pl_privknn.labelers.released_sums import (
    LEFT_BITS,
    RIGHT_BITS,
    TARGETS,
    NoisySum,
    StatisticsTeacher,
    Targets,
    not_too_long,
    step_for,
    whole_steps,
    within,
)
from pl_privknn.privacy.mechanisms.steps import clip_factors

_MOST_STEPS = 300


def fit_least_squares(public: Tensor, moment: Tensor, ridge: float) -> Tensor:
    """W that minimises E[|Wx − y|²]/2 + ridge/2·|W|², with E[x xᵀ] from public examples and E[y xᵀ] given.

    With noise on the moment alone, the public second moment stays exact, which is worth most where there is much
    noise (Mehta et al. 2022).

    Args:
        public: x of public examples, float64 ``(m, p)``.
        moment: E[y xᵀ], float64 ``(c, p)``, noisy.
        ridge: above 0.

    Returns:
        float64 ``(c, p)``.
    """
    second = public.T @ public / len(public)
    second.diagonal().add_(ridge)
    return torch.linalg.solve(second, moment.T).T.contiguous()


def fit_maximum_likelihood(
    public: Tensor,
    moment: Tensor,
    ridge: float,
    start: Tensor | None = None,
    targets: Targets = TARGETS["multiclass"],
) -> Tensor:
    """W that minimises E[log Σ exp(Wx)] − ⟨W, moment⟩ + ridge/2·|W|², the first mean over public examples.

    That is a softmax regression in which labels enter by their moment alone, since the log-likelihood is
    ⟨W, y xᵀ⟩ − log Σ exp(Wx); of attributes, for each a logistic regression. Strictly convex; by L-BFGS.

    Args:
        public: x of public examples, float64 ``(m, p)``.
        moment: E[y xᵀ], float64 ``(c, p)``, noisy.
        ridge: above 0.
        start: where to begin.
        targets: of classes, or of attributes.

    Returns:
        float64 ``(c, p)``.
    """
    from scipy.optimize import minimize

    def value_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(flat).view_as(moment)
        scores = public @ weights.T
        slope = targets.expected(scores).T @ public / len(public) - moment + ridge * weights
        value = (
            targets.log_partition(scores).mean()
            - (weights * moment).sum()
            + ridge / 2 * weights.square().sum()
        )
        return float(value), slope.flatten().numpy()

    first = torch.zeros_like(moment) if start is None else start
    found = minimize(
        value_and_slope,
        first.flatten().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _MOST_STEPS, "ftol": 1e-12, "gtol": 1e-7},
    )
    return torch.from_numpy(found.x).view_as(moment).clone()


def fit_nearest_mean(public: Tensor, sums: Tensor, bias: float, sigma: float) -> Tensor:
    """W whose scores are log-likelihoods of normal classes around their noisy means, up to what all have in common.

    The score of a class with mean μ is (⟨x, μ⟩ − |μ|²/2) / s²; the nearest mean has the largest. s² is the mean
    squared distance of public examples from their nearest mean, divided by the number of coordinates. Noise makes the
    mean of a class with few records long, and so far from every example. All classes have the same prior. Scores are
    divided by 1 + v/2, v the variance that the noise gives them, which makes probabilities less certain.

    Args:
        public: x of public examples, float64 ``(m, p)``.
        sums: Σ of x by class, float64 ``(c, p)``, noisy.
        bias: last coordinate of every x, above 0.
        sigma: standard deviation of the noise.

    Returns:
        float64 ``(c, p)``.
    """
    counts = (sums[:, -1:] / bias).clamp(min=1.0)
    means, unit = sums[:, :-1] / counts, public[:, :-1]
    squares, nearest = torch.cdist(unit, means).square().min(dim=1)
    spread = squares.mean().clamp(min=1e-12) / unit.shape[1]
    variance = (squares * (sigma / counts[nearest, 0]) ** 2).mean() / spread**2
    weights = torch.cat([means, -means.square().sum(dim=1, keepdim=True) / (2 * bias)], dim=1)
    return weights / (spread * (1 + variance / 2))


FITS = ("least_squares", "maximum_likelihood", "nearest_mean")


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
        fit: ``"least_squares"`` or ``"maximum_likelihood"`` of the private records; or ``"nearest_mean"``, the class
            whose noisy mean is nearest, which finds classes with few records, at the cost of accuracy on large ones.
        **kwargs: see :class:`~pl_privknn.labelers.released_sums.StatisticsTeacher`.

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
        self._softmax = False  # of least squares too, once scores have a scale
        super().__init__(1, *args, **kwargs)
        if fit == "nearest_mean" and (not self.bias or self.targets.midpoint):
            raise ValueError(
                f"fit={fit!r} with bias={self.bias:g}, task={self.targets.task!r}: means are sums over the counts of "
                "classes, which the bias gives; use a bias above 0, and task='multiclass'"
            )

    def sensitivity(self, release: int) -> float:
        """R under add_remove, else max(2, √2·R), or 2R for attributes and several records a person; see the class."""
        longest = math.sqrt(1 + self.bias**2)
        if self.adjacency == "add_remove":
            return longest
        if self.records_per_person > 1:
            return 2 * longest
        return max(2.0, self.targets.farthest * longest)

    def step(self, release: int) -> float:
        """Step of 2⁻²⁴ for a bias below 2; 2⁻³² for attributes, whose t are no whole numbers."""
        left, right = self._steps
        return left * right

    @property
    def _steps(self) -> tuple[float, float]:
        """Step of the label vectors, and step of x."""
        longest = max(1.0, self.bias)
        if not self.targets.midpoint:  # whole numbers already
            return 1.0, step_for(longest)
        return step_for(1.0, LEFT_BITS), step_for(longest, RIGHT_BITS)

    def _vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Label vectors of length 1, float64 ``(n, c)``: Y of classes, t of attributes."""
        vectors = self.targets.vectors(labels, num_targets) - self.targets.midpoint
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
        """Weights of the public fit to the released sum."""
        if self.fitted_by == "nearest_mean":
            return fit_nearest_mean(public, releases[0].noisy, self.bias, self.mechanism(0).sigma)
        return self._fit(public, self._moment(public, releases))

    def _moment(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """Noisy E[y xᵀ]."""
        divisor = self.private_records * self.targets.error_scale(len(releases[0].noisy))
        return releases[0].noisy / divisor + self.targets.midpoint * public.mean(dim=0)

    def _fit(self, public: Tensor, moment: Tensor) -> Tensor:
        penalty = self.penalty(len(moment))
        if self.fitted_by == "least_squares":
            return fit_least_squares(public, moment, penalty)
        return fit_maximum_likelihood(public, moment, penalty, targets=self.targets)

    def confident(self, public: Tensor, releases: Mapping[int, NoisySum], weights: Tensor) -> Tensor:
        """Scaled weights of a likelihood, and of least squares without public examples; see the base."""
        self._softmax, blank = False, bool((public == public[:1]).all())
        if self.fitted_by == "nearest_mean" or (self.fitted_by == "least_squares" and not blank):
            return weights
        moment = self._moment(public, releases)
        deviation = self.mechanism(0).sigma / (self.private_records * self.targets.error_scale(len(moment)))
        if self.fitted_by == "maximum_likelihood":
            fit = functools.partial(self._fit, public)
            return confident_weights(public, moment, deviation, fit, self.targets)
        if self.targets.midpoint or not self.bias:
            return weights
        penalty = self.penalty(len(moment))
        # Of E[x xᵀ] + λ with equal x: one eigenvalue of |x|² + λ, the others of λ.
        response = (public.shape[1] - 1) / penalty + 1 / (penalty + float(public[0].square().sum()))
        scale = scale_without_public(weights, moment, deviation, self.bias, response, self.targets)
        self._softmax = True
        return weights * scale

    def learned(self) -> dict[str, Tensor]:
        """See the base; with a mark where probabilities are a softmax of scaled scores."""
        return super().learned() | ({"softmax": torch.tensor(True)} if self._softmax else {})

    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Restore the state of :meth:`learned`."""
        super().relearn(learned)
        self._softmax = "softmax" in learned

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities of the model; scores of least squares are estimates of probabilities."""
        if self.fitted_by == "least_squares" and not self._softmax:
            return self.targets.probabilities_of(scores)
        return self.targets.expected(scores)


# Clipping norms of the first releases, and of all later ones: gradients shrink as the model learns.
_NORMS = (1.0, 0.5, 0.5, 0.25)


class PreconditionedGradients(StatisticsTeacher):
    """Teacher that is a softmax regression from a few noisy full-batch gradients and public features.

    The gradient Σ (p_W(x) − y) xᵀ needs private records for its label part alone. Release t is the sum of the clipped
    gradients of all records at the model W_t, plus noise; over N that is G_t. With public examples it gives the
    moment E[y xᵀ] by M_t = E_public[p_{W_t}(x) xᵀ] − G_t. The next model maximises the likelihood with the mean of
    all M so far, weighted by the inverse of their variances (see
    :func:`~pl_privknn.labelers.linear_models.fit_maximum_likelihood`). Gradients shrink as the model learns, and
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
        **kwargs: see :class:`~pl_privknn.labelers.released_sums.StatisticsTeacher`.

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
        """Clipping norm C under add_remove, else 2C."""
        return self.clip_norms[release] * (1.0 if self.adjacency == "add_remove" else 2.0)

    def step(self, release: int) -> float:
        """Step, 2⁻³² for a clipping norm of 1."""
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
        """Maximum-likelihood weights at the mean of all released moments."""
        return self._fit(public, releases, self._moment(public, releases)[0])

    def confident(self, public: Tensor, releases: Mapping[int, NoisySum], weights: Tensor) -> Tensor:
        """Scaled weights; see the base and :func:`~pl_privknn.labelers.confidence.confident_weights`."""
        moment, deviation = self._moment(public, releases)
        fit = functools.partial(self._fit, public, releases)
        return confident_weights(public, moment, deviation, fit, self.targets)

    def _fit(self, public: Tensor, releases: Mapping[int, NoisySum], moment: Tensor) -> Tensor:
        start = releases[max(releases)].weights
        return fit_maximum_likelihood(public, moment, self.penalty(len(moment)), start, self.targets)

    def _moment(self, public: Tensor, releases: Mapping[int, NoisySum]) -> tuple[Tensor, float]:
        """Mean of all E[y xᵀ], weighted by inverse variances, and the standard deviation of its noise."""
        total, precision, variance = torch.zeros_like(releases[min(releases)].noisy), 0.0, 0.0
        divisor = self.private_records * self.targets.error_scale(len(total))
        for number, taken in releases.items():
            expected = self.targets.expected(public @ taken.weights.T).T @ public / len(public)
            weight = self.clip_norms[number] ** -2
            total += weight * (expected - taken.noisy / divisor)
            precision += weight
            variance += (weight * self.mechanism(number).sigma / divisor) ** 2
        return total / precision, math.sqrt(variance) / precision
