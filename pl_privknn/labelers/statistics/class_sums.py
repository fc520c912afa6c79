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
from pl_privknn.labelers.statistics.lattice import step_for, whole_steps, within
from pl_privknn.labelers.statistics.teacher import StatisticsTeacher, Taken

FITS = ("least_squares", "maximum_likelihood")


class ClassSums(StatisticsTeacher):
    """A linear model from one release of Σ y xᵀ, the sums of unit features by class; all else is public.

    In least squares and in softmax regression labels enter by E[y xᵀ] alone. The other part, E[x xᵀ] or
    E[log Σ exp(Wx)], is taken from public examples, without noise (Mehta et al. 2022, arXiv:2211.13403).

    **Sensitivity.** A record adds x in its class's row and nothing elsewhere, so under ``add_remove`` the sum moves
    by |x| ≤ R = √(1 + bias²). Under ``replace_one`` it moves by √(|x|² + |x'|²) ≤ √2·R where the class changes and
    by |x − x'| ≤ 2 where it does not (the bias cancels), so by max(2, √2·R).

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
        """R, or max(2, √2·R); see the class."""
        longest = math.sqrt(1 + self.bias**2)
        return longest if self.adjacency == "add_remove" else max(2.0, math.sqrt(2.0) * longest)

    def step(self, release: int) -> float:
        """2⁻²⁴ for a bias below 2."""
        return step_for(max(1.0, self.bias))

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ y xᵀ in steps, the unit vector in x of length 1 at most and the bias the same for all."""
        total, step = torch.zeros(weights.shape, dtype=torch.int64), self.step(release)
        for inputs, labels in self.private_parts():
            unit = inputs[:, :-1] if self.bias else inputs
            steps = torch.cat([within(unit, 1.0, step), whole_steps(inputs[:, unit.shape[1] :], step)], dim=1)
            total += (functional.one_hot(labels, len(weights)).double().T @ steps).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, Taken]) -> Tensor:
        """The public fit."""
        fit = fit_least_squares if self.fitted_by == "least_squares" else fit_maximum_likelihood
        return fit(public, releases[0].noisy / self.expected_records, self.penalty)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax; of least squares, whose scores estimate probabilities, the positive parts over their sum."""
        if self.fitted_by == "maximum_likelihood":
            return scores.softmax(dim=1)
        # The largest stays the largest where none is positive.
        positive = (scores - scores.amax(dim=1, keepdim=True).clamp(max=0)).clamp(min=0) + 1e-12
        return positive / positive.sum(dim=1, keepdim=True)


class SoftVotes(ClassSums):
    """One release of soft votes: each record votes for its class at all public centres, by a kernel.

    A record with features f has the weight e^{−γ|f − z|²} at each centre z, scaled such that all its weights
    together have L2 norm 1; v, the vector of them, takes the place of x in :class:`ClassSums`. Reverse kNN gives one
    whole vote instead, which says less. The votes of all centres are smoothed by least squares with the weights of
    public examples.

    **Sensitivity.** |v| = 1 and no entry is negative, so the sums move by 1 under ``add_remove`` and by √2 at most
    under ``replace_one``, whether the class changes or not.

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
        """1, or √2."""
        return 1.0 if self.adjacency == "add_remove" else math.sqrt(2.0)

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
