"""Results of runs: one JSON file each, a CSV file of all, and the guarantee level of each ε."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn._checks import shown
from pl_privknn.comparison.run import Run, with_values
from pl_privknn.comparison.spec import epsilon_text, read_epsilon
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta, read_records
from pl_privknn.privacy.audit import mapping_of
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import (
    LEVELS,
    UNCONDITIONAL,
    Guarantee,
    Level,
    check_adjacency,
    noise_guarantee,
    weakest,
)
from pl_privknn.privacy.noise import SeededNoise

#: Marks of an ε that holds only under a condition, or not at all.
MARKS: dict[Level, str] = {"unconditional": "", "conditional": "†", "none": "‡"}
#: Guarantee of releases whose noise was drawn from a seed.
SEEDED = noise_guarantee(SeededNoise(0))
NOT_RECORDED = "how far this ε holds was not recorded"
_SEPARATOR = "; "


def mark(guarantee: Guarantee) -> str:
    """Mark of an ε of this guarantee, after a space; empty for an unconditional one."""
    return f" {MARKS[guarantee.level]}" if MARKS[guarantee.level] else ""


def stated(guarantee: Guarantee) -> dict[str, str]:
    """The fields ``guarantee`` and ``reason`` of a result or summary."""
    return {"guarantee": guarantee.level, "reason": guarantee.reason}


def guarantee_of(values: Mapping[str, Any], releases: Iterable[Charge] = ()) -> Guarantee:
    """Guarantee of a stored result or summary: the weakest that any of its fields states.

    Args:
        values: its fields, of which ``guarantee``, ``reason`` and ``noise_seeded`` are read. Without ``guarantee``
            the level is none, since the source of its noise was not recorded.
        releases: releases of the run, each with its guarantee.

    Raises:
        ValueError: for an unknown guarantee, or a reason with an unconditional one.
    """
    level, reason = values.get("guarantee"), values.get("reason")
    if level is None:
        found = Guarantee("none", (NOT_RECORDED,))
    elif reason:
        found = Guarantee(level, (reason,))
    else:
        found = Guarantee(level, () if level == "unconditional" else ("the reason was not recorded",))
    found &= weakest(charge.guarantee for charge in releases)
    if values.get("noise_seeded") and values.get("epsilon") is not None:
        found &= SEEDED
    # A file holds all reasons in one line; split it to show each reason once.
    return Guarantee(
        found.level, tuple(dict.fromkeys(found.reason.split(_SEPARATOR))) if found.reason else ()
    )


def footnotes(named: Iterable[tuple[str, Guarantee]]) -> list[str]:
    """Explanations of the marks of a table or plot: one text for each mark, with the reasons.

    Args:
        named: names of the rows or lines shown, with their guarantees.
    """
    levels: dict[Level, dict[str, Guarantee]] = {level: {} for level in LEVELS}
    for name, guarantee in named:
        rows = levels[guarantee.level]
        rows[name] = rows.get(name, UNCONDITIONAL) & guarantee
    return [_footnote(level, rows) for level, rows in levels.items() if rows and MARKS[level]]


def _footnote(level: Level, rows: Mapping[str, Guarantee]) -> str:
    """Footnote of a mark: reasons shared by all rows, then those of single rows."""
    shared = [
        reason
        for reason in weakest(rows.values()).reasons
        if all(reason in guarantee.reasons for guarantee in rows.values())
    ]
    text = f"{MARKS[level]} guarantee: {level}{' – ' if shared else ''}{_SEPARATOR.join(shared)}."
    own: dict[str, list[str]] = {}
    for name, guarantee in rows.items():
        if rest := _SEPARATOR.join(reason for reason in guarantee.reasons if reason not in shared):
            own.setdefault(rest, []).append(name)
    return " ".join([text, *(f"{', '.join(names)}: {rest}." for rest, names in own.items())])


#: Summary that a run writes at its end.
SUMMARY = "summary.json"
#: Subfolder of a comparison with the JSON files.
RESULTS = "results"
#: Columns of the CSV.
COLUMNS = (
    "comparison", "method", "title", "kind", "target_epsilon", "seed", "epsilon", "epsilon_spent", "delta",
    "adjacency", "unit", "guarantee", "reason", "label_accuracy", "queried", "answered", "test_accuracy",
    "val_accuracy", "seconds", "starts",
)  # fmt: skip
_OF_SUMMARY = (
    "epsilon", "epsilon_spent", "delta", "adjacency", "unit", "guarantee", "reason", "label_accuracy", "queried",
    "answered", "lost", "steps", "steps_planned", "noise_multiplier", "test_accuracy", "val_accuracy", "epochs",
    "seconds", "student", "labeler", "data", "released", "student_test_accuracy", "head_test_accuracy",
    "mean_test_accuracy",
)  # fmt: skip
# Fields that tables and plots need, with their types.
_READ = {"method": str, "title": str, "kind": str, "place": int, "seed": int, "records": list}
# Relative excess of ε over its target that is due to rounding when a double is written and read.
_ROUNDING = 1e-9


class ResultError(RuntimeError):
    """Raised where a run ended without a comparable result."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one run, from its JSON file.

    Attributes:
        method: name of the method.
        title: name of the method in tables and plots.
        place: position of the method in the comparison.
        target: target ε, ``math.inf`` for none.
        seed: the run's seed.
        accuracy: on the test set, in [0, 1].
        values: everything in the file.
    """

    method: str
    title: str
    place: int
    target: float
    seed: int
    accuracy: float
    values: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def epsilon(self) -> float:
        """ε of the run's guarantee; ``math.inf`` without privacy."""
        return math.inf if self.values["epsilon"] is None else float(self.values["epsilon"])

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """Guarantee of ε: the weakest that anything in the file states."""
        return guarantee_of(self.values, read_records(self.values.get("records", ())))


