import json
import math

import pytest
import pytorch_lightning as pl
import torch
from grouped import grouped
from pytorch_lightning.loggers import CSVLogger

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.callbacks.label_store import LabelStore, LabelStoreError
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.students import SupervisedStudent

CLASSES = 3


class OracleLabeler(Labeler):
    """Charges one Gaussian release a query and answers with the nearest private record's label."""

    def __init__(self, sigma=20.0, refuse_every=0):
        super().__init__()
        self.mechanism, self.refuse_every, self.asked = Gaussian(sigma), refuse_every, []

    def fit(self, features, labels, num_classes):
        self.features, self.labels = features, labels

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, num_queries)]

    def label(self, queries, ledger, max_answers=None):
        self.charge_and_draw(ledger, self.mechanism, len(queries), "answers")
        self.asked.append(len(queries))
        labels = self.labels[torch.cdist(queries, self.features).argmin(1)]
        if self.refuse_every:
            labels[:: self.refuse_every] = -1
        return Release(labels)


def make_data(n_public=40, **kwargs):
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(CLASSES, 1, 8, 8, generator=generator)

    def draw(n):
        labels = torch.arange(n) % CLASSES
        noise = 0.05 * torch.randn(n, 1, 8, 8, generator=generator)
        return (centres[labels] + noise).clamp(0, 1), labels

    (private, y), (public, truth), (test, z) = draw(90), draw(n_public), draw(30)
    return ArraysDataModule(
        private_images=private,
        private_labels=y,
        public_images=public,
        public_truth=truth,
        test_images=test,
        test_labels=z,
        num_classes=CLASSES,
        batch_size=8,
        **kwargs,
    )


class Recorder(pl.Callback):
    """Notes which public labels each epoch trains on."""

    def __init__(self):
        self.labels = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.labels.append(int((trainer.datamodule.public.labels >= 0).sum()))


