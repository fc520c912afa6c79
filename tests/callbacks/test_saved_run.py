"""A run that an earlier version left goes on: its configuration, labels, ledger and checkpoint are read."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from pl_privknn.cli.main import main

SAVED = Path(__file__).parents[1] / "data" / "run_of_0_1_0"


def released(folder):
    with sqlite3.connect(folder / "labels.sqlite") as db:
        return db.execute(
            "SELECT round, position, example, asked_at, released, label FROM queries"
        ).fetchall()


def test_a_run_of_the_first_version_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/before")
    shutil.copytree(SAVED, folder)
    before = json.loads((folder / "summary.json").read_text())
    assert main(["fit", "--resume", str(folder), "--trainer.max_epochs", "2"]) == 0
    after = json.loads((folder / "summary.json").read_text())
    assert after["epochs"] == 2
    assert after["epsilon"] == pytest.approx(before["epsilon"], rel=1e-9)
    assert after["epsilon_spent"] == pytest.approx(before["epsilon_spent"], rel=1e-9)
    # Its charges do not say where their noise came from, so the word is weaker than it was.
    assert (before["guarantee"], after["guarantee"]) == ("unconditional", "conditional")
    assert "did not say so" in after["reason"]
    assert released(folder) == released(SAVED)
    assert main(["audit", str(folder / "ledger.sqlite")]) == 0
    assert "conditional" in capsys.readouterr().out
