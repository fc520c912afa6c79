"""Write the table of measured results into README.md: render.py [--check].

The table is made from ``benchmarks/results/<name>/seed*.json`` alone, so it can't differ from what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
START, END = "<!-- results: rendered by benchmarks/render.py -->", "<!-- end of results -->"
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


def spread(values: list[float | None]) -> str:
    """Mean and sample standard deviation."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.3f}"
    return f"{statistics.mean(known):.3f} ± {statistics.stdev(known):.3f}"


def row(name: str, summaries: list[dict[str, Any]]) -> str:
    """One line of the table; ε is the largest of the seeds."""
    first = summaries[0]
    epsilons = [summary["epsilon"] for summary in summaries]
    epsilon = "none" if epsilons[0] is None else f"{max(epsilons):.3g}"
    if first["guarantee"] == "conditional":
        epsilon += " (conditional)"
    answered = "–"
    if first.get("queried"):
        answered = f"{statistics.mean(s['answered'] for s in summaries):.0f} of {first['queried']}"
    cells = [
        name,
        first["data"].removesuffix("DataModule"),
        first.get("labeler", first["student"]),
        epsilon,
        f"{first['delta']:g}" if first.get("delta") else "–",
        answered,
        spread([summary.get("label_accuracy") for summary in summaries]),
        spread([summary["test_accuracy"] for summary in summaries]),
        str(len(summaries)),
    ]
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The whole table as Markdown."""
    return "\n".join([HEADER, *[row(name, summaries) for name, summaries in found.items()]])


def with_table(text: str, rendered: str) -> str:
    """README's text with its table replaced."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{rendered}\n{END}{after}"


def main() -> None:
    """Render, or check what is rendered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if README.md is not up to date")
    parsed = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    fresh = with_table(text, table(runs()))
    if parsed.check and fresh != text:
        raise SystemExit("README.md is not up to date; run benchmarks/render.py")
    README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
