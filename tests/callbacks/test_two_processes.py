"""A training in two processes: one asks the private teacher, both learn from the same answers."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytorch_lightning as pl
import torch
from forked import in_child
from ledger_setup import needs_fork

from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler, SupervisedStudent
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise


def train(folder, rank, port):
    """What each of two processes does that were started for one training."""
    # As a launcher of such processes leaves it: Lightning starts none itself then.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", NODE_RANK="0", LOCAL_RANK=str(rank)
    )
    pl.seed_everything(0)
    data = DigitsDataModule(batch_size=32)
    teacher = PrivateKNN(k=60, sampling_rate=0.8, noise=Gaussian(14.0), noise_source=SeededNoise(0))
    labeling = PrivateLabeler(
        teacher, rounds=2, epochs_per_round=1, queries_per_round=40, query_batch_size=20, delta=1e-4,
        run_dir=folder, progress=False,
    )  # fmt: skip
    student = SupervisedStudent(network="small_cnn", in_channels=1, image_size=20, ema_decay=0.9)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[labeling], accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    assert (trainer.global_rank, trainer.world_size) == (rank, 2)
    trainer.fit(student, data)
    weights = torch.cat([p.detach().flatten() for p in student.parameters()])
    found = {
        "labels": data.public.labels.tolist(),
        "metrics": labeling.metrics,
        "weights": weights.double().norm().item(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@needs_fork
def test_one_process_asks_and_both_learn_from_the_same_answers(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(2) as both:
        statuses = both.map(lambda rank: in_child(lambda: train(run, rank, port)), range(2))
    assert list(statuses) == [0, 0]
    first, second = (json.loads((run / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert sum(label >= 0 for label in first["labels"]) == 80
    assert first["labels"] == second["labels"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-9)
    # Every query was paid for once, not once a process.
    report = Ledger.open_readonly(run / "ledger.sqlite").report()
    assert sum(charge.count for charge in report.charged) == 80
    assert report.spent.epsilon == pytest.approx(first["metrics"]["privacy/epsilon_spent"])
