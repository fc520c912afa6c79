"""Stored results have one shape and name what made them; the runner writes them so."""

import subprocess

import pytest

from benchmarks import __main__ as runner
from benchmarks import membership, record, runs
from benchmarks.record import Measured

FIELDS = ["part", "commit", "machine", "versions", "seeds", "settings", "results"]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A benchmark that measures two parts, with a folder of results of its own."""

    def add_options(parser):
        parser.add_argument("--size", type=int, default=3)
        parser.add_argument("--root", default="data")

    def measure(options):
        yield Measured({"figure": options.size}, [0, 1], "first")
        yield Measured({"figure": 0.1 + options.size}, [2], "second", settings={"own": True})

    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(membership, "add_options", add_options)
    monkeypatch.setattr(membership, "measure", measure)
    return tmp_path / "results" / "membership.json"


def test_runner_stores_each_part_with_what_made_it(made, capsys):
    assert runner.main(["membership", "--size", "5", "--dry-run"]) == 0
    assert '"figure": 5' in capsys.readouterr().out
    assert not made.exists()
    assert runner.main(["membership", "--size", "5"]) == 0
    first, second = record.entries("membership").values()
    assert list(first) == FIELDS
    assert (first["settings"], second["settings"]) == ({"size": 5}, {"own": True})  # places are no settings
    assert (first["seeds"], first["results"]) == ([0, 1], {"figure": 5})
    assert first["versions"]["torch"]
    assert set(first["machine"]) == {"arch", "system", "processor", "cores", "accelerator"}
    assert record.results("membership", "second") == {"figure": 5.1}
    # A part that is measured again takes its place; others stay.
    record.store("membership", Measured({"figure": 7}, [0], "first"), {"size": 7})
    assert [one["results"]["figure"] for one in record.entries("membership").values()] == [7, 5.1]


def test_commit_is_that_of_the_code_and_tells_changes(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() is None  # no repository
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = record.commit()
    assert (clean["from"], clean["modified"]) == ("run", False)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "one.json").write_text("{}")
    assert record.commit() == clean  # what it writes itself is no change of the code
    (tmp_path / "code.py").write_text("2")
    assert record.commit() == {**clean, "modified": True}


def test_comparison_begun_by_other_code_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "commit", lambda: {"hash": "a" * 40, "from": "run", "modified": False})
    runs.begin(tmp_path / "new")
    runs.begin(tmp_path / "new")  # the same code goes on
    monkeypatch.setattr(runs, "commit", lambda: {"hash": "b" * 40, "from": "run", "modified": False})
    with pytest.raises(SystemExit, match="begun by other code"):
        runs.begin(tmp_path / "new")
    (tmp_path / "old" / "results").mkdir(parents=True)
    with pytest.raises(SystemExit, match="unknown code"):
        runs.begin(tmp_path / "old")
