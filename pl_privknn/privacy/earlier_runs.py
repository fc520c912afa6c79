"""Earlier runs on the same data, and the ε of all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pl_privknn._checks import at_most, counted
from pl_privknn.config import get
from pl_privknn.privacy.files import HOLDOUT_LEDGER
from pl_privknn.privacy.verify import CONFIG, epsilon_of_files, ledger_of, mapping_of, releases_of

#: Arguments of data modules that a run may pay for.
_NAMED = {"names", "classes", "class_names", "numeric", "categorical"}


def ledgers_under(folder: Path) -> list[Path]:
    """Ledgers of the run in a folder, or of the runs in numbered folders below it, each once; of hold-outs too.

    Raises:
        FileNotFoundError: where there is none.
    """
    found = _ledgers([folder, *sorted(below for below in folder.iterdir() if _number_of(below) is not None)])
    if not found:
        raise FileNotFoundError(f"{folder}: there is no ledger in it, nor in a numbered folder below it")
    return found


def earlier_runs(folder: Path) -> list[Path]:
    """Folders of earlier runs on the same data: folders with lower numbers beside the run's folder.

    Runs whose configurations have equal sections ``data`` count as runs on the same data. Runs that share the ledger
    of this one are left out: it adds them up already.
    """
    folder = folder.resolve()
    number, data = _number_of(folder), _data_in(folder)
    if number is None or data is None or (own := ledger_of(folder)) is None:
        return []
    found = []
    for beside in sorted(folder.parent.iterdir()):
        other = _number_of(beside)
        if other is not None and other < number and _data_in(beside) == data:
            ledger = ledger_of(beside)
            found += [] if ledger is None or ledger.resolve() == own.resolve() else [beside]
    return found


def _data_in(folder: Path) -> Any:
    """Section ``data`` of a run, without names that it has paid for."""
    data = get(mapping_of(folder / CONFIG), "data")
    given = get(data, "init_args") or {}
    if not given.get("names"):
        return data
    kept = {name: value for name, value in given.items() if name not in _NAMED}
    return {**data, "init_args": kept}


def together(folder: Path) -> dict[str, Any]:
    """ε of a run and of earlier ones on the same data, by composition; empty without earlier ones.

    A record may be held out of one run and not of another, so hold-outs are composed too.

    Returns:
        ``earlier_runs``, their number, and ``epsilon_together``, at the run's δ.

    Raises:
        ValueError: where they count under different adjacencies or units.
    """
    earlier = earlier_runs(folder)
    if not earlier or (own := ledger_of(folder)) is None:
        return {}
    found = epsilon_of_files(_ledgers([folder, *earlier]), releases_of(own).delta, exact=False)
    return {"earlier_runs": len(earlier), "epsilon_together": found["epsilon"]}


def _ledgers(folders: Iterable[Path]) -> list[Path]:
    """Ledgers of runs and of their hold-outs, each once."""
    found: dict[Path, Path] = {}
    for folder in folders:
        for ledger in (ledger_of(folder), folder / HOLDOUT_LEDGER):
            if ledger is not None and ledger.is_file():
                found.setdefault(ledger.resolve(), ledger)
    return list(found.values())


def _number_of(folder: Path) -> int | None:
    """Number of a run's folder, ``NUMBER`` or ``version_NUMBER``."""
    number = folder.name.removeprefix("version_")
    return int(number) if number.isdecimal() and folder.is_dir() else None


def together_in_words(summary: Mapping[str, Any]) -> str:
    """Sentence about the result of :func:`together`, from a summary; empty without earlier runs."""
    if not summary.get("earlier_runs"):
        return ""
    return (
        f"{counted(summary['earlier_runs'], 'earlier run')} on these records: together "
        f"ε ≤ {at_most(summary['epsilon_together'])} (a shared ledger, ledger_path, keeps one budget)"
    )