def fit(tmp_path, callback, epochs=4, ckpt_path=None, data=None, callbacks=(), **kwargs):
    student = SupervisedStudent(
        network="small_cnn", num_classes=CLASSES, in_channels=1, image_size=8, optimization={"lr": 0.05}
    )
    data = data if data is not None else make_data()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(tmp_path, name="", version=""),
        default_root_dir=tmp_path,
        callbacks=[callback, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(student, data, ckpt_path=ckpt_path)
    return trainer, student, data


def callback(labeler=None, **kwargs):
    settings = {"rounds": 2, "epochs_per_round": 2, "queries_per_round": 10, "progress": False, "delta": 1e-4}
    settings["features"] = [torch.nn.Flatten(), "student"]
    return PrivateLabeler(labeler or OracleLabeler(), **grouped(PrivateLabeler, **{**settings, **kwargs}))


def test_rounds_come_before_the_first_epoch_and_between_epochs(tmp_path):
    labeler, recorder = callback(), Recorder()
    fit(tmp_path, labeler, callbacks=[recorder])
    assert labeler.labeler.asked == [10, 10]
    assert recorder.labels == [10, 10, 20, 20]
    assert labeler.metrics["labels/accuracy"] > 0.9
    # 20 releases of a Gaussian with sigma 20 and sensitivity 1 have the ε of one with sigma 20/√20.
    mu, eps = math.sqrt(20) / 20, labeler.epsilon
    phi = torch.distributions.Normal(0, 1).cdf
    delta = phi(torch.tensor(-eps / mu + mu / 2)) - math.exp(eps) * phi(torch.tensor(-eps / mu - mu / 2))
    assert float(delta) == pytest.approx(1e-4, rel=0.02)
    assert labeler.epsilon == labeler.epsilon_spent


def test_epsilon_is_stated_beforehand_and_covers_the_plan(tmp_path):
    labeler = callback(rounds=2)
    fit(tmp_path, labeler, epochs=1)  # ends before the second round
    assert labeler.labeler.asked == [10]
    assert labeler.epsilon > labeler.epsilon_spent > 0


def test_no_query_after_the_last_epoch(tmp_path):
    labeler = callback()
    fit(tmp_path, labeler, epochs=2)
    assert labeler.labeler.asked == [10]


def test_nothing_is_queried_in_fast_dev_run_validation_and_test(tmp_path):
    labeler = callback()
    trainer, student, data = fit(tmp_path, labeler, fast_dev_run=True)
    trainer.validate(student, data, verbose=False)
    trainer.test(student, data, verbose=False)
    assert labeler.labeler.asked == []
    assert not list(tmp_path.rglob("ledger.sqlite"))


def test_budget_is_checked_before_anything_is_asked(tmp_path):
    labeler = callback(max_epsilon=0.01)
    with pytest.raises(BudgetExceeded):
        fit(tmp_path, labeler)
    assert labeler.labeler.asked == []


def test_retrain_starts_afresh_and_continue_does_not(tmp_path):
    class Weights(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            self.seen = [*getattr(self, "seen", []), [p.detach().clone() for p in pl_module.parameters()]]
            self.optimizers = [*getattr(self, "optimizers", []), trainer.optimizers[0].state_dict()["state"]]

    for retrain in (True, False):
        weights = Weights()
        trainer, student, _ = fit(tmp_path / str(retrain), callback(retrain=retrain), callbacks=[weights])
        moved = [not torch.equal(a, b) for a, b in zip(weights.seen[1], weights.seen[2], strict=True)]
        assert any(moved)
        # Momentum lives in the optimizer: a fresh start has none.
        assert (len(weights.optimizers[2]) == 0) == retrain
        params = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        assert params == {id(p) for p in student.parameters() if p.requires_grad}


def test_logged_figures_share_the_step_axis_with_accuracy(tmp_path):
    labeler = callback(OracleLabeler(refuse_every=5))
    fit(tmp_path, labeler)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    table = [dict(zip(header, row.split(","), strict=True)) for row in rows[1:]]
    steps = {name: [r["step"] for r in table if r.get(name)] for name in ("privacy/epsilon", "val/accuracy")}
    assert steps["privacy/epsilon"] == steps["val/accuracy"]
    assert len(steps["privacy/epsilon"]) == 4
    last = [r for r in table if r.get("privacy/epsilon")][-1]
    assert float(last["privacy/epsilon"]) == pytest.approx(labeler.epsilon)
    assert float(last["labels/queried"]) == 20
    assert float(last["labels/answered"]) == 16


def test_resume_from_a_checkpoint_pays_nothing_twice(tmp_path):
    first = callback()
    trainer, _, _ = fit(tmp_path, first, epochs=3)
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    assert first.labeler.asked == [10, 10]
    data, second, recorder = make_data(), callback(), Recorder()
    fit(
        tmp_path / "other", second, epochs=6, ckpt_path=tmp_path / "mid.ckpt", data=data, callbacks=[recorder]
    )
    assert second.labeler.asked == []
    assert recorder.labels == [20, 20, 20]
    assert torch.equal(data.public.labels, trainer.datamodule.public.labels)
    assert second.epsilon == first.epsilon
    assert not (tmp_path / "other" / "ledger.sqlite").exists()


def test_resume_from_a_checkpoint_saved_before_the_query_still_queries_once(tmp_path):
    class SaveAtValidationEnd(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking and trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    first = callback()
    fit(tmp_path, first, epochs=4, callbacks=[SaveAtValidationEnd()])
    second = callback()
    fit(tmp_path, second, epochs=4, ckpt_path=tmp_path / "early.ckpt")
    assert second.labeler.asked == []  # the folder holds the second round already
    assert second.epsilon_spent == first.epsilon_spent


def test_other_privacy_parameters_in_the_same_folder_are_refused(tmp_path):
    fit(tmp_path, callback())
    with pytest.raises(LabelStoreError, match="other parameters"):
        fit(tmp_path, callback(OracleLabeler(sigma=10.0)))


def test_two_runs_share_one_ledger(tmp_path):
    shared = tmp_path / "shared.sqlite"
    one = callback(ledger_path=shared)
    fit(tmp_path / "one", one)
    two = callback(ledger_path=shared)
    fit(tmp_path / "two", two)
    assert two.epsilon > one.epsilon * 1.3
    with pytest.raises(BudgetExceeded):
        fit(tmp_path / "three", callback(ledger_path=tmp_path / "b.sqlite", max_epsilon=one.epsilon / 2))


def test_run_report(tmp_path):
    report = RunReport()
    labeler = callback(OracleLabeler(refuse_every=5))
    trainer, student, data = fit(tmp_path, labeler, callbacks=[report])
    trainer.test(student, data, verbose=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("epsilon_rdp", "epsilon_pld", "seconds"):
        assert summary[name] > 0
    assert summary["epsilon"] <= labeler.epsilon
    assert summary["delta"] == 1e-4
    assert 0.01 < summary["tpr_at_fpr_0.01"] < 1
    assert (summary["adjacency"], summary["guarantee"]) == ("add_remove", "unconditional")
    assert (summary["queried"], summary["answered"], summary["lost"]) == (20, 16, 0)
    assert 0 <= summary["test_accuracy"] <= 1
    assert dict(report.table())["answered"] == "16 of 20 queries"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="rounds=0"):
        callback(rounds=0)
    with pytest.raises(ValueError, match="delta=2"):
        callback(delta=2)
    with pytest.raises(ValueError, match="queries_per_round"):
        callback(queries_per_round=[10])
    with pytest.raises(ValueError, match="selection='best'"):
        callback(selection="best")
    with pytest.raises(ValueError, match="adjacency='replace_one'"):
        callback(adjacency="replace_one")
    with pytest.raises(ValueError, match="ledger_head_path=7 must be the path"):
        callback(ledger_head_path=7)
    with pytest.raises(ValueError, match="ledger_path='' must be the path"):
        callback(ledger_path="")


def test_selections(tmp_path):
    everything = callback(selection="all", queries_per_round=1, features=[torch.nn.Flatten()])
    fit(tmp_path / "all", everything)
    assert everything.labeler.asked == [40]  # nothing is left unanswered for the second round
    every_fifth = callback(OracleLabeler(refuse_every=5), selection="all", features=[torch.nn.Flatten()])
    fit(tmp_path / "refused", every_fifth)
    assert every_fifth.labeler.asked == [40, 8]
    few = callback(queries_per_round=30)
    _, _, data = fit(tmp_path / "random", few)
    assert few.labeler.asked == [30, 10]
    assert (data.public.labels >= 0).all()


def test_label_store_survives_reopening_and_counts_lost_queries(tmp_path):
    store = LabelStore(tmp_path / "labels.sqlite", {"sigma": 1})
    store.select(0, [5, 3, 8, 1])
    store.mark_asked(0, [0, 1], charges_now=0)
    store.put(0, [0, 1], Release(torch.tensor([2, -1]), torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])))
    store.mark_asked(0, [2], charges_now=1)
    store.close()
    again = LabelStore(tmp_path / "labels.sqlite", {"sigma": 1})
    assert again.counts() == {"queried": 3, "answered": 1, "refused": 1, "lost": 1}
    assert again.open_positions(0, charges_now=1) == [2, 3]  # asked, but never paid for
    assert again.open_positions(0, charges_now=2) == [3]  # paid for, answers lost
    examples, labels, soft = again.answers(1)
    assert (examples.tolist(), labels.tolist(), soft.tolist()) == ([5], [2], [[0.0, 0.0, 1.0]])
    (tmp_path / "broken.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 20)
    with pytest.raises(LabelStoreError, match="not a label store"):
        LabelStore(tmp_path / "broken.sqlite", {})
