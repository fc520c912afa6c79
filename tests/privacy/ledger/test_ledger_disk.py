"""The ledger's file when a charge is killed at any of its system calls, and when the disk is full or broken."""

import errno

import pytest

from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.verify import audit_ledger
from tests.privacy.ledger.ledger_setup import PROTECTED, G, charged
from tests.setup.traced import Fault, needs_trace, traced

pytestmark = needs_trace


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


class Payer:
    """Charges a ledger and notes, outside its folder, each charge that was acknowledged and each that was refused."""

    def __init__(self, folder, charges):
        self.ledger = folder / "ledger.sqlite"
        self.notes = folder.parent / "notes.txt"
        self.notes.write_text("")
        self.charges = charges

    def __call__(self):
        with self.notes.open("a", buffering=1) as notes:
            for _ in range(self.charges):
                try:
                    Ledger(self.ledger).run("a").charge(G, **PROTECTED)
                    notes.write("paid\n")
                except OSError as error:
                    notes.write("failed\n" if "\n" not in str(error) else "more than a line\n")

    def noted(self, word):
        return self.notes.read_text().split().count(word)


# A kill before a call leaves what one after the call before it leaves. A ledger's first charge makes its file, too.
@pytest.mark.long("first charge-after", "third charge-half", "third charge-every")
@pytest.mark.parametrize(
    ("rows", "kill", "step"),
    [(0, "half", 3), (0, "after", 3), (2, "after", 2), (2, "half", 1), (2, "after", 1)],
    ids=[
        "first charge-half",
        "first charge-after",
        "third charge",
        "third charge-half",
        "third charge-every",
    ],
)
def test_a_charge_that_is_killed_at_any_call_is_whole_or_absent(folder, kill, rows, step):
    payer = Payer(folder, 1)
    for _ in range(rows):
        payer()
    calls = traced(payer, folder).calls
    assert len(calls) > 15
    assert "fdatasync" in calls or "fsync" in calls
    before = charged(payer.ledger) if rows else 0
    for at in range(1, len(calls) + 1, step):
        if not rows:
            for path in folder.iterdir():
                path.unlink()
        payer.notes.write_text("")
        assert traced(payer, folder, Fault(at, kill)).status < 0
        paid = payer.noted("paid")
        known = charged(payer.ledger) if payer.ledger.exists() else 0
        assert before + paid <= known <= before + 1, f"killed {kill} call {at} ({calls[at - 1]})"
        Ledger(payer.ledger).run("b").charge(G, **PROTECTED)  # it goes on
        assert charged(payer.ledger) == known + 1
        audit_ledger(payer.ledger)
        before = known + 1 if rows else 0


@pytest.mark.long("EIO-True", "EDQUOT-False")
@pytest.mark.parametrize(("error", "lasting"), [("ENOSPC", False), ("EIO", True), ("EDQUOT", False)])
def test_a_disk_that_fails_loses_no_charge(folder, error, lasting):
    payer = Payer(folder, 3)
    calls = traced(payer, folder).calls
    refused = 0
    for at in range(1, len(calls), len(calls) // 8):
        before = charged(payer.ledger)
        payer.notes.write_text("")
        fault = Fault(at, error=getattr(errno, error), lasting=lasting)
        assert traced(payer, folder, fault).status == 0  # nothing but an OSError of one line
        paid, failed = payer.noted("paid"), payer.noted("failed")
        assert paid + failed == 3
        refused += failed
        # A charge that is reported as failed may have reached the disk: budget wasted, not lost.
        assert before + paid <= charged(payer.ledger) <= before + paid + failed
        payer()
        assert payer.noted("paid") == paid + 3
        audit_ledger(payer.ledger)
    assert refused >= 3
