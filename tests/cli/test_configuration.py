"""A file whose cost is asked names the project's own classes alone, and nothing of it is run."""

import copy
import json
import sys

import pytest

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.cli.main import main
from pl_privknn.configuration import (
    ConfigurationError,
    instantiate,
    known_classes,
    one_line,
    project_classes_only,
)
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy.mechanisms import Gaussian

DATA = {"class_path": "DigitsDataModule"}
KNN = {"class_path": "PrivateKNN", "init_args": {"k": 30, "sampling_rate": 0.5}}
SKLEARN = {"num_teachers": 30, "teachers": {"class_path": "SklearnTeachers"}}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a file behind when it is imported, and its name."""
    (tmp_path / "trap_module.py").write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).parents[1] / 'sprung'.touch()\n"
        "class Trap:\n"
        "    def __init__(self, **arguments):\n"
        "        pathlib.Path(__file__).parents[1] / 'sprung'.touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trap_module", None)


def knn(**arguments):
    return {**KNN, "init_args": {**KNN["init_args"], **arguments}}


TRAP = {"class_path": "trap_module.Trap", "init_args": {"path": "x"}}
CALL = {"class_path": "subprocess.run", "init_args": {"args": ["true"]}}
HIDDEN = [
    {"labeler": TRAP},
    {"labeler": "trap_module.Trap"},
    {"labeler": json.dumps(TRAP)},
    {"labeler": knn(noise=TRAP)},
    {"labeler": knn(noise="trap_module.Trap")},
    {"labeler": knn(noise=json.dumps({"noise": [TRAP]}))},
    {"labeler": knn(noise_source=TRAP)},
    {"labeler": {"class_path": "IndKNN", "init_args": {"epsilon": 1.0, "ids": TRAP}}},
    {"labeler": {"class_path": "PATE", "init_args": {"groups": {"a": [TRAP]}}}},
    {"labeler": {"class_path": "PATE", "init_args": {**SKLEARN, "partitioner": TRAP}}},
    {"labeler": KNN, "selection": TRAP},
    {"labeler": KNN, "selection": "trap_module.Trap"},
    {"labeler": KNN, "features": TRAP},
    {"labeler": KNN, "features": [["student", [TRAP]]]},
    {"labeler": {**KNN, "dict_kwargs": {"noise": TRAP}}},
    {"labeler": {"init_args": {}, "labeler.class_path": "trap_module.Trap"}},
    {"labeler": CALL},
    {"labeler": knn(noise=CALL)},
]


@pytest.mark.parametrize("labeling", HIDDEN)
@pytest.mark.parametrize("num_classes", [[], ["--num-classes", "10"]])
def test_nothing_outside_the_project_is_imported(labeling, num_classes, trap, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"labeling": {"queries_per_round": 10, **labeling}, "data": DATA}))
    assert main(["epsilon", str(path), "--fast", *num_classes]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert str(path) in printed
    assert not trap.exists()
    assert "trap_module" not in sys.modules


@pytest.mark.parametrize("data", [TRAP, "trap_module.Trap", {"class_path": "trap_module.Trap"}, "HOG", 3, []])
def test_data_modules_are_the_projects_own(data, trap, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"labeling": {"labeler": KNN}, "data": data}))
    assert main(["epsilon", str(path), "--fast"]) == 2
    assert capsys.readouterr().err.startswith(f"privknn epsilon: {path}: data")
    assert not trap.exists()


def test_what_has_no_part_in_a_plan_is_not_made(trap, tmp_path, capsys):
    # The estimator's name is text until a fit begins; extractors and teachers don't move the cost.
    teachers = {"class_path": "SklearnTeachers", "init_args": {"estimator": "trap_module.Trap"}}
    labeler = {"class_path": "PATE", "init_args": {"num_teachers": 30, "teachers": teachers}}
    missing = {"class_path": "CheckpointFeatures", "init_args": {"path": "nowhere.ckpt"}}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"labeling": {"labeler": labeler, "features": missing}, "data": DATA}))
    assert main(["epsilon", str(path), "--fast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] > 0
    assert not trap.exists()


def test_own_classes_by_name_and_by_path():
    for name in ("PrivateKNN", "pl_privknn.PrivateKNN", "pl_privknn.labelers.PrivateKNN"):
        found = project_classes_only({"class_path": name}, "labeler")
        assert found == {"class_path": "pl_privknn.labelers.private_knn.PrivateKNN"}
    assert known_classes()["Gaussian"] is Gaussian
    assert known_classes()["pl_privknn.labelers.private_knn.PrivateKNN"] is PrivateKNN
    unexported = {"class_path": "pl_privknn.labelers.pate_training.Partitioner"}
    assert project_classes_only(unexported, "x") == unexported


@pytest.mark.parametrize(
    "path",
    [
        "pl_privknn.labelers.pate_training.importlib.import_module",
        "pl_privknn.privacy.ledger.Ledger",
        "pl_privknn.cli.main.main",
        "pl_privknn.labelers.pate_training.np",
        "pl_privknn.labelers.nothing.Here",
        "pl_privknn.labelers",
        "..os.system",
        "Nothing",
        "",
        3,
        None,
        ["PrivateKNN"],
    ],
)
def test_other_paths_within_the_project_are_refused(path):
    with pytest.raises(ConfigurationError, match=r"labeler\.class_path=.* is not a class of this project"):
        project_classes_only({"class_path": path}, "labeler")


def test_paths_and_words_stay_what_they_are(tmp_path):
    plain = {"ledger_path": "no_such_module.sqlite", "root": "./os.data", "word": "student", "text": "a: b"}
    assert project_classes_only(plain, "labeling") == plain
    with pytest.raises(ConfigurationError, match=r"write \./json\.data"):
        project_classes_only({"root": "json.data"}, "data")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Parser key \"a.b\":\n  Expected a <class 'int'>. Got value: x", "a.b=x: want int"),
        (
            'Parser key "a":\n  Does not validate against any of the Union subtypes\n  Subtypes: [int, None]\n'
            "  Errors:\n    - Expected a <class 'int'>\n    - Expected a <class 'NoneType'>\n"
            "  Given value type: <class 'str'>\n  Given value: x",
            "a=x: want int",
        ),
        ("sigma=-1 must be\n  above 0", "sigma=-1 must be above 0"),
        ("", "ValueError"),
    ],
)
def test_messages_of_the_parser_become_one_line(text, line):
    assert one_line(ValueError(text)) == line


def test_sections_stay_as_they_were():
    features = {"class_path": "RememberedFeatures", "init_args": {"extractor": "HOG"}}
    teacher = {"class_path": "ReverseKNN", "init_args": {"epsilon": 1.0}}
    section = {"labeler": teacher, "features": [features]}
    before = copy.deepcopy(section)
    instantiate({"labeling": section}, {"labeling": PrivateLabeler})
    assert section == before
