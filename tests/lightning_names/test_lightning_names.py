"""``import lightning as L`` beside ``import pytorch_lightning as pl``: Trainers, modules and loggers of either."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from torch import nn

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.report.report_setup import CLASSES, SIDE, small_data

lightning = pytest.importorskip("lightning.pytorch")
PACKAGES = [pytorch_lightning, lightning]
ROOT = Path(__file__).resolve().parents[2]
FILES = ("callbacks/test_private_labeler.py", "training/test_private_training.py")


def python(folder, *words):
    """Run a program of its own in a folder, with what is importable here."""
    paths = os.pathsep.join(map(str, [folder, ROOT, *sys.path]))
    run = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_tests_passes_under_the_other_name(file, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace("pytorch_lightning", "lightning.pytorch"), encoding="utf-8")
    assert "passed" in python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}")


def test_a_training_needs_no_second_package(tmp_path):
    program = """
import sys
sys.modules["lightning"] = None
import pytorch_lightning as pl
from tests.training.training_setup import Lit, fit
callback, trainer = fit(Lit(), ".", epochs=1)
print(callback.epsilon > 0, isinstance(trainer, pl.Trainer))
"""
    assert python(tmp_path, "-c", program).splitlines()[-1] == "True True"


@pytest.mark.parametrize(("first", "second"), [PACKAGES, PACKAGES[::-1]])
def test_a_run_goes_on_under_the_other_name_with_a_logger_of_either(first, second, tmp_path):
    def fit(package, epochs, checkpoint=None):
        torch.manual_seed(0)
        student = SupervisedStudent(
            network=nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES)), num_classes=CLASSES
        )
        teacher, data = PrivateKNN(5, 0.8, None, Gaussian(4.0), SeededNoise(1)), small_data()
        labeling = PrivateLabeler(
            teacher,
            rounds=2,
            epochs_per_round=1,
            queries_per_round=8,
            features=nn.Flatten(),
            budget=Budget(delta=1e-4),
            run_dir=tmp_path,
            options={"progress": False},
        )
        report = RunReport(tmp_path, show=False)
        trainer = package.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            enable_progress_bar=False,
            log_every_n_steps=1,
            logger=[one.loggers.CSVLogger(tmp_path / one.__name__, "", "") for one in PACKAGES],
            callbacks=[labeling, report],
            default_root_dir=tmp_path,
        )
        trainer.fit(student, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return data.public.table.labels, labeling, report

    before, *_ = fit(first, 1)
    after, labeling, report = fit(second, 2, tmp_path / "last.ckpt")
    assert torch.equal(after[before >= 0], before[before >= 0])
    assert int((after >= 0).sum()) > int((before >= 0).sum()) > 0
    assert report.summary["versions"][second.__name__] == second.__version__
    assert report.summary["epsilon"] == labeling.epsilon > 0
    for package in PACKAGES:
        metrics = (tmp_path / package.__name__ / "metrics.csv").read_text(encoding="utf-8")
        assert f"{labeling.epsilon}"[:6] in metrics
