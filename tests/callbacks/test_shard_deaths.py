"""A process that holds a shard of Ind-KNN's records, and their budgets, dies."""

import contextlib
import os
import signal
import sqlite3

from pl_privknn.labelers.ind_knn import IndKNNParameters
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.record_budgets import BudgetTable
from tests.callbacks.sharded_fit import fit
from tests.labelers.ind_knn.ind_knn_setup import amounts
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_group


@needs_fork
def test_a_shard_that_dies_once_its_budgets_are_written_lets_nothing_out(tmp_path):
    folder, spend = tmp_path / "run", BudgetTable.spend

    def dying(*given, **named):
        spend(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    def member(rank):
        if rank == 1:
            BudgetTable.spend = dying
        fit(folder, "ind knn", 2)

    assert in_group(2, member) == [1, -signal.SIGKILL]
    (run,) = Ledger.open_readonly(folder / "run.sqlite").runs
    place = tmp_path / "run.private" / run

    def spent(rank):
        own = place / f"shard-{rank:05d}" if rank else place
        left = amounts(own, IndKNNParameters(0.9, 4.0, 0.5, 1.0))
        return len(left), len(left) - sum(left.values())

    def answered():
        with contextlib.closing(sqlite3.connect(folder / "run.sqlite")) as store:
            return store.execute("SELECT COALESCE(SUM(released), 0) FROM queries").fetchone()[0]

    before = [spent(rank) for rank in range(2)]
    assert [count for count, _ in before] == [31, 30]
    assert before[1][1] > 0
    assert answered() == 0
    assert in_group(2, lambda rank: fit(folder, "ind knn", 2)) == [0, 0]
    assert answered() == 24 - 5
    assert all(spent(rank)[1] >= before[rank][1] for rank in range(2))  # nothing was given back
    assert Ledger.open_readonly(folder / "run.sqlite").report().charged[0].count == 1
