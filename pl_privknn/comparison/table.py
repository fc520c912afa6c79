"""A comparison as a Markdown table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pl_privknn.comparison.results import Result
from pl_privknn.comparison.spec import epsilon_text

#: Marks guarantees that hang on a condition.
MARK = "†"

Cells = Mapping[tuple[str, float], Sequence[Result]]


def cells_of(results: Sequence[Result]) -> dict[tuple[str, float], list[Result]]:
    """Results of all seeds by method and target, methods in the comparison's order."""
    cells: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        cells.setdefault((result.method, result.target), []).append(result)
    return cells


def mean_and_spread(results: Sequence[Result]) -> tuple[float, float]:
    """Mean accuracy over seeds and its sample standard deviation (0 for one seed)."""
    accuracies = [result.accuracy for result in results]
    return statistics.mean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def best_at(cells: Cells, target: float, *, conditional: bool = False) -> str | None:
    """The method of highest mean accuracy at a target, among those whose guarantee has no condition.

    Args:
        cells: see :func:`cells_of`.
        target: ε.
        conditional: look among methods with a conditional guarantee instead.
    """
    known = {
        method: mean_and_spread(results)[0]
        for (method, epsilon), results in cells.items()
        if epsilon == target and _is_conditional(results) == conditional
    }
    return max(known, key=lambda method: known[method]) if known else None


def markdown_table(results: Sequence[Result]) -> str:
    """Test accuracy, mean ± standard deviation over seeds, one line a method and one column a target.

    The best method of each column is bold, and named in the last line. Methods with a conditional guarantee are
    marked and kept out of that contest; where one of them is ahead, the last line says so.
    """
    cells = cells_of(results)
    methods = {result.method: result.title for result in results}
    targets = sorted({result.target for result in results})
    finite = [target for target in targets if target < math.inf]
    seeds = {result.seed for result in results}
    heads = [f"ε ≤ {epsilon_text(target)}" if target < math.inf else "without privacy" for target in targets]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---|" * len(targets)]
    best = {target: best_at(cells, target) for target in finite}
    for method, title in methods.items():
        row = []
        marked = False
        for target in targets:
            here = cells.get((method, target), [])
            text = _cell(here, len(seeds))
            if here and _is_conditional(here):
                marked = True
                text += f" {MARK}"
            elif here and best.get(target) == method:
                text = f"**{text}**"
            row.append(text)
        lines.append(f"| {title}{f' {MARK}' if marked else ''} | {' | '.join(row)} |")
    named = [_best(cells, methods, target) if target < math.inf else "" for target in targets]
    lines.append(f"| *best* | {' | '.join(named)} |")
    return "\n".join([*lines, "", _notes(results, cells)])


def _best(cells: Cells, methods: Mapping[str, str], target: float) -> str:
    first, other = best_at(cells, target), best_at(cells, target, conditional=True)
    text = "–" if first is None else methods[first]
    if other is not None:
        ahead = mean_and_spread(cells[other, target])[0]
        if first is None or ahead > mean_and_spread(cells[first, target])[0]:
            text += f" ({methods[other]} {MARK} is ahead)"
    return text


def _cell(results: Sequence[Result], seeds: int) -> str:
    if not results:
        return "–"
    mean, spread = mean_and_spread(results)
    text = f"{mean:.3f}" if len(results) == 1 else f"{mean:.3f} ± {spread:.3f}"
    return text if len(results) == seeds else f"{text} ({len(results)} of {seeds} seeds)"


def _notes(results: Sequence[Result], cells: Cells) -> str:
    first = results[0].values
    seeds = len({result.seed for result in results})
    counted = f"{seeds} seed{'' if seeds == 1 else 's, mean ± standard deviation'}"
    parts = [f"Test accuracy at δ = {first['delta']:g} ({first['adjacency']}), {counted}."]
    reached = [
        max(result.epsilon for result in here) / target
        for (_, target), here in cells.items()
        if target < math.inf
    ]
    if reached:
        parts.append(f"Each run's ε is at most its column's, and at least {min(reached):.2f} of it.")
    if any(result.conditional for result in results):
        parts.append(f"{MARK} The guarantee holds only under a condition.")
    return " ".join(parts)


def _is_conditional(results: Sequence[Result]) -> bool:
    return any(result.conditional for result in results)
