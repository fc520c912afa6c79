"""Ind-KNN as a labeler: what it costs, what it answers, and a fit."""

import functools

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.config import as_section
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import IndKNN
from pl_privknn.labelers.base import PayingRun, stated_plan
from pl_privknn.labelers.ind_knn import IndKNNParameters, PublicDensity, RecordIdentities
from pl_privknn.labelers.ind_knn.algorithm import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_setup import engine_of, teacher
from tests.setup.refusals import refusals


def data(count=60):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


def fitted(count=60, **settings):
    labeler = teacher(**{"threshold": 0.3, "epsilon": 2.0, "num_queries": 50, **settings})
    labeler.fit(PrivateRecords.of(*data(count), 3))
    return labeler


def test_one_entry_for_all_calls_of_a_ledger():
    labeler, ledgers = fitted(), [FreeLedger(), FreeLedger()]
    for size, ledger in ((5, 0), (1, 0), (60, 0), (2, 1)):
        labeler.label(torch.randn(size, 4), ledgers[ledger])
    # Another run's books must show the stream too.
    assert ledgers[0].rows == ledgers[1].rows == stated_plan(labeler, 66, 66, 3)
    refusing = fitted()
    start = refusing.remaining()
    with pytest.raises(BudgetExceeded):
        refusing.label(torch.randn(5, 4), FreeLedger(limit=0))
    np.testing.assert_array_equal(refusing.remaining(), start)


def test_earlier_answers_serve_as_long_as_the_features_stay():
    labeler = fitted(reuse=True, ids=range(60))
    labeler.label(torch.randn(30, 4), FreeLedger())
    left = labeler.remaining()
    for features, kept in ((data()[0], 30), (torch.randn(60, 9), 0)):
        labeler.fit(PrivateRecords.of(features, torch.arange(60) % 3, 3))
        assert len(labeler._engine.answered[1]) == kept
        np.testing.assert_array_equal(labeler.remaining(), left)  # whatever their features


def test_a_new_process_without_a_folder_pays_again(tmp_path):
    plan = fitted().plan(40, 40, 3)
    with_room = Ledger(tmp_path / "a.sqlite", Budget(delta=1e-5)).run("run", plan)
    for _ in range(2):  # the second one stands for the resumed process
        fitted().label(torch.randn(10, 4), with_room)
    assert with_room.num_charges == 2
    one_stream = Ledger(tmp_path / "b.sqlite", Budget(epsilon=2.0, delta=1e-5)).run("run", plan)
    fitted().label(torch.randn(10, 4), one_stream)
    with pytest.raises(BudgetExceeded):
        fitted().label(torch.randn(10, 4), one_stream)


@pytest.mark.parametrize("in_a_folder", [True, False])
def test_a_stream_keeps_to_the_kind_of_noise_that_the_ledger_says_of_it(tmp_path, in_a_folder):
    """Its one entry holds for all answers: a seed that joins later would be seen nowhere."""
    sources = (SystemNoise(), SeededNoise(7))
    for number, (begun, other) in enumerate((sources, sources[::-1])):
        settings = {"state_dir": tmp_path / f"{number}"} if in_a_folder else {}
        ledger = Ledger(tmp_path / f"{number}.sqlite", Budget(delta=1e-5))
        plan = stated_plan(fitted(noise_source=begun), 60, 60, 3)
        labeler = fitted(noise_source=begun, **settings)
        labeler.label(torch.randn(1, 4), ledger.run("run", plan))
        if in_a_folder:
            labeler.close()
            labeler = fitted(noise_source=other, **settings)
        labeler.noise_source = other
        left = labeler.remaining()
        for run in (ledger.run("run", plan), ledger.run("another"), FreeLedger()):
            with pytest.raises(
                ValueError, match=r"noise_source: .* came from .*would now come from .*start a new run"
            ):
                labeler.label(torch.randn(30, 4), run)
        np.testing.assert_array_equal(labeler.remaining(), left)
        assert sum(charge.count for charge in ledger.report().charged) == 1
        labeler.noise_source = begun
        labeler.label(torch.randn(1, 4), ledger.run("run", plan))
        assert ledger.report().guarantee.guarantee == ("none" if number else "unconditional")
        labeler.close()


# ---------------------------------------------------------------- answers


def test_soft_answers_caps_and_held_back_answers():
    labeler = fitted(soft=True, abstain=1.0)
    release = labeler.label(torch.randn(40, 4), FreeLedger(), max_answers=25)
    assert (release.labels[25:] == -1).all()
    assert 0 < release.answered.sum() < 25
    torch.testing.assert_close(release.probabilities.sum(dim=1), torch.ones(40))
    assert torch.equal(release.probabilities.argmax(1)[release.answered], release.labels[release.answered])
    everything = fitted().label(torch.randn(40, 4), FreeLedger())
    assert everything.probabilities is None
    assert everything.answered.all()
    # A margin of m deviations is passed by noise alone with about the normal probability.
    engine = engine_of(IndKNNParameters(0.5, 5.0, 1.0, 1.0), 3, num_classes=2, abstain=2.0)
    run = PayingRun(FreeLedger(), SeededNoise(0), ("add_remove",))
    held = (engine.answer(torch.ones(5000, 3), run).labels == -1).mean()
    assert held == pytest.approx(1 - 2 * stats.norm.sf(2.0), abs=0.012)  # four standard errors


