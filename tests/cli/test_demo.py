"""``privknn demo``."""

import json
import math
import re
from pathlib import Path

import pytest

from pl_privknn.cli import main, publish

#: The demo's own runs, and quicker ones in their places.
DEMOS = {
    "its own": publish._DEMO,
    "quick": {"Recommended": "digits_reverse_knn", "Private-kNN": "digits_private_knn"},
}


@pytest.mark.long("its own")
@pytest.mark.parametrize("runs", DEMOS)
def test_demo_shows_both_teachers_in_one_table(runs, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(publish, "_DEMO", DEMOS[runs])
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--epochs", "1"]) == 0
    printed = capfd.readouterr()
    folder = Path(printed.out.strip().splitlines()[-1])
    for name, run in DEMOS[runs].items():
        summary = json.loads((folder / run / "summary.json").read_text(encoding="utf-8"))
        (row,) = [line for line in printed.out.splitlines() if re.match(rf"{name} +\d", line)]
        assert 0 <= float(row.removeprefix(name).split()[0]) - summary["epsilon"] < 0.001
        assert f"{summary['test_accuracy']:.3f}" in row
        assert summary["guarantee"] == "unconditional"
        assert (folder / run / "report.html").is_file()
        # The sentence states the best attack's rate, which the bound by ε and δ contains.
        found = re.search(rf"{name}: ε = (\S+) .* at most (\S+) in 100", printed.out)
        assert float(found[1]) == pytest.approx(summary["epsilon"], rel=0.01)
        assert 1 < float(found[2]) < 100 * (0.01 * math.exp(summary["epsilon"]) + summary["delta"]) * 1.05
    for unwanted in ("litlogger", "litmodels", "FLOPs", "Warning", "TPU"):
        assert unwanted not in printed.out + printed.err
