"""Files of plain data, and the objects that jsonargparse makes of it: what is read, and what is refused."""

import copy
import dataclasses
import json
import math
import sys

import pytest
from jsonargparse import ArgumentParser

from pl_privknn._parsing import Parser
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.cli import main
from pl_privknn.config import (
    ConfigurationError,
    argument_names,
    as_group,
    import_named,
    instantiate,
    known_class,
    one_line,
    read_document,
    read_yaml,
    write_yaml,
)
from pl_privknn.labelers import PrivateKNN


def test_numbers_and_words_as_people_write_them():
    text = "[1e-5, 2e1, 1.5, .5, -3, 1.e3, 1E+5, .inf, 2020-01-01, 1e, on time, '1e-5', null, true]"
    numbers = [1e-5, 20.0, 1.5, 0.5, -3, 1000.0, 1e5, math.inf]
    assert read_yaml(text) == [*numbers, "2020-01-01", "1e", "on time", "1e-5", None, True]


def test_json_and_yaml_say_the_same(tmp_path):
    document = {"releases": [{"mechanism": "gaussian", "sigma": 1e-05}], "delta": 1e-05, "name": "ε"}
    path, text = tmp_path / "file", json.dumps(document).encode()
    for content in (text, write_yaml(document).encode(), b"\xef\xbb\xbf" + text):
        path.write_bytes(content)
        assert read_document(path) == document


