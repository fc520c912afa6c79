"""Binary attributes as labels: clipped votes, their sensitivity, and decision rules.

A vote about a attributes is a row of zeros and ones, clipped to an L1 norm of at most τ. Sums of votes get noise, and
a rule that uses released values and public constants only turns them into attributes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_choice, check_open_unit, check_positive, check_switch
from pl_privknn.labelers.base import sum_noise
from pl_privknn.privacy.mechanisms.base import AdditiveNoise, Mechanism

#: Least number of answers for which mixtures are fitted.
_FEWEST_ANSWERS = 50
_ITERATIONS = 60
#: Deviation of the noise, as a share of the level of agreement, from which on denoising pays.
_MUCH_NOISE = 0.2


class DecisionRule(abc.ABC):
    """Base class of rules that turn noisy sums of clipped votes into probabilities of attributes.

    Half the votes is no threshold for clipped votes: a neighbour with s > τ attributes gives each only τ/s of
    a vote, so an attribute on which all k neighbours agree may stay far below k/2. A rule is post-processing:
    what it gets was released, or is a public constant, so it costs no privacy however it is chosen.
    """

    #: Whether the rule learns from all answers of a round, so that they should come in one release.
    learns: bool = False

    @abc.abstractmethod
    def __call__(self, noisy: Tensor, total: float | Tensor, tau: float | None, deviation: float) -> Tensor:
        """Turn noisy sums into probabilities of attributes.

        Args:
            noisy: released sums, float64, shape ``(m, a)``.
            total: public number of votes that make a sum (k, or the number of teachers); or a released one for
                each query, shape ``(m,)``.
            tau: τ of the clipping, or None.
            deviation: standard deviation of the noise on each sum.

        Returns:
            float64, shape ``(m, a)``: an attribute is given where it is above ½.
        """


@dataclasses.dataclass(frozen=True)
class FixedThresholds(DecisionRule):
    """Decision rule with a public threshold: the noisy sum must exceed fraction · total · min(τ/m, 1).

    ``m`` is how many attributes a record is expected to have: min(τ/m, 1) is the part of a vote that clipping
    leaves it, so the threshold is the named fraction of what agreeing neighbours would give.

    Attributes:
        fraction: share of agreeing votes from which an attribute is given.
        expected_positives: m, a public guess of the number of attributes of a record that has one in question.
            None: no more than τ, which leaves the threshold at fraction · total.
        denoise: replace the noisy sums by :func:`denoised` ones, learned from all answers.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import FixedThresholds
        >>> noisy = torch.tensor([[90.0, 20.0]], dtype=torch.float64)
        >>> FixedThresholds(fraction=0.5)(noisy, total=100, tau=3.0, deviation=10.0) > 0.5
        tensor([[ True, False]])
    """

    fraction: float = 0.5
    expected_positives: float | None = None
    denoise: bool = False

    def __post_init__(self) -> None:
        check_open_unit("fraction", self.fraction)
        if self.expected_positives is not None:
            check_positive("expected_positives", self.expected_positives)
        check_switch("denoise", self.denoise)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """Whether the rule learns from the released sums: only where it denoises them."""
        return self.denoise

    def __call__(self, noisy: Tensor, total: float | Tensor, tau: float | None, deviation: float) -> Tensor:
        """See :meth:`DecisionRule.__call__`; the probability is Φ(distance from the threshold / deviation)."""
        spread = torch.full((noisy.shape[1],), deviation, dtype=torch.float64)
        if self.denoise:
            noisy, spread = denoised(noisy, deviation)
        level = agreement(total, tau, self.expected_positives)
        return certainty(noisy, self.fraction * level, level, spread)


@dataclasses.dataclass(frozen=True)
class LearnedThresholds(DecisionRule):
    """Decision rule with a threshold per attribute, learned from the distribution of the released sums.

    1. The sums of all answers are :func:`denoised`: attributes go together, noise does not.
    2. For each attribute a mixture of two normal distributions of one variance (those who have it, those who
       don't) is fitted to its sums by expectation-maximisation, starting from the lower half and the highest
       tenth of them. It has a threshold, where both are equally likely,
       and a separation d, the distance of the means in standard deviations.
    3. The threshold is the mixture's where d ≥ 3 (two heaps), the public one where d ≤ 1 (one heap, whose halves
       would mean nothing), and in proportion in between; it stays within 0.05 and 0.95 of the level.

    Below 50 answers the public threshold is used. On Fashion-MNIST's attributes it was better than the public
    threshold at every τ that clips and at every noise tried, and about the same where nothing is clipped; see
    ``docs/methods/multilabel.md``.

    Attributes:
        expected_positives: see :class:`FixedThresholds`.
        denoise: whether step 1 is done. None: where the deviation of the noise is at least a fifth of the level of
            agreement; below, sums show more by themselves than a linear estimate keeps of them.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import LearnedThresholds
        >>> sums = torch.tensor([[5.0], [25.0]], dtype=torch.float64).repeat(50, 1)  # two heaps below 50
        >>> LearnedThresholds(denoise=False)(sums, total=100, tau=3.0, deviation=2.0)[:2] > 0.5
        tensor([[False],
                [ True]])
    """

    expected_positives: float | None = None
    denoise: bool | None = None

    learns = True

    def __post_init__(self) -> None:
        if self.expected_positives is not None:
            check_positive("expected_positives", self.expected_positives)
        if self.denoise is not None:
            check_switch("denoise", self.denoise)

    def __call__(self, noisy: Tensor, total: float | Tensor, tau: float | None, deviation: float) -> Tensor:
        """See :meth:`DecisionRule.__call__`.

        Raises:
            ValueError: for totals that differ between queries.
        """
        if isinstance(total, Tensor):
            raise InputError(
                "LearnedThresholds compares sums of equally many votes; use FixedThresholds with totals that "
                "differ between queries"
            )
        if len(noisy) < _FEWEST_ANSWERS:
            return FixedThresholds(expected_positives=self.expected_positives)(noisy, total, tau, deviation)
        spread = torch.full((noisy.shape[1],), deviation, dtype=torch.float64)
        level = float(agreement(total, tau, self.expected_positives))
        if self.denoise or (self.denoise is None and deviation >= _MUCH_NOISE * level):
            noisy, spread = denoised(noisy, deviation)
        thresholds = torch.tensor([_threshold(column, level) for column in noisy.T], dtype=torch.float64)
        return certainty(noisy, thresholds, level, spread)


def agreement(total: float | Tensor, tau: float | None, expected_positives: float | None) -> float | Tensor:
    """Expected sum of an attribute under ``total`` agreeing votes: total · min(τ/m, 1)."""
    if tau is None or expected_positives is None:
        return total
    return total * min(tau / expected_positives, 1.0)


def certainty(
    sums: Tensor, thresholds: float | Tensor, level: float | Tensor, spread: float | Tensor
) -> Tensor:
    """Φ((sum − threshold)/s), above ½ from the threshold on; s² is the noise left plus (level/10)².

    Args:
        sums: float64, shape ``(m, a)``.
        thresholds: one, one a query ``(m,)`` where ``level`` is, or one an attribute ``(a,)``.
        level: see :func:`agreement`.
        spread: standard deviation of the noise that is left in ``sums``, one or ``(a,)``.
    """
    if isinstance(level, Tensor):
        level = level[:, None]
        thresholds = thresholds[:, None] if isinstance(thresholds, Tensor) else thresholds
    squared = torch.as_tensor(spread, dtype=torch.float64) ** 2 + (0.1 * level) ** 2
    return torch.special.ndtr((sums - thresholds) / squared.sqrt().clamp(min=1e-12))


def denoised(noisy: Tensor, deviation: float) -> tuple[Tensor, Tensor]:
    """Linear estimate of the sums before noise, from the covariance of all released sums.

    With S = M + N, N independent of M with covariance σ²I, the best linear estimate of M is
    μ + (C − σ²I)C⁻¹(S − μ) (Wiener), with μ and C the mean and covariance of the released S. In C's
    eigenvectors each direction shrinks by (1 − σ²/λ)₊: directions in which attributes vary together stay,
    those that hold noise alone vanish. With as few answers as attributes C says little, and nothing is done.

    Args:
        noisy: float64, shape ``(m, a)``.
        deviation: σ.

    Returns:
        The estimates, ``(m, a)``, and the standard deviation of what noise is left in each attribute, ``(a,)``.
    """
    rows, attributes = noisy.shape
    if rows < 2 * attributes:
        return noisy, torch.full((attributes,), deviation, dtype=noisy.dtype)
    mean = noisy.mean(dim=0)
    centred = noisy - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / (rows - 1))
    kept = ((values - deviation**2).clamp(min=0) / values.clamp(min=1e-300)).clamp(max=1)
    left = deviation * (vectors**2 @ kept).sqrt()
    return mean + (centred @ vectors * kept) @ vectors.T, left


def _threshold(sums: Tensor, level: float) -> float:
    """Threshold for one attribute; see :class:`LearnedThresholds`."""
    public = 0.5 * level
    ordered = sums.sort().values
    # Clipping may leave the upper heap far below the level, from where the fit would not find it.
    low = float(ordered[: len(sums) // 2].mean())
    high = min(level, float(ordered[-(len(sums) // 10) :].mean()))
    variance = 0.25 * float(sums.var()) + (0.02 * level) ** 2
    weight = 0.3
    for _ in range(_ITERATIONS):
        odds = math.log(weight / (1 - weight)) + ((sums - low) ** 2 - (sums - high) ** 2) / (2 * variance)
        having = odds.sigmoid()
        weight = min(max(float(having.mean()), 0.01), 0.99)
        high = float((having * sums).sum() / having.sum().clamp(min=1e-9))
        low = float(((1 - having) * sums).sum() / (1 - having).sum().clamp(min=1e-9))
        residual = having * (sums - high) ** 2 + (1 - having) * (sums - low) ** 2
        variance = max(float(residual.mean()), (0.02 * level) ** 2)
    separation = (high - low) / math.sqrt(variance)
    trust = min(1.0, max(0.0, (separation - 1) / 2))
    if trust == 0.0:
        return public
    learned = (low + high) / 2 - variance / (high - low) * math.log(weight / (1 - weight))
    learned = min(max(learned, 0.05 * level), 0.95 * level)
    return trust * learned + (1 - trust) * public


def clip_attributes(labels: Tensor, tau: float | None) -> Tensor:
    """Clip votes: each row f is scaled by min(τ/|f|₁, 1).

    Args:
        labels: 0 or 1, shape ``(…, a)``.
        tau: τ, or None for no clipping.

    Returns:
        float64, shape ``(…, a)``; rows of L1 norm at most τ, entries in [0, 1].
    """
    votes = labels.double()
    if tau is None:
        return votes
    return votes * (tau / votes.sum(dim=-1, keepdim=True).clamp(min=1.0)).clamp(max=1.0)


def single_vote_norms(tau: float | None, num_attributes: int) -> tuple[float, float]:
    """Largest L1 and L2 norm of one clipped vote: sensitivity of a sum where a vote is added or removed.

    A row of s ones has entries c(s) = min(τ/s, 1), hence L1 norm min(s, τ) and L2 norm √(s·c(s)²). L1 is at most
    τ, and because c² ≤ c the squared L2 norm is at most the L1 norm, so at most τ as well: it is τ for
    s = τ where that is a whole number, and less otherwise. The maximum over s is taken.

    Args:
        tau: τ, or None for no clipping.
        num_attributes: a.
    """
    norms = [(s * c, s * c * c) for s, c in _votes(tau, num_attributes)]
    return max(l1 for l1, _ in norms), math.sqrt(max(squared for _, squared in norms))


@functools.lru_cache(maxsize=64)
def swapped_vote_norms(tau: float | None, num_attributes: int) -> tuple[float, float]:
    """Largest L1 and L2 distance of two clipped votes: sensitivity of a sum where a vote is replaced.

    Let u and w be the votes of the record that enters the k nearest and of the one that it pushes out (or of
    one teacher before and after), each with entries in [0, 1] and L1 norm at most τ. Then
    ‖u − w‖₁ ≤ 2τ, and since entries are not negative ⟨u, w⟩ ≥ 0, so
    ‖u − w‖₂² ≤ ‖u‖₂² + ‖w‖₂² ≤ ‖u‖₁ + ‖w‖₁ ≤ 2τ: the √(2τ) behind the RDP α·τ/σ² of Theorem 5 (Zhu et al.,
    Private-kNN, CVPR 2020, supplement). Each entry moves by at most 1, so √a is a bound too; without clipping
    it is attained.

    Both bounds are met only where two votes of τ ones fit side by side into a attributes. The votes that exist
    are rows of s ones with the entry c(s) = min(τ/s, 1), and for u with s ones and w with t ones the distance is
    largest where they share as few attributes as possible, o = max(0, s + t − a): moving a common attribute
    of w to a free place adds c(s)² + c(t)² − (c(s) − c(t))² = 2·c(s)c(t) ≥ 0 to the squared L2 distance, and
    c(s) + c(t) − |c(s) − c(t)| ≥ 0 to the L1 distance. So the exact maximum is over pairs (s, t), which this
    function goes through; s = 0 is a vote that comes or goes alone (a sample of fewer than k records, a teacher
    that abstains).

    Args:
        tau: τ, or None for no clipping.
        num_attributes: a.

    Returns:
        The L1 and the L2 sensitivity.
    """
    largest_l1 = largest_squared = 0.0
    for s, first in _votes(tau, num_attributes):
        for t, second in _votes(tau, num_attributes):
            shared = max(0, s + t - num_attributes)
            l1 = s * first + t * second - 2 * shared * min(first, second)
            squared = s * first**2 + t * second**2 - 2 * shared * first * second
            largest_l1, largest_squared = max(largest_l1, l1), max(largest_squared, squared)
    return largest_l1, math.sqrt(largest_squared)


def _votes(tau: float | None, num_attributes: int) -> Iterator[tuple[int, float]]:
    """Possible numbers of ones in a row, and the value of each one after clipping."""
    for ones in range(num_attributes + 1):
        yield ones, 1.0 if tau is None or ones <= tau else tau / ones


@dataclasses.dataclass(frozen=True)
class Attributes:
    """Settings of a teacher whose records have attributes: clipping of votes and decision rule.

    A record's (or teacher's) vote is its attribute vector f, scaled by min(τ/|f|₁, 1). Sums, one an attribute, get
    noise; nothing is screened. Probabilities of the attributes are released too, at no cost. Private-kNN: Zhu, Yu,
    Chandraker and Wang (CVPR 2020), section 4.3 and Theorem 5.

    Args:
        tau: τ, the most that one vote adds to all attributes together. None: no clipping.
        rule: how sums become attributes; None takes :class:`LearnedThresholds`, in reverse kNN
            ``FixedThresholds(denoise=True)``.

    Raises:
        ValueError: for a ``tau`` that is not above 0.

    Example:
        >>> from pl_privknn import Gaussian, PrivateKNN
        >>> from pl_privknn.labelers import Attributes
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> settings = Attributes(tau=3.0)
        >>> teacher = PrivateKNN(300, 1.0, noise=Gaussian(sigma=60.0), task="multilabel", attributes=settings)
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 40), 1e-5), 3)
        1.085
    """

    tau: float | None = 3.0
    rule: DecisionRule | None = None

    def __post_init__(self) -> None:
        if self.tau is not None:
            check_positive("attributes.tau", self.tau)

    @property
    def decision(self) -> DecisionRule:
        """Decision rule: the given one, else :class:`LearnedThresholds`."""
        return LearnedThresholds() if self.rule is None else self.rule

    def swapped(self, noise: Mechanism, num_attributes: int, rate: float = 1.0) -> AdditiveNoise:
        """Mechanism for noisy sums in which one vote may replace another; see :func:`swapped_vote_norms`."""
        l1, l2 = swapped_vote_norms(self.tau, num_attributes)
        return sum_noise(noise, l1, l2, rate, "sums of clipped votes")

    def decide(self, noisy: Tensor, total: float, deviation: float) -> Tensor:
        """Probabilities of attributes, float64 ``(m, a)``; see :meth:`DecisionRule.__call__`."""
        return self.decision(noisy, total, self.tau, deviation)


def attributes_of(task: str, attributes: Attributes | None) -> Attributes | None:
    """Settings of attributes for a task that has them, by default :class:`Attributes` without arguments; else None.

    Raises:
        ValueError: for another task, or settings of attributes where the task is ``"multiclass"``.
    """
    if check_choice("task", task, ("multiclass", "multilabel")) == "multilabel":
        return Attributes() if attributes is None else attributes
    if attributes is not None:
        raise ValueError(
            f"attributes={attributes!r}: task='multiclass' has none; give task='multilabel', or leave them out"
        )
    return None
