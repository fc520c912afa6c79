"""Runs on neighbouring private sets, with the same noise, differ in their answers and what follows from them."""

import json
import sqlite3

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import PrivateKNN, ReverseKNN
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent

#: All that a run logs of its labels; what answers decide may differ between neighbours.
LOGGED = {"privacy/epsilon", "privacy/epsilon_spent", "privacy/delta", "privacy/guarantee", "labels/queried"}
OF_ANSWERS = {"labels/answered", "labels/labelled", "labels/accuracy", "labels/accuracy_last_round"}
TEACHERS = {
    "private_knn": lambda: PrivateKNN(5, 0.5, noise=Gaussian(2.0), noise_source=SeededNoise(1)),
    "reverse_knn": lambda: ReverseKNN(1, epsilon=0.5, noise_source=SeededNoise(1)),
}
ROWS = {"queries": "round, position, example, asked_at", "spreads": "round, value", "meta": "key, value"}


def images(count, seed):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def data(records):
    """The first of 61 private records, of which the last is bright and of a class of its own."""
    private = torch.cat([0.5 * images(60, 0), torch.ones(1, 1, 8, 8)])
    labels = torch.cat([torch.arange(60) % 2, torch.tensor([2])])
    return ArraysDataModule(
        private[:records], labels[:records], images(40, 1), torch.arange(40) % 3, images(10, 2),
        torch.arange(10) % 3, num_classes=3, batch_size=8,
    )  # fmt: skip


def shapes(value):
    if isinstance(value, dict):
        return {str(name): shapes(item) for name, item in value.items()}
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def traces(folder, teacher, selection, records, asked):
    class Watched(type(teacher)):
        def label(self, queries, ledger, max_answers=None):
            asked.append(queries)
            return super().label(queries, ledger, max_answers)

    teacher.__class__ = Watched
    labeling = PrivateLabeler(
        teacher, rounds=2, epochs_per_round=1, queries_per_round=6, selection=selection, run_dir=folder,
        features=torch.nn.Flatten(), progress=False, delta=1e-3,
    )  # fmt: skip
    keep = ModelCheckpoint(folder / "ckpt", "last", enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=CSVLogger(folder, "", ""), default_root_dir=folder,
        callbacks=[labeling, keep, RunReport(folder)], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        SupervisedStudent(network="small_cnn", num_classes=3, in_channels=1, image_size=8), data(records)
    )
    with sqlite3.connect(folder / "labels.sqlite") as labels:
        stored = {
            table: sorted(labels.execute(f"SELECT {columns} FROM {table}")) for table, columns in ROWS.items()
        }
    own = ("run_id", "ledger_head")  # drawn for each run, and a hash of times
    stored["meta"] = [row for row in stored["meta"] if row[0] not in own]
    summary = json.loads((folder / "summary.json").read_text())
    released = {"seconds", "ledger_head", "val_accuracy", "label_accuracy", "label_accuracy_last_round"}
    return {
        "what the teacher is asked": [queries.tolist() for queries in asked],
        "metrics": {name: labeling.metrics[name] for name in sorted(set(labeling.metrics) - OF_ANSWERS)},
        "columns": (folder / "metrics.csv").read_text().splitlines()[0],
        "label store": stored,
        "charges": [charge.to_record() for charge in labeling.ledger.report().charged],
        "plan": [charge.to_record() for charge in labeling.ledger.report().guaranteed],
        "summary": {name: value for name, value in summary.items() if name not in released},
        "checkpoint": shapes(torch.load(folder / "ckpt" / "last.ckpt", weights_only=False)),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }, set(labeling.metrics)


@pytest.mark.parametrize("selection", ["random", "clusters"])
@pytest.mark.parametrize("name", TEACHERS)
def test_neighbouring_private_sets_leave_the_same_traces(tmp_path, name, selection):
    (one, logged), (other, _) = (
        traces(tmp_path / str(records), TEACHERS[name](), selection, records, []) for records in (61, 60)
    )
    assert logged >= LOGGED
    assert logged <= LOGGED | OF_ANSWERS
    for what in one:
        assert one[what] == other[what], what
