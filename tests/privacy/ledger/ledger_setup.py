"""What the tests of the ledger's file share."""

import json
import os

import pytest

from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SystemNoise

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


def paid_run(folder):
    """A ledger, and a summary that follows from it."""
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.run("run", plan=[Charge(Gaussian(4.0))]).charge(
        Gaussian(4.0), noise=SystemNoise(), adjacencies=["add_remove"]
    )
    report, head = ledger.report(exact=True), ledger.head
    ledger.close()
    stated = {"epsilon_spent": report.spent.epsilon, "max_epsilon": None, "run": "run", "ledger_head": head}
    (folder / "summary.json").write_text(json.dumps({**report.guarantee.to_dict(), **stated}))
    return str(folder)
