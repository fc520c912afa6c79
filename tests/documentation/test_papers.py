"""The recomputed figures of the papers in the documentation are those of the accountant."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks import render
from pl_privknn.privacy import account
from pl_privknn.privacy.accounting.accountant import read_records

ROOT = Path(__file__).resolve().parents[2]
ROWS = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text(encoding="utf-8"))
_ALL = json.loads((ROOT / "tests" / "data" / "reference_epsilons.json").read_text(encoding="utf-8"))
OF_THE_PAPER = [case for case in _ALL if case["id"].startswith(("figure5", "table1", "table3", "gnmax"))]


def _key(record):
    defaults = {"l2_sensitivity": 1.0, "sampling_rate": 1.0, "count": 1}
    return {name: round(v, 9) if isinstance(v, float) else v for name, v in {**defaults, **record}.items()}


def _shown(row):
    """Figure of a row on the page; of the paper's baselines, which the page leaves out, the computed one."""
    if row["what"].startswith(render._BASELINES):
        return account(read_records(row["releases"]), delta=row.get("delta", 1e-5)).epsilon
    lines = (ROOT / "docs/reference/papers.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {row['where']} | {row['what']} |")]
    return float(line.split("|")[5].strip(" *"))


@pytest.mark.parametrize("case", OF_THE_PAPER, ids=lambda case: case["id"])
def test_pages_agree_with_the_reference_cases(case):
    wanted = ([_key(record) for record in case["records"]], case["delta"])
    rows = [
        row
        for row in ROWS
        if ([_key(record) for record in row["releases"]], row.get("delta", 1e-5)) == wanted
        and row["paper"].startswith("Private-kNN")
    ]
    assert rows
    for row in rows:
        shown = _shown(row)
        # Four digits are shown.
        upper = 1.01 * case["epsilon_exact"] if "epsilon_exact" in case else 1.005 * case["epsilon"]
        assert case["epsilon_floor"] * 0.9995 <= shown <= upper * 1.0005


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "reference")
    return importlib.import_module("screening_worst_case")


def test_worst_vote_count_is_the_threshold_at_small_orders_and_far_from_it_at_large_ones(script):
    found = script.curves(script.NoisyScreening(**script.SCREENING), np.array([2.0, 20.0, 2000.0]))
    assert list(found) == list(range(30, 301))
    table = np.stack(list(found.values()))
    # Figures 1 and 2 of the supplement: about T at small orders, at the farther end of the range at large ones.
    assert [abs(30 + place - 210) <= 15 for place in table.argmax(axis=0)] == [True, True, False]
    assert table.argmax(axis=0)[-1] == 0
    log_p, log_q = script.NoisyScreening(**script.SCREENING).log_dominating_pairs("add_remove")
    orders = np.array([2.0, 20.0, 2000.0])
    np.testing.assert_allclose(table.max(axis=0), script.pairs_rdp(log_p, log_q, orders), rtol=1e-12)


@pytest.mark.long
def test_the_figure_is_drawn(script, tmp_path):
    script.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
