"""What pays: one run's handle on a ledger. Noise is handed out by the payment for it, so nobody draws before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pl_privknn._checks import check_int
from pl_privknn.privacy.ledger.balance import count_of
from pl_privknn.privacy.ledger.budget import LedgerReport, check_budget
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_known

if TYPE_CHECKING:
    from pl_privknn.privacy.ledger.ledger import Ledger
    from pl_privknn.privacy.noise import NoiseSource


class ChargesLedger(Protocol):
    """What labelers and baselines need of a ledger: to pay before they draw."""

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
    ) -> int:
        """Record ``count`` releases durably, or raise ``BudgetExceeded``; returns the row's position."""
        ...


def paid(
    ledger: ChargesLedger,
    source: NoiseSource,
    mechanism: Mechanism,
    count: int,
    key: str,
    adjacencies: Sequence[Adjacency],
) -> NoiseSource:
    """Pay for releases and get the noise for them.

    Args:
        ledger: pays.
        source: protective randomness; the charge records whether it is cryptographic.
        mechanism: what is released, with the sensitivity that holds under ``adjacencies``.
        count: number of releases.
        key: what the noise is for; a seeded source gives each key and row a stream of its own.
        adjacencies: neighbouring relations for which ``mechanism`` states its cost; a ledger of another one
            refuses the charge.

    Returns:
        the noise, after the charge is on disk.

    Raises:
        BudgetExceeded: if the charge would pass the budget; nothing was drawn.
        ValueError: where the ledger counts under another adjacency.
    """
    return source.stream(key, ledger.charge(mechanism, count, noise=source, adjacencies=adjacencies))


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
        charge the same run. :func:`paid` pays and hands out the noise in one step.

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
        ledger = self.ledger
        charge = Charge(mechanism, check_int("count", count))
        check_known(charge)
        if adjacencies is not None and ledger.adjacency not in adjacencies:
            raise ValueError(
                f"adjacency={ledger.adjacency!r} of the ledger {ledger.path}: this charge ({mechanism.label}) states "
                f"its cost under {' or '.join(map(repr, adjacencies))} only; use a ledger of that adjacency, or "
                "parameters that hold under the ledger's. Nothing was charged and nothing was drawn"
            )
        stated = {}
        if noise is not None and adjacencies is not None:
            stated = {"noise": "cryptographic" if noise.cryptographic else "seeded"}
        with ledger._writing():
            run = ledger._balance.run(self.run_id)
            if (after := run.after(charge)) is not None:
                granted = {**run.guaranteed(), mechanism: after}
                check_budget(ledger._balance, self.run_id, [charge], granted, "a charge of")
            return ledger._append("charge", {"run": self.run_id, "charge": charge.to_record(), **stated})

    def note(self, topic: str, text: str) -> None:
        """Write down a public fact, beside the charges and as durably; it costs nothing.

        State that is kept elsewhere (what a teacher has left to spend, for instance) notes here how far it has
        come, and is found out later where an older copy of it was put back.

        Args:
            topic: what the note is about. The last one on each topic counts, whichever run wrote it.
            text: nothing private.
        """
        with self.ledger._writing():
            if self.ledger._balance.notes.get(topic) != text:
                self.ledger._append("note", {"run": self.run_id, "topic": topic, "text": text})

    def noted(self, topic: str) -> str | None:
        """The last note on a topic in the whole ledger, or None."""
        self.ledger._sync()
        return self.ledger._balance.notes.get(topic)

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