def test_what_is_written_needs_no_alias():
    shared = {"betas": [0.9, 0.99]}
    assert read_yaml(write_yaml({"a": shared, "b": shared})) == {"a": shared, "b": shared}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: &a [*a]", "Circular reference"),
        ("a: [*b]", "undefined alias"),
        ("a: {<<: 3}", "expected a mapping"),
        ("? [a]: b", "unhashable key"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!set {x, y}", "type set is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deep"),
        ("--- 1\n--- 2\n", "neither JSON|YAML"),
        ("a: [1", "neither JSON|YAML"),
        ("\x00\x01", "neither JSON|YAML"),
        ("[" + "9" * 5000 + "]", "file: "),
        ("a: " + "9" * 5000, "not readable as YAML"),
        ("words", "neither JSON .* nor a YAML list or mapping"),
        ("", "neither JSON .* nor a YAML list or mapping"),
        (b"\xff\xfe\x00", "file: "),
        (b"- a\n" * (1 << 17), "KiB; make the file smaller"),
        (b" " * ((1 << 24) + 1), "more than 16 MiB"),
    ],
)
def test_what_is_refused(tmp_path, text, match):
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=match) as refused:
        read_document(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_aliases_are_written_out_in_places_of_their_own(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "definitions:\n  soft: &soft {sigma: [1, 2]}\n  k: &k 5\n"
        "a: *soft\nb: [*k, {c: *soft}]\nd: {<<: *soft, k: *k}\ne: {<<: [{k: 1}, {k: 2, m: 3}], m: 4}\n"
    )
    document = read_document(path)
    soft = {"sigma": [1, 2]}
    assert document == {"a": soft, "b": [5, {"c": soft}], "d": {**soft, "k": 5}, "e": {"k": 1, "m": 4}}
    document["a"]["sigma"].append(3)
    assert document["b"][1]["c"] == soft


@dataclasses.dataclass(frozen=True)
class Schedule:
    lr: float = 0.1
    steps: int = 5


class Trains:
    def __init__(self, name, schedule: Schedule = Schedule(), **kwargs):
        self.schedule = as_group("schedule", schedule, Schedule())


class TrainsNoisily(Trains):
    def __init__(self, sigma: float = 1.0, **kwargs):
        super().__init__("x", **kwargs)


def test_a_group_is_its_dataclass_or_a_mapping_that_changes_defaults():
    assert Trains("x", {"lr": 0.5}).schedule == Trains("x", Schedule(0.5)).schedule == Schedule(0.5, 5)
    assert Trains("x", None).schedule == Schedule()
    made = instantiate({"it": {"schedule": {"steps": 7}, "name": "x"}}, {"it": Trains}).it
    assert made.schedule == Schedule(steps=7)
    with pytest.raises(ValueError, match=r"schedule\.step: there is no such argument; did you mean steps\?"):
        Trains("x", {"step": 5})
    with pytest.raises(ValueError, match="schedule='adam' must be a group"):
        Trains("x", "adam")
    with pytest.raises(
        ConfigurationError,
        match=r"'schedule\.step'; did you mean it\.schedule\.steps\?",
    ):
        instantiate({"it": {"schedule": {"step": 7}, "name": "x"}}, {"it": Trains})


def test_names_of_arguments_are_those_of_bases_and_groups():
    own = ["schedule", "schedule.lr", "schedule.steps"]
    assert argument_names(Trains) == ["name", *own]
    assert argument_names(TrainsNoisily) == ["sigma", *own]  # which gives the name itself
    assert {"k", "sampling_rate", "screening", "noise"} <= set(argument_names(PrivateKNN))
    assert "noise.sigma" not in argument_names(PrivateKNN)


DATA = {"class_path": "DigitsDataModule"}
KNN = {"class_path": "PrivateKNN", "init_args": {"k": 30, "sampling_rate": 0.5}}
PATE = {"num_teachers": 30, "teachers": {"class_path": "LinearTeachers"}}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a file behind when it is imported, and its name."""
    (tmp_path / "trap_module.py").write_text(
        "import pathlib\n(pathlib.Path(__file__).parent / 'sprung').touch()\nclass Trap:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trap_module", None)


def knn(**arguments):
    return {**KNN, "init_args": {**KNN["init_args"], **arguments}}


TRAP = {"class_path": "trap_module.Trap", "init_args": {"path": "x"}}
CALL = {"class_path": "subprocess.run", "init_args": {"args": ["true"]}}
HIDDEN = [
    {"labeler": TRAP}, {"labeler": "trap_module.Trap"}, {"labeler": json.dumps(TRAP)},
    {"labeler": knn(noise=TRAP)}, {"labeler": knn(noise="trap_module.Trap")},
    {"labeler": knn(noise=json.dumps({"noise": [TRAP]}))}, {"labeler": knn(noise_source=TRAP)},
    {"labeler": {"class_path": "IndKNN", "init_args": {"epsilon": 1.0, "ids": TRAP}}},
    {"labeler": {"class_path": "PATE", "init_args": {**PATE, "partitioner": TRAP}}},
    {"labeler": KNN, "selection": TRAP}, {"labeler": KNN, "selection": "trap_module.Trap"},
    {"labeler": {**KNN, "dict_kwargs": {"noise": TRAP}}},
    {"labeler": {"init_args": {}, "labeler.class_path": "trap_module.Trap"}}, {"labeler": CALL},
    {"labeler": knn(noise=CALL)}, {"labeler": knn(noise="- trap_module.Trap")}, {"labeler": "'trap_module.Trap'"},
]  # fmt: skip


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
    labeler = {"class_path": "PATE", "init_args": PATE}
    path = tmp_path / "run.yaml"
    missing = {"class_path": "CheckpointFeatures", "init_args": {"path": "nowhere.ckpt"}}
    for features in (missing, TRAP, [["student", [TRAP]]]):
        path.write_text(json.dumps({"labeling": {"labeler": labeler, "features": features}, "data": DATA}))
        assert main(["epsilon", str(path), "--fast", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["epsilon"] > 0
        assert not trap.exists()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "pl_privknn.labelers.teachers.math.prod",
            "pl_privknn.privacy.ledger.Ledger",
            "pl_privknn.labelers",
        ),
        *(
            "pl_privknn.cli.main",
            "pl_privknn.labelers.teachers.torch",
            "pl_privknn.labelers.nothing.Here",
        ),
        *("jsonargparse.set_parsing_settings", "..os.system", "Nothing", "", 3, None, ["PrivateKNN"]),
    ],
)
def test_other_paths_within_the_project_are_refused(path):
    section = {"labeling": {"labeler": {"class_path": path}}}
    with pytest.raises(ConfigurationError, match="labeling"):
        instantiate(section, {"labeling": PrivateLabeler}, own_code=False)


@pytest.mark.parametrize(
    "path",
    ["PrivateKNN", *(f"pl_privknn.{room}PrivateKNN" for room in ("", "labelers.", "labelers.voting."))],
)
def test_own_classes_by_name_and_by_path(path):
    section = {"labeler": {**KNN, "class_path": path}}
    before = copy.deepcopy(section)
    made = instantiate({"labeling": section}, {"labeling": PrivateLabeler}, own_code=False).labeling
    assert type(made.labeler) is PrivateKNN
    assert known_class(path) is PrivateKNN
    assert section == before


def test_a_class_of_ones_own_is_refused_only_where_that_was_asked_for(trap):
    section = {"labeling": {"labeler": TRAP}}
    line = r"labeling\.labeler\.class_path: importing 'trap_module\.Trap' is not allowed"
    with pytest.raises(ConfigurationError, match=line):
        instantiate(section, {"labeling": PrivateLabeler}, own_code=False)
    assert "trap_module" not in sys.modules
    assert not trap.exists()
    with pytest.raises(ConfigurationError, match="Trap"):  # no labeler, but imported
        instantiate(section, {"labeling": PrivateLabeler})
    assert trap.exists()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"rounds": "two"}, "labeling.rounds: Expected a <class 'int'>. Got value: two"),
        (
            {"labeler": knn(noise={"class_path": "Gaussian", "init_args": {"sigmaa": 1}})},
            "labeling.labeler.init_args.noise: Option 'sigmaa' is not accepted; did you mean sigma?",
        ),
        ({"labeler": knn(k=0)}, "k=0 must be a whole number of at least 1"),
    ],
)
def test_errors_of_the_parser_and_of_constructors_become_one_line(changed, line):
    with pytest.raises(ConfigurationError) as refused:
        instantiate({"labeling": changed}, {"labeling": PrivateLabeler})
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_an_error_without_a_text_is_named_by_its_class():
    assert one_line(ValueError("sigma=-1 must be\n  above 0")) == "sigma=-1 must be above 0"
    assert one_line(ValueError()) == "ValueError"


def _nested(levels):
    section = {"class_path": "Pixels", "init_args": {"transform_sqrt": True}}
    for level in range(levels):
        joined = {
            "class_path": "JoinedFeatures",
            "init_args": {"extractors": [section, {"class_path": "HOG"}]},
        }
        around = joined if level == 1 else section
        section = {"class_path": "PublicPCA", "init_args": {"extractor": around, "components": 10 + level}}
    return {"labeling": {"features": [section], "labeler": _PARTLY_STATED, "rounds": 1}}


_PARTLY_STATED = {  # the teacher's own default of this group is not that of the group's class
    "class_path": "NoisySGDTeacher",
    "init_args": {"sampling_rate": 0.5, "expected_batch_size": 50, "steps": 3, "optimization": {"lr": 2.0}},
}


def _parser(kind):
    import_named(_PARTLY_STATED)
    import_named("JoinedFeatures CachedFeatures")
    parser = kind(exit_on_error=False)
    parser.add_class_arguments(PrivateLabeler, "labeling", fail_untyped=False)
    return parser


def test_nested_classes_parse_as_those_of_jsonargparse():
    ours, theirs = _parser(Parser), _parser(ArgumentParser)
    for levels in (0, 3, 3, 4):  # the second time from what is remembered
        assert repr(ours.parse_object(_nested(levels))) == repr(theirs.parse_object(_nested(levels)))


def test_nested_classes_are_parsed_a_few_times_each():
    calls = []

    class Counted(Parser):
        def parse_object(self, *args, **kwargs):
            calls.append(self)
            return super().parse_object(*args, **kwargs)

    def count(levels):
        calls.clear()
        _parser(Counted).parse_object(_nested(levels))
        return len(calls)

    assert count(8) < 6 * count(4)  # more than doubled by each level where defaults are added anew
