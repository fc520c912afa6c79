"""A comparison as a plot: test accuracy against ε."""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pl_privknn.comparison.marks import mark, stated
from pl_privknn.comparison.results import Result
from pl_privknn.comparison.table import (
    Cells,
    cells_of,
    guarantees,
    marks_explained,
    mean_and_spread,
    weakened,
)
from pl_privknn.privacy.guarantee import weakest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*<>pH"
# Of the text below a plot, in characters and inches a line.
_CHARACTERS, _LINE = 17.0, 0.14


def digest_of(results: Sequence[Result]) -> str:
    """Hash of what a plot shows; the SVG carries it, so that a test can tell an old plot."""
    names = (
        "title",
        "target_epsilon",
        "seed",
        "epsilon",
        "test_accuracy",
        "comparison",
        "delta",
    )
    shown = [[*(result.values[name] for name in names), stated(result.guarantee)] for result in results]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def figure_of(results: Sequence[Result], title: str | None = None) -> Figure:
    """Test accuracy against ε.

    The horizontal axis is logarithmic and shows ε of the runs, not their target. Points are means over seeds,
    bars their standard deviation. Those whose guarantee is weaker than others'
    (:func:`~pl_privknn.comparison.table.weakened`) are hollow and dashed. The legend marks what holds only under
    a condition, or not at all, and the text below says why. Horizontal lines are bounds without privacy, in the
    colour of their method, or black for methods that have nothing else.

    Args:
        results: see :func:`~pl_privknn.comparison.results.read_results`.
        title: over the plot; by default the comparison's name.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = cells_of(results)
    methods = {result.method: result.title for result in results}
    colours = matplotlib.colormaps["tab10" if len(methods) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    explain(figure, marks_explained(cells))
    axes = figure.add_subplot()
    bounds, known, out = False, guarantees(cells), weakened(cells)
    for place, (method, name) in enumerate(methods.items()):
        colour, marker = colours[place % len(colours)], _MARKERS[place % len(_MARKERS)]
        for apart in (False, True):
            shown = [key for key in known if key[0] == method and (key in out) == apart]
            if shown:
                points = _points(cells, shown)
                axes.errorbar(
                    [point[0] for point in points],
                    [point[1] for point in points],
                    yerr=[point[2] for point in points],
                    color=colour,
                    marker=marker,
                    markerfacecolor="none" if apart else colour,
                    linestyle="--" if apart else "-",
                    capsize=3,
                    label=name + mark(weakest(known[key] for key in shown)),
                )
        if bound := cells.get((method, math.inf)):
            alone = all(target == math.inf for other, target in cells if other == method)
            bounds |= not alone
            axes.axhline(
                mean_and_spread(bound)[0],
                color="black" if alone else colour,
                linestyle="-." if alone else ":",
                linewidth=1,
                label=f"{name} (no privacy)" if alone else None,
            )
    first = results[0].values
    axes.set_xscale("log")
    if targets := sorted({result.target for result in results if result.target < math.inf}):
        axes.set_xticks(targets, [f"{target:g}" for target in targets])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(f"ε at δ = {first['delta']:g} ({first['adjacency']})")
    axes.set_ylabel("test accuracy")
    axes.set_title(title or first["comparison"])
    axes.grid(alpha=0.3)
    if bounds:
        axes.plot([], [], ":", color="gray", label="the method without privacy")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def explain(figure: Figure, notes: Sequence[str]) -> None:
    """Write what the marks of a plot mean below it, and make room for that."""
    if not notes:
        return
    width, height = figure.get_size_inches()
    lines = [line for note in notes for line in textwrap.wrap(note, round(_CHARACTERS * width))]
    figure.set_size_inches(width, height + _LINE * len(lines))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="x-small")


def draw(results: Sequence[Result], path: str | Path, title: str | None = None) -> None:
    """Write :func:`figure_of` into ``path`` with the endings ``.svg`` and ``.png``.

    Args:
        results: what is drawn; the SVG carries their :func:`digest_of`.
        path: the file without its ending.
        title: over the plot.
    """
    import matplotlib

    description = f"results {digest_of(results)}"
    # The same file for the same results.
    with matplotlib.rc_context({"svg.hashsalt": "pl_privknn"}):
        figure = figure_of(results, title)
        figure.savefig(Path(f"{path}.svg"), metadata={"Date": None, "Description": description})
        figure.savefig(Path(f"{path}.png"), metadata={"Description": description}, dpi=120)


def _points(cells: Cells, shown: Collection[tuple[str, float]]) -> list[tuple[float, float, float]]:
    """(ε, mean, standard deviation) of cells, ascending."""
    return sorted(
        (max(result.epsilon for result in cells[key]), *mean_and_spread(cells[key])) for key in shown
    )
