"""Plot of test accuracy against ε, and all files of a comparison's results."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pl_privknn._checks import counted
from pl_privknn._figures import COLOURS, INK, MARKERS, new_figure, plain_axes
from pl_privknn.comparison.table import (
    Cells,
    Result,
    cells_of,
    guarantee_of_method,
    guarantees,
    mark,
    mark_footnotes,
    markdown_table,
    mean_and_spread,
    over_test_examples,
    terms,
    titles_of,
    weakened,
    write_csv,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (8.4, 5.4)
# Of the vertical axis, which is logarithmic in the error, so that good methods are told apart.
_TICKS = (0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 1)


def results_digest(results: Sequence[Result]) -> str:
    """Hash of the results' table, stored in plots, by which a test recognises an outdated one."""
    return hashlib.sha256(markdown_table(results).encode()).hexdigest()[:16]


def figure_of(results: Sequence[Result], title: str) -> Figure:
    """Figure of test accuracy against the ε of the runs, both on logarithmic axes (of the error).

    Points are means over seeds after the last epoch, bars their standard deviation, or of one seed the 95 % interval
    over test examples. Methods
    whose guarantee is weaker than others' (:func:`~pl_privknn.comparison.table.weakened`) are hollow and dashed; the
    text below explains the marks. Beyond the end of the axis is what a method reaches without privacy, joined by
    dots; a method that has no ε is a grey horizontal line.
    """
    cells = cells_of(results)
    notes = [_seeds(results), *mark_footnotes(cells)]
    lines = [line for note in notes for line in textwrap.wrap(note, round(16 * _SIZE[0]))]
    figure = new_figure(_SIZE[0], _SIZE[1] + 0.15 * len(lines))
    axes = plain_axes(figure)
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(_by_error, lambda height: 1.001 - np.exp(-height)))
    targets = sorted({target for _, target in cells if target < math.inf}) or [1.0]
    step = (targets[-1] / targets[0]) ** (1 / (len(targets) - 1)) if len(targets) > 1 else 2.0
    beyond = targets[-1] * step
    for place, method in enumerate(titles_of(cells)):
        _draw(axes, cells, method, place, beyond)
    ticks = {target: f"{target:g}" for target in targets}
    if {method for method, target in cells if target == math.inf} & {
        method for method, _ in guarantees(cells)
    }:
        ticks[beyond] = "no\nprivacy"
    spent = [result.values["epsilon"] for result in results if result.target < math.inf]
    if len(ticks) == 1 and spent:  # the runs' own ε often differ by little, which would fill the axis
        axes.set_xlim(min(targets[0] / 2, 0.9 * min(spent)), max(targets[0] * 2, 1.1 * max(spent)))
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"ε at {terms(results)}" if terms(results) else "ε", fontsize=9)
    axes.set_ylabel("test accuracy")
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 1.0))
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high])
    figure.suptitle(title, color=INK, fontsize=12)
    figure.legend(loc="outside right center", fontsize=8.5, frameon=False, labelcolor="linecolor")
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="x-small", color=INK)
    return figure


def _by_error(accuracy: np.ndarray) -> np.ndarray:
    """Coordinates of accuracies on the vertical axis: minus the logarithm of the error."""
    return -np.log(np.maximum(1.001 - accuracy, 1e-4))


def _draw(axes: Axes, cells: Cells, method: str, place: int, beyond: float) -> None:
    """Draw the line of one method, with an entry of the legend."""
    apart = any(key[0] == method for key in weakened(cells))
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    hollow: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": "none"}
    label = titles_of(cells)[method] + mark(guarantee_of_method(cells, method))
    points = sorted(
        (max(result.values["epsilon"] for result in here), *mean_and_spread(here))
        for (name, target), here in cells.items()
        if name == method and target < math.inf
    )
    bound = cells.get((method, math.inf))
    if not points:
        assert bound is not None
        label = f"{label}, without privacy"
        axes.axhline(mean_and_spread(bound)[0], color=INK, linestyle="-.", label=label)
        return
    x, y, spread = zip(*points, strict=True)
    style = {**hollow, "linestyle": "--"} if apart else {**hollow, "markerfacecolor": colour}
    axes.errorbar(x, y, yerr=spread if any(spread) else None, capsize=2.5, label=label, **style)
    if bound is not None:
        height = mean_and_spread(bound)[0]
        axes.plot([x[-1], beyond], [y[-1], height], ":", color=colour, linewidth=1.1)
        axes.plot([beyond], [height], **hollow)


def _seeds(results: Sequence[Result]) -> str:
    """Caption of a comparison's seeds and bars."""
    seeds = sorted({result.seed for result in results})
    if len(seeds) == 1:
        bars = "; bars are 95 % intervals over test examples" if over_test_examples(results) else ""
        return f"One run each, seed {seeds[0]}{bars}."
    return f"Means over seeds {', '.join(map(str, seeds))}; bars are standard deviations."


def draw(results: Sequence[Result], path: str | Path, title: str) -> None:
    """Write :func:`figure_of` to ``path`` as ``.svg`` and ``.png``, with :func:`results_digest` in both."""
    import matplotlib

    figure, description = figure_of(results, title), f"results {results_digest(results)}"
    with matplotlib.rc_context({"svg.hashsalt": "pl_privknn"}):  # the same file each time
        figure.savefig(f"{path}.svg", metadata={"Date": None, "Description": description})
    figure.savefig(f"{path}.png", metadata={"Description": description}, dpi=120, facecolor="white")


def render(results: Sequence[Result], output: Path, title: str, runs: int) -> str:
    """Write ``results.csv``, ``table.md`` and ``comparison.{svg,png}``; returns the table.

    Args:
        results: of the runs that are finished.
        output: folder of the files.
        title: of the plot.
        runs: number of all runs of the comparison; with fewer results, table and plot are marked as partial.

    Raises:
        ValueError: without results.
    """
    if not results:
        raise ValueError(f"{output} holds no finished run of the comparison")
    output.mkdir(parents=True, exist_ok=True)
    table = markdown_table(results)
    if len(results) < runs:
        partial = f"partial: {len(results)} of {counted(runs, 'run')}"
        title, table = f"{title} ({partial})", f"{partial}\n\n{table}"
    write_csv(results, output / "results.csv")
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    draw(results, output / "comparison", title)
    return table
