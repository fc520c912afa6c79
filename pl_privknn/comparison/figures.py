"""Figures that can be read on light and on dark ground: one SVG whose colours follow the reader's setting."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours by name: as drawn, on light ground, on dark ground. What is drawn is a stand-in that occurs nowhere else.
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
#: To draw with: the ground, text and axes, grid lines and bounds; and one colour a line.
GROUND, INK, FAINT = (_COLOURS[name][0] for name in ("ground", "ink", "faint"))
LINES = tuple(line[0] for line in _LINES)
MARKERS = "osD^vPX*<>pH"


def colour_variables() -> tuple[str, str]:
    """CSS declarations of all colours, for light and for dark ground."""
    named = [*_COLOURS.items(), *((f"line{place}", line) for place, line in enumerate(_LINES))]
    light, dark = ("".join(f"--{name}:{colours[ground]};" for name, colours in named) for ground in (1, 2))
    return light, dark


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches, in these colours."""
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


def thin_labels(axes: Axes) -> None:
    """Hide labels below a drawn horizontal axis that would run into their right neighbours; their ticks stay."""
    free = float("inf")
    for label in reversed(axes.get_xticklabels()):
        box = label.get_window_extent()
        label.set_visible(box.x1 < free)
        free = box.x0 if box.x1 < free else free


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], size: float = 8.5) -> None:
    """Write labels beside the right end of axes, at their heights, moved apart where they would touch.

    Args:
        axes: with their final limits and scale.
        ends: height in data, text and colour of each.
        size: of the text, in points.
    """
    figure = axes.figure
    pixels = axes.get_window_extent().height
    gap = size * 1.25 * figure.dpi / 72 / pixels  # in parts of the axes' height
    places = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1]) for y, *_ in ends
    ]
    for (_, text, colour), place, moved in zip(ends, places, apart(places, gap), strict=True):
        axes.annotate(
            text,
            xy=(1.0, place),
            xycoords="axes fraction",
            xytext=(1.045, moved),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=size,
            arrowprops={  # from the text's left end: from its middle, lines would cross other texts
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def apart(places: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Places moved by the least squares that put them ``gap`` apart, in their order, within bounds if they fit."""
    import numpy as np
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(places, kind="stable")
    steps = gap * np.arange(len(places))
    # Less the gaps before it, no place may lie below the one before: isotonic regression.
    fit = IsotonicRegression(y_min=low, y_max=max(low, high - float(steps[-1])))
    moved = np.empty(len(places))
    moved[order] = fit.fit_transform(np.arange(len(places)), np.asarray(places)[order] - steps) + steps
    return [float(place) for place in moved]


def themed_svg(figure: Figure, salt: str = "pl_privknn", as_text: bool = True) -> str:
    """The figure as SVG without a size of its own, in colours of CSS variables (see :func:`colour_variables`).

    Args:
        figure: drawn in the colours of this module.
        salt: of the ids within; figures of one page need different ones.
        as_text: letters as text in the page's font, or as outlines, which look alike everywhere.
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
    """The figure as a file of its own, whose colours follow the reader's setting."""
    light, dark = colour_variables()
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head, rest = themed_svg(figure, as_text=False).split(">", 1)
    width, height = (72 * side for side in figure.get_size_inches())
    head = f'{head} width="{width:g}pt" height="{height:g}pt"'
    path.write_text(f"{head}><desc>{description}</desc>{style}{rest}\n", encoding="utf-8")


def save_png(figure: Figure, path: Path, description: str, dpi: int = 120) -> None:
    """The figure as PNG; its stand-in colours are those of light ground to within what eyes can see."""
    figure.savefig(path, metadata={"Description": description}, dpi=dpi, facecolor=GROUND)
