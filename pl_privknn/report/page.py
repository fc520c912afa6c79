"""Page of a run or a ledger, in one file that needs no network, and its privacy card."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pl_privknn import __version__
from pl_privknn._checks import at_most, printable
from pl_privknn._figures import COLOURS, INK, inline_svg, new_figure, plain_axes
from pl_privknn.privacy.audit import reading
from pl_privknn.privacy.files import write_durably, write_json
from pl_privknn.privacy.verification import audit_ledger
from pl_privknn.report.facts import audited, card_of, ledger_facts, percent, run_facts

_CARD = "privacy_card"
#: Files of which a run's folder has at least one.
_FILES = ("summary.json", "labels.sqlite", "ledger.sqlite")
Points = Sequence[tuple[float, float]]
# In inches of 72 points: letters of 10 points stay readable on a phone, where a page is about 5 inches wide.
_SIZE, _LETTERS = (4.8, 2.9), 10.5


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
        ValueError: for a run that used no private record; and as :func:`write_report`.
    """
    with reading(run):
        return card_of(facts_of(run, exact))


def facts_of(path: str | Path, exact: bool = True) -> dict[str, Any]:
    """Facts of a page as plain JSON types.

    The template sees nothing else.
    """
    path = Path(path)
    if path.is_file():
        ledger = ledger_facts(path, audit_ledger(path, exact=exact), exact)
        facts = {"kind": "ledger", "title": path.name, **ledger}
    elif not path.is_dir():
        raise FileNotFoundError(f"there is nothing at {path}; name a run's folder or a ledger")
    elif not any((path / name).is_file() for name in _FILES):
        raise ValueError(
            f"{path} is no run's folder (summary.json, ledger.sqlite); name a run's folder or a ledger"
        )
    else:
        facts = run_facts(path, audited(path, exact), exact)
    plain: dict[str, Any] = json.loads(json.dumps(facts))  # tuples as lists
    return plain


def card_markdown(card: dict[str, Any]) -> str:
    """Privacy card in Markdown: a page in plain words, then the technical details."""
    return str(_environment().get_template("privacy_card.md.j2").render(card=card, version=__version__))


def render_page(facts: dict[str, Any]) -> str:
    """HTML page of facts."""
    parts = {**dict.fromkeys(("promise", "answers", "student", "checks", "settings", "versions")), **facts}
    charts: dict[str, Any] = {"attacker": None, "growth": None}
    if (promise := parts["promise"]) is not None:
        charts["attacker"] = attacker_chart(promise["attacker"]["curve"])
        if len(growth := facts["spent"]["growth"]) > 2:  # one release is no curve
            charts["growth"] = growth_chart(growth, promise["epsilon"])
    template = _environment().get_template("report.html.j2")
    return str(template.render(facts=parts, charts=charts, version=__version__))


def attacker_chart(rates: Points) -> str:
    """True- against false-positive rate of the best attacker."""
    figure = new_figure(*_SIZE)
    axes = plain_axes(figure)
    axes.plot(*zip(*rates, strict=True), color=COLOURS[1], linewidth=2.0)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1.2, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("false alarms", fontsize=_LETTERS)
    axes.set_ylabel("records detected, at most", fontsize=_LETTERS)
    axes.tick_params(labelsize=_LETTERS)
    axes.annotate("blind guessing", (0.62, 0.52), color=INK, fontsize=_LETTERS)
    return inline_svg(figure, "attacker")


def growth_chart(spent: Points, promised: float) -> str:
    """ε spent against the number of releases, with the stated ε."""
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