def test_thresholds_follow_public_density_alone():
    generator = torch.Generator().manual_seed(0)
    # A dense and a sparse region: a fixed threshold can't suit both.
    spread = torch.where(torch.arange(3000) % 2 == 0, 0.1, 1.0)[:, None]
    centre = torch.where(torch.arange(3000)[:, None] % 2 == 0, torch.eye(8)[0], -torch.eye(8)[0])
    rows = centre + spread * torch.randn(3000, 8, generator=generator)
    private, public, queries = rows[:2000], rows[2000:2600], rows[2600:]
    density, near = (
        PublicDensity(neighbors=40, private_records=2000),
        unit_rows(queries) @ unit_rows(private).T,
    )
    parameters = IndKNNParameters(0.01, 10.0, 0.5, 1.0)
    thresholds = density.thresholds(parameters, (unit_rows(queries) @ unit_rows(public).T).numpy())
    sizes = (near >= torch.tensor(thresholds)[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 50
    for half in (sizes[::2], sizes[1::2]):
        assert 30 < half.median() < 55
    labeler = teacher(0.01, epsilon=1.0, density=density)
    labeler.fit(PrivateRecords.of(private, torch.arange(2000) % 3, 3, public=public))
    np.testing.assert_allclose(labeler._engine._thresholds(unit_rows(queries)), thresholds, rtol=1e-6)
    # Without public examples the queries so far take their place; a query is not its own neighbour.
    alone = teacher(0.01, epsilon=1.0, density=density)
    alone.fit(PrivateRecords.of(private, torch.arange(2000) % 3, 3))
    alone.label(queries, FreeLedger())
    assert torch.equal(alone._engine.reference, unit_rows(queries))
    sizes = (near >= torch.tensor(alone._engine._thresholds(unit_rows(queries)))[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 60
    labeler.fit(PrivateRecords.of(torch.randn(2000, 5), torch.arange(2000) % 3, 3))
    assert len(labeler._engine.reference) == 0  # other features: those examples can't serve any more


@pytest.mark.parametrize("hashing", [None, SignProjections(6, 3)])
def test_the_callers_table_stays_as_it_is(hashing):
    answers = []
    for dtype in (torch.float32, torch.float64):
        labeler, (features, labels) = teacher(0.3, epsilon=2.0, hashing=hashing), data(3000)
        features[7] = 0
        features = features.to(dtype)
        before = features.clone()
        labeler.fit(PrivateRecords.of(features, labels, 3))
        assert torch.equal(features, before)
        queries = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
        answers.append([*labeler.label(queries, FreeLedger()).labels, *labeler.remaining()])
    assert answers[0] == answers[1]


def asked(shape, value=0.0):
    return lambda: fitted().label(torch.full(shape, value), FreeLedger())


GOOD = {"threshold": 0.5, "epsilon": 1.0}
WRONG = [
    ("threshold", 0.0), ("threshold", 1.0), ("epsilon", 0.0), ("delta", 1.0),
    ("num_queries", 0), ("kernel", "linear"), ("bandwidth", 0.0), ("min_count", 0.0), ("abstain", -1.0),
    ("conversion", "zcdp"),
]  # fmt: skip
test_bad_arguments_are_named = refusals(
    {
        **{
            f"{name}={value!r}".replace(".", r"\."): functools.partial(teacher, **{**GOOD, name: value})
            for name, value in WRONG
        },
        "no noise is set": lambda: teacher().parameters,
        "give exactly one": lambda: teacher(epsilon=1.0, rho=0.1),
        "neighbors=5": lambda: PublicDensity(5, 4),
        "call fit": lambda: teacher(**GOOD).label(torch.randn(2, 4), FreeLedger()),
        r"queries: shape \(2, 5\)": asked((2, 5)),
        "NaN": asked((2, 4), torch.nan),
    }
)


def test_what_tells_records_apart_stands_in_no_configuration():
    listed = list(range(60))
    noise = {"class_path": "pl_privknn.privacy.mechanisms.noisy_votes.Gaussian", "init_args": {"sigma": 1.0}}
    for given in (RecordIdentities(ids=np.arange(60)), RecordIdentities(ids=listed), {"ids": listed}):
        noted, left_out = as_section(IndKNN(0.2, Gaussian(1.0), budget=Budget(epsilon=1.0), identities=given))
        assert noted["init_args"] == {"threshold": 0.2, "noise": noise, "budget": {"epsilon": 1.0}}
        assert left_out == ["identities"]
    noted, left_out = as_section(
        IndKNN(0.2, Gaussian(1.0), budget=Budget(epsilon=1.0), identities=RecordIdentities(ids="numbers.npy"))
    )
    assert (noted["init_args"]["identities"], left_out) == ({"ids": "numbers.npy"}, [])
