"""Noise that the steps of a training share in part: DP-FTRL by a banded matrix, with amplification by sampling.

Why ε is that of ⌈steps / b⌉ Poisson-sampled Gaussian releases at rate b·q (Choquette-Choo et al. 2023, section 4):

1. G has the clipped sums of the steps as rows. To release the rows of G + C⁻¹Z is to release those of CG + Z, for a
   lower triangular C and independent noise Z.
2. A record of subset s is in steps s, s + b, … alone, in each by a coin of its own. Its gradient g of step t stands
   in rows t to t + b − 1 of CG, as g times a column of C, of norm 1 at most; no two of its steps share a row.
3. g depends on rows before t alone. So think of these b rows as released at step t, with this record's part alone:
   one Poisson-sampled Gaussian of rate b·q. Rows before s have nothing of it.
4. The other records' part of a row, chosen by the rows before and by other coins, is added to that afterwards. What
   is released between the rows (an accuracy, with its own charge) is one more release after those of step t.
5. So the record's whole contribution is adaptive composition of one such release in every cycle of b steps.

Each record is put in its subset by a coin of its own, whatever the others are. The bound holds for every outcome of
these coins, which are tossed alike with and without the record, and so for all of them together.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import PaidSteps


@dataclasses.dataclass(frozen=True)
class BandedNoise:
    """Lets a step's noise take back part of that of the steps before it (Choquette-Choo et al. 2023; DP-FTRL).

    Noise of a step is C⁻¹Z: Z is independent noise, C lower triangular and Toeplitz, with the first ``bands`` Taylor
    coefficients of (1 − x)^(−1/2) (the banded square root of Kalinin, Lampert 2024), scaled to a norm of 1. For the
    same σ a single step has more noise, and the sum of many steps, of which weights are made, has less.

    **Who takes part, and when.** At the start each record is put in one of ``bands`` subsets, by a coin of its own.
    Step t of those paid for draws from subset t mod ``bands`` alone, at ``bands`` times the rate, so that the
    expected batch stays. A record is in one step at most of each cycle of ``bands`` steps, which is one release.

    Args:
        bands: nonzero diagonals of C; 1 is ordinary noisy SGD. At most expected records over the expected batch.
            ``bands − 1`` noise vectors of the gradient's size, in float64, are kept in memory.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> from pl_privknn.training import BandedNoise, PrivateTraining
        >>> noise = BandedNoise(bands=8)
        >>> training = PrivateTraining(
        ...     noise_multiplier=2.0, expected_batch_size=512, expected_records=60_000, correlated_noise=noise
        ... )
        >>> cycles = noise.releases(20 * training.steps_per_epoch)
        >>> release = Gaussian(2.0, 1.0, noise.rate(512 / 60_000))
        >>> cycles, round(epsilon_for_delta([Charge(release, cycles)], delta=1e-5), 2)
        (295, 2.7)
    """

    bands: int

    def __post_init__(self) -> None:
        check_int("bands", self.bands)

    @property
    def coefficients(self) -> list[float]:
        """A column of C from the diagonal down, of norm 1."""
        taylor = [1.0]
        for k in range(1, self.bands):
            taylor.append(taylor[-1] * (2 * k - 1) / (2 * k))
        norm = math.hypot(*taylor)
        return [coefficient / norm for coefficient in taylor]

    def check_beside(self, sampling_rate: float, **others: Any) -> None:
        """Raise ``ValueError`` beside what this is not stated for.

        Args:
            sampling_rate: expected batch over expected records.
            **others: by their names; None where they are not asked for.
        """
        self.rate(sampling_rate)
        if found := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"correlated_noise: its guarantee is for one rate and one norm; leave out {' and '.join(found)}"
            )

    def rate(self, sampling_rate: float) -> float:
        """The rate at which a step draws from its subset.

        Args:
            sampling_rate: expected batch over expected records.

        Raises:
            ValueError: where a subset is smaller than the expected batch.
        """
        rate = self.bands * sampling_rate
        if rate > 1 + 1e-9:
            raise ValueError(
                f"bands={self.bands}: each of so many subsets of the expected records is smaller than the expected "
                f"batch, which a step draws from one of them; give at most {math.floor(1 / sampling_rate + 1e-9)}"
            )
        return min(1.0, rate)

    def releases(self, steps: int) -> int:
        """In how many of ``steps`` steps, counted from the first, a record is at most."""
        return math.ceil(steps / self.bands)

    def subsets(self, count: int, coins: NoiseSource) -> Tensor:
        """The subset of each record, int64 ``(count,)``: independent, and fixed for as long as noise is correlated.

        Args:
            count: number of records.
            coins: of their own.
        """
        return coins.integers((count,), self.bands)


class CorrelatedSteps(PaidSteps):
    """Paid steps with correlated noise; rows of the ledger are for whole cycles of ``bands`` steps.

    A resumed training makes a new one, which correlates nothing with the steps before: C is then block diagonal, its
    columns are cut off and so no longer, and those of different blocks share no row. It begins with a cycle of its
    own, as rows are for whole ones; what a crash left of a cycle is never drawn. So a record that is put in another
    subset then is still in one step of each cycle at most.

    Args:
        ledger: pays.
        mechanism: the release of a cycle for one record, which draws the independent noise.
        steps: how many steps there may be.
        steps_per_charge: how many are paid together, rounded up to whole cycles.
        chosen: how noise is correlated.
    """

    def __init__(
        self,
        ledger: ChargesLedger,
        mechanism: Gaussian,
        steps: int,
        steps_per_charge: int,
        chosen: BandedNoise,
    ) -> None:
        super().__init__(ledger, mechanism, steps, steps_per_charge, chosen.bands)
        self._first, *self._others = chosen.coefficients
        # As secret as the gradients: with the noise of a step, its sum is known.
        self._before: deque[Tensor] = deque(maxlen=chosen.bands - 1)

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds no noise, and so begins afresh."""
        return {**self.__dict__, "_before": deque(maxlen=self._before.maxlen)}

    def release(self, gradients: Tensor, noise: NoiseSource) -> Tensor:
        """Pay for a step, where that was not done yet, then add its noise, see :meth:`PaidSteps.release`."""
        drawn = super().release(torch.zeros_like(gradients), noise)
        for coefficient, earlier in zip(self._others, self._before, strict=False):
            drawn -= coefficient * earlier
        drawn /= self._first
        self._before.appendleft(drawn)
        return gradients.double() + drawn
