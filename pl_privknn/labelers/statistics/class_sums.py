"""One Gaussian release of the sums of features, or of kernel weights, by class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.labelers.canaries import Canaries, one_in_each_cell
from pl_privknn.labelers.statistics.fits import fit_least_squares, fit_maximum_likelihood
from pl_privknn.labelers.statistics.lattice import LEFT_BITS, RIGHT_BITS, step_for, whole_steps, within
from pl_privknn.labelers.statistics.teacher import StatisticsTeacher, Taken

FITS = ("least_squares", "maximum_likelihood")


class ClassSums(StatisticsTeacher):
    """A linear model from one release of Σ y xᵀ, the sums of unit features by class; all else is public.

    In least squares and in softmax regression labels enter by E[y xᵀ] alone. The other part, E[x xᵀ] or
    E[log Σ exp(Wx)], is taken from public examples, without noise (Mehta et al. 2022, arXiv:2211.13403).

    **Sensitivity.** A record adds x in its class's row and nothing elsewhere, so under ``add_remove`` the sum moves
    by |x| ≤ R = √(1 + bias²). Under ``replace_one`` it moves by √(|x|² + |x'|²) ≤ √2·R where the class changes and
    by |x − x'| ≤ 2 where it does not (the bias cancels), so by max(2, √2·R).

    **Attributes** (``task="multilabel"``): t = (2y − 1)/√a takes the place of y, with a attributes. Every record's t
    has length 1, whichever attributes it has, so the sum moves by R under ``add_remove`` and by 2R at most under
    ``replace_one``, and nothing is clipped. E[y xᵀ] follows from E[t xᵀ] and the public E[x].

    Args:
        *args: ``epsilon`` or ``noise_multiplier``.
        fit: ``"least_squares"`` or ``"maximum_likelihood"``.
        **kwargs: see :class:`~pl_privknn.labelers.statistics.teacher.StatisticsTeacher`.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import ClassSums
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = ClassSums(noise_multiplier=4.0)
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
        """R, or max(2, √2·R), of attributes 2R; see the class."""
        longest = math.sqrt(1 + self.bias**2)
        if self.adjacency == "add_remove":
            return longest
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
        for inputs, labels in self.private_parts():
            unit = inputs[:, :-1] if self.bias else inputs
            rows = torch.cat(
                [within(unit, 1.0, right), whole_steps(inputs[:, unit.shape[1] :], right)], dim=1
            )
            total += (within(self._vectors(labels, len(weights)), 1.0, left).T @ rows).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, Taken]) -> Tensor:
        """The public fit."""
        num_targets = len(releases[0].noisy)
        moment = releases[0].noisy / (self.expected_records * self.targets.error_scale(num_targets))
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


class SoftVotes(ClassSums):
    """One release of soft votes: each record votes for its class at all public centres, by a kernel.

    A record with features f has the weight e^{−γ|f − z|²} at each centre z, scaled such that all its weights
    together have L2 norm 1; v, the vector of them, takes the place of x in :class:`ClassSums`. Reverse kNN gives one
    whole vote instead, which says less. The votes of all centres are smoothed by least squares with the weights of
    public examples.

    **Sensitivity.** |v| = 1 and no entry is negative, so the sums move by 1 under ``add_remove`` and by √2 at most
    under ``replace_one``, whether the class changes or not; of attributes, whose votes have signs, by 2 at most.

    Args:
        *args: ``epsilon`` or ``noise_multiplier``.
        gamma: γ, for features of unit length, to which they are scaled.
        centers: so many public examples, drawn at random, are centres; None takes all of them.
        seed: of the choice of centres, a public matter.
        **kwargs: see :class:`ClassSums`; without ``bias``, ``components`` and ``whitening``.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import SoftVotes
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = SoftVotes(noise_multiplier=8.0)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), 1e-5), 3)
        0.434
    """

    def __init__(
        self,
        *args: Any,
        gamma: float = 10.0,
        centers: int | None = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, bias=0.0, components=None, whitening=0.0, **kwargs)
        self.gamma = check_positive("gamma", gamma)
        self.centers = None if centers is None else check_int("centers", centers)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)
        self._centers: Tensor | None = None

    def sensitivity(self, release: int) -> float:
        """1, or √2, of attributes 2."""
        if self.adjacency == "add_remove":
            return 1.0
        return self.targets.farthest

    def canaries(self, public: Tensor, num_classes: int) -> Canaries:
        """At public examples, each of which votes for its own centre most."""
        return one_in_each_cell(public[:50], num_classes)

    def learn_publicly(self, features: Tensor) -> None:
        """Choose the centres."""
        if self.centers is not None and self.centers < len(features):
            generator = torch.Generator().manual_seed(self.seed)
            features = features[torch.randperm(len(features), generator=generator)[: self.centers]]
        self._centers = functional.normalize(features.double(), dim=1)

    def learned(self) -> dict[str, Tensor]:
        """The centres."""
        return {} if self._centers is None else {"centers": self._centers}

    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Take the centres."""
        self._centers = learned["centers"]

    def transformed(self, features: Tensor) -> Tensor:
        """Kernel weights at the centres, the largest of them 1."""
        assert self._centers is not None
        unit = functional.normalize(features.double(), dim=1)
        # Of unit vectors, |f − z|² = 2 − 2 f·z. Constants go away when the weights are scaled.
        powers = 2 * self.gamma * (unit @ self._centers.T)
        return (powers - powers.amax(dim=1, keepdim=True)).exp()
