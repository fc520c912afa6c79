"""Packages that each command imports, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.export import export_run
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace
from tests.cli.test_predict import finished
from tests.setup.passed_files import fit_photographs, photographs
from tests.setup.small_fit import fit_student

ROOT = Path(__file__).resolve().parents[2]
LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics"}
PROGRAM = """
import contextlib, io, json, sys
from pl_privknn.cli import main
found = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = ["privknn", *words]
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main()
        except SystemExit as error:
            status = error.code
    found[name] = [status, *sorted((set(sys.modules) - before) & KNOWN)]
print(json.dumps(found))
"""
PLANNED = """
labeling: {labeler: {class_path: PrivateKNN, init_args: {k: 9, noise: {class_path: Gaussian, init_args: {sigma: 9}}}},
           features: [HOG], queries_per_round: 20}
model: VATStudent
data: DigitsDataModule
"""
TRAINED = "model: {class_path: NoisySGD, init_args: {private_records: 900, expected_batch_size: 90}}\n"
COMMANDS = (
    "audit", "check", "compare", "demo", "epsilon", "export", "fit", "init", "plan", "predict", "report", "test",
    "validate",
)  # fmt: skip


def imported(folder, commands):
    """Exit status of each command, and what it was the first to import: of Lightning, its parts and torch."""
    program = f"KNOWN = {LIGHTNING | {'torch'}}" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on arrays, its exported model, a plan of each kind, a list of releases, and photographs."""
    folder = tmp_path_factory.mktemp("imports")
    fit_student(folder, ReverseKNN(noise=Laplace(scale=5.0)), 0.1)
    (folder / "planned.yaml").write_text(PLANNED)
    (folder / "trained.yaml").write_text(TRAINED)
    (folder / "list.json").write_text(json.dumps([Charge(Gaussian(sigma=9.0), 3).to_record()]))
    photographs(folder / "photographs")
    finished(folder / "pictured", in_channels=1)
    np.save(folder / "images.npy", np.zeros((2, 1, 8, 8), np.float32))
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    data = ArraysDataModule(
        torch.rand(9, 1, 8, 8), torch.arange(9) % 3, torch.rand(9, 1, 8, 8), num_classes=3
    )
    torch.save({"state_dict": module.state_dict()}, folder / "run" / "last.ckpt")
    export_run(folder / "run", folder / "export", module=module, data=data)
    return folder


ENDS_WITHOUT_TORCH = {
    "help": ["--help"],
    **{f"help of {name}": [name, "--help"] for name in COMMANDS},
    "version": ["--version"],
    "epsilon of a ledger": ["epsilon", "run/run.sqlite", "--fast"],
    "epsilon of a list": ["epsilon", "list.json", "--delta", "1e-5", "--tradeoff", "--fast"],
    "audit of a run": ["audit", "run"],
    "audit of a ledger": ["audit", "run/run.sqlite"],
    "report of a ledger": ["report", "run/run.sqlite", "--fast"],
}
ENDS_WITHOUT_LIGHTNING = {
    "epsilon of a configuration": ["epsilon", "planned.yaml", "--fast"],
    "plan of a teacher": ["plan", "planned.yaml", "--epsilon", "1", "--fast"],
    "report of a run": ["report", "run", "--fast"],
    "check of data": ["check", "--data", "photographs", "--epsilon", "1", "--private-records", "60"],
    "check of a class": ["check", "ReverseKNN"],
    "prediction of a file": ["predict", "export/model.pt2", "images.npy"],
    "prediction of a run": ["predict", "pictured", "images.npy"],
}
REFUSED = {
    "command": ["fti"],
    "option": ["plan", "planned.yaml", "--epsilom", "1"],
    "no configuration": ["fit"],
    "missing configuration": ["fit", "--config", "nowhere.yaml"],
    "missing run": ["fit", "--resume", "nowhere"],
    "missing data": ["fit", "--data", "nowhere", "--epsilon", "1", "--private-records", "100"],
    "half a recommendation": ["fit", "--epsilon", "1"],
    "epsilon": ["fit", "--data", "photographs", "--epsilon", "-1", "--private-records", "100"],
    "records": ["init", "--data", "photographs", "--epsilon", "1", "--private-records", "2"],
    "delta": ["check", "--data", "photographs", "--epsilon", "1", "--private-records", "60", "--delta", "2"],
    "nothing to check": ["check"],
    "unknown labeler": ["check", "PrivatKNN"],
    "missing run to report": ["report", "nowhere"],
    "missing ledger": ["epsilon", "nowhere.sqlite"],
    "missing audit": ["audit", "nowhere"],
    "no file to audit": ["audit"],
    "plot": ["epsilon", "list.json", "--plot", "x.svg"],
    "missing plan": ["plan", "nowhere.yaml", "--epsilon", "1"],
    "missing export": ["export", "nowhere"],
    "missing model": ["predict", "nowhere"],
    "output": ["predict", "run", "--output", "list.json"],
    "nothing to compare": ["compare"],
    "missing comparison": ["compare", "nowhere.yaml"],
    "epochs": ["demo", "--epochs", "0"],
}


def test_what_needs_no_tensor_imports_no_torch(folder):
    assert imported(folder, ENDS_WITHOUT_TORCH) == {name: [0] for name in ENDS_WITHOUT_TORCH}


def test_what_trains_nothing_imports_no_lightning(folder):
    first, *others = found = imported(folder, ENDS_WITHOUT_LIGHTNING)
    assert found.pop(first) == [0, "torch"]
    assert found == {name: [int(name == "check of a class")] for name in others}


def test_a_plan_of_a_private_training_imports_metrics_alone(folder):
    words = ["plan", "trained.yaml", "--epsilon", "1", "--fast", "--num-classes", "10"]
    assert imported(folder, {"plan": words}) == {"plan": [0, "torch", "torchmetrics"]}


def test_bad_arguments_are_refused_at_once(folder):
    assert imported(folder, REFUSED) == {name: [2] for name in REFUSED}


def test_a_fit_of_data_opens_each_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    passed = fit_photographs(tmp_path)
    assert passed.calls("pl_privknn/config.py", "read_yaml") <= 10
    opened = [count for path, count in passed.opened.items() if not path.startswith("public")]
    assert set(opened) == {1}
    assert max(passed.opened.values()) <= 2  # once more for the sizes of some public images
