"""PATE: what it releases and charges, one record and one teacher, and the data-dependent report."""

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.base import PayingRun, check_protects, stated_plan
from pl_privknn.labelers.partitions import ClassBalancedPartition, GuidedPartition
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.teachers import LinearTeachers
from pl_privknn.labelers.voting import Screening
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.accounting.accountant import account, read_records
from pl_privknn.privacy.mechanisms import Charge, ExponentialArgmax, Gaussian, Laplace, NoisyScreening
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.refusals import refusals
from tests.setup.scripted_noise import Quiet


class FixedVotes(PATE):
    """PATE whose teachers vote as they are told."""

    def __init__(self, histograms, **arguments):
        self.histograms = torch.as_tensor(histograms)
        super().__init__(num_teachers=int(self.histograms.sum(dim=1).max()), **arguments)
        self.fit(PrivateRecords.of(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 3))

    def learn(self, records):
        pass

    def votes(self, queries):
        return self.histograms[: len(queries)]


def table(n=300, d=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    return centres[labels] + torch.randn(n, d, generator=generator), labels


def fitted(n=300, given=None, **arguments):
    arguments = {
        "num_teachers": 12, "teachers": LinearTeachers(steps=20, batch_size=8), "noise": Gaussian(2.0),
        "noise_source": SeededNoise(0), **arguments,
    }  # fmt: skip
    pate = PATE(**arguments)
    pate.fit(PrivateRecords.of(*(table(n) if given is None else given), 3))
    return pate


# ---------------------------------------------------------------------- what is released

HISTOGRAM = np.array([12, 9, 4])


def literal_confident(rng, m, noisier):
    """Confident-GNMax of the histogram; screening has its own draws."""
    passes = 12 + noisier * rng.normal(0, 3.0, m) >= 13
    return np.where(passes, (HISTOGRAM + noisier * rng.normal(0, 2.0, (m, 3))).argmax(axis=1), -1)


def literal(draw):
    return lambda rng, m, noisier: (HISTOGRAM + noisier * draw(rng, (m, 3))).argmax(axis=1)


LITERAL = {
    "lnmax": ({"noise": Laplace(4.0)}, literal(lambda rng, size: rng.laplace(0, 4.0, size))),
    "gnmax": ({"noise": Gaussian(4.0)}, literal(lambda rng, size: rng.normal(0, 4.0, size))),
    "gumbel": ({"noise": ExponentialArgmax(3.0)}, literal(lambda rng, size: rng.gumbel(0, 3.0, size))),
    "confident": ({"screening": Screening(13, Gaussian(3.0)), "noise": Gaussian(2.0)}, literal_confident),
}


@pytest.mark.parametrize("name", LITERAL)
def test_labels_have_the_distribution_of_the_literal_mechanism(name):
    draws, (mechanism, simulate) = 8000, LITERAL[name]
    pate = FixedVotes(np.tile(HISTOGRAM, (draws, 1)), **mechanism, noise_source=SeededNoise(3))
    ours, rng = pate.label(torch.zeros(draws, 1), FreeLedger()).labels.numpy(), np.random.default_rng(0)
    # Two-sample chi-square at a fixed seed: a correct release fails for one seed in a thousand.
    # The test has power: a quarter more noise is told apart.
    for noisier, found in ((1.0, False), (1.25, True)):
        tables = [np.bincount(1 + drawn, minlength=4) for drawn in (ours, simulate(rng, draws, noisier))]
        chosen = np.array(tables)[:, np.sum(tables, axis=0) > 0]
        assert (stats.chi2_contingency(chosen).pvalue < 1e-3) == found


# ---------------------------------------------------------------------- what is charged


def test_charges_are_those_of_the_plan_and_use_the_objects_that_draw():
    pate = fitted(screening=Screening(8, Gaussian(1.0)), noise=Gaussian(2.0))
    ledger = FreeLedger()
    release = pate.label(table(60, seed=1)[0], ledger, max_answers=25)
    screening, answers = ledger.rows
    assert (screening.mechanism, screening.count) == (NoisyScreening(12, 8.0, 1.0, 3), 60)
    assert (answers.mechanism, answers.count) == (Gaussian(2.0, math.sqrt(2)), 25)
    assert int(release.answered.sum()) == 25
    assert stated_plan(pate, 60, 25, 3) == ledger.rows
    assert fitted(noise=Laplace(20.0)).plan(5, 9, 3) == [Charge(Laplace(20.0, 2.0), 5)]
    assert PATE(100).plan(5, 9, 3) == [Charge(Gaussian(16.0, math.sqrt(2)), 5)]  # nothing is screened
    assert pate.plan(5, 0, 3) == [Charge(NoisyScreening(12, 8.0, 1.0, 3), 5)]


def test_published_settings_cost_what_was_recomputed():
    # 250 teachers, T 200, σ1 150, σ2 40 (MNIST of Papernot et al. 2018): 286 answers of 640 queries.
    pate = PATE(250, screening=Screening(200, Gaussian(150)), noise=Gaussian(40))
    report = account(pate.plan(640, 286, 10), delta=1e-5, exact=False)
    assert report.guarantee == "unconditional"
    # From first principles: the worst coin of the screening and α/σ² an answer.
    passes = stats.norm.sf((200 - np.arange(25, 251)) / 150)
    pairs = [(passes[1:], passes[:-1]), (passes[:-1], passes[1:])]
    orders = np.linspace(1.5, 60, 1171)
    screening = [
        max(
            (np.log(p**a * q ** (1 - a) + (1 - p) ** a * (1 - q) ** (1 - a)) / (a - 1)).max()
            for p, q in pairs
        )
        for a in orders
    ]
    curve = 640 * np.array(screening) + 286 * orders / 40**2
    expected = np.min(curve + math.log(1e5) / (orders - 1))
    assert report.epsilon_rdp_classic == pytest.approx(expected, rel=1e-4)
    assert report.epsilon < report.epsilon_rdp_classic


@pytest.mark.parametrize("partitioner", [ClassBalancedPartition(), GuidedPartition(4, steps=5)])
def test_conditional_partitions_mark_every_charge_with_the_reason(partitioner):
    conditional = fitted(partitioner=partitioner, screening=Screening(8, Gaussian(1.0)), noise=Gaussian(2.0))
    ledger = FreeLedger()
    conditional.label(table(20, seed=1)[0], ledger)
    assert {charge.mechanism.guarantee for charge in ledger.rows} == {"conditional"}
    assert {charge.mechanism.reason for charge in ledger.rows} == {partitioner.condition}
    assert read_records([charge.to_record() for charge in ledger.rows]) == ledger.rows
    assert account(ledger.rows, delta=1e-3, exact=False).guarantee == "none"  # the noise is of a seed as well
    report = account([Charge(row.mechanism, row.count) for row in ledger.rows], delta=1e-3, exact=False)
    assert report.guarantee == "conditional"
    assert partitioner.condition in report.reason
    plain = fitted(screening=Screening(8, Gaussian(1.0)), noise=Gaussian(2.0))
    counts = [charge.count for charge in ledger.rows]
    same = account(plain.plan(*counts, 3), delta=1e-3, exact=False)
    assert same.guarantee == "unconditional"
    assert report.epsilon == pytest.approx(same.epsilon, rel=1e-9)


# ---------------------------------------------------------------------- one record, one teacher


def test_persons_are_dealt_out_where_a_partition_can():
    pate = fitted()
    assert pate.records.unit == "record"
    pate.fit(PrivateRecords.of(*table(), 3, owners=torch.arange(300) // 6))
    assert pate.records.unit == "person"
    with pytest.raises(ValueError, match="unit='person': PATE"):
        check_protects(PATE(5, noise=Gaussian(1.0), partitioner=GuidedPartition()), "person")
    with pytest.raises(ValueError, match=r"private_groups: must be int64 of shape \(n,\)"):
        PrivateRecords.of(*table(), 3, owners=torch.tensor([1, 2, 3, 4, 5]))


# ---------------------------------------------------------------------- broken and missing teachers


class Fragile(LinearTeachers):
    """Parts of more than 27 records bring features that no training survives."""

    def train(self, features, labels, parts, *settings):
        broken = torch.bincount(parts)[parts] > 27
        return super().train(torch.where(broken[:, None], torch.nan, features), labels, parts, *settings)


def test_a_teacher_that_fails_abstains_and_the_run_stops_where_all_do():
    pate = fitted(teachers=Fragile(steps=5))
    failed = int(pate.trained.failed.sum())
    assert 0 < failed < 12
    assert pate.trained.failures == {"not finite"}
    assert (pate.votes(torch.zeros(4, 6)).sum(dim=1) == 12 - failed).all()
    with pytest.raises(RuntimeError, match="every teacher"):
        fitted(n=900, teachers=Fragile(steps=5))


def test_the_screening_stays_in_its_range():
    # One vote is left of twelve: screening compares ⌈12/3⌉ = 4, the least that twelve votes can give.
    few = torch.tensor([[1, 0, 0]])
    for threshold, label in ((4, 0), (4.01, -1)):
        bound = PATE(12, noise=Gaussian(1.0), screening=Screening(threshold, Gaussian(1.0))).aggregation(3)
        run = PayingRun(FreeLedger(), Quiet(), ("add_remove",))
        assert bound.release(1, lambda *_: few, run).labels.tolist() == [label]
    assert len(fitted().label(torch.zeros(0, 6), FreeLedger()).labels) == 0


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


test_bad_input_is_named = refusals(
    {
        r"threshold=11.*num_teachers=10": lambda: PATE(
            10, screening=Screening(11, Gaussian(1.0)), noise=Gaussian(1.0)
        ),
        r"threshold=-1.*from 0": lambda: PATE(10, screening=Screening(-1, Gaussian(1.0))),
        "num_teachers=1": lambda: PATE(1),
        "fit": lambda: PATE(5, noise=Gaussian(1.0)).label(torch.zeros(1, 2), FreeLedger()),
    }
)
