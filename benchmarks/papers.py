"""The ε of the papers' printed rows recomputed, for docs/reference/papers.md.

The rows are in ``papers.yaml``: what is printed, and the releases that follow from the parameters printed beside it.
Nothing but the accountant makes the figures.
"""

from __future__ import annotations

import functools
from typing import Any

import yaml

from benchmarks.record import ROOT, epsilon_of, explained, guarantee, markdown, results, runs, spread
from pl_privknn.comparison.results import guarantee_of, mark
from pl_privknn.privacy import account
from pl_privknn.privacy.accounting.accountant import read_records
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL, Guarantee, weakest

#: The starts of papers' names, which are the names of their tables.
TABLES = ("Private-kNN", "Reverse kNN", "Ind-KNN", "Guided PATE")
COLUMNS = ["where", "what", "printed ε", "classic", "**ε**", "printed accuracy", "our nearest run", "remark"]


@functools.cache
def rows() -> list[dict[str, Any]]:
    """The rows with their reports, equal releases accounted once."""
    document = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text(encoding="utf-8"))
    reports: dict[str, Any] = {}
    for row in document:
        delta, adjacency = row.get("delta", 1e-5), row.get("adjacency", "add_remove")
        key = repr((row["releases"], delta, adjacency))
        if key not in reports:
            reports[key] = account(read_records(row["releases"]), delta=delta, adjacency=adjacency)
        row["report"] = reports[key]
    return document


def measured(row: dict[str, Any]) -> tuple[str, Guarantee]:
    """Our nearest run: mean accuracy over seeds, its spread and its ε; and how far that ε holds."""
    name = row["measured"]
    if name is None:
        return "–", UNCONDITIONAL
    if isinstance(name, str):
        found = runs()[name]
        accuracy = spread(summary["test_accuracy"] for summary in found)
        return f"{accuracy} at ε {epsilon_of(found)}", guarantee(found)
    if "ind_knn" in name:
        wanted = {"queries": 2000, "epsilon": name["ind_knn"], "method": "density", "accounting": "gdp"}
        stored = results("ind_knn_accuracy", "hog")
        (one,) = [one for one in stored["rows"] if all(one[key] == value for key, value in wanted.items())]
        whole = guarantee_of(stored)
        return f"answers {one['mean']:.3f} ± {one['spread']:.3f}, HOG, 2,000 queries{mark(whole)}", whole
    settings = results("pate_figures")["settings"]["100 teachers, LNMAX 1/γ = 10"]
    kinds = ("RandomPartition", "ClassBalancedPartition", "GuidedPartition")
    cells = [settings[kind][name["guided_pate"]] for kind in kinds]
    whole = weakest(guarantee_of(cell) for cell in cells)
    return ", ".join(f"{cell['student_accuracy']['mean']:.3f}" for cell in cells) + mark(whole), whole


def table(name: str) -> str:
    """The table of one paper, with our configuration and our nearest run beside each row."""
    chosen = [row for row in rows() if row["paper"].startswith(name)]
    lines = []
    for row in chosen:
        report, printed = row["report"], row["printed"]
        lines.append([
            row["where"],
            row["what"],
            printed["epsilon"],
            f"{report.epsilon_rdp_classic:.4g}",
            f"**{report.epsilon:.4g}**",
            printed.get("accuracy", "–"),
            measured(row)[0],
            row.get("note", ""),
        ])  # fmt: skip
    return explained(markdown(COLUMNS, lines), ((row["where"], measured(row)[1]) for row in chosen))
