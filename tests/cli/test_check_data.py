"""``privknn check --data``: public facts, the recommended run and its size, and nothing of private records."""

import csv
import sys

import numpy as np
import pytest

from pl_privknn.cli import main
from pl_privknn.cli.common import say
from tests.setup.passed_files import photographs

SECRET = "Zwqkxjvy"
ASKED = ["--epsilon", "1", "--private-records", "500"]


def table(path, count, secret=""):
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label", "person"])
        rows.writerows(
            [f"{secret} text {path.stem} {n}" if n else "", ["money", "sport"][n % 2], f"{secret} {n // 2}"]
            for n in range(count)
        )


def printed(capsys, words):
    """Output of a check."""
    assert main(["check", *words, *ASKED]) == 0
    return capsys.readouterr().out.splitlines()


def test_check_counts_public_and_test_parts_and_what_is_left_out(tmp_path, capsys):
    for part, count in {"private": 60, "public": 41, "test": 21}.items():
        table(tmp_path / f"{part}.csv", count, SECRET if part == "private" else "")
    before = sorted(tmp_path.rglob("*"))
    lines = printed(capsys, ["--data", str(tmp_path), "--person", "person"])
    assert "Private part: not loaded; 500 persons (your estimate)." in lines
    assert "Public part: 40 examples; labelled: money 20, sport 20." in lines
    assert "Test part: 20 examples; labelled: money 10, sport 10." in lines
    for part in ("public", "test"):
        said = f"{part}: records are left out: 1 with no text (the first is record 1)."
        assert sum(said in line for line in lines) == 1
    assert any(line.startswith("Teacher: released gradients") for line in lines)
    assert not any(",," in line for line in lines)
    assert any(line.startswith("Memory: about 1.1 GB") and "560 examples" in line for line in lines)
    assert sorted(tmp_path.rglob("*")) == before


def test_lines_break_between_words_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    say(text := " ".join(["between"] * 40), "short")
    assert capsys.readouterr().out == f"{text}\nshort\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say(text, "short")
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == f"{text} short"
    assert max(map(len, lines)) <= 90


def test_check_of_one_private_table_says_the_same_whatever_its_records_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    for count in (30, 3000):
        table(tmp_path / "mails.csv", count, SECRET)
        said.append(printed(capsys, ["--data", "mails.csv"]))
    assert said[0] == said[1]
    assert SECRET not in " ".join(said[0])
    assert "Private part: not loaded; 500 records (your estimate)." in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["mails.csv"]


def test_check_says_what_it_read_of_private_records(tmp_path, capsys):
    rows = "".join(f'{{"age": {n}, "label": "{n % 2}"}}\n' for n in range(30))
    (tmp_path / "own.jsonl").write_text(rows, encoding="utf-8")
    lines = printed(capsys, ["--data", str(tmp_path / "own.jsonl"), "--num-classes", "2"])
    said = "the names of its classes and the kinds of its columns and the names of its columns"
    assert f"Private part: not loaded, except {said}; 500 records (your estimate)." in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to check; give --data PATH"),
        (["IndKNN", "--data", "x"], "give either a labeler class or --data PATH, not both"),
        (["--data", "nothing.npz", *ASKED], "--data nothing.npz: no such file or folder"),
        (
            ["--data", "own.csv", "--person", "persn", *ASKED],
            "has no column 'persn': name the right one by --person",
        ),
        (
            ["--data", "own.csv", "--public", "public.csv", "--text", "person", *ASKED],
            "check: --text 'person': the column holds numbers",
        ),
        (["--data", "own.csv", "--encoding", "utf-99", *ASKED], "name another encoding by --encoding"),
        (["--data", "own.csv", "--classes", "money", *ASKED], "--classes money: expected at least two"),
        (["--data", "own.csv", "--public", "nowhere", *ASKED], "--public nowhere: no such file"),
        (["--data", "own.csv", "--bounds", "b.yaml", *ASKED], "--bounds b.yaml: no such file"),
    ],
)
def test_check_refuses_in_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own", "public"):
        table(tmp_path / f"{name}.csv", 30)
    assert main(["check", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_suffixes_of_arrays_are_read_in_any_case(tmp_path, capsys):
    numbers = np.random.default_rng(0).random((60, 4)).astype("f4")
    for name, values in {"embeddings": numbers, "labels": np.arange(60) % 3}.items():
        with (tmp_path / f"{name}.NPY").open("wb") as file:
            np.save(file, values)
    with (tmp_path / "own.NPZ").open("wb") as file:
        np.savez(file, embeddings=numbers, labels=np.arange(60) % 3)
    for place in (tmp_path, tmp_path / "own.NPZ"):
        assert printed(capsys, ["--data", str(place)])[0].startswith("No public examples, 3 classes;")


LABELER = """
from pl_privknn import Labeler
class Mine(Labeler):
    pass
"""


def test_a_labeler_of_the_working_directory_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labeler_of_a_test.py").write_text(LABELER)
    assert main(["check", "labeler_of_a_test.Mine"]) == 2
    assert "Can't instantiate abstract class Mine" in capsys.readouterr().err


def test_what_lies_beside_data_is_not_imported(tmp_path, monkeypatch, capsys):
    photographs(tmp_path / "photographs")
    (tmp_path / "module_beside_data.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    seen = []

    def looked(*_, **__):
        seen.extend(sys.path)
        raise ValueError("enough")

    monkeypatch.setattr("pl_privknn.recommendation.recommend.data_at", looked)
    assert main(["check", "--data", "photographs", "--epsilon", "1", "--private-records", "60"]) == 2
    assert seen
    assert str(tmp_path) not in seen


def test_check_says_that_a_run_pays_for_the_public_rows_of_a_table(tmp_path, capsys):
    with (tmp_path / "claims.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "region", "label"])
        rows.writerows([20 + n % 60, ["north", "south"][n % 2], ["low", "high"][n % 2]] for n in range(60))
    lines = printed(capsys, ["--data", str(tmp_path / "claims.csv"), "--label", "label"])
    assert any(
        line.startswith("2 columns, classes that the run pays for; 500 private records") for line in lines
    )
    assert any(line.startswith("Not stated, and paid for: classes with many records") for line in lines)
    assert (
        "Public part: none; the run pays for releases of the private part and draws rows from them." in lines
    )
