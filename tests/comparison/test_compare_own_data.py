"""Comparisons of the main methods on one's own data: the plan and its cost, before anything runs."""

import numpy as np
import pytest

from pl_privknn.cli.main import main


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
    for method in ("reverse_knn", "released_gradients", "private_knn", "noisy_sgd"):
        for epsilon in (1, 2):
            assert f"missing  {method} ε={epsilon} seed 1" in printed
    assert "All 16 private runs together: ε at most 24 at δ 0.0016" in printed
    assert "costs nothing more" in printed
    assert [path.name for path in data.parent.iterdir()] == ["own"]


@pytest.mark.long
def test_all_methods_run_and_their_table_is_written(data, capsys):
    words = ["compare", "--data", "own", "--epsilon", "8", "--private-records", "200", "--workers", "0"]
    assert main([*words, "--output", "out"]) == 0
    assert "4 runs: 0 done before, 4 now, 0 failed" in capsys.readouterr().out
    assert any((data.parent / "out").glob("*.csv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data own --epsilon 1", "--private-records N belong together"),
        ("--data own --epsilon 1 --private-records 200 some.yaml", "without a YAML"),
        ("--data own --epsilon -1 --private-records 200", "--epsilon=-1"),
        ("--data own --epsilon 1 --private-records 3", "--private-records=3"),
        ("--data nowhere --epsilon 1 --private-records 200", "nowhere"),
        ("--data own --epsilon 1 --private-records 200 --delta 2", "delta=2"),
        ("--epsilon 1", "belong together"),
        ("", "--data PATH or --render DIR"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(data, words, message, capsys):
    assert main(["compare", *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in data.parent.iterdir()] == ["own"]


def test_data_without_public_examples_are_refused(data, capsys):
    for path in data.glob("public_*"):
        path.unlink()
    assert main(["compare", "--data", "own", "--epsilon", "1", "--private-records", "200"]) == 2
    assert "there are no public examples to compare methods with" in capsys.readouterr().err
