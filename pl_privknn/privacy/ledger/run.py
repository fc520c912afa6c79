"""One run's handle on a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pl_privknn.privacy.ledger.balance import count_of
from pl_privknn.privacy.ledger.budget import LedgerReport
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism
from pl_privknn.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from pl_privknn.privacy.ledger.ledger import Ledger


class LedgerRun:
    """One run's handle on a ledger: what labelers and baselines pay with. Get it from :meth:`Ledger.run`."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self.ledger = ledger
        self.run_id = run_id

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
    ) -> int:
        """Pay for ``count`` releases; the row is on disk when this returns. Draw only afterwards.

        Within the plan this takes milliseconds. Beyond it the budget is checked again. Several processes may
        charge the same run. :func:`~pl_privknn.privacy.paying.paid` pays and hands out the noise in one step.

        Args:
            mechanism: what is released.
            count: how often.
            noise: the source that will draw. The row says whether it is cryptographic; where it is not, the
                guarantee of the ledger is none.
            adjacencies: neighbouring relations under which ``mechanism`` states its cost. A charge that leaves
                this or ``noise`` out makes the ledger's guarantee conditional.

        Returns:
            position of the row, which no other charge will ever have.

        Raises:
            BudgetExceeded: if the charge would pass the budget; nothing was written.
            ValueError: for a count that is not a whole number of at least 1, a ledger of an adjacency that is not
                among ``adjacencies``, or a mechanism that is not defined under it.
            OSError: if the disk refuses; nothing may be drawn then.
        """
        return self.ledger._charge(self.run_id, mechanism, count, noise, adjacencies)

    def note(self, topic: str, text: str) -> None:
        """Write down a public fact, beside the charges and as durably; it costs nothing.

        State that is kept elsewhere (what a teacher has left to spend, for instance) notes here how far it has
        come, and is found out later where an older copy of it was put back.

        Args:
            topic: what the note is about. The last one on each topic counts, whichever run wrote it.
            text: nothing private.
        """
        self.ledger._note(self.run_id, topic, text)

    def noted(self, topic: str) -> str | None:
        """The last note on a topic in the whole ledger, or None."""
        return self.ledger._noted(topic)

    def charged(self, mechanism: Mechanism) -> int:
        """How many releases by this mechanism the run has charged."""
        return count_of(self.ledger._run_balance(self.run_id).charged, mechanism)

    @property
    def origin(self) -> str:
        """Hash of the ledger's first row, which tells it from other ledgers, wherever it lies."""
        return self.ledger._balance.origin

    @property
    def num_charges(self) -> int:
        """How many charges the run has made."""
        return self.ledger._run_balance(self.run_id).num_charges

    def report(self, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of this run alone; ``run.ledger.report()`` has those of everybody."""
        return self.ledger.run_report(self.run_id, delta, exact)

    @property
    def epsilon(self) -> float:
        """ε of this run's guarantee alone, at the budget's δ."""
        return self.report().epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of what this run charged in fact, at the budget's δ."""
        return self.report().epsilon_spent
