"""Rounds of labelling in a fit: when they come, what they cost, what a resumed run pays."""

import json
import math
import shutil

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

from pl_privknn.callbacks import FullSelection, PrivateLabeler, RunReport
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from tests.setup.grouped import grouped
from tests.setup.refusals import refusals
from tests.setup.small_fit import easy_images, quiet_trainer, small_student


class OracleLabeler(Labeler):
    """Charges one Gaussian release a query and answers with the nearest private record's label."""

    def __init__(self, sigma=20.0, refuse_every=0):
        super().__init__()
        self.mechanism, self.refuse_every, self.asked = Gaussian(sigma), refuse_every, []

    def learn(self, records):
        self.features, self.labels = records.table(), records.labels

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, num_queries)]

    def answer(self, queries, run, max_answers):
        run.pay(self.mechanism, len(queries), "answers")
        self.asked.append(len(queries))
        labels = self.labels[torch.cdist(queries, self.features).argmin(1)]
        if self.refuse_every:
            labels[:: self.refuse_every] = -1
        return Release(labels)


class Recorder(pl.Callback):
    """Notes which public labels each epoch trains on."""

    def __init__(self):
        self.labels = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.labels.append(int((trainer.datamodule.public.labels >= 0).sum()))


class Saves(pl.Callback):
    """A checkpoint before the second round, and one at the end."""

    def __init__(self, folder):
        self.folder = folder

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / "early.ckpt")

    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / "end.ckpt")


def fit(folder, callback, epochs=4, ckpt_path=None, callbacks=(), **kwargs):
    data = ArraysDataModule(*easy_images(90, 40, 30, noise=0.05), num_classes=3, batch_size=8)
    student = small_student(optimization={"lr": 0.05})
    trainer = quiet_trainer(
        folder, epochs, logger=CSVLogger(folder, "", ""), callbacks=[callback, *callbacks],
        enable_checkpointing=True, **kwargs,
    )  # fmt: skip
    trainer.fit(student, data, ckpt_path=ckpt_path)
    return trainer, student, data


