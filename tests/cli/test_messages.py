"""Usual mistakes on the command line end in one line that says what to write instead."""

import copy
from pathlib import Path

import pytest
import torch
import yaml

from pl_privknn.cli import main
from pl_privknn.cli.common import user_error
from pl_privknn.config import did_you_mean, put
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import IndKNN, PrivateKNN
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.private_state import PrivateStoreError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "configs" / "digits_private_knn.yaml").read_text(encoding="utf-8"))
RUN = "fit --config run.yaml"
KNN = "labeling.labeler.init_args"
MISTAKES = {
    "a misspelt teacher": ({"labeling.labeler.class_path": "PrivateKNNN"}, "did you mean PrivateKNN?"),
    "misspelt noise of a teacher": ({f"{KNN}.noise.class_path": "Gausian"}, "did you mean Gaussian?"),
    "an argument that a teacher has not": ({f"{KNN}.kk": 90}, "did you mean k?"),
    "an argument beside `class_path`": ({"labeling.labeler.k": 90}, "go into init_args"),
    "a key of `labeling` that is none": ({"labeling.round": 2}, "did you mean labeling.rounds?"),
    "a section that is none": ({"labelling.rounds": 2}, "did you mean labeling.rounds?"),
    "a word for a number": (
        {"labeling.rounds": "two"},
        "labeling.rounds: Expected a <class 'int'>. Got value: two",
    ),
    "a threshold above k": ({f"{KNN}.screening.threshold": 300}, "threshold=300.0 can't be reached by k=90"),
    "an unknown network": ({"model.init_args.network": "small"}, "known are cifar_cnn"),
    "a module that is not there": ({"labeling.labeler": {"class_path": "no.Guess"}}, "put no.py into"),
    "an option that is none": (f"{RUN} --labeling.rouns 2", "did you mean labeling.rounds?"),
    "a file that is not there": ("fit --config nothing.yaml", "--config nothing.yaml: no such file"),
    "no file at all": ("fit", "give --config FILE"),
    "ε without a number of records": (
        "fit --data photos --epsilon 1",
        "--private-records N; give these three without --config",
    ),
    "a misspelt section": ("fit --config run.yaml --modle VATStudent", "did you mean model?"),
    "a misspelt command": ("fitt", "did you mean fit?"),
    "a comparison without a file": ("compare", "give the YAML of a comparison"),
    "a plan without a target": ("plan run.yaml", "--epsilon"),
}


@pytest.mark.parametrize("user_error", MISTAKES)
def test_one_line_says_what_to_do(user_error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (change, remedy), config = MISTAKES[user_error], copy.deepcopy(CONFIG)
    for path, value in change.items() if isinstance(change, dict) else ():
        put(config, path, value)
    Path("run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main((RUN if isinstance(change, dict) else change).split()) == 2
    printed = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set")]
    assert len(printed) == 1, printed
    assert remedy in printed[0]


def test_a_name_is_meant_whatever_its_case_and_nothing_is_guessed_of_others():
    names = ["PrivateKNN", "IndKNN", "PATE"]
    assert did_you_mean("privateknn", names) == "did you mean PrivateKNN?"
    assert did_you_mean("zzz", names) == "known are IndKNN, PATE, PrivateKNN"
    assert did_you_mean("lr", ["network", "optimization.lr"]) == "did you mean optimization.lr?"
    assert did_you_mean("x", []) == "leave it out"


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        function()
    return caught.value


def test_what_the_package_or_the_disk_refuses_is_a_mistake_and_other_code_is_not():
    for function, word in (
        (lambda: PrivateKNN(k=0), "k=0"),
        (
            lambda: IndKNN(0.5, Gaussian(0.5), budget=Budget(epsilon=1.0)).label(torch.ones(1, 2), None),
            "call fit",
        ),
        (lambda: Ledger("unused", Budget(delta=2.0)), "delta=2.0"),
        (lambda: ArraysDataModule("x.npy", [0], "y.npy", num_classes=2), "x.npy"),
    ):
        assert word in user_error(raised(function))
    assert user_error(PrivateStoreError("the budgets\nare older")) == "the budgets are older"
    assert user_error(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    for foreign in (lambda: torch.ones(2) @ torch.ones(3), lambda: int("seven")):
        assert user_error(raised(foreign)) is None
    assert user_error(raised(lambda: int("seven")), anywhere=True).startswith("ValueError: ")
