"""Groups of records with different sampling rates in the same noisy steps: their cost and their Poisson samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.files import read_numbers
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import poisson_sample, step_mechanism


@dataclasses.dataclass(frozen=True, eq=False)
class RecordGroups:
    """Groups of private records, each with the ε that the owners of its records chose.

    Which group a record is in must follow from a rule that was there before, and from this record alone: its owner's
    choice, or where it comes from. A group defined by other records, or by a model's output, has no separate ε.

    Args:
        members: group of each private record in the data module's order, whole numbers from 0, shape ``(n,)``, or
            the path of a ``.npy`` file with them.
        epsilons: ε of each group.

    Raises:
        ValueError: for arguments that don't fit each other.
        FileNotFoundError: if there is no such file.

    Example:
        >>> from pl_privknn.privacy.record_groups import RecordGroups
        >>> RecordGroups([0, 1, 1], epsilons=(0.5, 2.0)).largest(None)
        2.0
    """

    members: Any = dataclasses.field(repr=False)  # which record is in which group is private
    epsilons: Sequence[float]

    def __post_init__(self) -> None:
        if not self.epsilons:
            raise ValueError(f"epsilons={self.epsilons!r}: give one a group")
        for epsilon in self.epsilons:
            check_positive("epsilons", epsilon)
        given = self.members
        if isinstance(given, str | Path):
            given = np.array(read_numbers("members", given))
        members = torch.as_tensor(given)
        if members.ndim != 1 or members.is_floating_point() or members.is_complex():
            raise ValueError("members: must be whole numbers of shape (n,), the group of each private record")
        if not bool(((members >= 0) & (members < len(self.epsilons))).all()):
            raise ValueError(
                f"members: must be groups from 0 to {len(self.epsilons) - 1}, one a private record"
            )
        object.__setattr__(self, "members", members.long())

    def largest(self, epsilon: float | None) -> float:
        """Largest ε of all groups, which is the ledger's guarantee.

        Args:
            epsilon: of all records; None where there are groups.

        Raises:
            ValueError: where there is one.
        """
        if epsilon is not None:
            raise ValueError(f"epsilon={epsilon!r}: groups have an ε of their own; leave epsilon out")
        return max(self.epsilons)


def rate_for_steps(epsilon: float, delta: float, noise_multiplier: float, steps: int) -> float:
    """The largest Poisson rate at which ``steps`` steps cost at most ``epsilon``; 1 at most.

    Raises:
        ValueError: as :func:`noise_for_steps`.
    """
    multiplier, count = check_positive("noise_multiplier", noise_multiplier), check_int("steps", steps)
    start = min(0.5, multiplier * epsilon / (10 * math.sqrt(count)))
    parameter = Parameter("sampling_rate", start=start, low=1e-7, high=1.0, rising=True)
    return calibrate(
        lambda rate: [Charge(step_mechanism(multiplier, 1.0, rate), count)],
        parameter,
        epsilon=epsilon,
        delta=delta,
        exact=False,
    ).value


def group_costs(
    rates: Sequence[float], steps: Charge, charges: Sequence[Charge], delta: float, exact: bool = True
) -> list[float]:
    """ε of each group of records, where groups have different Poisson rates in the same steps.

    Args:
        rates: one a group.
        steps: the steps as they are charged, with the largest rate.
        charges: all releases, including ``steps``; all others count in full for every group.
        delta: δ of the guarantee.
        exact: see :func:`~pl_privknn.privacy.accounting.accountant.account`.
    """
    shared, others, left = steps.mechanism, [], steps.count
    if not isinstance(shared, Gaussian):
        raise TypeError(f"steps: {type(shared).__name__} is not a step of noisy SGD")
    for charge in charges:
        taken = min(left, charge.count) if charge.mechanism == shared else 0
        left -= taken
        if charge.count > taken:
            others.append(dataclasses.replace(charge, count=charge.count - taken))
    costs = []
    for rate in rates:
        own = Charge(dataclasses.replace(shared, sampling_rate=rate), steps.count)
        costs.append(account([own, *others], delta=delta, exact=exact).epsilon)
    return costs


def poisson_sample_by_group(members: Tensor, rates: Sequence[float], noise: NoiseSource) -> Tensor:
    """Poisson sample of records at the rates of their groups; see :func:`poisson_sample`.

    Args:
        members: group of each record, int64 ``(n,)``.
        rates: one a group.
        noise: source of the coins.
    """
    drawn = []
    for group, rate in enumerate(rates):
        rows = torch.nonzero(members == group).flatten()
        drawn.append(rows[poisson_sample(len(rows), rate, noise)])
    return torch.cat(drawn).sort().values
