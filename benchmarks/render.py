"""README.md's tables of measured results, and the plots of comparisons.

They are made from stored results alone, so they can't differ from what was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import DOCS, ROOT, entries, names
from pl_privknn.comparison.marks import footnotes, guarantee_of, mark
from pl_privknn.comparison.results import Result, in_order, result_from
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest

README = ROOT / "README.md"
PLOTS = DOCS / "guides"
START, END = "<!-- results: rendered by benchmarks/render.py -->", "<!-- end of results -->"
COMPARE_START = "<!-- comparisons: rendered by benchmarks/render.py -->"
COMPARE_END = "<!-- end of comparisons -->"
COMPARISON = "compare_"
TITLES = {
    "compare_fashion_mnist": "Fashion-MNIST, 60,000 private records",
    "compare_fashion_mnist_attributes": "Attributes of Fashion-MNIST, 60,000 private records",
    "compare_digits": "Digits, 1,000 private records",
}
HEADER = (
    "| run | data | teacher | ε | δ | answered | label accuracy | student's test accuracy | seeds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def markdown(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    names = list(header)
    rows = [names, ["---"] * len(names), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def runs() -> dict[str, list[dict[str, Any]]]:
    """Summaries of training runs by name, in order of seeds: what ``python -m benchmarks config`` stored."""
    stored = {name: entries(name) for name in names() if not name.startswith(COMPARISON)}
    return {
        name: [one["results"] for one in parts.values()]
        for name, parts in stored.items()
        if all(part.startswith("seed ") for part in parts)
    }


def comparisons() -> dict[str, list[Result]]:
    """Stored comparisons by name: what ``python -m benchmarks compare`` stored."""
    return {name: comparison(name) for name in names() if name.startswith(COMPARISON)}


def comparison(name: str) -> list[Result]:
    """The runs of one."""
    return in_order(_result(name, one) for one in entries(name).values())


def _result(name: str, entry: dict[str, Any]) -> Result:
    values = {
        **entry["results"],
        **entry["settings"],
        "seed": entry["seeds"][0],
        "versions": entry["versions"],
    }
    return result_from(values, f"{name}, {entry['part']}")


def spread(values: list[float | None]) -> str:
    """Mean and sample standard deviation."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.3f}"
    return f"{statistics.mean(known):.3f} ± {statistics.stdev(known):.3f}"


def explained(table: str, named: Iterable[tuple[str, Guarantee]]) -> str:
    """A table, and what the marks in it mean."""
    return "\n\n".join([table, *footnotes(named)])


def epsilon_of(summaries: list[dict[str, Any]]) -> str:
    """The largest ε of the seeds, marked by the weakest guarantee."""
    epsilons = [summary["epsilon"] for summary in summaries]
    return "none" if epsilons[0] is None else f"{max(epsilons):.3g}{mark(guarantee(summaries))}"


def guarantee(summaries: list[dict[str, Any]]) -> Guarantee:
    """The weakest guarantee of the seeds; unconditional where no private record was used, so there is no ε."""
    return weakest(guarantee_of(summary) for summary in summaries if summary["epsilon"] is not None)


def row(name: str, summaries: list[dict[str, Any]]) -> str:
    """One line of the table."""
    first = summaries[0]
    answered = "–"
    if first.get("queried"):
        answered = f"{statistics.mean(s['answered'] for s in summaries):.0f} of {first['queried']}"
    cells = [
        name,
        first["data"].removesuffix("DataModule"),
        first.get("labeler", first["student"]),
        epsilon_of(summaries),
        f"{first['delta']:g}" if first.get("delta") else "–",
        answered,
        spread([summary.get("label_accuracy") for summary in summaries]),
        spread([summary["test_accuracy"] for summary in summaries]),
        str(len(summaries)),
    ]
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The whole table as Markdown."""
    lines = [HEADER, *[row(name, summaries) for name, summaries in found.items()]]
    return explained("\n".join(lines), ((name, guarantee(summaries)) for name, summaries in found.items()))


def compared(name: str, results: list[Result]) -> str:
    """A comparison's plot and table as Markdown."""
    from pl_privknn.comparison import markdown_table

    picture = f"![test accuracy against ε: {name}](docs/guides/{name}.svg)"
    return f"{picture}\n\n{markdown_table(results)}"


def with_part(text: str, start: str, end: str, rendered: str) -> str:
    """README's text with the part between two marks replaced."""
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{README.name}: want one line {start!r} and one line {end!r} after it")
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{rendered}\n{end}{after}"


def rendered(text: str) -> str:
    """README's text with all its tables fresh."""
    text = with_part(text, START, END, table(runs()))
    if not (found := comparisons()) and COMPARE_START not in text:
        return text
    return with_part(text, COMPARE_START, COMPARE_END, "\n\n".join(compared(*each) for each in found.items()))


def old_plots() -> list[str]:
    """Plots of comparisons that don't show the stored results."""
    from pl_privknn.comparison.plot import digest_of

    plots = {PLOTS / f"{name}.svg": digest_of(results) for name, results in comparisons().items()}
    return [
        plot.name
        for plot, digest in plots.items()
        if not plot.is_file() or digest not in plot.read_text(encoding="utf-8")
    ]


def draw_comparisons() -> None:
    """Each comparison into ``docs/guides/<its name>.svg`` and ``.png``."""
    from pl_privknn.comparison.plot import draw

    for name, results in comparisons().items():
        draw(results, PLOTS / name, TITLES.get(name))


def fresh() -> dict[Path, str]:
    """README.md as the stored results say."""
    return {README: rendered(README.read_text(encoding="utf-8"))}
