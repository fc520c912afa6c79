"""One public example stands for each class, chosen by the exponential mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pl_privknn._checks import check_positive
from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.statistics.teacher import StatisticsTeacher, Taken
from pl_privknn.privacy.mechanisms import ExponentialArgmax
from pl_privknn.privacy.mechanisms.base import Mechanism, check_adjacency
from pl_privknn.privacy.noise import NoiseSource

#: Length of the interval in which a record moves the logarithms of a choice's odds, times b.
REACH = {"add_remove": 1.0, "replace_one": 2.0}


class PublicPrototypes(StatisticsTeacher):
    """Each class is the public example that its records are most like (Wahdany et al. 2024, arXiv:2406.08039).

    Public example z has for class c the utility Σ s(x, z) over the private records x of that class, where s is their
    cosine from ``low`` to ``high``, mapped to 0 … 1. One example a class is chosen with probability ∝
    exp(utility / b). Queries are answered by the cosines to the chosen ones. No sum is divided by the number of
    records, so a class of few records is not drowned by the others; where records are many, teachers that release
    sums say more.

    **Cost.** A record has one class, so all choices together are one release. Under ``add_remove`` it moves the
    utilities of its class upwards by 1 at most: the logarithms of the choice's odds lie in an interval of 1/b, and a
    vote added to one class is the worst of these (Dong, Durfee, Rogers 2020). Under ``replace_one`` it moves those of
    one class by 1 up or down, or those of two classes by 1 each: an interval of 2/b, as of a vote swapped.

    Args:
        epsilon: ε of pure differential privacy: b is 1/ε, or 2/ε under ``replace_one``.
        low: cosine that counts for nothing.
        high: cosine that counts for 1.
        temperature: answers are the softmax of cosines over it.
        **kwargs: see :class:`~pl_privknn.labelers.statistics.teacher.StatisticsTeacher`: ``components``,
            ``whitening``, ``adjacency`` and ``noise_source``.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import PublicPrototypes
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PublicPrototypes(epsilon=0.5)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), delta=1e-9), 3)
        0.5
    """

    def __init__(
        self, epsilon: float, low: float = 0.0, high: float = 1.0, temperature: float = 0.1, **kwargs: Any
    ) -> None:
        reach = REACH[check_adjacency(kwargs.get("adjacency", "add_remove"))]
        super().__init__(1, noise_multiplier=reach / check_positive("epsilon", epsilon), bias=0.0, **kwargs)
        if self.targets.task != "multiclass":
            raise ValueError(
                "task='multilabel': a class has a public example that stands for it, an attribute has none; use "
                "PublicCurvature or ClassSums"
            )
        if not -1.0 <= low < high <= 1.0:
            raise ValueError(f"low={low!r}, high={high!r}: want cosines with -1 <= low < high <= 1")
        self.low, self.high = float(low), float(high)
        self.temperature = check_positive("temperature", temperature)

    # Of a choice there is no sum that would say something of each canary: one record, in many runs.
    canaries, evidence = Labeler.canaries, Labeler.evidence

    def sensitivity(self, release: int) -> float:
        """1: of each utility."""
        return 1.0

    def mechanism(self, release: int) -> ExponentialArgmax:
        """The choice, of all classes at once."""
        votes = "add" if self.adjacency == "add_remove" else "swap"
        return ExponentialArgmax(self.noise_multiplier, votes=votes)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Utilities of the public examples for each class, **private**, float64 ``(c, m)``."""
        assert self._public is not None
        total = self._public.new_zeros(len(weights), len(self._public))
        for inputs, labels in self.private_parts():
            likeness = (inputs @ self._public.T - self.low) / (self.high - self.low)
            total.index_add_(0, labels, likeness.clamp(0.0, 1.0))
        return total

    def public_basis(self) -> dict[str, Tensor]:
        """The public examples, too."""
        assert self._public is not None
        return {**self.learned(), "public": self._public}

    def take_basis(self, basis: dict[str, Tensor]) -> None:
        """Take them."""
        learned = dict(basis)
        self._public = learned.pop("public")
        self.relearn(learned)

    def drawn(self, release: int, mechanism: Mechanism, exact: Tensor, noise: NoiseSource) -> Tensor:
        """The chosen examples, float64 ``(c, p)``."""
        assert self._public is not None
        assert isinstance(mechanism, ExponentialArgmax)
        return self._public[mechanism.argmax(exact, noise)]

    def model(self, public: Tensor, releases: Mapping[int, Taken]) -> Tensor:
        """Cosines to the chosen examples, over the temperature."""
        return releases[0].noisy / self.temperature
