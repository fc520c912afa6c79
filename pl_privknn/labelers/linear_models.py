"""Linear models from released moments: labels as vectors, fits to public features, released centre."""

from __future__ import annotations

import abc
import math
from fractions import Fraction
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn.privacy.mechanisms.steps import clip_factors


class Targets(abc.ABC):
    """Labels as vectors, and their exponential family in a linear model.

    A record's part in a gradient is (p − y) xᵀ, y its vector and p what the model expects of it. ``c`` is the number
    of classes or attributes.
    """

    task: ClassVar[str]
    #: What sums subtract from each entry of y: the vectors are then short, of length 1 after :meth:`error_scale`.
    centre: ClassVar[float] = 0.0
    #: Largest distance of two such vectors.
    farthest: ClassVar[float]

    @abc.abstractmethod
    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Y of labels, float64 ``(n, c)``, entries 0 or 1."""

    @abc.abstractmethod
    def expected(self, scores: Tensor) -> Tensor:
        """E[y] of a model with these scores, ``(n, c)``: the gradient of :meth:`log_partition`."""

    @abc.abstractmethod
    def log_partition(self, scores: Tensor) -> Tensor:
        """Log of what exp⟨scores, y⟩ is divided by, ``(n,)``."""

    @abc.abstractmethod
    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Probabilities nearest to least-squares estimates of y, ``(n, c)``."""

    @abc.abstractmethod
    def answers(self, probabilities: Tensor) -> Tensor:
        """Labels of the most likely vectors, int64 as labels are."""

    @abc.abstractmethod
    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """Labels and probabilities of refused queries."""

    def error_scale(self, num_targets: int) -> float:
        """Public factor of errors p − y, which gives them a length of about 1 before training."""
        return 1.0


class ClassTargets(Targets):
    """One class per record: softmax."""

    task = "multiclass"
    farthest = math.sqrt(2.0)

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Of class j, the j-th unit vector."""
        return functional.one_hot(labels, num_targets).double()

    def expected(self, scores: Tensor) -> Tensor:
        """Class probabilities."""
        return scores.softmax(dim=1)

    def log_partition(self, scores: Tensor) -> Tensor:
        """Log Σ exp."""
        return scores.logsumexp(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """The positive parts over their sum."""
        # The largest stays the largest where none is positive.
        positive = (estimates - estimates.amax(dim=1, keepdim=True).clamp(max=0)).clamp(min=0) + 1e-12
        return positive / positive.sum(dim=1, keepdim=True)

    def answers(self, probabilities: Tensor) -> Tensor:
        """The likeliest class, ``(n,)``."""
        return probabilities.argmax(dim=1)

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """-1, ``(n,)``, and zeros."""
        return torch.full((count,), -1), torch.zeros(count, num_targets)


class AttributeTargets(Targets):
    """Independent binary attributes: one sigmoid each."""

    task = "multilabel"
    centre, farthest = 0.5, 2.0

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """The attributes themselves."""
        return labels.double()

    def expected(self, scores: Tensor) -> Tensor:
        """Probabilities of the attributes."""
        return scores.sigmoid()

    def log_partition(self, scores: Tensor) -> Tensor:
        """Σ log(1 + exp)."""
        return functional.softplus(scores).sum(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Cut off at 0 and 1."""
        return estimates.clamp(0, 1)

    def answers(self, probabilities: Tensor) -> Tensor:
        """Most likely labels, ``(n, c)``."""
        return (probabilities > 0.5).long()

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """-1, ``(n, c)``, and ½."""
        return torch.full((count, num_targets), -1), torch.full((count, num_targets), 0.5)

    def error_scale(self, num_targets: int) -> float:
        """2/√c: before anything is learned, each entry of an error is ½ or −½."""
        return 2 / math.sqrt(num_targets)


#: By the name of what data modules call a task.
TARGETS: dict[str, Targets] = {kind.task: kind for kind in (ClassTargets(), AttributeTargets())}

