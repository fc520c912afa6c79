"""Self-contained page of a run, a comparison or a ledger."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pl_privknn import __version__
from pl_privknn._checks import at_most, printable
from pl_privknn.comparison.plot import (
    FAINT,
    INK,
    LINES,
    colour_variables,
    figure_of,
    legend_beside,
    new_figure,
    plain_axes,
    themed_svg,
)
from pl_privknn.privacy.audit import reading
from pl_privknn.privacy.files import write_durably, write_json
from pl_privknn.privacy.verification import audit_ledger
from pl_privknn.report.card import card_of
from pl_privknn.report.facts import audited, comparison_facts, is_run, ledger_facts, percent, run_facts

if TYPE_CHECKING:
    from pl_privknn.comparison.results import Result

_CARD = "privacy_card"
Points = Sequence[tuple[float, float]]
# In inches of 72 points: letters of 10 points stay readable on a phone, where a page is about 5 inches wide.
_SIZE = (4.8, 2.9)


def write_report(path: str | Path, output: str | Path | None = None, exact: bool = True) -> Path:
    """Write one HTML file that needs no network, and the privacy card into the same folder.

    Args:
        path: the folder of a run or of a comparison, or a ledger.
        output: the HTML file; by default ``report.html`` in the folder, or ``NAME.report.html`` next to the ledger.
        exact: also compute the exact worst case (seconds).

    Returns:
        The HTML file. ``privacy_card.md`` and ``privacy_card.json`` are in its folder, but not for a comparison.

    Raises:
        ValueError: where ``path`` is none of these, or a file in it is damaged.
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
        facts, results, audit = facts_of(path, exact)
        if output is None:
            output = path / "report.html" if path.is_dir() else path.with_suffix(".report.html")
        output = Path(output)
        if output.is_dir():
            raise ValueError(f"output={str(output)!r} is a folder; name the HTML file")
        output.parent.mkdir(parents=True, exist_ok=True)
        write_durably(output, render(facts, results))
        if facts.get("promise") is not None:
            write_card(card_of(facts), output.parent)
    return output


def write_card(card: dict[str, Any], output: Path) -> None:
    """Write a privacy card into a folder, for programs and for people.

    Args:
        card: see :func:`privacy_card`.
        output: the folder.
    """
    write_json(output / f"{_CARD}.json", card)
    write_durably(output / f"{_CARD}.md", card_markdown(card))


def privacy_card(run: str | Path, exact: bool = True) -> dict[str, Any]:
    """The privacy card of a run's folder, or of a ledger, as plain JSON types.

    An infinite ε is a float here, and the string ``"inf"`` in ``privacy_card.json``: JSON has no infinite numbers.

    Args:
        run: the folder, or the ledger's file.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: for a comparison, or a run that used no private record; and as :func:`write_report`.
    """
    with reading(run):
        return card_of(facts_of(run, exact)[0])


def facts_of(
    path: str | Path, exact: bool = True
) -> tuple[dict[str, Any], list[Result], dict[str, Any] | None]:
    """Facts of a page as plain JSON types, results of a comparison, and the audit of a private run.

    The template sees nothing else.
    """
    path = Path(path)
    results: list[Result] = []
    audit = None
    if path.is_file():
        facts = {
            "kind": "ledger",
            "title": path.name,
            **ledger_facts(path, audit_ledger(path, exact=exact), exact),
        }
    elif not path.is_dir():
        raise FileNotFoundError(
            f"there is nothing at {path}; name a run's folder, a comparison's folder or a ledger"
        )
    elif is_run(path):
        audit = audited(path, exact)
        facts = run_facts(path, audit, exact)
    else:
        try:
            facts, results = comparison_facts(path)
        except ValueError as error:
            raise ValueError(f"{error}; nor is it a run's folder (summary.json, ledger.sqlite)") from None
    return json.loads(json.dumps(facts)), results, audit  # tuples as lists


def card_markdown(card: dict[str, Any]) -> str:
    """Privacy card in Markdown: a page in plain words, then the technical details."""
    return str(_environment().get_template("privacy_card.md.j2").render(card=card, version=__version__))


def render(facts: dict[str, Any], results: list[Result] | None = None) -> str:
    """HTML page of facts, and of the results of a comparison's plot."""
    template = _environment().get_template("report.html.j2")
    light, dark = colour_variables()
    parts = {**dict.fromkeys(("comparison", "answers", "student", "checks", "settings", "versions")), **facts}
    charts = _charts(facts, results or [])
    return str(template.render(facts=parts, charts=charts, light=light, dark=dark, version=__version__))


def _charts(facts: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    charts: dict[str, Any] = dict.fromkeys(("attacker", "growth", "comparison"))
    if (promise := facts.get("promise")) is not None:
        charts["attacker"] = attacker_chart(promise["attacker"]["curve"])
        if len(growth := facts["spent"]["growth"]) > 2:  # one release is no curve
            charts["growth"] = line_chart(
                {"spent": growth}, "releases charged", "growth", bounds={"promised": promise["epsilon"]}
            )
    charts["curves"] = [
        {
            "title": curve["title"],
            "svg": line_chart(
                curve["series"], "epoch", f"curve{place}", curve["share"], rounds=curve["rounds"]
            ),
        }
        for place, curve in enumerate(facts.get("curves", []))
    ]
    if results:
        charts["comparison"] = themed_svg(figure_of(results), "comparison")
    return charts


def line_chart(
    series: Mapping[str, Points],
    across: str,
    salt: str,
    share: bool = False,
    bounds: Mapping[str, float] | None = None,
    rounds: Sequence[float] = (),
) -> str:
    """Line chart with a legend.

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


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pl_privknn.report", "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "md": _markdown, "yaml": _scalar, "slug": _slug}
    environment.filters["share"] = lambda value: "–" if value is None else f"{100 * value:.1f} %"
    environment.filters["figure"] = lambda value: "∞" if value is None else at_most(value)
    return environment


def _markdown(text: Any) -> str:
    """Escape text of an untrusted file: no line, column, link, emphasis or HTML comes from it."""
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", html.escape(printable(str(text)), quote=False))


def _scalar(value: Any) -> str:
    """A value as YAML, on one line."""
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, str)
        else yaml.safe_dump(value).partition("\n")[0]
    )


def _slug(text: Any) -> str:
    return re.sub(r"[^a-z0-9]+", "-", str(text).lower()).strip("-") or "run"
