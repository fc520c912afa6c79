"""What TensorBoard and W&B are told of a run, read back from their files."""

import json
import sqlite3
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.mechanisms import Laplace
from pl_privknn.privacy.noise import SeededNoise
from tests.callbacks.wandb_files import finished_run
from tests.report.report_setup import CLASSES, QUERIES, SIDE, small_data, small_run
from tests.setup.small_fit import quiet_trainer, small_student


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with both loggers: its folder, its callback, its data, and the warnings of Lightning."""
    folder = tmp_path_factory.mktemp("logged")
    wandb.teardown()
    loggers = [WandbLogger(save_dir=folder, project="p", offline=True), TensorBoardLogger(folder, "tb", "")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback, data = small_run(folder, loggers=loggers)
    wandb.finish()
    return folder, callback, data, [str(one.message) for one in caught]


@pytest.fixture(scope="module")
def records(logged):
    return finished_run(logged[0])


def history(records):
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_the_config_of_a_wandb_run_names_labeler_noise_rounds_and_data(records):
    config = {
        item.key: json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "config"
        for item in record.config.update
    }
    found = {name: config["noise"]["gaussian"][name] for name in ("sigma", "sampling_rate", "count")}
    assert found == {"sigma": 4.0, "sampling_rate": 0.8, "count": 2 * QUERIES}
    assert (config["labeler"], config["student"], config["rounds"]) == ("PrivateKNN", "SupervisedStudent", 2)
    assert config["queries_per_round"] == [QUERIES, QUERIES]
    data = {"name": "ArraysDataModule", "classes": 3, "public_images": 24, "task": "multiclass"}
    assert config["data"] == data
    assert config["budget"] == {"epsilon": None, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}


def test_epsilon_and_accuracy_stand_in_one_row(logged, records):
    folder, callback, *_ = logged
    summary = json.loads((folder / "summary.json").read_text())
    rows = [row for row in history(records) if "tradeoff/epsilon" in row]
    epochs = [row for row in rows if "tradeoff/val_accuracy" in row]
    assert len(epochs) == 2
    assert all(row["tradeoff/epsilon"] == pytest.approx(callback.epsilon) for row in epochs)
    spent = [row["tradeoff/epsilon_spent"] for row in epochs]
    assert 0 < spent[0] < spent[1] <= 1.000001 * callback.epsilon
    assert epochs[-1]["tradeoff/val_accuracy"] == pytest.approx(summary["val_accuracy"], abs=1e-6)
    (test,) = [row for row in rows if "tradeoff/test_accuracy" in row]
    assert test["tradeoff/test_accuracy"] == summary["test_accuracy"]
    assert test["tradeoff/epsilon"] == summary["epsilon"]


def test_the_table_of_queries_holds_public_pictures_and_released_answers(logged, records):
    folder, _, data, _ = logged
    with sqlite3.connect(folder / "run.sqlite") as store:
        asked = store.execute("SELECT example, label FROM queries ORDER BY round, position").fetchall()
    assert any(name.startswith("queries") for row in history(records) for name in row)
    (artifact,) = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    files = {file.path: Path(file.local_path) for file in artifact.manifest.contents}
    table = json.loads(files["queries.table.json"].read_text())
    assert table["columns"] == ["picture", "example", "round", "state", "label", "truth", "right"]
    assert len(table["data"]) == len(asked)
    for row, (wanted, released) in zip(table["data"], asked, strict=True):
        picture, example, _, state, label, truth, right = row
        assert (example, state, label) == (wanted, "answered", data.class_names[released])
        assert truth == data.class_names[int(data.public.truth[example])]
        assert right == (label == truth)
        shown = np.array(Image.open(files[picture["path"]]).convert("L"))
        public = (data.public.images([example])[0, 0] * 255).round().numpy().astype(np.uint8)
        assert np.array_equal(shown, public)


class Plain(Logger):
    """A logger without files, whose name and version are nothing."""

    name = version = None

    def log_metrics(self, metrics, step=None):
        """Nothing is kept."""

    def log_hyperparams(self, *args, **kwargs):
        """Nothing is kept."""


LOGGERS = {  # and where its runs are
    "W&B": (lambda: WandbLogger(project="p", offline=True), "runs/SupervisedStudent/"),
    "TensorBoard": (lambda: TensorBoardLogger("logs"), "logs/lightning_logs/version_"),
    "CSV": (lambda: CSVLogger("logs"), "logs/lightning_logs/version_"),
    "one of one's own": (Plain, "runs/SupervisedStudent/"),
    "none": (lambda: False, "runs/SupervisedStudent/"),
}


@pytest.mark.parametrize("name", LOGGERS)
def test_two_runs_of_a_script_have_folders_of_their_own(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, wanted = LOGGERS[name]
    folders, data = [], small_data()
    for queries in (8, 9):
        wandb.teardown()
        teacher = ReverseKNN(noise=Laplace(scale=5.0), noise_source=SeededNoise(1))
        labeling = PrivateLabeler(teacher, queries_per_round=queries, features=torch.nn.Flatten())
        student = small_student(CLASSES, SIDE)
        quiet_trainer(None, logger=make(), callbacks=[labeling], enable_checkpointing=True).fit(student, data)
        folders.append(str(Path(labeling.run_dir).resolve().relative_to(tmp_path)))
        wandb.finish()
    assert folders == [f"{wanted}0", f"{wanted}1"]
    assert all((tmp_path / folder / "summary.json").is_file() for folder in folders)
    assert all(len(list((tmp_path / folder).glob("checkpoints/*.ckpt"))) == 1 for folder in folders)
    # The trainer's own checkpoints are in the folder of W&B's project, those of other loggers beside the runs.
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "logs", "wandb", "p", "None", "checkpoints"}
