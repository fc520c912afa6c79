"""One Gaussian release of the sums of features, or of kernel weights, by class."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.labelers.statistics.fits import fit_least_squares, fit_maximum_likelihood
from pl_privknn.labelers.statistics.teacher import StatisticsTeacher, Taken
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.privacy.noise import NoiseSource

FITS = ("least_squares", "maximum_likelihood")


class ClassSums(StatisticsTeacher):
    """A linear model from one release of Σ y xᵀ, the sums of unit features by class; all else is public.

    In least squares and in softmax regression labels enter by E[y xᵀ] alone. The other part, E[x xᵀ] or
    E[log Σ exp(Wx)], is taken from public examples, without noise (Mehta et al. 2022, arXiv:2211.13403).

    **Sensitivity.** A record adds x in its class's row and nothing elsewhere, so under ``add_remove`` the sum moves
    by |x| ≤ R = √(1 + bias²). Under ``replace_one`` it moves by √(|x|² + |x'|²) ≤ √2·R where the class changes and
    by |x − x'| ≤ 2 where it does not (the bias cancels), so by max(2, √2·R).

    Args:
        target_epsilon: find the least noise that costs at most this at ``delta``. Give it or ``noise_multiplier``.
        noise_multiplier: standard deviation of the noise over the sensitivity.
        delta: δ of ``target_epsilon``.
        expected_records: N, a public constant, about the number of private records.
        fit: ``"least_squares"`` or ``"maximum_likelihood"``.
        ridge: the penalty is λ = ridge · σ / N, σ the noise of a sum of sensitivity 1.
        bias: a constant beside the unit features.
        components: keep so many principal directions of the public features; None takes features as they are.
        whitening: divide each direction by its public standard deviation to this power.
        adjacency: neighbouring relation.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

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
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        expected_records: int = 60_000,
        fit: str = "least_squares",
        ridge: float = 0.4,
        bias: float = 0.3,
        components: int | None = None,
        whitening: float = 0.5,
        adjacency: Adjacency = "add_remove",
        noise_source: NoiseSource | None = None,
    ) -> None:
        self.fitted_by = check_choice("fit", fit, FITS)
        super().__init__(
            1, target_epsilon, noise_multiplier, delta, expected_records, ridge, bias, components, whitening,
            adjacency, noise_source,
        )  # fmt: skip

    def sensitivity(self, release: int) -> float:
        """R, or max(2, √2·R); see the class."""
        longest = math.sqrt(1 + self.bias**2)
        return longest if self.adjacency == "add_remove" else max(2.0, math.sqrt(2.0) * longest)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ y xᵀ."""
        total = torch.zeros_like(weights)
        for inputs, labels in self.private_parts():
            total += functional.one_hot(labels, len(weights)).double().T @ inputs
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
        target_epsilon: see :class:`ClassSums`, as for what is not named here.
        noise_multiplier: as well.
        delta: as well.
        expected_records: as well.
        gamma: γ, for features of unit length, to which they are scaled.
        centers: so many public examples, drawn at random, are centres; None takes all of them.
        fit: as for :class:`ClassSums`.
        ridge: as well.
        seed: of the choice of centres, a public matter.
        adjacency: neighbouring relation.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

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
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        expected_records: int = 60_000,
        gamma: float = 10.0,
        centers: int | None = 1000,
        fit: str = "least_squares",
        ridge: float = 0.4,
        seed: int = 0,
        adjacency: Adjacency = "add_remove",
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(
            target_epsilon, noise_multiplier, delta, expected_records, fit, ridge, 0.0, None, 0.0, adjacency,
            noise_source,
        )  # fmt: skip
        self.gamma = check_positive("gamma", gamma)
        self.centers = None if centers is None else check_int("centers", centers)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)
        self._centers: Tensor | None = None

    def sensitivity(self, release: int) -> float:
        """1, or √2."""
        return 1.0 if self.adjacency == "add_remove" else math.sqrt(2.0)

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
