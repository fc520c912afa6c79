"""The charts of a page, as SVG in its colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pl_privknn.comparison.plot import FAINT, INK, LINES, legend_beside, new_figure, plain_axes, themed_svg

Points = Sequence[tuple[float, float]]
# In inches of 72 points: letters of 10 points stay readable on a phone, where a page is about 5 inches wide.
_SIZE = (4.8, 2.9)


def line_chart(
    series: Mapping[str, Points],
    across: str,
    salt: str,
    share: bool = False,
    bounds: Mapping[str, float] | None = None,
    rounds: Sequence[float] = (),
) -> str:
    """Lines with a legend beside them.

    Args:
        series: points by name.
        across: what the horizontal axis shows.
        salt: a word that no other chart of the page has.
        share: the values are shares, shown up to 1.
        bounds: horizontal lines by name.
        rounds: places on the horizontal axis at which a labelling round began.
    """
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure.add_subplot())
    ends = []
    for place, (name, points) in enumerate(series.items()):
        colour = LINES[place % len(LINES)]
        across_values, values = zip(*points, strict=True)
        (line,) = axes.plot(
            across_values,
            values,
            color=colour,
            linewidth=1.8,
            marker="o" if len(points) <= 16 else "",
            markersize=3.5,
            label=name,
        )
        ends.append((float(values[-1]), line))
    for name, value in (bounds or {}).items():
        ends.append((value, axes.axhline(value, color=INK, linewidth=1.0, linestyle="--", label=name)))
    for place, start in enumerate(rounds):
        axes.axvline(start, color=FAINT, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"round {place + 2}", (start, 0.03), xycoords=("data", "axes fraction"), color=INK, fontsize=9
        )
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low) if share else min(low, 0.0), min(1.0, high) if share else high)
    axes.set_xlabel(across, fontsize=10.5)
    axes.tick_params(labelsize=10.5)
    legend_beside(figure, ends, size=10.5)
    return themed_svg(figure, salt)


def attacker_chart(rates: Points, salt: str = "attacker") -> str:
    """True- against false-positive rate of the best attacker."""
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure.add_subplot())
    axes.plot([point[0] for point in rates], [point[1] for point in rates], color=LINES[1], linewidth=2.0)
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("false alarms", fontsize=10.5)
    axes.set_ylabel("records detected, at most", fontsize=11, color=INK)
    axes.tick_params(labelsize=10.5)
    axes.annotate("blind guessing", (0.62, 0.52), color=INK, fontsize=10.5)
    return themed_svg(figure, salt)
