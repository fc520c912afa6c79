"""Write the tables and plots of stored results into docs/.

Each table stands between ``<!-- NAME: rendered by benchmarks/render.py -->`` and ``<!-- end of NAME -->`` and is made
from files of ``benchmarks/results/`` alone, those of the papers by the accountant, so that none can differ from what
was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks import (
    accountants,
    attacks,
    foreign_modules,
    membership,
    private_training,
    recipes,
    scale,
    speed,
    tables,
)
from benchmarks.record import (
    DOCS,
    ROOT,
    entries,
    epsilon_of,
    explained,
    guarantee,
    listed,
    markdown,
    names,
    results,
    runs,
    spread,
)
from pl_privknn.comparison.plot import draw, results_digest
from pl_privknn.comparison.table import Result, markdown_table
from pl_privknn.privacy import account
from pl_privknn.privacy.accounting.accountant import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = DOCS / "guides"
TITLES = {
    "compare_bbc_news": "BBC news, 1,400 private articles",
    "compare_fashion_mnist": "Fashion-MNIST, 60,000 private records",
    "compare_fashion_mnist_attributes": "Attributes of Fashion-MNIST, 60,000 private records",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`render`."""
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where a page or plot is old")


def render(options: argparse.Namespace) -> int:
    """Render all pages and plots, or list those that differ from stored results."""
    old = update(fresh(), write=not options.check)
    if options.check:
        old += [f"docs/guides/{plot}" for plot in old_plots()]
        for page in old:
            print(f"{page} is not up to date; run python -m benchmarks render")
        return int(bool(old))
    for name, found in comparisons().items():
        draw(found, PLOTS / name, TITLES.get(name, name))
    for place, figure in FIGURES.items():
        _save(figure(), DOCS / place)
    return 0


def fresh(pages: Iterable[str] | None = None) -> dict[Path, str]:
    """Pages, by default all, rendered from stored results."""
    found = {}
    for page in dict.fromkeys(where for where, _, _ in TABLES) if pages is None else pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, make in [(name, make) for where, name, make in TABLES if where == page]:
            text = with_table(text, name, make(), page)
        found[ROOT / page] = text
    return found


def with_table(text: str, name: str, table: str, page: str) -> str:
    """Text of a page with one table replaced."""
    start, end = f"<!-- {name}: rendered by benchmarks/render.py -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{page}: expected one line {start!r} and one line {end!r} after it")
    before, rest = text.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


