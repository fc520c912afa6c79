"""Stored results: one file per benchmark in ``results/``, with one entry per measurement, and their tables.

An entry names what made it, so that an old figure is not taken for one of today's code::

    {"part": "seed 0", "commit": {…}, "machine": {…}, "versions": {…}, "seeds": [0], "settings": {…}, "results": …}

In the file the entries, one a line, share ``commit``, ``machine`` and ``versions``: ``"made"`` is a position in the
list of that name. The configuration of a run in a comparison is not stored: it follows from the commit's file, the
method, ε and the seed.

``commit`` holds a ``hash`` and where it is known ``from``: ``"run"`` is the code that measured (``modified`` where
files differed from it), ``"history"`` the commit that stored figures from before entries named theirs, or whose own
commit was not published. What such figures did not write down is null or missing; nothing was filled in afterwards.
``seeds`` is a list, or n for 0 … n−1.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pl_privknn.comparison.table import footnotes, guarantee_of, mark
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
_MADE = ("commit", "machine", "versions")
_PACKAGES = ("pl_privknn", "torch", "pytorch_lightning", "numpy", "opacus", "dp-accounting", "timm")


class Measured(NamedTuple):
    """Measurement that a benchmark hands to the runner.

    Attributes:
        results: the figures, with their marks; plain JSON types.
        seeds: the seeds that they come from.
        part: which measurement of the benchmark this is; a stored one of the same name is replaced.
        settings: what the figures depend on; the options of the command where None.
        benchmark: the file, where it is not named as the command is.
    """

    results: Any
    seeds: list[int]
    part: str = "all"
    settings: dict[str, Any] | None = None
    benchmark: str | None = None


def entries(name: str) -> dict[str, dict[str, Any]]:
    """Stored measurements of one benchmark by part; empty without a file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    whole = (
        {"part": one["part"], **stored["made"][one.pop("made")], **one} for one in stored["measurements"]
    )
    return {one["part"]: one for one in whole}


def results(name: str, part: str = "all") -> Any:
    """Figures of one stored measurement."""
    return entries(name)[part]["results"]


def names() -> list[str]:
    """Benchmarks with stored results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def runs() -> dict[str, list[dict[str, Any]]]:
    """Summaries of training runs by name, in order of seeds."""
    return {
        name: [one["results"] for one in parts.values()]
        for name, parts in ((name, entries(name)) for name in names())
        if all(part.startswith("seed ") for part in parts)
    }


def markdown(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Markdown table."""
    titles = list(header)
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Settings and figures of each stored measurement, with the name of its ``part``."""
    return [{"part": part, **one["settings"], **one["results"]} for part, one in entries(name).items()]


def listed(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown table of rows; the cells of a column are its format string, filled in."""
    return markdown(columns, ([cell.format_map(row) for cell in columns.values()] for row in rows))


def explained(table: str, named: Iterable[tuple[str, Guarantee]]) -> str:
    """Table with explanations of its marks; short for seeded noise, which privacy.md explains."""
    short = "none, since noise came from a seed"
    # By its start, since stored results keep the wording of their time.
    notes = (re.sub("none – the noise came from a seed[^;.]*", short, note) for note in footnotes(named))
    return "\n\n".join([table, *notes])


def spread(values: Iterable[float | None]) -> str:
    """Mean and sample standard deviation; a dash where a value is missing."""
    given = list(values)
    known = [value for value in given if value is not None]
    if not known or len(known) < len(given):
        return "–"
    mean = f"{statistics.mean(known):.3f}"
    return f"{mean} ± {statistics.stdev(known):.3f}" if len(known) > 1 else mean


def epsilon_of(summaries: list[dict[str, Any]]) -> str:
    """Largest ε of the seeds, marked by the weakest guarantee."""
    epsilons = [summary["epsilon"] for summary in summaries]
    return "none" if epsilons[0] is None else f"{max(epsilons):.3g}{mark(guarantee(summaries))}"


def guarantee(summaries: list[dict[str, Any]]) -> Guarantee:
    """Weakest guarantee of the seeds; unconditional where no private record was used, so there is no ε."""
    return weakest(guarantee_of(summary) for summary in summaries if summary["epsilon"] is not None)


def store(
    name: str, measured: Measured, settings: dict[str, Any], begun: dict[str, Any] | None = None
) -> None:
    """Write one measurement into the benchmark's file, with its other parts.

    Args:
        name: the benchmark.
        measured: its figures.
        settings: options of the command.
        begun: :func:`commit` before the measurement, during which files may change; that of now where None.
    """
    entry = {
        "part": measured.part,
        "commit": begun or commit(),
        "machine": machine(),
        "versions": versions(),
        "seeds": measured.seeds,
        "settings": settings if measured.settings is None else measured.settings,
        "results": measured.results,
    }
    kept = entries(name)
    kept[measured.part] = json.loads(json.dumps(entry, default=str))
    write(name, list(kept.values()))


def write(name: str, measurements: list[dict[str, Any]]) -> None:
    """Write the file of a benchmark."""
    made: list[dict[str, Any]] = []
    lines = []
    for one in measurements:
        shared = {key: one[key] for key in _MADE}
        if shared not in made:
            made.append(shared)
        rest = {key: one[key] for key in one if key not in _MADE}
        lines.append({"part": one["part"], "made": made.index(shared), **rest})
    parts = [
        ",\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in part)
        for part in (made, lines)
    ]
    text = f'{{"benchmark":{json.dumps(name)},"made":[\n{parts[0]}\n],"measurements":[\n{parts[1]}\n]}}\n'
    RESULTS.mkdir(exist_ok=True)
    write_durably(RESULTS / f"{name}.json", text)


def commit() -> dict[str, Any] | None:
    """Commit of the measuring code; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git("status", "--porcelain", "--", ":!benchmarks/results")
    return {"hash": head, "from": "run", "modified": bool(changed)}


def machine() -> dict[str, Any]:
    """Kind of machine, for comparable speed, without identifying it."""
    import torch

    return {
        "arch": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Versions of Python and the installed packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