#: Binary digits of a record's coordinates, counted from its greatest length.
BITS = 24
#: Of the two sides of an outer product, whose steps are products of theirs.
LEFT_BITS, RIGHT_BITS = 14, 18
# Squares of whole numbers are exact in float64 below this, and wrong by less than so much of them above.
_EXACT, _ROUNDING = 2**53, 2.0**-40


def step_for(length: float, bits: int = BITS) -> float:
    """The largest power of two that is at most ``length`` · 2**−bits."""
    return math.ldexp(0.5, math.frexp(length)[1] - bits)


def whole_steps(rows: Tensor, step: float) -> Tensor:
    """Multiples of ``step`` (a power of two) next to ``rows``, towards zero: whole numbers, float64."""
    return (rows.double() / step).trunc()


def not_too_long(squares: Tensor, length: float, step: float) -> Tensor:
    """Whether vectors of these squared lengths, in steps, are at most as long as ``length``; bool."""
    bound = math.floor((Fraction(length) / Fraction(step)) ** 2)
    return squares <= (bound if bound < _EXACT else bound * (1 - _ROUNDING))


def within(rows: Tensor, length: float, step: float) -> Tensor:
    """:func:`whole_steps` of rows that are no longer than ``length``, float64 ``(n, p)``.

    A row that is longer, which an error alone could make, counts as none.

    Args:
        rows: shape ``(n, p)``.
        length: public bound.
        step: power of two.
    """
    steps = whole_steps(rows, step)
    kept = not_too_long(steps.square().sum(dim=1, keepdim=True), length, step)
    return torch.where(kept, steps, 0.0)


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


#: Share of runs on public and private examples of one kind that are taken for runs on two kinds.
ERROR_RATE = 1e-3


class Centre(NamedTuple):
    """Released difference of the private and the public mean, with its test: post-processing.

    Attributes:
        offset: the difference, float64 ``(d,)``, noisy.
        chance_distance: length that noise and sampling alone give the difference (root mean square).
        p_value: probability of such a length or more where both means are the same.
    """

    offset: Tensor
    chance_distance: float
    p_value: float

    @property
    def is_shift(self) -> bool:
        """Whether the difference is significant at :data:`ERROR_RATE`; otherwise it is not subtracted."""
        return self.p_value < ERROR_RATE

    def __str__(self) -> str:
        figures = f"(distance {float(self.offset.norm()):.3f}, noise {self.chance_distance:.3f})"
        if self.is_shift:
            return f"public examples are of another kind than private ones {figures}; private features are centred"
        return f"no shift between public and private examples was found {figures}; nothing is subtracted"


def clipped_differences(unit: Tensor, mean: Tensor) -> Tensor:
    """Differences of vectors ``(n, d)`` from the public mean ``(d,)``, clipped to length 1: a record's part."""
    rows = unit - mean
    return rows * clip_factors(rows.norm(dim=1), 1.0)[:, None]


def centre_of(noisy: Tensor, sigma: float, records: int, public: Tensor) -> Centre:
    """Centre of a noisy sum of :func:`clipped_differences`, with the test of its length.

    Where private and public examples have one distribution, the difference of the means is about normal with
    covariance K = (σ/N)² + Σ (1/N + 1/m), Σ of public differences. Its squared length is compared with the scaled
    χ² of the same mean and variance (Satterthwaite), of which traces of K are all that has to be estimated.

    Args:
        noisy: released sum, float64 ``(d,)``.
        sigma: standard deviation of its noise.
        records: N, public constant by which it is divided.
        public: unit vectors of the public examples, float64 ``(m, d)``.
    """
    from scipy.stats import chi2

    rows = clipped_differences(public, public.mean(dim=0))
    offset = noisy / records - rows.mean(dim=0)
    spread = torch.cov(rows.T, correction=0).view(len(offset), -1) * (1 / records + 1 / len(rows))
    spread.diagonal().add_((sigma / records) ** 2)
    mean, square = float(spread.trace()), float(spread.square().sum())
    if square:
        p_value = float(chi2.sf(float(offset.square().sum()) * mean / square, mean**2 / square))
    else:  # equal public examples and no noise: any difference is none of chance
        p_value = float(not offset.any())
    return Centre(offset, math.sqrt(mean), p_value)
