"""A ledger that costs nothing and takes notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pl_privknn._checks import check_int
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Mechanism
from pl_privknn.privacy.mechanisms.base import check_known
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.store import NOISE_MARKS


class FreeLedger:
    """Notes every charge in memory and asks for nothing: for tests, and for benchmarks on public data.

    Never for a release: what it notes is gone with the process, and no budget stops it.

    Args:
        limit: refuse after so many charges, as a budget that is spent does; None never refuses.
        start: position of the first row. Seeded noise is a function of the row, so a ledger that goes on where
            another one stopped starts at that one's number of rows.

    Attributes:
        rows: the charges in order, marked as a real ledger marks them: no guarantee where their noise is
            seeded, a conditional one where the charge did not state its noise and adjacencies.

    Example:
        >>> from pl_privknn import Gaussian
        >>> ledger = FreeLedger(limit=1)
        >>> ledger.charge(Gaussian(5.0), 3)
        0
        >>> ledger.rows[0].count, ledger.rows[0].guarantee.level
        (3, 'conditional')
    """

    def __init__(self, limit: int | None = None, start: int = 0) -> None:
        self.limit = None if limit is None else check_int("limit", limit, minimum=0)
        self.start = check_int("start", start, minimum=0)
        self.rows: list[Charge] = []

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
    ) -> int:
        """Note ``count`` releases; see :class:`~pl_privknn.privacy.ledger.ChargesLedger`.

        Raises:
            BudgetExceeded: beyond ``limit`` charges; nothing was noted.
            ValueError: for a count or a mechanism that a real ledger refuses.
        """
        charge = Charge(mechanism, count)
        check_known(charge)
        if self.limit is not None and len(self.rows) >= self.limit:
            raise BudgetExceeded(
                f"limit={self.limit}: this ledger takes no more charges; nothing was charged and nothing was drawn",
                math.nan, math.nan, math.nan,
            )  # fmt: skip
        stated = None
        if noise is not None and adjacencies is not None:
            stated = "cryptographic" if noise.cryptographic else "seeded"
        self.rows.append(charge.marked(NOISE_MARKS[stated]))
        return self.start + len(self.rows) - 1
