"""Results of a comparison's runs, marks of their guarantees, and the table of all methods."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn.callbacks.labeling_round import MODELS
from pl_privknn.privacy.mechanisms.base import (
    LEVELS,
    UNCONDITIONAL,
    Guarantee,
    Level,
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
_COLUMNS = (
    "epsilon", "epsilon_spent", "delta", "adjacency", "unit", "label_accuracy", "queried", "answered",
    "test_accuracy", "test_baseline", "test_balanced_accuracy", "val_accuracy", "seconds",
)  # fmt: skip


# ---------------------------------------------------------------------------- guarantees


def mark(guarantee: Guarantee) -> str:
    """Footnote mark of an ε with this guarantee, after a space; empty for an unconditional guarantee."""
    return f" {MARKS[guarantee.level]}" if MARKS[guarantee.level] else ""


def stated(guarantee: Guarantee) -> dict[str, str]:
    """The fields ``guarantee`` and ``reason`` of a summary or a stored figure."""
    return {"guarantee": guarantee.level, "reason": guarantee.reason}


def guarantee_of(values: Mapping[str, Any]) -> Guarantee:
    """Guarantee that a summary or a stored figure states.

    Args:
        values: its fields, of which ``guarantee`` and ``reason`` are read. Without ``guarantee`` the level is none,
            since the source of its noise was not recorded.

    Raises:
        ValueError: for an unknown guarantee, or a reason with an unconditional one.
    """
    level, reason = values.get("guarantee"), values.get("reason")
    if level is None:
        return Guarantee("none", (NOT_RECORDED,))
    if not reason:
        return Guarantee(level, () if level == "unconditional" else ("the reason was not recorded",))
    # A file holds all reasons in one line; split it to show each reason once.
    return Guarantee(level, tuple(dict.fromkeys(reason.split(_SEPARATOR))))


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
    """Footnote of a mark: reasons shared by all rows, then reasons of single rows."""
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


# ---------------------------------------------------------------------------- results


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one run.

    Attributes:
        method: name of the method.
        title: name of the method in tables and plots.
        target: target ε, ``math.inf`` for none.
        seed: the run's seed.
        values: the run's summary.
    """

    method: str
    title: str
    target: float
    seed: int
    values: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set after the last epoch, in [0, 1]."""
        return float(self.values["test_accuracy"])

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """Guarantee of the run's ε."""
        return guarantee_of(self.values)


Cells = Mapping[tuple[str, float], Sequence[Result]]


def cells_of(results: Sequence[Result]) -> dict[tuple[str, float], list[Result]]:
    """Results of all seeds by method and target, in the comparison's order; each model of a run is a method."""
    cells: dict[tuple[str, float], list[Result]] = {}
    for model in (model for result in results for model in _models_of(result)):
        cells.setdefault((model.method, model.target), []).append(model)
    return cells


def _models_of(result: Result) -> list[Result]:
    """Separate results of a run's student, head and their mean, where it evaluated them; else the run itself."""
    if result.values.get("head_test_accuracy") is None:
        return [result]
    return [
        dataclasses.replace(
            result,
            method=f"{result.method}, {model}",
            title=f"{result.title}, {model}",
            values={**result.values, "test_accuracy": result.values[f"{model}_test_accuracy"]},
        )
        for model in MODELS
    ]


def titles_of(cells: Cells) -> dict[str, str]:
    """Titles of the methods that have cells."""
    return {method: results[0].title for (method, _), results in cells.items()}


def mean_and_spread(results: Sequence[Result]) -> tuple[float, float]:
    """Mean accuracy and its spread.

    Returns:
        The mean over seeds, and their sample standard deviation; of one seed half the width of the 95 % interval over
        test examples (Agresti and Coull 1998), 0 where their number was not recorded.
    """
    accuracies = [result.accuracy for result in results]
    if len(accuracies) > 1:
        return statistics.mean(accuracies), statistics.stdev(accuracies)
    (accuracy,), count = accuracies, results[0].values.get("test_examples")
    if not count:
        return accuracy, 0.0
    share = (accuracy * count + 2) / (count + 4)
    return accuracy, 1.96 * math.sqrt(share * (1 - share) / (count + 4))


def over_test_examples(results: Sequence[Result]) -> bool:
    """Whether these results have a spread over test examples, not over seeds; see :func:`mean_and_spread`."""
    return any(result.values.get("test_examples") for result in results)


def guarantees(cells: Cells) -> dict[tuple[str, float], Guarantee]:
    """Guarantee of each cell that has an ε: the weakest guarantee of its runs."""
    return {
        key: weakest(result.guarantee for result in here) for key, here in cells.items() if key[1] < math.inf
    }


def weakened(cells: Cells) -> set[tuple[str, float]]:
    """Cells with a weaker guarantee than others in the comparison, which are not ranked with them.

    Noise from seeds does not count where all methods have it.
    """
    found = guarantees(cells)
    seeded = set(SEEDED.reasons)
    shared = seeded if all(seeded.issubset(guarantee.reasons) for guarantee in found.values()) else set()
    return {key for key, guarantee in found.items() if not shared.issuperset(guarantee.reasons)}


