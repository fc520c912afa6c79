"""Runs of every teacher, killed at system calls that change their files, end at the ε that they promised.

``--kills 12`` kills each teacher's run twelve times; the suite is content with two.
"""

import collections
import functools
import json
import random
import sqlite3

import pytest

from pl_privknn.labelers import (
    PATE,
    GuidedPartition,
    IndKNN,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
)
from pl_privknn.labelers.released_sums import ReleaseLostError
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger, LedgerRun
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.run import RunFileError
from pl_privknn.privacy.verify import audit_ledger
from tests.setup.small_fit import fit_student
from tests.setup.traced import Fault, needs_trace, traced

pytestmark = needs_trace
LINEAR = LinearTeachers(steps=10, batch_size=8)
TEACHERS = {
    "private_knn": lambda: PrivateKNN(9, 0.5, Screening(4, Gaussian(2.0)), Gaussian(3.0)),
    "pate": lambda: PATE(6, LINEAR, noise=Gaussian(2.0), progress=False),
    "guided_pate": lambda: PATE(
        6, LINEAR, GuidedPartition(5, features="given"), noise=Gaussian(2.0), progress=False
    ),
    "reverse_knn": lambda: ReverseKNN(1, budget=Budget(epsilon=0.5)),
    "ind_knn": lambda: IndKNN(0.6, Gaussian(3.0), budget=Budget(epsilon=1.0), num_queries=300),
    "noisy_sgd_teacher": lambda: NoisySGDTeacher(
        0.5, 30, 10, noise_multiplier=2.0, optimization={"steps_per_charge": 3}, model={"components": None}
    ),
    "public_curvature": lambda: PreconditionedGradients(noise_multiplier=2.0, private_records=60, releases=3),
}


def fit(folder, name):
    """A short run that notes, outside its folder, every charge that was acknowledged."""
    charge = LedgerRun.charge

    @functools.wraps(charge)
    def noting(self, mechanism, count=1, **stated):
        row = charge(self, mechanism, count, **stated)
        with (folder / "notes.txt").open("a") as notes:
            notes.write(json.dumps([mechanism.kind, count]) + "\n")
        return row

    LedgerRun.charge = noting  # in a child of its own
    try:
        asked = {"delta": 1e-5, "queries_per_round": 12, "query_batch_size": 4}
        fit_student(folder, TEACHERS[name](), 0.15, private=60, public=24, **asked)
    except (RunFileError, ReleaseLostError):
        # A teacher that answers all queries of a round at once may be killed between its only charge and its
        # answers: it says so, and asks nothing again.
        assert released(folder) == {}


def counts(charges):
    found = collections.Counter()
    for kind, count in charges:
        found[kind] += count
    return found


def acknowledged(folder):
    path = folder / "notes.txt"
    return counts(map(json.loads, path.read_text().splitlines())) if path.exists() else counts({})


def charged(folder):
    path = folder / "run" / "run.sqlite"
    if not path.exists():
        return counts({})
    report = Ledger.open_readonly(path).report()
    return counts((charge.mechanism.kind, charge.count) for charge in report.charged)


def released(folder):
    path = folder / "run" / "run.sqlite"
    if not path.exists():
        return {}
    with sqlite3.connect(path) as store:
        if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'queries'").fetchall():
            return {}
        rows = store.execute("SELECT round, position, example, label FROM queries WHERE released").fetchall()
    return {row[:3]: row[3] for row in rows}


def promise(folder):
    audit = audit_ledger(folder / "run" / "run.sqlite", delta=1e-5)
    assert audit["epsilon_spent"] <= audit["epsilon"] * (1 + 1e-9)
    return audit["epsilon"], audit["guarantee"]


@pytest.mark.long("guided_pate", "reverse_knn", "noisy_sgd_teacher")
@pytest.mark.parametrize("name", TEACHERS)
def test_a_killed_run_ends_at_the_promised_epsilon(tmp_path, name, request):
    # What a first run imports and loads, children need not do again.
    fit_student(tmp_path / "warm", TEACHERS[name](), 0.15, private=60, public=24)
    whole = tmp_path / "whole"
    whole.mkdir()
    ended = traced(lambda: fit(whole, name), whole / "run")
    assert ended.status == 0
    assert charged(whole) == acknowledged(whole) != counts({})
    draws, kills, hits = random.Random(name), request.config.getoption("--kills"), 0
    for number in range((kills + 1) // 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = {}
        for _ in range(2):  # the second kill hits a run that was resumed
            fault = Fault(draws.randint(1, len(ended.calls)), draws.choice(["before", "half", "after"]))
            status = traced(functools.partial(fit, folder, name), folder / "run", fault).status
            assert status <= 0, (number, fault)
            hits += status < 0
            paid, known = charged(folder), acknowledged(folder)
            assert known <= paid
            assert kept.items() <= released(folder).items()
            kept = released(folder)
        assert traced(functools.partial(fit, folder, name), folder / "run").status == 0
        assert promise(folder) == (pytest.approx(promise(whole)[0], rel=1e-9), promise(whole)[1])
        assert kept.items() <= released(folder).items()
    assert hits >= kills // 2
