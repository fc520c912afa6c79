"""A training in two processes: one asks the private teacher, both learn from the same answers."""

import json
import os
import signal
import time

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler, SupervisedStudent
from pl_privknn import _processes as processes
from pl_privknn.callbacks.label_run import stored_answers
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_group, wait_at_most
from tests.setup.small_fit import quiet_trainer


class SlowTeacher(PrivateKNN):
    """Does something in its second batch of queries, which may take a while."""

    def __init__(self, then):
        super().__init__(k=60, sampling_rate=0.8, noise=Gaussian(14.0), noise_source=SeededNoise(0))
        self.then, self.batches = then, 0

    def label(self, *args, **kwargs):
        self.batches += 1
        if self.batches == 2:
            self.then()
        return super().label(*args, **kwargs)


class ImpatientAtFirst(pl.Callback):
    """The training's processes wait for each other a second at most, until it begins."""

    def on_fit_start(self, trainer, pl_module):
        wait_at_most(1.0)

    def on_train_start(self, trainer, pl_module):
        wait_at_most(60.0)


def train(folder, rank, then):
    """What each of two processes does that were started for one training."""
    pl.seed_everything(0)
    processes._BEAT = 0.1
    data = DigitsDataModule(private_records=300, public_examples=100, batch_size=32)
    labeling = PrivateLabeler(
        SlowTeacher(then), rounds=2, epochs_per_round=1, queries_per_round=40, budget={"delta": 1e-4},
        run_dir=folder, options={"query_batch_size": 10, "progress": False},
    )  # fmt: skip
    student = SupervisedStudent(network="small_cnn", in_channels=1, image_size=20, ema_decay=0.9)
    trainer = quiet_trainer(folder, 2, callbacks=[ImpatientAtFirst(), labeling], devices=2, strategy="ddp")
    assert (trainer.global_rank, trainer.world_size) == (rank, 2)
    trainer.fit(student, data)
    norm = float(torch.cat([p.detach().flatten() for p in student.parameters()]).double().norm())
    found = {"labels": data.public.labels.tolist(), "metrics": labeling.metrics, "weights": norm}
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@needs_fork
def test_one_process_asks_and_both_learn_from_the_same_answers(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    # The round takes three times as long as one process waits for another in the training's own group.
    assert in_group(2, lambda rank: train(run, rank, lambda: time.sleep(3.0))) == [0, 0]
    first, second = (json.loads((run / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert sum(label >= 0 for label in first["labels"]) == 80
    assert first["labels"] == second["labels"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-9)
    # Every query was paid for once, not once a process.
    report = Ledger.open_readonly(run / "run.sqlite").report()
    assert sum(charge.count for charge in report.charged) == 80
    assert report.spent.epsilon == pytest.approx(first["metrics"]["privacy/epsilon_spent"])


@needs_fork
def test_nothing_more_is_asked_once_a_process_has_died(tmp_path):
    pid = tmp_path / "pid"

    def kill_the_other():
        os.kill(int(pid.read_text()), signal.SIGKILL)
        time.sleep(1.0)

    def member(rank):
        if rank == 1:
            pid.write_text(str(os.getpid()))
        try:
            train(tmp_path, rank, kill_the_other)
        except RuntimeError as error:
            (tmp_path / "said").write_text(str(error))

    assert in_group(2, member) == [0, -signal.SIGKILL]
    said = (tmp_path / "said").read_text()
    assert said.startswith("another process of this training ended")
    assert "\n" not in said
    # Two batches of ten were paid for, and both are kept.
    charged = Ledger.open_readonly(tmp_path / "run.sqlite").report().charged
    assert sum(charge.count for charge in charged) == 20
    assert len(stored_answers(tmp_path).examples) == 20
