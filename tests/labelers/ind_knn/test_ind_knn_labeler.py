"""Ind-KNN as a labeler: what it costs, what it answers, and a fit."""

import math

import numpy as np
import pytest
import torch
from grouped import grouped
from scipy import stats

from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.prediction import IndKNNEngine, IndKNNSwitches
from pl_privknn.labelers.ind_knn.private_table import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, FixedTotal
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.per_record.budgets import CONVERSIONS
from pl_privknn.privacy.per_record.filter import IndividualFilter
from pl_privknn.privacy.per_record.journal import JournalError
from pl_privknn.testing import FreeLedger

# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_the_ledger_entry_is_the_stated_epsilon(conversion):
    labeler = IndKNN(0.5, 0.5, epsilon=1.0, delta=1e-5, num_queries=600, budgets={"conversion": conversion})
    parameters = labeler.parameters
    assert parameters.sigma1 == pytest.approx(math.sqrt(100 / parameters.budget))
    for queries, answers, rounds in [(1, 1, 1), (10**6, 5, 1), (100, 100, 7)]:
        (charge,) = labeler.plan(queries, answers, 10, rounds)
        assert charge == Charge(FixedTotal(math.sqrt(2 * parameters.budget)), 1)
    report = account([charge], delta=1e-5)
    if conversion == "gdp":
        assert 0.9999 < report.epsilon <= 1.0 + 1e-6
    else:
        shown = report.epsilon_rdp if conversion == "rdp" else report.epsilon_rdp_classic
        # The order of the RDP total lies on a grid, so its minimum is slightly above the stated ε.
        assert shown == pytest.approx(1.0, rel=2e-3)
        assert report.epsilon < 0.95


def _data(n=60):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator), torch.arange(n) % 3


def _fitted(n=60, **settings):
    given = {"threshold": 0.3, "sigma2": 0.5, "epsilon": 2.0, "num_queries": 50, **settings}
    labeler = IndKNN(**grouped(IndKNN, **{"noise_source": SeededNoise(0), **given}))
    labeler.fit(*_data(n), 3)
    return labeler


def test_one_entry_for_all_calls_and_it_comes_before_the_first_draw():
    order = []

    class Watched(SeededNoise):
        def normal(self, shape, scale):
            order.append("draw")
            return super().normal(shape, scale)

        def stream(self, *key):
            return self

    class Noting(FreeLedger):
        def charge(self, *charge, **stated):
            order.append("charge")
            return super().charge(*charge, **stated)

    labeler, ledger = _fitted(noise_source=Watched(0)), Noting()
    for size in (5, 1, 60):
        labeler.label(torch.randn(size, 4), ledger)
    assert ledger.rows == stated_plan(labeler, 66, 66, 3)
    assert order == ["charge", "draw", "draw", "draw"]
    other = Noting()
    labeler.label(torch.randn(2, 4), other)  # another run's books must show the stream too
    assert other.rows == ledger.rows
    order.clear()
    refusing = _fitted(noise_source=Watched(0))
    with pytest.raises(BudgetExceeded):
        refusing.label(torch.randn(5, 4), Noting(limit=0))
    assert order == ["charge"]
    assert (refusing.remaining() == refusing.parameters.budget).all()


def test_budgets_belong_to_records_whatever_their_features():
    labeler, ledger = _fitted(reuse=True, ids=range(60)), FreeLedger()
    labeler.label(torch.randn(30, 4), ledger)
    left = labeler.remaining()
    assert left.min() < left.max()
    labeler.fit(torch.randn(60, 9), torch.arange(60) % 3, 3)
    np.testing.assert_array_equal(labeler.remaining(), left)
    labeler.label(torch.randn(30, 9), ledger)
    assert (labeler.remaining() <= left).all()
    assert len(ledger.rows) == 1
    unnumbered = _fitted()
    unnumbered.label(torch.randn(30, 4), ledger)
    with pytest.raises(ValueError, match="not those that the budgets belong to"):
        unnumbered.fit(torch.randn(60, 9), torch.arange(60) % 3, 3)


