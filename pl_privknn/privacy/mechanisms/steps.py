"""Steps of noisy SGD without the training: cost, Poisson samples and noise."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive, check_rate
from pl_privknn._processes import ALONE, ProcessGroup
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.mechanisms.base import Charge, Unit
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.stated import NoNoise
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.records import persons_of, records_drawn

# A hair: rounding in float32 must not let a clipped gradient be longer than the bound.
_SLACK = 1e-5


#: What draws the noise of a training's steps.
StepMechanism = Gaussian | NoNoise


def step_mechanism(noise_multiplier: float, max_grad_norm: float, sampling_rate: float) -> Gaussian:
    """The release of one step: a sum of clipped gradients over a Poisson batch, plus Gaussian noise.

    Args:
        noise_multiplier: standard deviation of the noise over ``max_grad_norm``.
        max_grad_norm: L2 norm ``C`` to which each example's gradient is clipped, the sensitivity of the sum.
        sampling_rate: rate at which every record takes part in a step, independently of all others.
    """
    multiplier = check_positive("noise_multiplier", noise_multiplier)
    norm = check_positive("max_grad_norm", max_grad_norm)
    return Gaussian(multiplier * norm, norm, check_rate("sampling_rate", sampling_rate))


def steps_per_epoch(sampling_rate: float) -> int:
    """Number of steps per epoch, ⌈1 / sampling_rate⌉; depends on the rate alone, not on the records."""
    # 1 / rate may come out a hair above a whole number.
    return math.ceil(1 / check_rate("sampling_rate", sampling_rate) - 1e-9)


def noise_for_steps(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """The least noise multiplier with which ``steps`` steps cost at most ``epsilon``; 0 for an infinite one.

    Raises:
        ValueError: for arguments out of range; :class:`~pl_privknn.privacy.accounting.calibration.CalibrationError`
            where the target can't be met.
    """
    rate, count = check_rate("sampling_rate", sampling_rate), check_int("steps", steps)
    if epsilon == math.inf:
        return 0.0
    parameter = Parameter("noise_multiplier", start=max(0.5, 20 * rate), low=1e-2, high=1e6, rising=False)
    return calibrate(
        lambda multiplier: [Charge(step_mechanism(multiplier, 1.0, rate), count)],
        parameter,
        epsilon=epsilon,
        delta=delta,
        exact=False,
    ).value


def steps_within(
    mechanism: StepMechanism, most: int, epsilon: float, delta: float, others: list[Charge] | None = None
) -> int:
    """Number of steps, ``most`` at most, that stay within ``epsilon`` together with earlier grants.

    Raises:
        ValueError: as :func:`noise_for_steps`; not even one step may fit.
    """
    granted = others or []
    parameter = Parameter("steps", start=most, low=1, high=check_int("most", most), rising=True, whole=True)
    found = calibrate(
        lambda steps: [*granted, Charge(mechanism, int(steps))],
        parameter,
        epsilon=epsilon,
        delta=delta,
        exact=False,
    )
    return int(found.value)


def noise_aware_lr(
    lr: float, noise_limit: float | None, noise_multiplier: float, steps: int, batch_size: float
) -> float:
    """Reduce a learning rate for a noisy training, by public numbers alone.

    ν = noise_multiplier · √steps / batch_size is the noise that all steps together add, per weight, in units of
    the clipping norm. The rate is multiplied by min(1, noise_limit / ν), so that one setting serves for many ε;
    to tune the rate for each ε on private records would cost privacy.

    Args:
        lr: learning rate for little noise.
        noise_limit: ν from which on it is lowered; None never lowers it.
        noise_multiplier: noise over the clipping norm.
        steps: number of steps.
        batch_size: what the noisy sums are divided by.
    """
    if noise_limit is None or noise_multiplier == 0:
        return lr
    noise = noise_multiplier * math.sqrt(steps) / batch_size
    return lr * min(1.0, check_positive("noise_limit", noise_limit) / noise)


def clip_factors(norms: Tensor, max_grad_norm: float, slack: float = _SLACK) -> Tensor:
    """Factors in [0, 1] that bring each example's gradient within ``max_grad_norm``.

    A gradient that is not finite gets the factor 0, because one record must not be able to spoil a release.
    Its values have to be put to 0 as well: 0 · NaN is NaN.

    Args:
        norms: L2 norms over all parameters, shape ``(b,)``.
        max_grad_norm: the bound.
        slack: relative rounding error of norms and of what is scaled by the factors; enough for float32 by default.
    """
    factors = (max_grad_norm * (1.0 - slack) / norms).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))


def poisson_sample(count: int, sampling_rate: float, noise: NoiseSource) -> Tensor:
    """Positions of a Poisson sample, int64, ascending; possibly none.

    Each of ``count`` records is in it with probability ``sampling_rate``, once at most, independently of all
    others. A sample of fixed size, or one drawn with replacement, would not have the stated guarantee. Which
    records were drawn, and how many, is private: amplification requires that it is not known.
    """
    return torch.nonzero(noise.bernoulli((count,), sampling_rate)).flatten()


def poisson_persons(owners: Tensor, sampling_rate: float, most: int, noise: NoiseSource) -> Tensor:
    """Positions of at most ``most`` records, drawn by private coins, of each person of a Poisson sample of persons.

    Args:
        owners: person of each record, int64 ``(n,)``. **Private**.
        sampling_rate: rate at which every person takes part, independently of all others.
        most: m, a public constant.
        noise: source of the coins.

    Returns:
        int64, person by person. **Private**.
    """
    numbers, persons = persons_of(owners)
    takes_part = torch.zeros(len(persons), dtype=torch.bool)
    takes_part[poisson_sample(len(persons), sampling_rate, noise)] = True
    rows = torch.nonzero(takes_part[numbers]).flatten()
    chosen = rows[records_drawn(owners[rows], most, noise)]
    return chosen[numbers[chosen].argsort(stable=True)]


class PaidSteps:
    """Steps of noisy SGD in all processes: Poisson samples, ledger rows written before the noise, and noise.

    The first row pays for one step, each later one for twice as many as the one before it. Counters are the same in
    all processes; the first one pays and draws the noise.

    Args:
        ledger: pays; None in other processes than the first.
        mechanism: the release of one step, which also draws it.
        steps: how many steps there may be.
        steps_per_charge: how many are paid together at most. A crash wastes at most this many.
        unit: unit of privacy, for which each step has the mechanism's sensitivity.
        processes: of the training, each with its own records.

    Attributes:
        left: steps that are not done yet.
        row: position of the last row paid; 0 before the first.
    """

    def __init__(
        self,
        ledger: ChargesLedger | None,
        mechanism: StepMechanism,
        steps: int,
        steps_per_charge: int,
        unit: Unit = "record",
        processes: ProcessGroup = ALONE,
    ) -> None:
        self.mechanism, self._unit = mechanism, unit
        self.left = check_int("steps", steps, 0)
        self.row = 0
        self._ledger, self._processes = ledger, processes
        self._most = check_int("steps_per_charge", steps_per_charge)
        self._paid, self._together = 0, 1

    def sample(
        self,
        records: int,
        sampling_rate: float,
        noise: NoiseSource,
        owners: Tensor | None = None,
        records_per_person: int = 1,
    ) -> Tensor:
        """Charge the next step, where that is due, then draw its sample of this process's records.

        Args:
            records: number of this process's records. **Private**.
            sampling_rate: Poisson rate.
            noise: source of the coins, of which each step and each process has its own.
            owners: person of each record, where the unit is a person.
            records_per_person: most records of a drawn person that take part.

        Returns:
            Positions, int64. **Private**.

        Raises:
            BudgetExceeded: from the ledger; nothing was drawn.
            RuntimeError: if no step is left.
        """
        self._pay(noise)
        # A seeded source must not toss the same coins again after a resume, nor for records of other processes.
        rank = self._processes.rank
        coins = noise.stream("batches", self.row, self.left, *(("rank", rank) if rank else ()))
        if owners is None:
            return poisson_sample(records, sampling_rate, coins)
        return poisson_persons(owners, sampling_rate, records_per_person, coins)

    def release(self, gradients: Tensor, noise: NoiseSource) -> Tensor:
        """Charge a step, where that is due, then add its noise to the sum of all processes.

        Args:
            gradients: sum of clipped gradients of this process, shape ``(parameters,)``, all zero for an empty batch.
            noise: source of the noise; each step draws from a separate stream.

        Returns:
            float64, shape ``(parameters,)``, the same in all processes.

        Raises:
            BudgetExceeded: from the ledger; nothing was drawn.
            RuntimeError: if no step is left.
        """
        whole = self._processes.sum(gradients)
        self._pay(noise)
        self._paid -= 1
        self.left -= 1
        stream = functools.partial(noise.stream, "step", self.row, self._paid)
        noisy = self._processes.from_first(lambda: self.mechanism.add_noise(whole, stream()).cpu())
        return noisy.to(gradients.device)

    def _pay(self, noise: NoiseSource) -> None:
        if self.left <= 0:
            raise RuntimeError("all planned steps of noisy SGD are done; a further one would exceed the plan")
        if self._paid == 0:
            count = min(self._together, self.left)
            self.row = self._processes.from_first(functools.partial(self._charge, count, noise))
            self._paid, self._together = count, min(2 * count, self._most)

    def _charge(self, count: int, noise: NoiseSource) -> int:
        assert self._ledger is not None
        return self._ledger.charge(
            self.mechanism, count, noise=noise, adjacencies=("add_remove",), unit=self._unit
        )
