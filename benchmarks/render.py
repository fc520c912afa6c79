"""Write the tables of measured results into README.md: render.py [--check].

The tables are made from ``benchmarks/results/<name>/seed*.json`` and, for comparisons, from
``benchmarks/results/compare_<name>/*.json`` alone, so they can't differ from what was measured. ``--check`` tells
a plot of a comparison that was drawn from other results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pl_privknn.comparison.marks import footnotes, guarantee_of, mark
from pl_privknn.privacy.guarantee import Guarantee, weakest

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
DOCS = HERE.parent / "docs"
PLOTS = DOCS / "guides"
START, END = "<!-- results: rendered by benchmarks/render.py -->", "<!-- end of results -->"
COMPARE_START = "<!-- comparisons: rendered by benchmarks/render.py -->"
COMPARE_END = "<!-- end of comparisons -->"
HEADER = (
    "| run | data | teacher | ε | δ | answered | label accuracy | student's test accuracy | seeds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def runs(results: Path = HERE / "results") -> dict[str, list[dict[str, Any]]]:
    """Summaries by name of the run, in order of seeds."""
    found = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("seed*.json"))]
        if summaries:
            found[folder.name] = summaries
    return found


def comparisons(results: Path = HERE / "results") -> list[Path]:
    """Folders of stored comparisons."""
    return sorted(path for path in results.glob("compare_*") if path.is_dir() and any(path.glob("*.json")))


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


def compared(folder: Path) -> str:
    """A comparison's plot and table as Markdown."""
    from pl_privknn.comparison import markdown_table, read_results

    picture = f"![test accuracy against ε: {folder.name}](docs/guides/{folder.name}.png)"
    return f"{picture}\n\n{markdown_table(read_results(folder))}"


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
    return with_part(text, COMPARE_START, COMPARE_END, "\n\n".join(map(compared, found)))


def old_plots() -> list[str]:
    """Plots of comparisons that don't show the stored results."""
    old = []
    for folder in comparisons():
        from pl_privknn.comparison import read_results
        from pl_privknn.comparison.plot import digest_of

        plot = PLOTS / f"{folder.name}.svg"
        if not plot.is_file() or digest_of(read_results(folder)) not in plot.read_text(encoding="utf-8"):
            old.append(plot.name)
    return old


def main() -> None:
    """Render, or check what is rendered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if README.md or a plot is not up to date")
    parsed = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    fresh = rendered(text)
    if parsed.check and fresh != text:
        raise SystemExit("README.md is not up to date; run benchmarks/render.py")
    if parsed.check and (old := old_plots()):
        raise SystemExit(f"docs/guides/{old[0]} is not up to date; run benchmarks/plot.py")
    if not parsed.check:
        README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