def best_at(cells: Cells, target: float) -> str | None:
    """Method of highest mean accuracy at a target ε, among those without a weaker guarantee."""
    out = weakened(cells)
    known = {
        key[0]: mean_and_spread(results)[0]
        for key, results in cells.items()
        if key[1] == target and key not in out
    }
    return max(known, key=lambda method: known[method]) if known else None


def mark_footnotes(cells: Cells) -> list[str]:
    """Explanations of the marks of cells, with their reasons."""
    return footnotes((cells[key][0].title, guarantee) for key, guarantee in guarantees(cells).items())


# ---------------------------------------------------------------------------- files


def markdown_table(results: Sequence[Result]) -> str:
    """Table of test accuracies, mean ± standard deviation over seeds, one row per method and one column per target.

    The last row is the accuracy of always predicting the largest class. Where the runs have it, a table of balanced
    accuracy, the mean recall of the classes, follows.

    Results whose guarantee is conditional or none are marked, and the last lines give the reasons. The best method of
    each column is bold; methods with a weaker guarantee than others are not ranked.
    """
    cells = cells_of(results)
    parts = [_rows_of(results, cells), _note(results, cells, len({result.seed for result in results}))]
    if all(result.values.get("test_balanced_accuracy") is not None for result in results):
        balanced = cells_of([_balanced(result) for result in results])
        parts += [_rows_of(results, balanced, "balanced accuracy of released models")]
    return "\n\n".join([*parts, *mark_footnotes(cells)])


def _balanced(result: Result) -> Result:
    """Copy of a result with the balanced accuracy of its released model in place of the accuracy."""
    found = {"test_accuracy": result.values["test_balanced_accuracy"], "head_test_accuracy": None}
    return dataclasses.replace(result, values={**result.values, **found, "test_baseline": None})


def _rows_of(results: Sequence[Result], cells: Cells, heading: str = "method") -> str:
    """Markdown table of the cells; ``heading`` is the title of its first column."""
    targets = sorted({result.target for result in results})
    best = {target: best_at(cells, target) for target in targets if target < math.inf}
    seeds = len({result.seed for result in results})
    lines = [f"| {heading} | {' | '.join(map(column_title, targets))} |", "|---|" + "---|" * len(targets)]
    for method, title in titles_of(cells).items():
        row = [
            cell(cells, (method, target), seeds, "**" if best.get(target) == method else "")
            for target in targets
        ]
        lines.append(f"| {title}{mark(guarantee_of_method(cells, method))} | {' | '.join(row)} |")
    shares = {result.target: result.values.get("test_baseline") for here in cells.values() for result in here}
    if None not in shares.values():
        lines.append(f"| largest class | {' | '.join(f'{shares[target]:.3f}' for target in targets)} |")
    return "\n".join(lines)


def guarantee_of_method(cells: Cells, method: str) -> Guarantee:
    """Weakest guarantee of a method's cells."""
    return weakest(guarantee for (name, _), guarantee in guarantees(cells).items() if name == method)


def column_title(target: float) -> str:
    """Title of a column."""
    return f"ε ≤ {target:g}" if target < math.inf else "without privacy"


def cell(cells: Cells, key: tuple[str, float], seeds: int, around: str = "") -> str:
    """Mean accuracy and spread of a method at a target, with its mark; ``seeds`` is the expected number of runs."""
    results = cells.get(key, [])
    if not results:
        return "–"
    mean, spread = mean_and_spread(results)
    text = f"{mean:.3f} ± {spread:.3f}" if spread or len(results) > 1 else f"{mean:.3f}"
    if len(results) < seeds:
        text = f"{text} ({len(results)} of {seeds} seeds)"
    return f"{around}{text}{around}{mark(guarantees(cells).get(key, UNCONDITIONAL))}"


def terms(results: Sequence[Result]) -> str:
    """δ, neighbouring relation and unit of privacy of the private runs; empty where there are none."""
    first = next((result.values for result in results if result.target < math.inf), None)
    return (
        ""
        if first is None
        else f"δ = {first['delta']:g} ({first['adjacency']}, a {first.get('unit', 'record')})"
    )


def _note(results: Sequence[Result], cells: Cells, seeds: int) -> str:
    counted = f"{seeds} seeds, mean ± standard deviation"
    if seeds == 1:
        counted = (
            "1 seed, ± half the 95 % interval over test examples" if over_test_examples(results) else "1 seed"
        )
    reached = [
        max(result.values["epsilon"] for result in here) / target
        for (_, target), here in cells.items()
        if target < math.inf
    ]
    if not reached:
        return f"Test accuracy, {counted}."
    return (
        f"Test accuracy at {terms(results)}, {counted}. Each run's ε is at most its column's, and at least "
        f"{min(reached):.2f} of it."
    )


def write_csv(results: Sequence[Result], path: Path) -> None:
    """Write all results as a CSV file, one row per run."""
    with path.open("w", encoding="utf-8", newline="") as file:
        own = ("method", "title", "target_epsilon", "seed", "guarantee", "reason")
        writer = csv.DictWriter(file, [*own, *_COLUMNS], lineterminator="\n")
        writer.writeheader()
        for result in results:
            row = {"method": result.method, "title": result.title, "target_epsilon": result.target}
            found = {name: result.values.get(name) for name in _COLUMNS}
            writer.writerow({**row, "seed": result.seed, **found, **stated(result.guarantee)})
