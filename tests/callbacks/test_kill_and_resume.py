import json
import signal
import sqlite3

import pytest

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from pl_privknn.privacy.verify import audit_ledger
from tests.callbacks import killed_run
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_child

pytestmark = needs_fork


def run(folder, die_at=-1, die_on=""):
    """Fit in a child; how it ended, negative for a signal."""
    return in_child(lambda: killed_run.main(folder, die_at, die_on))


def released(folder):
    path = folder / "run.sqlite"
    if not path.exists():
        return {}
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT round, position, example, label FROM queries WHERE released").fetchall()
    return {row[:3]: row[3] for row in rows}


def epsilon_of_draws(folder):
    """ε of the releases that were really drawn, as the process noted them before each draw."""
    counts = [int(line) for line in (folder / "drawn.txt").read_text().split()]
    screened = sum(count for count in counts if count > 0)
    answered = -sum(count for count in counts if count < 0)
    charges = [Charge(NoisyScreening(9, 4, 1.0, 2, 0.5), screened)]
    if answered:
        charges.append(Charge(Gaussian(6.0, 2**0.5, 0.5), answered))
    return account(charges, delta=1e-3).epsilon


@pytest.mark.parametrize(
    "deaths",
    # In the first screening; in the second batch's release; around the two writes of a batch.
    [[(1, "")], [(4, "")], [(-1, "before:put")], [(-1, "after:put")], [(-1, "after:mark_asked")]],
)
def test_sigkill_loses_no_label_and_forgets_no_budget(tmp_path, deaths):
    for death in deaths:
        assert run(tmp_path, *death) == -signal.SIGKILL
    before = released(tmp_path)
    if (tmp_path / "drawn.txt").exists():
        audit = audit_ledger(tmp_path / "run.sqlite", delta=1e-3)
        # The note is written just before the draw: the ledger must already hold it.
        assert audit["epsilon_spent"] >= epsilon_of_draws(tmp_path) * (1 - 1e-9)
        assert audit["epsilon"] >= audit["epsilon_spent"]
    assert run(tmp_path) == 0
    after = released(tmp_path)
    assert before.items() <= after.items()
    summary = json.loads((tmp_path / "summary.json").read_text())
    audit = audit_ledger(tmp_path / "run.sqlite", delta=1e-3)
    assert audit["epsilon_spent"] >= epsilon_of_draws(tmp_path) * (1 - 1e-9)
    assert summary["epsilon"] >= summary["epsilon_spent"]
    # At most the batch in flight is lost, and the promise made beforehand is kept without being raised.
    assert summary["lost"] <= 5
    assert summary["answered"] + summary["refused"] + summary["lost"] == summary["queried"] <= 30
    plan = [Charge(NoisyScreening(9, 4, 1.0, 2, 0.5), 30), Charge(Gaussian(6.0, 2**0.5, 0.5), 25)]
    assert summary["epsilon"] == pytest.approx(account(plan, delta=1e-3).epsilon, rel=1e-6)
    if deaths != [(4, "")]:
        return
    # A third start finds everything done: no further draw.
    draws = (tmp_path / "drawn.txt").read_text()
    assert run(tmp_path) == 0
    assert (tmp_path / "drawn.txt").read_text() == draws
