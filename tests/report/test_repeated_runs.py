"""Runs on the same records add up: in the summary, the card, the report and ``privknn epsilon``."""

import json
import math

import pytest

from pl_privknn.callbacks import LabelingOptions
from pl_privknn.cli import main
from pl_privknn.config import read_document, write_yaml
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.earlier_runs import earlier_runs, together
from pl_privknn.privacy.mechanisms import Laplace
from pl_privknn.privacy.verify import epsilon_of_files
from pl_privknn.report import write_report
from tests.setup.small_fit import fit_student


@pytest.fixture
def runs(tmp_path, capsys):
    """Three runs on the same data in numbered folders."""
    for number in range(3):
        fit_student(
            tmp_path, ReverseKNN(noise=Laplace(scale=9.0)), 0.1, run_dir=tmp_path / "runs" / str(number)
        )
    return tmp_path / "runs", capsys.readouterr().out


def test_later_runs_say_what_all_cost_together(runs, capsys):
    folder, printed = runs
    ledgers = [folder / str(number) / "run.sqlite" for number in range(3)]
    summaries = [json.loads((folder / str(number) / "summary.json").read_text()) for number in range(3)]
    assert "earlier_runs" not in summaries[0]
    for number in (1, 2):
        assert summaries[number]["earlier_runs"] == number
        known = epsilon_of_files(ledgers[: number + 1], summaries[0]["delta"], exact=False)["epsilon"]
        assert summaries[number]["epsilon_together"] == pytest.approx(known)
        assert summaries[number]["epsilon"] < known < (number + 1) * summaries[number]["epsilon"] * 1.001
    assert "2 earlier runs on these records" in " ".join(printed.replace("│", " ").split())
    page = write_report(folder / "2", exact=False).read_text()
    assert "2 earlier runs on these records: together" in page
    assert "2 earlier runs on these records: together" in (folder / "2" / "privacy_card.md").read_text()
    assert "earlier runs" not in write_report(folder / "0", exact=False).read_text()
    assert main(["audit", str(folder / "2")]) == 0
    capsys.readouterr()
    assert main(["epsilon", str(folder), "--fast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(summaries[2]["epsilon_together"])


def test_other_data_and_shared_ledgers_are_left_out(runs, tmp_path, capsys):
    folder, _ = runs
    config = read_document(folder / "1" / "config.yaml")
    config["data"]["init_args"]["num_classes"] = 4
    (folder / "1" / "config.yaml").write_text(write_yaml(config))
    assert [path.name for path in earlier_runs(folder / "2")] == ["0"]
    assert together(folder / "2")["earlier_runs"] == 1
    shared = LabelingOptions(ledger_path=tmp_path / "shared.sqlite", progress=False)
    for number in (0, 1):
        place = tmp_path / "sharing" / str(number)
        fit_student(tmp_path, ReverseKNN(noise=Laplace(scale=9.0)), 0.1, run_dir=place, options=shared)
    assert together(tmp_path / "sharing" / "1") == {}
    (tmp_path / "nothing").mkdir()
    assert main(["epsilon", str(tmp_path / "nothing")]) == 2
    assert "there is no ledger in it" in capsys.readouterr().err
    assert math.isfinite(epsilon_of_files([tmp_path / "shared.sqlite"])["epsilon"])
