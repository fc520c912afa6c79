"""Plots of comparisons, and figures for light and dark backgrounds."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pl_privknn.comparison.results import Result, mark, read_results, stated, write_csv
from pl_privknn.comparison.table import (
    Cells,
    cells_of,
    guarantees,
    joint_cost,
    mark_footnotes,
    markdown_table,
    mean_and_spread,
    titles_of,
    weakened,
)
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL, weakest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

#: Colours by name: as drawn, on light and on dark background. The drawn colour is a unique placeholder.
_COLOURS = {
    "ground": ("#fefefd", "#ffffff", "#14181d"),
    "ink": ("#1f2427", "#1f2428", "#e6e9ec"),
    "faint": ("#a9aeb3", "#8a9097", "#7d858d"),
}
_LINES = (  # after Okabe and Ito, darker on white and lighter on black
    ("#0072b1", "#0072b2", "#56b4e9"),
    ("#d55d00", "#d55e00", "#ff8f3f"),
    ("#009d73", "#008a64", "#33d3a1"),
    ("#cc78a7", "#b8568f", "#f0a6d0"),
    ("#7a5194", "#7a5195", "#b79cff"),
    ("#8c6c00", "#8c6d00", "#e8c93d"),
    ("#2a7f88", "#2a7f8e", "#7fe0e8"),
    ("#b01e30", "#b02030", "#ff8a8c"),
    ("#5a5a59", "#5a5a5a", "#c2c6ca"),
    ("#56823b", "#56823a", "#9bdb7d"),
)
#: Colours of background, text and axes, grid lines and bounds; and one colour per line.
GROUND, INK, FAINT = (_COLOURS[name][0] for name in ("ground", "ink", "faint"))
LINES = tuple(line[0] for line in _LINES)
MARKERS = "osD^vPX*<>pH"
#: Methods of the built-in comparisons; the position determines the colour on all plots.
_METHODS = (
    "public_curvature", "noisy_sgd_linear", "noisy_sgd_two_layer", "reverse_knn", "private_knn", "pate",
    "guided_pate", "ind_knn", "noisy_sgd", "noisy_sgd_teacher",
)  # fmt: skip


def styles(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method; models of one method share its colour and differ by marker."""
    free = list(methods)
    found: dict[str, tuple[str, str]] = {}
    places: dict[str, int] = {}
    taken = {_METHODS.index(name) for name in (m.partition(", ")[0] for m in free) if name in _METHODS}
    spare = itertools.cycle([place for place in range(len(LINES)) if place not in taken] or range(len(LINES)))
    for method in free:
        base = method.partition(", ")[0]
        if base not in places:
            places[base] = _METHODS.index(base) if base in _METHODS else next(spare)
        alike = sum(other.partition(", ")[0] == base for other in found)
        found[method] = LINES[places[base]], MARKERS[(places[base] + 4 * alike) % len(MARKERS)]
    return found


def colour_variables() -> tuple[str, str]:
    """CSS declarations of all colours, for light and dark backgrounds."""
    named = [*_COLOURS.items(), *((f"line{place}", line) for place, line in enumerate(_LINES))]
    light, dark = ("".join(f"--{name}:{colours[ground]};" for name, colours in named) for ground in (1, 2))
    return light, dark


def new_figure(width: float, height: float) -> Figure:
    """Empty figure, with sizes in inches, in these colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Axes) -> Axes:
    """Axes without a frame, with a faint grid."""
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, which="both")
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)
    axes.grid(color=FAINT, alpha=0.35, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def legend_beside(figure: Figure, named: Sequence[tuple[float, Line2D]], size: float = 8.5) -> None:
    """Add a legend to the right of all axes.

    Args:
        figure: with a constrained layout.
        named: height of each line's right end, and a line that carries its label and style; the highest comes first.
        size: of the text, in points.
    """
    handles = [line for _, line in sorted(named, key=lambda item: -item[0])]
    figure.legend(
        handles=handles, loc="outside right center", fontsize=size, frameon=False, labelcolor="linecolor"
    )


def themed_svg(figure: Figure, salt: str = "pl_privknn", as_text: bool = True) -> str:
    """SVG of a figure without a fixed size, in colours of CSS variables (see :func:`colour_variables`).

    Args:
        figure: drawn in the colours of this module.
        salt: for element ids; must differ between figures of one page.
        as_text: letters as text in the page's font, instead of outlines, which look the same everywhere.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none" if as_text else "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor=GROUND)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    text = f"{head}>{rest}"
    if as_text:
        text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", text)
        text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    for name, (drawn, *_) in [*_COLOURS.items(), *((f"line{i}", line) for i, line in enumerate(_LINES))]:
        text = text.replace(drawn, f"var(--{name})")
    return text.strip()


