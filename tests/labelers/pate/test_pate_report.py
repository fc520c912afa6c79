import pickle
import re
from pathlib import Path

import pytest
import torch

from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.voting import Screening
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.pate.pate_setup import FixedVotes, fitted, table

# ---------------------------------------------------------------------- what stays private


def test_pickles_hold_nothing_private():
    pate = fitted(noise_source=None)
    pate.label(table(20, seed=1)[0], FreeLedger())
    copy = pickle.loads(pickle.dumps(pate))
    assert copy._trained is None
    assert copy.asked_votes()[0].shape[0] == 0
    assert copy.plan(3, 3, 3) == pate.plan(3, 3, 3)
    assert len(pickle.dumps(pate)) < 3_000


# ---------------------------------------------------------------------- the papers' figures


def test_data_dependent_report_is_conditional_and_below_the_independent_figure():
    histograms = [(95, 3, 2)] * 60 + [(40, 35, 25)] * 20
    pate = FixedVotes(
        histograms, screening=Screening(70, Gaussian(8.0)), noise=Gaussian(12.0), noise_source=SeededNoise(0)
    )
    ledger = FreeLedger()
    released = pate.label(torch.zeros(80, 1), ledger)
    report = pate.data_dependent_report(1e-5)
    assert (report.queries, report.answers) == (80, int(released.answered.sum()))
    assert report.epsilon_independent == account(ledger.rows, delta=1e-5, exact=False).epsilon
    assert report.epsilon_one_direction <= report.epsilon < 0.7 * report.epsilon_independent
    # Its noise is seeded here: on top of the condition, nothing is protected.
    assert report.guarantee == "none"
    assert "private votes" in report.reason
    assert "seed" in report.reason
    assert "private votes" in report.to_dict()["reason"]
    # Nothing of it went into the ledger.
    assert {charge.mechanism.kind for charge in ledger.rows} == {"noisy_screening", "gaussian"}
    torn = FixedVotes([(34, 33, 33)] * 20, noise=Gaussian(12.0), noise_source=SeededNoise(0))
    torn.label(torch.zeros(20, 1), FreeLedger())
    report = torn.data_dependent_report(1e-5)
    independent = rdp.epsilon_improved(rdp.ORDERS, 20 * rdp.ORDERS / 144, 1e-5)
    assert report.epsilon == pytest.approx(min(independent, report.epsilon_independent))
    assert PATE(5, noise=Gaussian(1.0)).data_dependent_report(1e-5).epsilon == 0


def test_example_of_the_documentation_prints_what_it_says(capsys):
    page = (Path(__file__).resolve().parents[3] / "docs" / "methods" / "pate.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.split() == re.findall(r"# ([\d.]+)$", code.rstrip())
