"""Partition selection: its cost by brute force on neighbouring counts, persons, thresholds, and a run by command."""

import csv
import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm

from pl_privknn.cli import main
from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger, delta_for_epsilon, epsilon_for_delta
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.privacy.partitions import NAMES, PaidNames, UnnamedRecords, class_counts, release_names
from pl_privknn.privacy.public_rows import PART, PublicRowsLost
from pl_privknn.privacy.verify import mapping_of


def shown(counts, sigma, threshold):
    """Probabilities of what classes show: nothing in the first place, else a cell of their noisy count."""
    edges, total = np.append(np.linspace(threshold, threshold + 60, 300), np.inf), np.ones(1)
    for count in counts:
        masses = np.diff(norm.cdf((edges - count) / sigma))
        # No noise is drawn for a class that does not occur.
        one = np.append(1 - masses.sum(), masses) if count else np.eye(len(edges))[0]
        total = np.outer(total, one).ravel()
    return total


def neighbours(threshold, adjacency, unit):
    """Weights of two classes in pairs of neighbouring tables."""
    for base in itertools.product([0, 2, threshold + 20], repeat=2):
        if adjacency == "replace_one":
            yield np.add(base, (1, 0)), np.add(base, (0, 1))
            continue
        for moved in [(1, 0), (0.5**0.5, 0.5**0.5)][: 1 if unit == "record" else 2]:
            yield np.add(base, moved), np.array(base)
            yield np.array(base), np.add(base, moved)


@pytest.mark.parametrize(
    ("adjacency", "unit"), [("add_remove", "record"), ("replace_one", "record"), ("add_remove", "person")]
)
def test_no_neighbours_differ_by_more_than_the_stated_cost(adjacency, unit):
    names, budget = PaidNames(classes=True, share=0.9, exposure=0.4), Budget(8.0, 1e-2, adjacency, unit)
    sigma, threshold = names.mechanisms(budget)["classes"].sigma, names.threshold(budget)
    found = dict[float, float]()
    for epsilon in (0.0, 1.0, 8.0):
        stated = delta_for_epsilon(names.plan(budget), epsilon, adjacency)
        for one, other in neighbours(threshold, adjacency, unit):
            p, q = shown(one, sigma, threshold), shown(other, sigma, threshold)
            share = np.maximum(p - math.exp(epsilon) * q, 0).sum() / stated
            found[epsilon] = max(found.get(epsilon, 0.0), share)
    assert max(found.values()) <= 1 + 1e-6
    assert found[0.0] > 0.95  # of classes with many records
    assert found[8.0] > 0.5  # of a class with one


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize(("kind", "columns"), [("classes", 1), ("values", 3)])
def test_a_class_of_one_is_released_with_the_stated_probability_at_most(unit, kind, columns):
    for epsilon, share in itertools.product((0.1, 1.0, 5.0), (0.1, 0.5)):
        names = PaidNames(classes=True, categories=("a", "b", "c"), share=share)
        budget = Budget(epsilon, 1e-5, unit=unit)
        sigma, threshold = names.mechanisms(budget)[kind].sigma, names.threshold(budget, kind)
        exposed = [
            columns * m * norm.sf((threshold - m**-0.5) / sigma)
            for m in range(1, 2 if unit == "record" else 5)
        ]
        assert 0.99e-6 < max(exposed) <= 1e-6


def test_a_person_counts_with_length_1_whatever_their_records_are():
    generator = np.random.default_rng(0)
    longest = 0.0
    for _ in range(200):
        count = int(generator.integers(1, 30))
        classes = generator.choice([*"abcdef", ""], count).tolist()
        owners = torch.from_numpy(generator.integers(0, 3, count))
        moved = dict(zip(*(list(of) for of in class_counts(classes, owners)), strict=True))
        kept = [name for name, owner in zip(classes, owners, strict=True) if owner]
        for name, one in zip(*class_counts(kept, owners[owners > 0]), strict=True):
            moved[name] = moved[name] - one
        weights = np.array([float(weight) for weight in moved.values()]) / PART
        assert sum(weights > 0) <= 4
        assert weights.min() >= 0
        longest = max(longest, np.linalg.norm(weights))
    assert 0.999 < longest <= 1


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("classes", "columns", "categories"),
    [(True, (), ()), (False, ("a", "b"), ("a", "b")), (True, ("a",), ("a", "b", "c")), (False, (), ("a",))],
)
def test_names_and_what_they_leave_cost_the_budget(adjacency, classes, columns, categories):
    names = PaidNames(classes=classes, columns=columns, categories=categories)
    budget = Budget(1.0, 1e-5, adjacency)
    mu = 1 / _sigma(names.left(budget))
    total = [*names.plan(budget), Charge(Gaussian(1 / mu))]
    assert 0.99 < epsilon_for_delta(total, 1e-5, adjacency) <= 1.0