def result_of(run: Run, folder: Path, calibrated: dict[str, float], starts: int) -> dict[str, Any]:
    """Content of the JSON file of a finished run.

    Args:
        run: the run.
        folder: its folder.
        calibrated: calibrated settings by dotted path.
        starts: number of starts; above 1 for an interrupted run.

    Raises:
        ResultError: if the run left no accuracy on the test set, or its guarantee is not the one that the
            comparison is about.
    """
    summary = mapping_of(folder / SUMMARY)
    if summary.get("test_accuracy") is None:
        raise ResultError("the run left no accuracy on the test set; the data module needs a test set")
    comparison, methods = run.comparison, run.comparison.methods
    kept = {name: summary[name] for name in _OF_SUMMARY if name in summary} | stated(guarantee_of(summary))
    if run.private:
        _check_guarantee(run, summary)
    else:
        reason = "no noise: the method's bound without privacy"
        if run.method.kind == "true_labels":
            reason = "trained on the true labels of public examples; no private record was used"
        kept |= {"epsilon": None, "epsilon_spent": None, "guarantee": "none", "reason": reason}
    return {
        "comparison": comparison.name,
        "method": run.method.name,
        "title": run.method.title,
        "place": methods.index(run.method),
        "kind": run.method.kind,
        "target_epsilon": "inf" if not run.private else run.epsilon,
        "seed": run.seed,
        "delta": comparison.delta,
        "adjacency": comparison.adjacency,
        "unit": comparison.unit,
        **kept,
        "calibrated": calibrated,
        "noise_seeded": comparison.noise_seeded,
        "starts": starts,
        "records": _records(folder) if run.private else [],
        "config": without_places(with_values(run.document, calibrated)),
        "versions": summary["versions"],
        "fingerprint": run.fingerprint,
    }


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_results(folder: str | Path) -> list[Result]:
    """Results in a folder, or in its ``results``, ordered by method as in the comparison, ε and seed.

    Raises:
        ValueError: if there are none, or a file is no result.
    """
    folder = Path(folder)
    place = folder / RESULTS if (folder / RESULTS).is_dir() else folder
    results = [
        result_from(path.read_text(encoding="utf-8"), str(path)) for path in sorted(place.glob("*.json"))
    ]
    if not results:
        raise ValueError(f"{folder} holds no results of a comparison (*.json, or results/*.json)")
    return in_order(results)


def in_order(results: Iterable[Result]) -> list[Result]:
    """Results ordered by method as in the comparison, ε and seed."""
    return sorted(results, key=lambda result: (result.place, result.method, result.target, result.seed))


def write_csv(results: Sequence[Result], path: Path) -> None:
    """Write all results as a CSV file, one row per run."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="", lineterminator="\n")
        writer.writeheader()
        for result in results:
            row = {**result.values, **stated(result.guarantee)}
            writer.writerow({name: value for name, value in row.items() if value is not None})


def epsilon_of_all(records: Sequence[dict[str, Any]], delta: float, adjacency: str) -> float:
    """ε of all runs of a comparison together, by RDP: the cost of comparing on the same records.

    Args:
        records: releases of all runs.
        delta: δ of the total.
        adjacency: neighbouring relation.
    """
    if not records:
        return 0.0
    total = epsilon_for_delta(read_records(list(records)), delta, check_adjacency(adjacency), method="rdp")
    return total if math.isfinite(total) else math.inf


def result_from(content: str | dict[str, Any], where: str) -> Result:
    """Result of a run from the text or the content of its JSON file.

    Raises:
        ValueError: naming ``where``, if it is no result.
    """
    try:
        values = json.loads(content) if isinstance(content, str) else content
        for name, kind in _READ.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name} must be {kind.__name__}, found {shown(values[name])}")
        found = Result(
            method=values["method"],
            title=values["title"],
            place=values["place"],
            target=read_epsilon(where, values["target_epsilon"]),
            seed=values["seed"],
            accuracy=float(values["test_accuracy"]),
            values=values,
        )
        _ = found.epsilon, found.guarantee  # refuses a file with meaningless fields
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is not a result of a comparison ({error!r}); remove it from the folder"
        ) from error


def _check_guarantee(run: Run, summary: dict[str, Any]) -> None:
    comparison, limit = run.comparison, run.epsilon
    if summary.get("epsilon") is None:
        raise ResultError(f"the run states no ε, expected ε={epsilon_text(limit)}")
    for name in ("delta", "adjacency", "unit"):
        if summary.get(name) != (wanted := getattr(comparison, name)):
            raise ResultError(
                f"the run has {name}={summary.get(name)!r}, the comparison {wanted!r}, so they can't be compared; "
                f"add an argument {name} to the class"
            )
    if summary["epsilon"] > limit * (1 + _ROUNDING):
        raise ResultError(f"the run's ε={summary['epsilon']:.6g} exceeds its target {epsilon_text(limit)}")


def _records(folder: Path) -> list[dict[str, Any]]:
    """Planned releases of a run, from its ledger; ``privknn epsilon`` recomputes ε from them."""
    path = folder / "ledger.sqlite"
    if not path.is_file():
        return []
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        return [charge.to_record() for charge in ledger.report().guaranteed]


def without_places(value: Any) -> Any:
    """Copy with absolute paths shortened to their last component."""
    if isinstance(value, dict):
        return {name: without_places(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if isinstance(value, str) and len(value) > 1 and Path(value).is_absolute():
        return f"…/{Path(value).name}"
    return value
