"""Comparisons of the main methods on one's own data: the plan and its cost, before anything runs."""

import csv

import numpy as np
import pytest
from PIL import Image

from pl_privknn.cli import main


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Embeddings of two classes, as arrays."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "own"
    folder.mkdir()
    for part, number in {"private": 200, "public": 60, "test": 20}.items():
        labels = np.arange(number) % 2
        np.save(folder / f"{part}_embeddings.npy", draw.normal(size=(number, 6)) + 3 * labels[:, None])
        if part != "public":
            np.save(folder / f"{part}_labels.npy", labels)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_dry_run_states_the_plan_and_epsilon_of_all_runs_together(data, capsys):
    words = ["compare", "--data", "own", "--epsilon", "2", "1", "--private-records", "200", "--delta", "1e-4"]
    assert main([*words, "--seeds", "0", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for method in ("reverse_knn", "released_gradients", "noisy_sgd"):
        for epsilon in (1, 2):
            assert f"missing  {method} ε={epsilon} seed 1" in printed
    assert "All 12 private runs together: ε at most 18 at δ 0.0012" in printed
    assert "costs nothing more" in printed
    assert [path.name for path in data.parent.iterdir()] == ["own"]
    assert "supervised" not in printed
    np.save(data / "public_truth.npy", np.arange(60) % 2)  # a line that needs no private record
    assert main([*words, "--dry-run"]) == 0
    assert "missing  supervised ε=inf seed 0" in capsys.readouterr().out


def test_where_the_run_pays_for_public_rows_teachers_of_gaussian_noise_are_compared(data, capsys):
    rows = [[place, place % 7, "ab"[place % 2]] for place in range(240)]
    for name, some in {"claims": rows[:200], "late": rows[200:]}.items():
        with (data.parent / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["age", "visits", "label"], *some])
    words = ["compare", "--data", "claims.csv", "--test", "late.csv", "--label", "label", "--epsilon", "1"]
    assert main([*words, "--private-records", "200", "--dry-run"]) == 0
    found = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")}
    assert found == {"released_gradients", "class_sums"}


@pytest.mark.long
def test_all_methods_run_and_their_table_is_written(data, capsys):
    words = ["compare", "--data", "own", "--epsilon", "8", "--private-records", "200", "--workers", "0"]
    assert main([*words, "--output", "out"]) == 0
    assert "3 runs: 0 done before, 3 now, 0 failed" in capsys.readouterr().out
    rows = list(csv.DictReader((data.parent / "out" / "results.csv").open(encoding="utf-8")))
    assert {row["method"] for row in rows} == {"reverse_knn", "released_gradients", "noisy_sgd"}
    assert all(7 < float(row["epsilon"]) <= 8 and row["test_accuracy"] for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data own --epsilon 1", "--private-records N are given together"),
        ("--data own --epsilon 1 --private-records 200 some.yaml", "without a YAML"),
        ("--data own --epsilon -1 --private-records 200", "--epsilon=-1"),
        ("--data own --epsilon 1 --private-records 3", "--private-records=3"),
        ("--data nowhere --epsilon 1 --private-records 200", "nowhere"),
        ("--data own --epsilon 1 --private-records 200 --delta 2", "--delta 2"),
        ("--epsilon 1", "nothing to compare"),
        ("", "--data PATH or --render DIR"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(data, words, message, capsys):
    assert main(["compare", *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in data.parent.iterdir()] == ["own"]


def test_without_public_examples_methods_that_need_none_are_planned(data, capsys):
    for path in data.glob("public_*"):
        path.unlink()
    words = ["compare", "--data", "own", "--epsilon", "1", "--private-records", "200", "--dry-run"]
    assert main(words) == 0
    planned = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert planned == ["class_sums", "noisy_sgd"]


def test_data_without_test_examples_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(np.full((8, 8), number, dtype=np.uint8)).save(f"photos/{name}/{number}.png")
    assert main(["compare", "--data", "photos", "--epsilon", "1", "--private-records", "20"]) == 2
    said = capsys.readouterr().err
    assert "give --test PATH" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
