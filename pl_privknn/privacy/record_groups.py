"""Groups of records with sampling rates of their own in the same noisy steps: what they cost, and their coins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import poisson_sample, step_mechanism


def rate_for_steps(
    epsilon: float, delta: float, noise_multiplier: float, steps: int, others: Sequence[Charge] = ()
) -> float:
    """The largest Poisson rate at which ``steps`` steps, and ``others``, cost at most ``epsilon``; 1 at most.

    Raises:
        ValueError: as :func:`noise_for_steps`.
    """
    multiplier, count = check_positive("noise_multiplier", noise_multiplier), check_int("steps", steps)
    start = min(0.5, multiplier * epsilon / (10 * math.sqrt(count)))
    parameter = Parameter("sampling_rate", start=start, low=1e-7, high=1.0, rising=True)
    return calibrate(
        lambda rate: [Charge(step_mechanism(multiplier, 1.0, rate), count), *others],
        parameter,
        epsilon=epsilon,
        delta=delta,
        exact=False,
    ).value


def group_costs(
    rates: Sequence[float], steps: Charge, charges: Sequence[Charge], delta: float, exact: bool = True
) -> list[float]:
    """ε of each group of records that has a Poisson rate of its own in the same steps.

    Args:
        rates: one a group.
        steps: the steps as they are charged, with the largest rate.
        charges: all that was released, ``steps`` among it; what is beside them counts in full for every group.
        delta: δ of the guarantee.
        exact: see :func:`~pl_privknn.privacy.accounting.accountant.account`.
    """
    shared, others, left = steps.mechanism, [], steps.count
    if not isinstance(shared, Gaussian):
        raise TypeError(f"steps: {type(shared).__name__} is no step of noisy SGD")
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
    """As :func:`poisson_sample`, of records with the rates of their groups.

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