def test_reused_answers_stay_while_the_features_do():
    features, labels = _data()
    labeler, ledger = _fitted(reuse=True, ids=range(60)), FreeLedger()
    labeler.label(torch.randn(8, 4), ledger)
    labeler.fit(features, labels, 3)
    assert len(labeler._engine.answered) == 8
    labeler.fit(features + 1, labels, 3)
    assert len(labeler._engine.answered) == 0


def test_a_new_process_without_a_folder_pays_again(tmp_path):
    def ask(labeler, run):
        return labeler.label(torch.randn(10, 4), run)

    plan = _fitted().plan(40, 40, 3)
    with_room = Ledger(tmp_path / "a.sqlite", delta=1e-5).run("run", plan)
    ask(_fitted(), with_room)
    ask(_fitted(), with_room)  # stands for the resumed process
    assert with_room.num_charges == 2
    one_stream = Ledger(tmp_path / "b.sqlite", delta=1e-5, max_epsilon=2.0).run("run", plan)
    ask(_fitted(), one_stream)
    with pytest.raises(BudgetExceeded):
        ask(_fitted(), one_stream)


def test_a_new_process_with_a_folder_goes_on(tmp_path):
    plan = _fitted().plan(40, 40, 3)
    ledger = Ledger(tmp_path / "ledger.sqlite", delta=1e-5, max_epsilon=2.0)
    run = ledger.run("run", plan)
    first = _fitted(state_dir=tmp_path / "state")
    released = first.label(torch.randn(64, 4), run).labels
    left = first.remaining()
    with pytest.raises(JournalError, match="in use"):
        _fitted(state_dir=tmp_path / "state")
    first.close()
    second = _fitted(state_dir=tmp_path / "state")
    np.testing.assert_array_equal(second.remaining(), left)
    again = second.label(torch.zeros(64, 4), ledger.run("run", plan)).labels
    assert run.num_charges == 1
    assert (second.remaining() == left).all()  # zero vectors have no neighbours: answers are noise alone,
    assert not torch.equal(again, released)  # and other noise than before, though the seed is the same
    second.close()
    with pytest.raises(ValueError, match="not those that the budgets belong to"):
        _fitted(n=61, state_dir=tmp_path / "state")
    (tmp_path / "state" / "budgets").unlink()
    with pytest.raises(JournalError, match="'budgets' is missing"):
        _fitted(state_dir=tmp_path / "state")


def test_owners_numbers_follow_records_that_move(tmp_path):
    features, labels = _data(30)
    numbers = torch.randperm(1000)[:30]
    np.save(tmp_path / "ids.npy", numbers.numpy())
    settings = {"threshold": 0.3, "sigma2": 0.5, "epsilon": 2.0, "num_queries": 50}
    first = IndKNN(
        **grouped(IndKNN, **settings, records={"ids": tmp_path / "ids.npy", "state_dir": tmp_path / "state"})
    )
    first.fit(features, labels, 3)
    first.label(torch.randn(20, 4), FreeLedger())
    left = first.remaining()
    first.close()
    order = torch.randperm(30)[:25]
    second = IndKNN(
        **grouped(
            IndKNN, **settings, records={"ids": numbers[order].numpy(), "state_dir": tmp_path / "state"}
        )
    )
    second.fit(features[order], labels[order], 3)
    np.testing.assert_array_equal(second.remaining(), left[order.numpy()])
    with pytest.raises(ValueError, match="ids: shape"):
        second.fit(features, labels, 3)


# ---------------------------------------------------------------- answers