def callback(labeler=None, **kwargs):
    settings = {"rounds": 2, "epochs_per_round": 2, "queries_per_round": 10, "progress": False, "delta": 1e-4}
    settings["features"] = [torch.nn.Flatten(), "student"]
    return PrivateLabeler(labeler or OracleLabeler(), **grouped(PrivateLabeler, **{**settings, **kwargs}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two rounds, one in five of whose answers is refused, and its test."""
    folder, labeler = tmp_path_factory.mktemp("whole"), callback(OracleLabeler(refuse_every=5))
    recorder, report = Recorder(), RunReport()
    trainer, student, data = fit(folder, labeler, callbacks=[recorder, report, Saves(folder)])
    trainer.test(student, data, verbose=False)
    return folder, labeler, recorder, report, data


def test_rounds_come_before_the_first_epoch_and_between_epochs_at_the_stated_epsilon(whole):
    _, labeler, recorder, *_ = whole
    assert labeler.labeler.asked == [10, 10]
    assert recorder.labels == [8, 8, 16, 16]
    assert labeler.metrics["labels/accuracy"] > 0.9
    # 20 releases of a Gaussian with sigma 20 and sensitivity 1 have the ε of one with sigma 20/√20.
    mu, eps = math.sqrt(20) / 20, labeler.epsilon
    phi = torch.distributions.Normal(0, 1).cdf
    delta = phi(torch.tensor(-eps / mu + mu / 2)) - math.exp(eps) * phi(torch.tensor(-eps / mu - mu / 2))
    assert float(delta) == pytest.approx(1e-4, rel=0.02)
    assert labeler.epsilon == labeler.epsilon_spent


def test_logged_figures_share_the_step_axis_with_accuracy(whole):
    folder, labeler, *_ = whole
    header, *rows = [row.split(",") for row in (folder / "metrics.csv").read_text().splitlines()]
    table = [dict(zip(header, row, strict=True)) for row in rows]
    steps = {name: [r["step"] for r in table if r.get(name)] for name in ("privacy/epsilon", "val/accuracy")}
    assert steps["privacy/epsilon"] == steps["val/accuracy"]
    assert len(steps["privacy/epsilon"]) == 4
    last = [r for r in table if r.get("privacy/epsilon")][-1]
    assert float(last["privacy/epsilon"]) == pytest.approx(labeler.epsilon)
    assert (float(last["labels/queried"]), float(last["labels/answered"])) == (20, 16)


def test_run_report(whole):
    folder, labeler, _, report, _ = whole
    summary = json.loads((folder / "summary.json").read_text())
    assert min(summary[name] for name in ("epsilon_rdp", "epsilon_pld", "seconds")) > 0
    assert summary["epsilon"] <= labeler.epsilon
    assert summary["delta"] == 1e-4
    assert 0.01 < summary["tpr_at_fpr_0.01"] < 1
    assert (summary["adjacency"], summary["guarantee"]) == ("add_remove", "conditional")
    assert summary["reason"] == "OracleLabeler moves by no more than it charges"
    assert (summary["queried"], summary["answered"], summary["lost"]) == (20, 16, 0)
    assert 0 <= summary["test_accuracy"] <= 1
    assert dict(report.table())["queries answered"] == "16 of 20"


def test_a_fit_that_ends_before_the_second_round_asks_nothing_for_it(tmp_path):
    labeler = callback()
    fit(tmp_path, labeler, epochs=2)
    assert labeler.labeler.asked == [10]
    assert labeler.epsilon > labeler.epsilon_spent > 0  # it is stated beforehand and covers the plan


def test_nothing_is_queried_in_fast_dev_run_validation_and_test(tmp_path):
    labeler = callback()
    trainer, student, data = fit(tmp_path, labeler, fast_dev_run=True)
    trainer.validate(student, data, verbose=False)
    trainer.test(student, data, verbose=False)
    assert labeler.labeler.asked == []
    assert not list(tmp_path.rglob("run.sqlite"))


def test_retrain_starts_afresh_and_continue_does_not(tmp_path):
    class Weights(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            self.seen = [*getattr(self, "seen", []), [p.detach().clone() for p in pl_module.parameters()]]
            self.optimizers = [*getattr(self, "optimizers", []), trainer.optimizers[0].state_dict()["state"]]

    for retrain in (True, False):
        weights = Weights()
        trainer, student, _ = fit(tmp_path / str(retrain), callback(retrain=retrain), callbacks=[weights])
        assert any(not torch.equal(a, b) for a, b in zip(weights.seen[1], weights.seen[2], strict=True))
        # Momentum lives in the optimizer: a fresh start has none.
        assert (len(weights.optimizers[2]) == 0) == retrain
        params = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        assert params == {id(p) for p in student.parameters() if p.requires_grad}


def test_resume_from_a_checkpoint_pays_nothing_twice(whole, tmp_path):
    folder, first, _, _, trained_on = whole
    second, recorder = callback(), Recorder()
    _, _, data = fit(tmp_path, second, epochs=6, ckpt_path=folder / "end.ckpt", callbacks=[recorder])
    assert second.labeler.asked == []
    assert recorder.labels == [16, 16]
    assert torch.equal(data.public.labels, trained_on.public.labels)
    assert second.epsilon == first.epsilon
    assert not (tmp_path / "run.sqlite").exists()


def test_what_began_in_a_folder_goes_on_there_with_the_same_parameters_alone(whole, tmp_path):
    folder, first = shutil.copytree(whole[0], tmp_path / "copy"), whole[1]
    second = callback(OracleLabeler(refuse_every=5))
    fit(folder, second, ckpt_path=folder / "early.ckpt")
    assert second.labeler.asked == []  # the folder holds the second round already
    assert second.epsilon_spent == first.epsilon_spent
    with pytest.raises(ValueError, match="other parameters"):
        fit(folder, callback(OracleLabeler(sigma=10.0)))


def test_two_runs_share_one_ledger_and_its_budget(tmp_path):
    shared = tmp_path / "shared.sqlite"
    one, two = callback(ledger_path=shared), callback(ledger_path=shared)
    fit(tmp_path / "one", one, epochs=1)
    alone = one.epsilon
    fit(tmp_path / "two", two, epochs=1)
    assert two.epsilon > alone * 1.3
    assert one.epsilon == two.epsilon  # that of the whole ledger
    three = callback(epsilon=alone / 2)
    with pytest.raises(BudgetExceeded):
        fit(tmp_path / "three", three)
    assert three.labeler.asked == []


test_bad_arguments_are_named = refusals(
    {
        "rounds=0": lambda: callback(rounds=0),
        "delta=2": lambda: callback(delta=2),
        "queries_per_round": lambda: callback(queries_per_round=[10]),
        "selection='best'": lambda: callback(selection="best"),
        "adjacency='replace_one'": lambda: callback(adjacency="replace_one"),
        "ledger_path=7 must be the path": lambda: callback(ledger_path=7),
        "ledger_path='' must be the path": lambda: callback(ledger_path=""),
    }
)


@pytest.mark.parametrize(
    ("refuse_every", "settings", "asked"),
    [
        (
            0,
            {"selection": FullSelection(), "queries_per_round": 1},
            [40],
        ),  # nothing is left for the second round
        (5, {"selection": FullSelection()}, [40, 8]),
        (0, {"queries_per_round": 30}, [30, 10]),
    ],
)
def test_selections(tmp_path, refuse_every, settings, asked):
    labeler = callback(OracleLabeler(refuse_every=refuse_every), epochs_per_round=1, **settings)
    _, _, data = fit(tmp_path, labeler, epochs=2)
    assert labeler.labeler.asked == asked
    assert bool((data.public.labels >= 0).all()) == (refuse_every == 0)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_students_of_another_precision_are_refused_before_any_query(tmp_path, precision):
    labeling = PrivateLabeler(OracleLabeler(), run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=rf"precision='{precision}'.*bf16-mixed"):
        fit(tmp_path, labeling, precision=precision)
    assert not (tmp_path / "run" / "run.sqlite").exists()
