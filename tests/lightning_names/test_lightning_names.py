"""``import lightning as L`` beside ``import pytorch_lightning as pl``: Trainers, modules and loggers of either."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.cli.main import main
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.report.report_setup import CLASSES, SIDE, small_data

lightning = pytest.importorskip("lightning.pytorch")
PACKAGES = [pytorch_lightning, lightning]
ROOT = Path(__file__).resolve().parents[2]

# After the package is there, and where the other name is not installed.
IMPORTS = {
    "lightning, last": "{1}\nimport lightning as {0}\n",
    "pytorch_lightning, alone": "import sys\nsys.modules['lightning'] = None\nimport pytorch_lightning as {}\n{}",
}


def _printed(code, folder):
    """The last line that a program of its own prints, read as JSON."""
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path]))},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def _trainer(package, folder, **kwargs):
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return package.Trainer(**(options | kwargs), default_root_dir=folder)


def _labeling(folder, **kwargs):
    teacher = PrivateKNN(5, 0.8, None, Gaussian(4.0), SeededNoise(1))
    kwargs |= {
        "features": nn.Flatten(),
        "budget": Budget(delta=1e-4),
        "run_dir": folder,
    }
    return PrivateLabeler(
        teacher, epochs_per_round=1, queries_per_round=8, options={"progress": False}, **kwargs
    )


def _student():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))
    return SupervisedStudent(network=network, num_classes=CLASSES)


def _foreign(package):
    """A module for our batches and for tuples that knows nothing of us, a data module, and a callback."""

    class Module(package.LightningModule):
        def __init__(self, pixels: int = SIDE * SIDE, classes: int = CLASSES):
            super().__init__()
            self.network = nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))

        def training_step(self, batch, batch_idx):
            x, y = batch["labeled"] if isinstance(batch, dict) else batch
            return F.cross_entropy(self.network(x), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/accuracy", (self.network(x).argmax(1) == y).float().mean())

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self.network(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(package.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.rand(8, 1, SIDE, SIDE), torch.arange(8) % CLASSES), 4)

        def val_dataloader(self):
            return self.train_dataloader()

    class Steps(package.Callback):
        def __init__(self):
            self.ends = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.ends.append(batch_idx)

    return Module(), Data(), Steps()


@pytest.mark.parametrize(("package", "logger"), [PACKAGES, PACKAGES[::-1]])
def test_a_labelled_run_and_its_summary(package, logger, tmp_path):
    steps = _foreign(package)[2]
    labeling, report = _labeling(tmp_path), RunReport(tmp_path, show=False)
    csv, tensorboard = (
        logger.loggers.CSVLogger(tmp_path, "", ""),
        logger.loggers.TensorBoardLogger(tmp_path, "tb", ""),
    )
    trainer = _trainer(package, tmp_path, logger=[csv, tensorboard], callbacks=[labeling, report, steps])
    student, data = _student(), small_data()
    trainer.fit(student, data)
    (result,) = trainer.test(student, data, verbose=False)
    assert steps.ends
    assert report.summary["test_accuracy"] == pytest.approx(result["test/accuracy"])
    assert report.summary["versions"][package.__name__] == package.__version__
    assert report.summary["epsilon"] == labeling.epsilon > 0
    assert f"{labeling.epsilon}"[:6] in (tmp_path / "metrics.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(("first", "second"), [PACKAGES, PACKAGES[::-1]])
def test_a_run_goes_on_under_the_other_name(first, second, tmp_path):
    def fit(package, epochs, checkpoint=None):
        labeling, student, data = _labeling(tmp_path, rounds=2), _student(), small_data()
        trainer = _trainer(package, tmp_path, max_epochs=epochs, callbacks=[labeling])
        trainer.fit(student, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return data.public.table.labels, student

    before, _ = fit(first, 1)
    after, student = fit(second, 2, tmp_path / "last.ckpt")
    assert torch.equal(after[before >= 0], before[before >= 0])
    assert int((after >= 0).sum()) > int((before >= 0).sum()) > 0
    assert student.trainer.current_epoch == 2


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_of_either_package_learns_from_our_data_module(package, tmp_path):
    module, own, steps = _foreign(package)
    report, data = RunReport(tmp_path, show=False), small_data()
    _trainer(package, tmp_path, callbacks=[report]).fit(module, datamodule=own)
    assert report.summary["guarantee"] == "none"
    assert 0 <= report.summary["val_accuracy"] <= 1
    data.train_on_truth = True
    trainer = _trainer(package, tmp_path, callbacks=[steps])
    trainer.fit(module, datamodule=data)
    assert steps.ends == [0, 1, 2]
    assert 0 <= trainer.validate(module, data, verbose=False)[0]["val/accuracy"] <= 1
    assert 0 <= trainer.test(module, data, verbose=False)[0]["val/accuracy"] <= 1
    assert torch.cat(trainer.predict(module, data)).shape == (30, CLASSES)


def test_a_compiled_student_learns(tmp_path):
    student, data = _student(), small_data()
    data.train_on_truth = True
    before = student.network[1].weight.detach().clone()
    _trainer(lightning, tmp_path).fit(torch.compile(student, backend="eager"), data)
    assert not torch.equal(student.network[1].weight, before)


def test_a_configuration_names_a_module_of_lightning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "Theirs", type(_foreign(lightning)[0]), raising=False)
    monkeypatch.chdir(tmp_path)
    config = {
        "data": {"class_path": "DigitsDataModule", "init_args": {"train_on_truth": True}},
        "model": {"class_path": f"{__name__}.Theirs", "init_args": {"pixels": 400, "classes": 10}},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["fit", "--config", "theirs.yaml", "--labeling.labeler", "null"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["student"], summary["guarantee"]) == ("Module", "none")
    assert "lightning.pytorch" in summary["versions"]


_TRAINED = (
    """import json
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training import PrivateTraining""",
    """


class Records(Dataset):
    def __init__(self):
        self.images = torch.rand(300, 1, 6, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": int(self.images[index].mean() > 0.5)}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.network(batch["image"]), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Records(), 32, shuffle=True)


noise = {"options": {"noise_source": SeededNoise(1)}, "noise_multiplier": 1.0}
training = PrivateTraining(expected_batch_size=30, private_records=300, **noise)
module = Module()
pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[training]).fit(module, datamodule=Data())
print(json.dumps([training.epsilon, module.network[1].weight.tolist()]))
""",
)


def test_private_training_of_a_foreign_module_on_its_own_data_is_the_same(tmp_path, monkeypatch, capsys):
    def program(name):
        imports, rest = _TRAINED
        return IMPORTS[name].format("pl", imports) + rest

    epsilon, weights = _printed(program("pytorch_lightning, alone"), tmp_path / "alone")
    monkeypatch.chdir(tmp_path)
    exec(program("lightning, last"), {"__name__": "theirs"})
    other, others = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert other == epsilon > 0
    assert others == [
        pytest.approx(row, abs=1e-6) for row in weights
    ]  # by vmap or by a loop, as the clock decides
