"""The ε of the papers' printed rows recomputed, for papers.md and privacy.md of docs/.

The rows are in ``papers.yaml``: what is printed, and the releases that follow from the parameters printed beside it.
Nothing but the accountant makes the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import DOCS, ROOT, results
from benchmarks.render import epsilon_of, explained, guarantee, runs, spread
from pl_privknn.comparison.marks import guarantee_of, mark
from pl_privknn.privacy import account
from pl_privknn.privacy.accounting.accountant import read_records
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL, Guarantee, weakest

END = "<!-- end of table -->"
#: Marks of the tables, and the rows that each shows: by paper, or by figure and table.
TABLES = {
    "methods/privacy.md": [
        (
            "<!-- papers: rendered by benchmarks/papers.py -->",
            ("Private-kNN", ("Figure 5", "Table 1", "Table 3")),
        )
    ],
    "reference/papers.md": [
        (f"<!-- {name}: rendered by benchmarks/papers.py -->", (name, ()))
        for name in ("Private-kNN", "Reverse kNN", "Ind-KNN", "Guided PATE")
    ],
}
COLUMNS = ["where", "what", "printed ε", "classic", "RDP", "PLD", "exact", "**ε**", "printed accuracy"]
#: Of the page with all papers.
FURTHER = ["run by", "our nearest run, on Fashion-MNIST"]


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
        accuracy = spread([summary["test_accuracy"] for summary in found])
        return f"{accuracy} at ε {epsilon_of(found)}", guarantee(found)
    if "ind_knn" in name:
        wanted = {"queries": 2000, "epsilon": name["ind_knn"], "method": "density", "accounting": "gdp"}
        stored = results("ind_knn_accuracy", "hog")
        (one,) = [one for one in stored["rows"] if all(one[key] == value for key, value in wanted.items())]
        whole = guarantee_of(stored)
        return f"answers {one['mean']:.3f} ± {one['spread']:.3f}, HOG, 2,000 queries{mark(whole)}", whole
    settings = results("pate_figures")["settings"]["100 teachers, LNMAX 1/γ = 10"]
    cells = [
        settings[partition][name["guided_pate"]]
        for partition in ("RandomPartition", "ClassBalancedPartition", "GuidedPartition")
    ]
    whole = weakest(guarantee_of(cell) for cell in cells)
    return ", ".join(f"{cell['student_accuracy']['mean']:.3f}" for cell in cells) + mark(whole), whole


def line(row: dict[str, Any], further: bool) -> str:
    """One line of a table."""
    report, printed = row["report"], row["printed"]
    exact = report.epsilon_exact
    figures = [report.epsilon_rdp_classic, report.epsilon_rdp, report.epsilon_pld, exact]
    cells = [
        row["where"],
        row["what"],
        str(printed["epsilon"]),
        *["–" if value is None else f"{value:.4g}" for value in figures],
        f"**{report.epsilon:.4g}**",
        str(printed.get("accuracy", "–")),
    ]
    if further:
        config = row["config"]
        cells += ["–" if config is None else f"`{config}`", measured(row)[0]]
    cells.append(row.get("note", ""))
    return f"| {' | '.join(cells)} |"


def table(found: list[dict[str, Any]], paper: str, places: tuple[str, ...], further: bool) -> str:
    """The table of one paper, of some places in it or of all."""
    chosen = [row for row in found if row["paper"].startswith(paper)]
    if places:
        chosen = [row for row in chosen if row["where"].startswith(places)]
    names = [*COLUMNS, *(FURTHER if further else []), "remark"]
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines = "\n".join([*head, *(line(row, further) for row in chosen)])
    return explained(lines, ((row["where"], measured(row)[1]) for row in chosen)) if further else lines


def rendered(page: str, text: str, found: list[dict[str, Any]]) -> str:
    """The page's text with fresh tables."""
    for start, (paper, places) in TABLES[page]:
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        text = f"{before}{start}\n{table(found, paper, places, page.endswith('papers.md'))}\n{END}{after}"
    return text


def fresh() -> dict[Path, str]:
    """The pages as the accountant says."""
    found = rows()
    return {DOCS / page: rendered(page, (DOCS / page).read_text(encoding="utf-8"), found) for page in TABLES}