def save_svg(figure: Figure, path: Path, description: str) -> None:
    """Write a figure as an SVG file whose colours follow the reader's light or dark setting."""
    light, dark = colour_variables()
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head, rest = themed_svg(figure, as_text=False).split(">", 1)
    width, height = (72 * side for side in figure.get_size_inches())
    head = f'{head} width="{width:g}pt" height="{height:g}pt"'
    path.write_text(f"{head}><desc>{description}</desc>{style}{rest}\n", encoding="utf-8")


def save_png(figure: Figure, path: Path, description: str, dpi: int = 120) -> None:
    """Write a figure as PNG; the placeholder colours are visually equal to those on light background."""
    figure.savefig(path, metadata={"Description": description}, dpi=dpi, facecolor=GROUND)


# Width of the text below a plot in characters, and inches per line.
_CHARACTERS, _LINE = 16.0, 0.15
# Number of lines, and largest share of the height range, from which their ends get a separate panel.
_CROWD, _CROWDED = 5, 0.5


def digest_of(results: Sequence[Result]) -> str:
    """Hash of the plotted data, stored in the SVG, by which a test recognises an outdated plot."""
    names = ("title", "target_epsilon", "seed", "epsilon", "test_accuracy", "comparison", "delta")
    shown = [[*(result.values[name] for name in names), stated(result.guarantee)] for result in results]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def figure_of(results: Sequence[Result], title: str | None = None) -> Figure:
    """Figure of test accuracy against ε.

    The horizontal axis is logarithmic and shows the ε of the runs, not their target; beyond its end is what a method
    reaches without privacy, joined by dots. Points are means over seeds, bars their standard deviation, where there
    are several. Those whose guarantee is weaker than others'
    (:func:`~pl_privknn.comparison.table.weakened`) are hollow and dashed. The legend lists methods in the order of
    their lines' right ends, with marks for what holds only under a condition, or not at all; the text below says why.
    Where ends crowd, the left panel shows everything and the right one the crowd.

    Args:
        results: see :func:`~pl_privknn.comparison.results.read_results`.
        title: over the plot; by default the comparison's name.
    """
    cells = cells_of(results)
    first = results[0].values
    ends = _ends(cells)
    crowd = _crowd(cells, ends)
    figure = new_figure(8.4, 4.6)
    explain(figure, [caption(results), *mark_footnotes(cells)])
    if crowd is None:
        panels = [plain_axes(figure.add_subplot())]
    else:
        panels = [plain_axes(axes) for axes in figure.subplots(1, 2, width_ratios=(1, 1.4))]
    for axes in panels:
        _draw(axes, cells)
    if crowd is not None:
        panels[0].axhspan(*crowd, color=FAINT, alpha=0.18, linewidth=0)
        panels[0].set_title("all", fontsize=9.5, color=INK)
        panels[1].set_title("the shaded range", fontsize=9.5, color=INK)
        panels[1].set_ylim(*crowd)
    for axes in panels:
        axes.set_xlabel(
            f"ε at δ = {first['delta']:g} ({first['adjacency']}, a {first.get('unit', 'record')})", fontsize=9
        )
        axes.tick_params(axis="x", labelsize=7.5)
    panels[0].set_ylabel("test accuracy", color=INK)
    figure.suptitle(title or first["comparison"], color=INK, fontsize=12)
    legend_beside(figure, ends)
    return figure


def caption(results: Sequence[Result]) -> str:
    """Caption of a comparison's seeds and bars."""
    seeds = sorted({result.seed for result in results})
    what = "training, the choice of queries and the noise"
    if not all(result.values.get("noise_seeded") for result in results):
        what = "training and the choice of queries, not the noise, which is the operating system's"
    if len(seeds) == 1:
        return f"One run each, seed {seeds[0]}, which decides {what}."
    named = ", ".join(map(str, seeds))
    return f"Means over seeds {named}; bars are standard deviations. A seed decides {what}."


def explain(figure: Figure, notes: Sequence[str]) -> None:
    """Add explanations of the marks below a plot, and extend the figure for them."""
    if not notes:
        return
    width, height = figure.get_size_inches()
    lines = [line for note in notes for line in textwrap.wrap(note, round(_CHARACTERS * width))]
    figure.set_size_inches(width, height + _LINE * len(lines))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="x-small", color=INK)