def test_soft_answers_caps_and_held_back_answers():
    labeler = _fitted(soft=True, abstain=1.0)
    release = labeler.label(torch.randn(40, 4), FreeLedger(), max_answers=25)
    assert (release.labels[25:] == -1).all()
    assert 0 < release.answered.sum() < 25
    torch.testing.assert_close(release.soft.sum(dim=1), torch.ones(40))
    assert torch.equal(release.soft.argmax(1)[release.answered], release.labels[release.answered])
    everything = _fitted().label(torch.randn(40, 4), FreeLedger())
    assert everything.soft is None
    assert everything.answered.all()
    # A margin of m deviations is passed by noise alone with about the normal probability.
    parameters = IndKNNParameters(0.5, 5.0, 1.0, 1.0)
    engine = IndKNNEngine(parameters, IndKNNSwitches(abstain=2.0), 2, 3, IndividualFilter(1.0))
    held = (engine.answer(torch.ones(20_000, 3), SeededNoise(0)).labels == -1).mean()
    assert held == pytest.approx(1 - 2 * stats.norm.sf(2.0), abs=0.006)  # four standard errors


def test_reuse_helps_when_budgets_are_spent():
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(600) % 3
    rows = torch.eye(3)[labels] + 0.15 * torch.randn(600, 3, generator=generator)
    truth = torch.arange(900) % 3
    queries = torch.eye(3)[truth] + 0.15 * torch.randn(900, 3, generator=generator)
    accuracy = {}
    for reuse in (False, True):
        labeler = IndKNN(
            0.8, 1.0, 1.0, num_queries=50, noise_source=SeededNoise(0), switches={"reuse": reuse}
        )
        labeler.fit(rows, labels, 3)
        released = labeler.label(queries, FreeLedger()).labels
        accuracy[reuse] = float((released == truth)[450:].double().mean())
    assert accuracy[False] < 0.6
    assert accuracy[True] > 0.9


