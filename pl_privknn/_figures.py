"""Figures that are readable on light and dark backgrounds: transparent, with text in a middle grey."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour of text and axes.
INK = "#7f7f80"
#: Colour and marker of each line, in turn.
COLOURS = (
    *("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9"),
    *("#e7ba52", "#3b4cc0", "#00a087", "#7b4173", "#8c6d31", "#98df8a", "#bd0026", "#5254a3"),
)
MARKERS = "osD^vPX*<>"


def new_figure(width: float, height: float) -> Figure:
    """Empty figure, with sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(figure: Figure) -> Axes:
    """Add axes without a frame, with a faint grid."""
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both")
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def inline_svg(figure: Figure, salt: str) -> str:
    """SVG of a figure for a page, without a fixed size, in the page's font and colour of text.

    Args:
        figure: drawn in :data:`INK`.
        salt: for element ids; must differ between figures of one page.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    head, rest = text[text.index("<svg") :].split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>\s*", "", rest, flags=re.DOTALL)
    rest = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", rest)
    return f"{head}>{rest}".replace(INK, "currentColor").strip()