def render(folder: Path, output: Path) -> str:
    """Write ``results.csv``, ``table.md`` and ``comparison.{svg,png}`` of the results in ``folder``.

    Returns:
        The table, and what all runs together cost.
    """
    results = read_results(folder)
    output.mkdir(parents=True, exist_ok=True)
    table = markdown_table(results)
    write_csv(results, output / "results.csv")
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    draw(results, output / "comparison")
    return f"{table}\n{joint_cost(results)}"


def draw(results: Sequence[Result], path: str | Path, title: str | None = None) -> None:
    """Write :func:`figure_of` to ``path`` with the suffixes ``.svg`` and ``.png``.

    The SVG is light or dark as its reader's system is, the PNG light.

    Args:
        results: the plotted results; both files carry their :func:`digest_of`.
        path: the file without its suffix.
        title: over the plot.
    """
    description = f"results {digest_of(results)}"
    figure = figure_of(results, title)
    save_svg(figure, Path(f"{path}.svg"), description)
    save_png(figure, Path(f"{path}.png"), description)


def _draw(axes: Axes, cells: Cells) -> None:
    """Draw all lines of a comparison, without labels."""
    known, out = guarantees(cells), weakened(cells)
    targets = sorted({target for _, target in cells if target < math.inf})
    beyond = _beyond(cells)
    for method, (colour, marker) in styles(titles_of(cells)).items():
        ends: list[tuple[float, float]] = []
        for apart in (False, True):
            shown = [key for key in known if key[0] == method and (key in out) == apart]
            if not shown:
                continue
            x, y, spreads = zip(*_points(cells, shown), strict=True)
            axes.errorbar(
                x,
                y,
                yerr=spreads if any(len(cells[key]) > 1 for key in shown) else None,
                color=colour,
                marker=marker,
                markersize=5,
                markerfacecolor="none" if apart else colour,
                linestyle="--" if apart else "-",
                capsize=2.5,
                label=titles_of(cells)[method] + mark(weakest(known[key] for key in shown)),
            )
            ends.append((x[-1], y[-1]))
        if bound := cells.get((method, math.inf)):
            height = mean_and_spread(bound)[0]
            if not ends:
                axes.axhline(height, color=colour, linestyle="-.", linewidth=1.1)
            else:
                last, reached = max(ends)
                axes.plot([last, beyond], [reached, height], ":", color=colour, linewidth=1.1)
                axes.plot([beyond], [height], marker, color=colour, markersize=5, markerfacecolor="none")
    axes.set_xscale("log")
    ticks = {target: f"{target:g}" for target in targets}
    if any(target == math.inf for _, target in cells):
        ticks[beyond] = "no\nprivacy"
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)


def _beyond(cells: Cells) -> float:
    """Position of runs without privacy on the ε axis: one step beyond the last ε."""
    targets = sorted({target for _, target in cells if target < math.inf}) or [1.0]
    step = (targets[-1] / targets[0]) ** (1 / (len(targets) - 1)) if len(targets) > 1 else 2.0
    return targets[-1] * step


def _ends(cells: Cells) -> list[tuple[float, Line2D]]:
    """Height of each line's right end, with a legend line of its name and style."""
    from matplotlib.lines import Line2D

    known, out = guarantees(cells), weakened(cells)
    found = []
    for method, (colour, marker) in styles(titles_of(cells)).items():
        targets = [target for other, target in cells if other == method]
        own = [guarantee for (other, _), guarantee in known.items() if other == method]
        style: Literal["-", "--", "-."] = (
            "-." if not own else "--" if any((method, target) in out for target in targets) else "-"
        )
        label = titles_of(cells)[method] + (mark(weakest(own)) if own else mark(UNCONDITIONAL))
        line = Line2D([], [], color=colour, marker=marker if own else "", linestyle=style, label=label)
        line.set_markersize(5)
        found.append((mean_and_spread(cells[method, max(targets)])[0], line))
    return found


def _crowd(cells: Cells, ends: Sequence[tuple[float, Line2D]]) -> tuple[float, float] | None:
    """Height range shown in a separate panel; None where the labels fit without one."""
    heights = [mean_and_spread(results)[0] for results in cells.values()]
    low, high = min(height for height, *_ in ends), max(height for height, *_ in ends)
    if len(ends) < _CROWD or not 0 < high - low < _CROWDED * (max(heights) - min(heights)):
        return None
    room = 0.12 * (high - low)
    return low - room, max(high, *heights) + room


def _points(cells: Cells, shown: Collection[tuple[str, float]]) -> list[tuple[float, float, float]]:
    """Points (ε, mean, standard deviation) of cells, by ascending ε."""
    return sorted(
        (max(result.epsilon for result in cells[key]), *mean_and_spread(cells[key])) for key in shown
    )
