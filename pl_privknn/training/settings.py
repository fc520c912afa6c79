"""Groups of arguments of a private training: its budget, its batches, its clipped gradients."""

from __future__ import annotations

import dataclasses

from pl_privknn._checks import check_choice, check_int, check_positive, check_rate
from pl_privknn.privacy.settings import Budget
from pl_privknn.training.clipping import CLIPPING

ON_BUDGET = ("error", "stop")


@dataclasses.dataclass(frozen=True)
class TrainingBudget(Budget):
    """What a training may cost, or how much noise it draws.

    Args:
        delta: δ of the guarantee.
        max_epsilon: budget of the ledger; None for no limit.
        epsilon: find the least noise with which all steps cost at most this. Give it or
            ``noise_multiplier``.
        noise_multiplier: noise over ``clip_norm``.
        on_budget: where the plan passes ``max_epsilon``, ``"error"`` raises ``BudgetExceeded`` at once and
            ``"stop"`` trains for as many steps as fit, and then ends the training.

    Raises:
        ValueError: for an argument out of its range.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    on_budget: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epsilon", "noise_multiplier"):
            # No noise at all would be no privacy at all, so it is no value of a private training.
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        check_choice("on_budget", self.on_budget, ON_BUDGET)

    def check_complete(self) -> None:
        """Raise ``ValueError`` unless exactly one of ``epsilon`` and ``noise_multiplier`` is given."""
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon={self.epsilon!r}, noise_multiplier={self.noise_multiplier!r}: give exactly "
                "one of them"
            )


@dataclasses.dataclass(frozen=True)
class PoissonBatches:
    """How private records are drawn: each takes part in a step with the same probability, independently.

    Args:
        batch_size: what the noisy sum of gradients is divided by, a public constant; about the expected size of a
            batch.
        sampling_rate: Poisson rate. Give it or ``expected_records``.
        expected_records: about how many private records there are, a public constant that takes the place of
            their number, which is private; the rate is then ``batch_size`` over it.

    Raises:
        ValueError: for an argument out of its range.
    """

    batch_size: int = 1024
    sampling_rate: float | None = None
    expected_records: int | None = None

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size)
        if self.sampling_rate is not None:
            check_rate("sampling_rate", self.sampling_rate)
        if self.expected_records is not None:
            check_int("expected_records", self.expected_records)

    @property
    def rate(self) -> float:
        """The Poisson rate of a step, from public constants alone: a rate of batch/n would tell n.

        Raises:
            ValueError: unless exactly one of ``sampling_rate`` and ``expected_records`` is given, and in range.
        """
        rate, expected = self.sampling_rate, self.expected_records
        if (rate is None) == (expected is None):
            raise ValueError(
                f"sampling_rate={rate!r}, expected_records={expected!r}: give exactly one of them. The number of "
                "private records is private, so give a public estimate of it as expected_records (the rate is then "
                "batch_size / expected_records)"
            )
        if expected is None:
            return check_rate("sampling_rate", rate)
        if expected < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is more than expected_records={expected}; lower batch_size, or give "
                "sampling_rate instead of expected_records"
            )
        return self.batch_size / expected


@dataclasses.dataclass(frozen=True)
class Clipping:
    """How each record's gradient is made and bounded.

    Args:
        clip_norm: L2 bound of each record's gradient.
        clipping: ``"flat"``, ``"ghost"`` or ``"per_layer"``, see
            :class:`~pl_privknn.training.clipping.ClippedGradients`.
        physical_batch_size: records at once; bounds memory and changes nothing else. By default 64 on a CPU, 512
            elsewhere.

    Raises:
        ValueError: for an argument out of its range.
    """

    clip_norm: float = 1.0
    clipping: str = "flat"
    physical_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_positive("clip_norm", self.clip_norm)
        check_choice("clipping", self.clipping, CLIPPING)
        if self.physical_batch_size is not None:
            check_int("physical_batch_size", self.physical_batch_size)
