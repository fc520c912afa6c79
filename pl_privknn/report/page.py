"""Page of a run or a ledger, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_privknn import __version__
from pl_privknn._figures import COLOURS, INK, inline_svg, new_figure, plain_axes
from pl_privknn.privacy.card import card_of, templates, write_card
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.verify import reading
from pl_privknn.report.facts import facts_of

Points = Sequence[tuple[float, float]]
# In inches of 72 points: letters of 10 points stay readable on a phone, where a page is about 5 inches wide.
_SIZE, _LETTERS = (4.8, 2.9), 10.5
# Facts that a ledger, or a run without private records, lacks.
_PARTS = (
    "promise",
    "released",
    "columns",
    "answers",
    "student",
    "together",
    "checks",
    "settings",
    "versions",
)


def write_report(path: str | Path, output: str | Path | None = None, exact: bool = True) -> Path:
    """Write one HTML file that needs no network, and the privacy card into the same folder.

    Args:
        path: the folder of a run, or a ledger.
        output: the HTML file; by default ``report.html`` in the folder, or ``NAME.report.html`` next to the ledger.
        exact: also compute the exact worst case (seconds).

    Returns:
        The HTML file. ``privacy_card.md`` and ``privacy_card.json`` are in its folder, but not for a run without
        private records.

    Raises:
        ValueError: where ``path`` is neither, or a file in it is damaged.
        LedgerCorrupt: for a ledger whose rows do not fit.
        FileNotFoundError: if there is nothing at ``path``.

    Example:
        >>> import tempfile
        >>> from pl_privknn.privacy import Charge, Gaussian, Ledger
        >>> from pl_privknn.report import write_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Ledger(f"{folder}/ledger.sqlite").run("first", plan=[Charge(Gaussian(sigma=4.0))])
        ...     run.ledger.close()
        ...     page = write_report(f"{folder}/ledger.sqlite")
        ...     page.name, "ε = 0.926" in page.read_text(encoding="utf-8")
        ...
        ('ledger.report.html', True)
    """
    path = Path(path)
    with reading(path):
        facts = facts_of(path, exact)
        if output is None:
            output = path / "report.html" if path.is_dir() else path.with_suffix(".report.html")
        output = Path(output)
        if output.is_dir():
            raise ValueError(f"output={str(output)!r} is a folder; name the HTML file")
        output.parent.mkdir(parents=True, exist_ok=True)
        write_durably(output, render_page(facts))
        if facts.get("promise") is not None:
            write_card(card_of(facts), output.parent)
    return output


def render_page(facts: dict[str, Any]) -> str:
    """HTML page of facts."""
    parts = {
        **dict.fromkeys(_PARTS),
        **facts,
    }
    charts: dict[str, Any] = {"attacker": None, "growth": None, "reliability": None}
    if parts["student"] and (bins := parts["student"].get("test_reliability")):
        charts["reliability"] = reliability_chart(bins)
    if (promise := parts["promise"]) is not None:
        charts["attacker"] = attacker_chart(promise["attacker"]["curve"], promise["unit"])
        if len(growth := facts["spent"]["growth"]) > 2:  # one release is no curve
            charts["growth"] = growth_chart(growth, promise["epsilon"])
    template = templates("pl_privknn.report", "templates").get_template("report.html.j2")
    return str(template.render(facts=parts, charts=charts, version=__version__))


def attacker_chart(rates: Points, unit: str) -> str:
    """Chart of the best attacker's true- against false-positive rate."""
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure)
    axes.plot(*zip(*rates, strict=True), color=COLOURS[1], linewidth=2.0)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1.2, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("false alarms", fontsize=_LETTERS)
    axes.set_ylabel(f"{unit}s detected, at most", fontsize=_LETTERS)
    axes.tick_params(labelsize=_LETTERS)
    axes.annotate("blind guessing", (0.62, 0.52), color=INK, fontsize=_LETTERS)
    return inline_svg(figure, "attacker")


def growth_chart(spent: Points, promised: float) -> str:
    """Chart of the spent ε against the number of releases, with the stated ε."""
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure)
    axes.plot(
        *zip(*spent, strict=True), color=COLOURS[0], linewidth=1.8, marker="o", markersize=3.5, label="spent"
    )
    axes.axhline(promised, color=INK, linewidth=1.0, linestyle="--", label="promised")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("releases charged", fontsize=_LETTERS)
    axes.tick_params(labelsize=_LETTERS)
    figure.legend(loc="outside right center", fontsize=_LETTERS, frameon=False, labelcolor="linecolor")
    return inline_svg(figure, "growth")


def reliability_chart(bins: Sequence[Sequence[float]]) -> str:
    """Chart of accuracy against probability, by bins of (examples, mean probability, accuracy)."""
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure)
    counts, means, accuracies = zip(*bins, strict=True)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1.2, linestyle="--")
    axes.plot(means, accuracies, color=COLOURS[0], linewidth=1.2)
    areas = [12 + 200 * count / sum(counts) for count in counts]
    axes.scatter(means, accuracies, s=areas, color=COLOURS[0], zorder=3)
    axes.set(xlim=(0, 1.03), ylim=(0, 1.03))
    axes.set_xlabel("probability of the prediction", fontsize=_LETTERS)
    axes.set_ylabel("share of right ones", fontsize=_LETTERS)
    axes.tick_params(labelsize=_LETTERS)
    return inline_svg(figure, "reliability")
