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
from pl_privknn.privacy.public_rows import PublicRowsLost
from pl_privknn.privacy.verify import mapping_of


def shown(counts, sigma, threshold):
    """Probabilities of what a class shows: nothing in the first place, else its rounded noisy count."""
    found = []
    grid = np.arange(-40, 80)
    for count in counts:
        if not count:  # it does not occur, so that no noise is drawn for it
            found.append(np.eye(len(grid) + 1)[0])
            continue
        masses = norm.cdf((grid - count + 0.5) / sigma) - norm.cdf((grid - count - 0.5) / sigma)
        hidden = masses[grid < threshold].sum() + norm.cdf((grid[0] - count - 0.5) / sigma)
        found.append(np.array([hidden, *np.where(grid >= threshold, masses, 0.0)]))
    total = found[0]
    for one in found[1:]:
        total = np.outer(total, one).ravel()
    return total


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_neighbours_differ_by_more_than_the_stated_cost(adjacency):
    names, budget = PaidNames(classes=True, share=0.9, exposure=0.5), Budget(8.0, 1e-2, adjacency)
    sigma, threshold = names.mechanisms(budget)["classes"].sigma, names.threshold(budget)
    assert sigma > 0.3
    plan, largest = names.plan(budget), 0.0
    tables = list(itertools.product([0, 1, threshold + 10, threshold + 11], repeat=2))
    for one, other in itertools.product(tables, repeat=2):
        moved = np.subtract(one, other)
        near = abs(moved).sum() == 1 if adjacency == "add_remove" else sorted(moved) == [-1, 1]
        if not near:
            continue
        p, q = shown(one, sigma, threshold), shown(other, sigma, threshold)
        for epsilon in (0.0, 0.5, 1.0, 3.0, 8.0):
            found = np.maximum(p - math.exp(epsilon) * q, 0).sum()
            stated = delta_for_epsilon(plan, epsilon, adjacency)
            assert found <= stated * (1 + 1e-6) + 1e-12, (one, other, epsilon)
            largest = max(largest, found / stated)
    assert largest > 0.9


def test_a_class_of_one_record_is_released_with_the_stated_probability_at_most():
    for epsilon, share in itertools.product((0.1, 1.0, 5.0), (0.1, 0.5)):
        names, budget = PaidNames(classes=True, share=share), Budget(epsilon, 1e-5)
        sigma, threshold = names.mechanisms(budget)["classes"].sigma, names.threshold(budget)
        assert norm.sf((threshold - 1.5) / sigma) <= 1e-6 < norm.sf((threshold - 2.5) / sigma)


def test_a_person_counts_in_one_class_whatever_their_records_are():
    generator = np.random.default_rng(0)
    for _ in range(200):
        count = int(generator.integers(1, 12))
        classes = generator.choice(["a", "b", "c", ""], count).tolist()
        owners = torch.from_numpy(generator.integers(0, 3, count))
        found, counts = class_counts(classes, owners)
        less, fewer = class_counts(
            [name for name, owner in zip(classes, owners, strict=True) if owner], owners[owners > 0]
        )
        moved = dict(zip(found, counts.tolist(), strict=True))
        for name, one in zip(less, fewer.tolist(), strict=True):
            moved[name] -= one
        assert sorted(moved.values())[-1:] in ([], [0], [1])
        assert sum(map(abs, moved.values())) <= 1


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("classes", "columns"), [(True, ()), (False, ("a", "b")), (True, ("a",))])
def test_names_and_what_they_leave_cost_the_budget(adjacency, classes, columns):
    names, budget = PaidNames(classes=classes, columns=columns), Budget(1.0, 1e-5, adjacency)
    mu = 1 / _sigma(names.left(budget))
    total = [*names.plan(budget), Charge(Gaussian(1 / mu))]
    assert 0.99 < epsilon_for_delta(total, 1e-5, adjacency) <= 1.0


def _sigma(budget):
    from pl_privknn.privacy.mechanisms.steps import noise_for_steps

    return noise_for_steps(budget.epsilon, budget.delta, 1.0, 1)


def test_names_are_released_once_and_lost_ones_are_refused(tmp_path, monkeypatch):
    names, budget = PaidNames(classes=True, columns=("x",)), Budget(2.0, 1e-5)
    classes = ["often"] * 900 + ["also"] * 600 + ["Mallory"] + [""]
    cells = torch.tensor([0] * 1000 + [1] * 502)
    records = UnnamedRecords(classes, [(cells, 3)])
    run = Ledger(tmp_path / "ledger.sqlite", budget).run("run", names.plan(budget))
    found = release_names(names, tmp_path, run, budget, SystemNoise(), lambda: records)
    assert found["classes"].keys() == {"often", "also"}
    assert found["kinds"]["x"] == pytest.approx([1000, 502, 0], abs=200)
    assert release_names(names, tmp_path, run, budget, SystemNoise(), lambda: None) == found
    assert run.num_charges == 3
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