def update(pages: dict[Path, str], write: bool) -> list[str]:
    """Outdated pages; updates them if requested."""
    old = [page for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    for page in old if write else []:
        page.write_text(pages[page], encoding="utf-8")
    return [str(page.relative_to(ROOT)) for page in old]


def _save(figure: Figure, place: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": place.name}):  # the same file each time
        figure.savefig(place, dpi=110, metadata={"Date": None})


# -- comparisons -------------------------------------------------------------------------------------------------


def comparison(name: str) -> list[Result]:
    """Runs of a stored comparison, by method, ε and seed."""
    found = []
    for entry in entries(name).values():
        values = entry["results"]
        target = float(values["target_epsilon"])
        result = Result(values["method"], values["title"], target, entry["seeds"][0], values)
        found.append(((values["place"], target, result.seed), result))
    return [result for _, result in sorted(found, key=lambda item: item[0])]


def comparisons() -> dict[str, list[Result]]:
    """Comparisons shown in docs/results/accuracy.md, by name."""
    return {name: comparison(name) for name in names() if name.startswith("compare_")}


#: Comparison that has a table beside its plot, and the table's ε.
_TABULATED, _SHOWN = "compare_fashion_mnist", (0.1, 1.0)


def compared() -> str:
    """Plots of all comparisons, and the table of one."""
    stored = comparisons()
    parts = [f"![test accuracy against ε: {name}](../guides/{name}.svg)" for name in stored]
    shown = [result for result in stored[_TABULATED] if result.target in _SHOWN]
    return "\n\n".join([*parts, markdown_table(shown)])


def old_plots() -> list[str]:
    """Outdated plots of comparisons."""
    shown = {plot.stem: plot.read_text(encoding="utf-8") for plot in PLOTS.glob("compare_*.svg")}
    digests = {name: results_digest(found) for name, found in comparisons().items()}
    return [f"{name}.svg" for name, digest in digests.items() if digest not in shown.get(name, "")]


# -- runs of one configuration, and older measurements -------------------------------------------------------------


_REVERSE_KNN = "fashion_mnist_reverse_knn_"
_CURATOR = tuple(f"{_REVERSE_KNN}eps{name}" for name in ("0.1", "0.1_one_round", "0.5", "1", "1_one_round"))


def curator_table() -> str:
    """Table of runs of reverse kNN with a curator."""
    found = runs()
    lines = []
    for name in _CURATOR:
        label_accuracy, test_accuracy = (
            spread(summary[figure] for summary in found[name])
            for figure in ("label_accuracy", "test_accuracy")
        )
        lines.append(
            [
                name.removeprefix(_REVERSE_KNN),
                epsilon_of(found[name]),
                label_accuracy,
                test_accuracy,
                len(found[name]),
            ]
        )
    table = markdown(["run", "ε", "label accuracy", "student's test accuracy", "seeds"], lines)
    return explained(table, ((name, guarantee(found[name])) for name in _CURATOR))


# -- the papers' printed rows --------------------------------------------------------------------------------------

#: The starts of papers' names, which are the names of their tables. The page states
#: those of the other papers in a sentence each.
PAPERS = ("Private-kNN",)
#: Variants of PATE, of which the paper on Private-kNN prints a data-dependent ε.
_BASELINES = ("LNMax", "GNMax")


@cache
def printed_rows() -> list[dict[str, Any]]:
    """Rows of ``papers.yaml`` with the reports of their releases; equal releases are accounted once."""
    document = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text(encoding="utf-8"))
    reports: dict[str, Any] = {}
    for row in document:
        delta, adjacency = row.get("delta", 1e-5), row.get("adjacency", "add_remove")
        key = repr((row["releases"], delta, adjacency))
        if key not in reports:
            reports[key] = account(read_records(row["releases"]), delta=delta, adjacency=adjacency)
        row["report"] = reports[key]
    return document


def paper(name: str) -> str:
    """Table of one paper, without its baselines."""
    lines = []
    for row in printed_rows():
        if not row["paper"].startswith(name) or row["what"].startswith(_BASELINES):
            continue
        report, printed = row["report"], row["printed"]
        figures = printed["epsilon"], f"{report.epsilon_rdp_classic:.4g}", f"**{report.epsilon:.4g}**"
        lines.append([row["where"], row["what"], *figures, row.get("note", "")])
    return markdown(["where", "what", "printed", "classic", "**ε**", "remark"], lines)


_IND_KNN_SPEED = {
    "records × dimensions": "{records:,} × {dimension}",
    "queries at once": "{batch:,}",
    "Ind-KNN": "{exact_ratio:.2f}",
    "with hashing": "{hashing_ratio:.2f}",
    "recall": "{recall:.2f}",
}


def ind_knn_speed() -> str:
    """Table of the run time of Ind-KNN."""
    return listed(_IND_KNN_SPEED, results("ind_knn_speed")["rows"])


def dated(make: Callable[[], str], *stored: str) -> Callable[[], str]:
    """Table followed by the versions and commits that measured its stored results."""
    return lambda: f"{make()}\n\n{measured_by(stored)}"


def measured_by(stored: Iterable[str]) -> str:
    """Sentence with the versions and commits of stored results."""
    found: dict[str, list[str]] = {}
    for entry in (entry for name in stored for entry in entries(name).values()):
        hashes = found.setdefault(entry["versions"].get("pl_privknn", "unknown"), [])
        if (short := entry["commit"]["hash"][:8]) not in hashes:
            hashes.append(short)
    versions = "; ".join(f"{version} ({', '.join(hashes)})" for version, hashes in found.items())
    return f"Measured with version {versions}."


#: Page, name of the table, what makes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/results/accuracy.md", "comparisons", dated(compared, *(n for n in names() if n.startswith("compare_")))),
    ("docs/results/accuracy.md", "private training", dated(private_training.table, "private_training")),
    ("docs/results/accuracy.md", "curator", dated(curator_table, *_CURATOR)),
    ("docs/methods/public_rows.md", "tables", dated(tables.table, "tables")),
    ("docs/guides/recommendation.md", "recipes", dated(recipes.table, "recipes")),
    ("docs/results/attacks.md", "attacks", dated(attacks.table, "attacks")),
    ("docs/results/attacks.md", "membership", dated(membership.table, "membership")),
    ("docs/results/modules.md", "foreign modules", dated(foreign_modules.table, "foreign_modules")),
    ("docs/results/speed.md", "speed", dated(speed.table, "speed")),
    ("docs/results/speed.md", "training speed", dated(foreign_modules.speed_table, "foreign_modules")),
    ("docs/results/speed.md", "Ind-KNN", dated(ind_knn_speed, "ind_knn_speed")),
    ("docs/results/speed.md", "table memory", dated(scale.table, "table_memory")),
    ("docs/reference/golden_values.md", "accountants", dated(accountants.table, "accountants")),
    *(("docs/reference/papers.md", name, partial(paper, name)) for name in PAPERS),
]  # fmt: skip
#: Plots other than those of comparisons.
FIGURES: dict[str, Callable[[], Figure]] = {
    "guides/membership.svg": membership.figure,
    "guides/recipes.svg": recipes.figure,
}
