import importlib
import json
from pathlib import Path

import pytest
import torch
from wandb_files import finished_run

import pl_privknn
from pl_privknn.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--trainer.max_epochs", "2", "--labeling.epochs_per_round", "1", "--labeling.queries_per_round", "40",
    "--labeling.max_answers", "60", "--labeling.progress", "false", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
    "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1",
]  # fmt: skip
DIGITS = ["--config", str(ROOT / "configs" / "digits_private_knn.yaml")]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_fit_leaves_everything_in_its_folder(tmp_path, capsys):
    assert main(["fit", *DIGITS, *SMALL]) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    folder = Path(printed[-1])
    assert folder == Path("runs/digits_private_knn/0")
    assert any("guarantee" in line for line in printed)
    for name in ("config.yaml", "ledger.sqlite", "labels.sqlite", "metrics.csv", "summary.json"):
        assert (folder / name).is_file(), name
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    wanted = (
        "epsilon epsilon_spent epsilon_rdp epsilon_pld delta adjacency guarantee queried answered "
        "label_accuracy test_accuracy seconds"
    )
    assert all(summary[name] is not None for name in wanted.split())
    assert summary["queried"] == 80
    # The auditor's figure, from the ledger alone, is the summary's.
    assert main(["audit", str(folder / "ledger.sqlite"), "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert audit["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-9)
    assert main(["epsilon", str(folder / "ledger.sqlite"), "--delta", "1e-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-9)
    # Evaluation of what was saved needs the folder alone, and asks the teacher nothing.
    arguments = [
        "--config",
        str(folder / "config.yaml"),
        "--ckpt_path",
        str(folder / "checkpoints/last.ckpt"),
    ]
    before = (folder / "ledger.sqlite").read_bytes()
    for command in ("test", "validate", "predict"):
        assert main([command, *arguments]) == 0
    assert (folder / "ledger.sqlite").read_bytes() == before
    # No private image or label is in what the run leaves: checkpoints hold the student and public facts.
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    assert not any("private" in key for key in checkpoint)


def test_resume_continues_in_the_same_folder(tmp_path, capsys):
    assert main(["fit", *DIGITS, *SMALL, "--run_dir", "runs/a"]) == 0
    first = json.loads(Path("runs/a/summary.json").read_text())
    assert main(["fit", "--resume", "runs/a", "--trainer.max_epochs", "3"]) == 0
    second = json.loads(Path("runs/a/summary.json").read_text())
    assert second["epochs"] == 3
    for name in ("epsilon", "epsilon_spent", "queried", "answered", "label_accuracy"):
        assert second[name] == first[name]
    assert main(["fit", "--resume", "runs/none"]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_budget_and_changed_parameters_are_refused_with_one_line(tmp_path, capsys):
    assert main(["fit", *DIGITS, *SMALL, "--labeling.budget.max_epsilon", "0.001"]) == 2
    assert "max_epsilon" in capsys.readouterr().err
    assert main(["fit", *DIGITS, *SMALL, "--run_dir", "runs/b", "--trainer.max_epochs", "1"]) == 0
    assert main(["fit", "--resume", "runs/b", "--labeling.labeler.init_args.k", "41"]) == 2
    assert "other parameters" in capsys.readouterr().err


def test_own_labeler_by_class_path(tmp_path, monkeypatch):
    (tmp_path / "my_teacher.py").write_text(
        "import torch\n"
        "from pl_privknn import Gaussian, Labeler, Release\n"
        "from pl_privknn.privacy.mechanisms import Charge\n"
        "class Guess(Labeler):\n"
        "    def __init__(self, sigma: float = 50.0):\n"
        "        super().__init__()\n"
        "        self.mechanism = Gaussian(sigma)\n"
        "    def fit(self, features, labels, num_classes):\n"
        "        self.counts = torch.bincount(labels, minlength=num_classes)\n"
        "    def plan(self, num_queries, max_answers, num_classes, rounds=1):\n"
        "        return [Charge(self.mechanism, num_queries)]\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        ledger.charge(self.mechanism, len(queries))\n"
        "        counts = self.counts.repeat(len(queries), 1)\n"
        "        return Release(self.mechanism.add_noise(counts, self.noise_source).argmax(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "own.yaml"
    config.write_text(
        "data: {class_path: DigitsDataModule}\n"
        "model: {class_path: SupervisedStudent, init_args: {network: small_cnn}}\n"
        "labeling:\n"
        "  labeler: {class_path: my_teacher.Guess, init_args: {sigma: 80.0}}\n"
        "  features: [{class_path: HOG, init_args: {orientations: 6}}]\n"
    )
    assert main(["fit", "--config", str(config), *SMALL, "--run_dir", "runs/own"]) == 0
    summary = json.loads(Path("runs/own/summary.json").read_text())
    assert (summary["labeler"], summary["answered"]) == ("Guess", 40)


@pytest.mark.long
def test_wandb_offline_run_has_epsilon_and_accuracy_on_one_step_axis(tmp_path):
    # W&B's process takes relative paths from where it was started, perhaps by an earlier test in another folder.
    importlib.import_module("wandb").teardown()
    arguments = ["--trainer.logger", "WandbLogger", "--trainer.logger.offline", "true"]
    assert main(["fit", *DIGITS, *SMALL, *arguments, "--run_dir", "runs/wandb"]) == 0
    records = finished_run("runs/wandb")
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    steps = {
        name: [row["trainer/global_step"] for row in rows if name in row]
        for name in ("privacy/epsilon", "val/accuracy")
    }
    assert len(steps["privacy/epsilon"]) == 2
    assert steps["privacy/epsilon"] == steps["val/accuracy"]
    assert Path("runs/wandb/metrics.csv").is_file()
    assert Path("runs/wandb/config.yaml").is_file()


def test_epsilon_of_records(tmp_path, capsys):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"mechanism": "gaussian", "sigma": 85, "count": 8192}]))
    assert main(["epsilon", str(path), "--delta", "1e-5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] == pytest.approx(4.708, rel=0.005)
    assert report["adjacency"] == "add_remove"
    assert main(["epsilon", str(path), "--delta", "1e-5"]) == 0
    assert "epsilon_rdp" in capsys.readouterr().out
    assert main([]) == 0


def test_version_and_a_configuration_of_the_package(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"privknn {pl_privknn.__version__}\n"
    assert not Path("configs").exists()
    assert main(["epsilon", "--fast", "configs/digits_reverse_knn.yaml"]) == 0
    assert "epsilon" in capsys.readouterr().out
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits_reverse_knn.yaml").write_text("labeling: nonsense", encoding="utf-8")
    assert (
        main(["epsilon", "--fast", "configs/digits_reverse_knn.yaml"]) == 2
    )  # a file that is there goes first
    capsys.readouterr()
    assert main(["epsilon", "configs/no_such.yaml"]) == 2
    assert "no_such.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["logger", "disk", "report"])
def test_what_fails_after_a_training_takes_nothing_of_its_result(
    failing, tmp_path, monkeypatch, capsys, recwarn
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_logger.py").write_text(
        "from pytorch_lightning.loggers import CSVLogger\n"
        "class Failing(CSVLogger):\n"
        "    def finalize(self, status):\n"
        "        raise RuntimeError('the server is gone')\n"
    )
    words = ["--labeling.progress", "false", "--trainer.enable_progress_bar", "false", "--run_dir", "run"]

    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    if failing == "logger":
        words += ["--trainer.logger", "failing_logger.Failing", "--trainer.logger.save_dir", "logs"]
    elif failing == "disk":
        monkeypatch.setattr("pl_privknn.callbacks.run_summary.write_durably", broken)
    else:
        words += ["--attach_ledger", "true"]
        monkeypatch.setattr("pl_privknn.cli.train.write_report", broken)
    words += ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1"]
    assert main(["fit", "--config", "configs/digits_reverse_knn.yaml", *words]) == 0
    shown = capsys.readouterr().out
    assert "ε" in shown
    assert "test accuracy" in shown
    told = [str(each.message) for each in recwarn if "the training's result stands" in str(each.message)]
    assert ("server is gone" if failing == "logger" else "No space left") in told[0]


def test_a_module_without_a_test_step_trains_privately_and_states_epsilon(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "untested.py").write_text(
        "import pytorch_lightning as pl, torch\n"
        "class Line(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 10))\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n",
        encoding="utf-8",
    )
    training = {"epsilon": 2.0, "expected_batch_size": 50, "expected_records": 100}
    config = {
        "model": {"class_path": "untested.Line"},
        "data": {"class_path": "DigitsDataModule", "init_args": {"num_private": 100, "num_public": 20}},
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "PrivateTraining", "init_args": training}],
        },
        "run_dir": "run",
    }
    (tmp_path / "line.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert main(["fit", "--config", "line.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "ε" in shown
    assert "unconditional" in shown
    assert 1.9 < json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] <= 2.0
