"""What the tests of the ledger's file share."""

import json
import os

import pytest

from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.privacy.run import Run

G = Gaussian(20.0)
#: What a charge says for its guarantee to be unconditional.
PROTECTED = {"noise": SystemNoise(), "adjacencies": ("add_remove",)}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def fill(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(G, 50)])
    for count in (10, 20, 15):
        run.charge(G, count)
    ledger.close()


def charged(path):
    ledger = Ledger.open_readonly(path)
    return sum(charge.count for charge in ledger.report().charged)


class PaidRun(Run):
    """A run of one release."""

    def plan(self):
        return [Charge(Gaussian(4.0))], {}


def paid_run(folder):
    """A run that has paid, and a summary that follows from it."""
    run = PaidRun(folder, {}, budget=Budget())
    if not run.num_charges:
        run.ledger_run.charge(Gaussian(4.0), noise=SystemNoise(), adjacencies=["add_remove"])
    report = run.ledger.report(exact=True)
    stated = {"epsilon_spent": report.spent.epsilon, "max_epsilon": None}
    stated |= {"run": run.run_id, "ledger_head": report.head}
    (folder / "summary.json").write_text(json.dumps({**report.guarantee.to_dict(), **stated}))
    run.close()
    run.ledger.close()
    return str(folder)