def _sigma(budget):
    from pl_privknn.privacy.mechanisms.steps import noise_for_steps

    return noise_for_steps(budget.epsilon, budget.delta, 1.0, 1)


def test_names_are_released_once_and_lost_ones_are_refused(tmp_path, monkeypatch):
    names, budget = PaidNames(classes=True, columns=("x",), categories=("x",)), Budget(2.0, 1e-5)
    classes = ["often"] * 900 + ["also"] * 600 + ["Mallory"] + [""]
    cells = torch.tensor([0] * 1000 + [1] * 502)
    records = UnnamedRecords(classes, [(cells, 3)], [["north"] * 900 + ["Mallory"] * 2 + [""] * 600])
    run = Ledger(tmp_path / "ledger.sqlite", budget).run("run", names.plan(budget))
    found = release_names(names, tmp_path, run, budget, SystemNoise(), lambda: records)
    assert found["classes"].keys() == {"often", "also"}
    assert found["kinds"]["x"] == pytest.approx([1000, 502, 0], abs=200)
    assert release_names(names, tmp_path, run, budget, SystemNoise(), lambda: None) == found
    assert found["values"] == {"x": {"north": pytest.approx(900, abs=200)}}
    assert run.num_charges == len(names.plan(budget)) == 5
    (tmp_path / NAMES).unlink()
    with pytest.raises(PublicRowsLost, match="paid for its names"):
        release_names(names, tmp_path, run, budget, SystemNoise(), lambda: records)


def table(path, extra=()):
    generator = np.random.default_rng(0)
    age, region = generator.normal(45, 12, 900), generator.choice(["north", "south"], 900)
    notes = generator.choice(["late again", "all is well"], 900)
    labels = np.where(age > 45, "high", "low")
    rows = list(map(list, zip(np.round(age, 1), region, notes, labels, strict=True)))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "region", "note", "label"], *rows, *extra])
    return ["--data", str(path)]


def folder(path, extra=()):
    for name in ("dark", "light"):
        (path / name).mkdir(parents=True)
        for number in range(150):
            pixels = np.full((16, 16), number // 2 + 120 * (name == "light"), "uint8")
            pixels[0, 0] = number
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    for name in extra:
        (path / name).mkdir()
        Image.new("L", (16, 16)).save(path / name / "only.png")
    return ["--data", str(path)]


@pytest.mark.parametrize(
    ("made", "extra", "options"),
    [
        (table, [["1e300", "Mallory", "", "Trent"]], []),
        (table, [["", "Mallory", "an odd note", "Trent"]], ["--text", "note"]),
        (folder, ["Trent"], []),
    ],
)
def test_data_with_nothing_stated_end_unconditional_and_show_no_rare_class(
    made, extra, options, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = [*made(tmp_path / ("data.csv" if made is table else "data"), extra), *options]
    words += ["--epsilon", "8", "--private-records", "500", "--trainer.accelerator", "cpu"]
    assert main(["fit", *words]) == 0
    run = tmp_path / "runs" / "data" / "0"
    summary = mapping_of(run / "summary.json")
    assert summary["guarantee"] == "unconditional"
    assert 7.9 < summary["epsilon"] <= 8.0
    assert main(["audit", str(run)]) == 0
    assert len(json.loads((run / NAMES).read_text())["classes"]) == 2
    output = "".join(capfd.readouterr())
    for file in run.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".yaml", ".csv"):
            output += file.read_text()
    assert not {"Trent", "Mallory"} & {*output.replace(",", " ").replace('"', " ").split()}
