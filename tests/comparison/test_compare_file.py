"""The YAML of a comparison: what is refused, and what each run makes of it."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.optimize import brentq
from scipy.stats import norm

from pl_privknn.cli import main
from pl_privknn.comparison import read_comparison
from pl_privknn.comparison.run import choose, comparison_of
from pl_privknn.config import ConfigurationError, get, put, write_yaml
from pl_privknn.planning import plan_of
from pl_privknn.privacy import account
from tests.cli.parsed_config import understood
from tests.comparison.compare_setup import (
    LABELER,
    SIGMA,
    TRUE,
    document,
    folder,
    knn,
    own_folder,  # noqa: F401 - used by itself
    sgd,
    write,
)

ROOT = Path(__file__).resolve().parents[2]
REVERSE = {"set": {LABELER: {"class_path": "ReverseKNN"}, "labeling.queries_per_round": 20}}
BOUND = {math.inf: {SIGMA: 0.5}}


def methods(**changes):
    return {"knn": {**knn(), "at": BOUND}, "reverse": REVERSE, "sgd": sgd(), "supervised": TRUE, **changes}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("metods", [], ["unknown key 'metods'", "methods"]),
        ("methods.knn.labelling", {}, ["unknown key 'labelling'", "methods.knn"]),
        ("methods.a/b", {}, ["methods.a/b", "folder"]),
        ("methods", [1], ["methods: [1] must be a section"]),
        ("methods.knn.at", {"much": {}}, ["methods.knn.at", "ε='much'"]),
        ("methods.knn.set", [], ["methods.knn.set: [] must be a section"]),
        ("methods.knn.config", {"trainer": {}}, ["methods.knn.config has no 'data'"]),
        ("epsilons", [0], ["ε=0", "above 0"]),
        ("epsilons", [1, 1], ["epsilons=[1, 1]", "once"]),
        ("epsilons", [], ["epsilons=[]"]),
        ("seeds", [1.5], ["seeds=1.5"]),
        ("seeds", 3, ["seeds=3"]),
        ("budget", {"epsilon": 1}, ["budget", "unknown key 'epsilon'"]),
        ("budget", {"delta": 1}, ["delta=1"]),
        ("budget", {"adjacency": "both"}, ["adjacency='both'"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(path, value, words, capsys):
    whole = document(methods())
    put(whole, path, value)
    Path("c.yaml").write_text(yaml.safe_dump(whole))
    assert main(["compare", "c.yaml", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ["c.yaml", *words]), line


def test_all_methods_have_the_same_data_budget_and_seeds():
    comparison = comparison_of(document(methods(), seeds=[0, 1], epsilons=[0.5, 2]), "small")
    cells = comparison.cells()
    # knn at two ε and without noise; reverse and sgd at two; true labels without ε; two seeds of each.
    assert len(cells) == 2 * (3 + 2 + 2 + 1)
    for cell in cells:
        made = cell.document
        assert made["seed_everything"] == cell.seed
        assert get(made, "data.init_args.batch_size") == 32
        assert made["trainer"]["max_epochs"] == (2 if cell.method == "sgd" else 1)
        where = "model.init_args.budget" if cell.method == "sgd" else "labeling.budget"
        target = {} if cell.epsilon == math.inf else {"epsilon": cell.epsilon}
        wanted = {"delta": 1e-4, "adjacency": "add_remove", "unit": "record", **target}
        assert get(made, where) == (None if cell.method == "supervised" else wanted)
        assert get(made, "labeling.options.seed") == (
            cell.seed if cell.method in ("knn", "reverse") else None
        )
        assert ("labeling" in made) == (cell.method in ("knn", "reverse"))
    assert get(next(cell for cell in cells if cell.epsilon == math.inf).document, SIGMA) == 0.5
    other = {"set": {**REVERSE["set"], "data.init_args.batch_size": 16}}
    with pytest.raises(ConfigurationError, match=r"methods\.other .*batch_size: 32 then, 16 now"):
        comparison_of(document(methods(other=other)), "small").cells()


def test_configurations_in_files_overrides_and_choices(tmp_path):
    config = document({})["config"]
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump(config))
    own = {**config, "trainer": {"max_epochs": 7}, "labeling": {"labeler": {"class_path": "ReverseKNN"}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    named = {"mine": {"config": "own.yaml", "at": {1: {"labeling.queries_per_round": 5}}}, "knn": knn()}
    path = tmp_path / "c.yaml"
    whole = document(named, config="shared.yaml", seeds=[0, 4])
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    comparison = read_comparison(path, {"labeling.queries_per_round": 9})
    assert comparison.name == "c"
    mine, other = choose(comparison, seed=[4], epsilon=[1.0])
    assert (mine.document["trainer"]["max_epochs"], other.document["trainer"]["max_epochs"]) == (7, 1)
    # The command line has the last word.
    assert [get(cell.document, "labeling.queries_per_round") for cell in (mine, other)] == [9, 9]
    for wrong in ({"method": ["x"]}, {"seed": [7]}, {"epsilon": [3.0]}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            choose(comparison, **wrong)
    path.write_text(yaml.safe_dump(document({"mine": {"config": "none.yaml"}})))
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        read_comparison(path)


def sigma_of_gaussian(epsilon, delta, length):
    """Balle and Wang (2018), Theorem 8: the exact σ of one Gaussian release of sensitivity ``length``."""

    def excess(sigma):
        a, b = length / (2 * sigma), epsilon * sigma / length
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(excess, 1e-2, 1e4)


def test_noise_of_any_labeler_is_found_from_its_own_plan_unless_the_method_states_it(tmp_path):
    (tmp_path / "foreign_teacher.py").write_text(
        "from pl_privknn import Gaussian, Labeler\n"
        "from pl_privknn.privacy.mechanisms import Charge\n"
        "class Foreign(Labeler):\n"
        "    free_parameters = ('noise',)\n"
        "    def __init__(self, noise: float):\n"
        "        super().__init__()\n"
        "        self.noise = noise\n"
        "    def answer(self, queries, run, max_answers): ...\n"
        "    def plan(self, num_queries, max_answers, num_classes, rounds=1):\n"
        "        return [Charge(Gaussian(self.noise, 3.0), max_answers * rounds)]\n"
    )
    sizes = {"labeling.rounds": 2, "labeling.queries_per_round": 10, "labeling.max_answers": 8}
    noise = f"{LABELER}.init_args.noise"
    foreign = {"set": {LABELER: {"class_path": "foreign_teacher.Foreign"}, **sizes}, "at": {2: {noise: 77.0}}}
    calibrated, stated = comparison_of(document({"foreign": foreign}, epsilons=[0.5, 2]), "small").cells()
    # 8 answers a round for 2 rounds by that plan, of sensitivity 3 each: one release of length 3·√16.
    wanted = sigma_of_gaussian(0.5, 1e-4, 12.0)
    assert wanted * (1 - 1e-4) <= calibrated.calibrated()[noise] <= wanted * 1.004
    assert stated.calibrated() == {}
    sys.modules.pop("foreign_teacher")
    # Under so little noise a single query is too dear for the class's own setting, or there is none.
    unknown = {"set": {LABELER: {"class_path": "NoTeacher"}}}
    with pytest.raises(ConfigurationError, match=r"methods\.unknown at ε=1: .*NoTeacher"):
        comparison_of(document({"unknown": unknown}), "small").cells()[0].calibrated()


def test_another_configuration_in_a_folder_is_refused_and_named(capsys):
    assert main(["compare", write({"true": TRUE}), "--workers", "0"]) == 0
    capsys.readouterr()

    def times():
        files = [path for path in Path("runs").rglob("*") if path.is_file() and path.name != "run.lock"]
        return sorted(path.stat().st_mtime_ns for path in files)

    before = times()
    words = ["--set", "model.init_args.network=mnist_cnn"]
    assert main(["compare", write({"true": TRUE}), "--workers", "0", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "model.init_args.network: 'small_cnn' then, 'mnist_cnn' now" in error
    assert "--output" in error
    assert times() == before
    for words in (["--set", "seeds"], ["--only", "nobody"]):
        assert main(["compare", write({"true": TRUE}), *words]) == 2
        assert words[-1] in capsys.readouterr().err


def test_a_run_whose_stated_noise_exceeds_its_epsilon_fails_before_it_spends(capsys):
    config = write({"knn": {**knn(), "at": {1: {SIGMA: 0.5}}}}, epsilons=[1])
    assert main(["compare", config, "--workers", "0"]) == 1
    printed = capsys.readouterr().out
    assert "failed: knn ε=1 seed 0: privknn fit: " in printed
    assert "budget" in printed
    assert not (folder("knn", 1) / "run.sqlite").exists()


@pytest.mark.long(
    "compare_arrays", "compare_bbc_news", "compare_fashion_mnist", "compare_fashion_mnist_attributes"
)
@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/compare_*.yaml")), ids=lambda path: path.stem)
def test_shipped_comparison_is_understood_and_its_noise_meets_epsilon(path, capsys):
    images, labels = np.zeros((20, 16, 16), np.uint8), np.arange(20) % 10
    parts = {"private": "labels", "public": "truth", "test": "labels"}
    arrays = {f"{part}_images": images for part in parts}
    np.savez("arrays.npz", **arrays, **{f"{part}_{name}": labels for part, name in parts.items()})
    Path("data/bbc_news").mkdir(parents=True)
    for part in parts:
        rows = "".join(f"words of {topic},topic {topic}\n" for topic in range(5) for _ in range(4))
        Path(f"data/bbc_news/{part}.csv").write_text(f"text,label\n{rows}")
    comparison = read_comparison(path)
    cells = [cell for cell in choose(comparison, seed=[0]) if cell.epsilon in (1, math.inf)]
    assert {cell.method for cell in cells} == set(comparison.methods)
    for cell in cells:
        noise = cell.calibrated()
        for place, value in noise.items():
            put(cell.document, place, value)
        Path("cell.yaml").write_text(write_yaml(cell.document))
        understood("cell.yaml")
        if noise:
            charges = plan_of(cell.document, path, own_code=True).charges
            delta = comparison.budget["delta"]
            assert 0.9 < account(charges, delta=delta, exact=False).epsilon <= cell.epsilon
    assert main(["compare", str(path), "--dry-run", "--seeds", "0", "--epsilon", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(cell.epsilon == 1 for cell in cells)
    assert all(line.startswith("missing") for line in lines)