def test_thresholds_follow_public_density_alone():
    generator = torch.Generator().manual_seed(0)
    # A dense and a sparse region: a fixed threshold can't suit both.
    spread = torch.where(torch.arange(3000) % 2 == 0, 0.1, 1.0)[:, None]
    centre = torch.where(torch.arange(3000)[:, None] % 2 == 0, torch.eye(8)[0], -torch.eye(8)[0])
    rows = centre + spread * torch.randn(3000, 8, generator=generator)
    private, public, queries = rows[:2000], rows[2000:2600], rows[2600:]
    density = PublicDensity(neighbors=40, records=2000)
    parameters = IndKNNParameters(0.01, 10.0, 0.5, 1.0)
    thresholds = density.thresholds(parameters, (unit_rows(queries) @ unit_rows(public).T).numpy())
    sizes = ((unit_rows(queries) @ unit_rows(private).T) >= torch.tensor(thresholds)[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 50
    for half in (sizes[::2], sizes[1::2]):
        assert 30 < half.median() < 55
    labeler = IndKNN(0.01, 0.5, 1.0, noise_source=SeededNoise(0), switches={"density": density})
    labeler.use_public(public)
    labeler.fit(private, torch.arange(2000) % 3, 3)
    np.testing.assert_allclose(labeler._engine._thresholds(unit_rows(queries)), thresholds, rtol=1e-6)
    # Without public examples the queries so far take their place; a query is not its own neighbour.
    alone = IndKNN(0.01, 0.5, 1.0, noise_source=SeededNoise(0), switches={"density": density})
    alone.fit(private, torch.arange(2000) % 3, 3)
    alone.label(queries, FreeLedger())
    assert torch.equal(alone._engine.reference, unit_rows(queries))
    own = alone._engine._thresholds(unit_rows(queries))
    sizes = ((unit_rows(queries) @ unit_rows(private).T) >= torch.tensor(own)[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 60
    labeler.fit(torch.randn(2000, 5), torch.arange(2000) % 3, 3)
    assert len(labeler._engine.reference) == 0  # other features: those examples can't serve any more


@pytest.mark.parametrize("hashing", [None, SignProjections(6, 3)])
def test_only_a_table_that_nobody_else_looks_at_is_overwritten(hashing):
    answers = []
    for owned, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.float64)):
        labeler = IndKNN(0.3, 0.5, epsilon=2.0, noise_source=SeededNoise(0), switches={"hashing": hashing})
        features, labels = _data(3000)
        features[7] = 0
        features = features.to(dtype)
        before = features.clone()
        labeler.owns_table = owned
        labeler.fit(features, labels, 3)
        vectors = labeler._engine.table.vectors
        overwritten = owned and dtype == torch.float32
        assert torch.equal(features, unit_rows(before) if overwritten else before)
        assert (vectors.data_ptr() == features.data_ptr()) == overwritten
        assert torch.equal(vectors, unit_rows(before))
        queries = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
        answers.append((labeler.label(queries, FreeLedger()).labels, labeler.remaining()))
    for labels, remaining in answers[1:]:
        assert torch.equal(labels, answers[0][0])
        np.testing.assert_array_equal(remaining, answers[0][1])


def test_bad_arguments_are_named():
    good = {"threshold": 0.5, "sigma2": 0.5, "epsilon": 1.0}
    for name, value in [
        ("threshold", 0.0), ("threshold", 1.0), ("sigma2", 0.0), ("sigma1", -1.0), ("epsilon", 0.0),
        ("delta", 1.0), ("num_queries", 0), ("kernel", "linear"), ("bandwidth", 0.0), ("min_count", 0.0),
        ("abstain", -1.0), ("conversion", "zcdp"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}={value!r}".replace(".", r"\.")):
            IndKNN(**grouped(IndKNN, **{**good, name: value}))
    with pytest.raises(ValueError, match="exactly one"):
        IndKNN(0.5, 0.5)
    with pytest.raises(ValueError, match="exactly one"):
        IndKNN(0.5, 0.5, 1.0, budgets={"budget": 0.1})
    with pytest.raises(ValueError, match="neighbors=5"):
        PublicDensity(5, 4)
    with pytest.raises(RuntimeError, match="call fit"):
        IndKNN(**grouped(IndKNN, **good)).label(torch.randn(2, 4), FreeLedger())
    with pytest.raises(ValueError, match=r"queries: shape \(2, 5\)"):
        _fitted().label(torch.randn(2, 5), FreeLedger())
    with pytest.raises(ValueError, match="NaN"):
        _fitted().label(torch.full((2, 4), torch.nan), FreeLedger())


def test_in_training_rounds_cost_one_entry(tmp_path):
    import pytorch_lightning as pl

    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.datamodules import ArraysDataModule
    from pl_privknn.students import SupervisedStudent

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(260, 1, 8, 8, generator=generator)
    labels = (images[:, 0, :4].mean(dim=(1, 2)) > images[:, 0, 4:].mean(dim=(1, 2))).long()
    data = ArraysDataModule(
        private_images=images[:200], private_labels=labels[:200], public_images=images[200:240],
        public_truth=labels[200:240], test_images=images[240:], test_labels=labels[240:],
        num_classes=2, batch_size=8,
    )  # fmt: skip
    labeling = PrivateLabeler(
        IndKNN(0.6, 0.5, epsilon=1.0, num_queries=30, records={"state_dir": tmp_path / "state"}),
        rounds=2,
        epochs_per_round=1,
        queries_per_round=15,
        query_batch_size=5,
        features=[torch.nn.Flatten(), "student"],
        progress=False,
        files={"run_dir": tmp_path / "run"},
        budget={"max_epsilon": 1.0},
    )
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, callbacks=[labeling], default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    student = SupervisedStudent(network="small_cnn", num_classes=2, in_channels=1, image_size=8)
    trainer.fit(student, data)
    assert labeling.label_counts()["answered"] == 30
    assert 0.9999 < labeling.epsilon <= 1.0
    assert labeling.epsilon_spent == labeling.epsilon
    assert labeling._run.ledger_run.num_charges == 1
