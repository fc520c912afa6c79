"""Markdown tables of comparisons."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from pl_privknn._checks import at_most
from pl_privknn.callbacks.labeling_round import MODELS
from pl_privknn.comparison.results import SEEDED, Result, epsilon_of_all, footnotes, mark
from pl_privknn.comparison.spec import epsilon_text
from pl_privknn.privacy.mechanisms.base import SEVERAL_FILES, UNCONDITIONAL, Guarantee, weakest

Cells = Mapping[tuple[str, float], Sequence[Result]]


def cells_of(results: Sequence[Result]) -> dict[tuple[str, float], list[Result]]:
    """Results of all seeds by method and target, in the comparison's order; each model of a run is a method."""
    cells: dict[tuple[str, float], list[Result]] = {}
    for model in (model for result in results for model in models_of(result)):
        cells.setdefault((model.method, model.target), []).append(model)
    return cells


def models_of(result: Result) -> list[Result]:
    """Separate results of a run's student, head and their mean, where it evaluated them; else the run itself."""
    if result.values.get("head_test_accuracy") is None:
        return [result]
    return [
        dataclasses.replace(
            result,
            method=f"{result.method}, {model}",
            title=f"{result.title}, {words}",
            accuracy=float(result.values[f"{model}_test_accuracy"]),
        )
        for model, words in zip(MODELS, ("student", "head", "mean of both"), strict=True)
    ]


def titles_of(cells: Cells) -> dict[str, str]:
    """Titles of the methods that have cells."""
    return {method: results[0].title for (method, _), results in cells.items()}


def mean_and_spread(results: Sequence[Result]) -> tuple[float, float]:
    """Mean accuracy over seeds and its sample standard deviation (0 for one seed)."""
    accuracies = [result.accuracy for result in results]
    return statistics.mean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def guarantees(cells: Cells) -> dict[tuple[str, float], Guarantee]:
    """Guarantee of each cell that has an ε: that of its weakest run."""
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


def best_at(cells: Cells, target: float, *, apart: bool = False) -> str | None:
    """Method of highest mean accuracy at a target, among those without a weaker guarantee.

    Args:
        cells: see :func:`cells_of`.
        target: ε.
        apart: rank the :func:`weakened` cells instead.
    """
    out = weakened(cells)
    known = {
        key[0]: mean_and_spread(results)[0]
        for key, results in cells.items()
        if key[1] == target and (key in out) == apart
    }
    return max(known, key=lambda method: known[method]) if known else None


def mark_footnotes(cells: Cells) -> list[str]:
    """Explanations of the marks of cells, with their reasons."""
    return footnotes((cells[key][0].title, guarantee) for key, guarantee in guarantees(cells).items())


def joint_cost(results: Sequence[Result]) -> str:
    """Sentence on the joint privacy cost of all runs, which share their private records."""
    if any(result.target == math.inf and result.values["kind"] != "true_labels" for result in results):
        without = " Runs without privacy come on top of that: on real records they void any guarantee."
    else:
        without = ""
    first = results[0].values
    records = [record for result in results for record in result.values["records"]]
    total = epsilon_of_all(records, first["delta"], first["adjacency"])
    text = at_most(total)
    private = [result.guarantee for result in results if result.target < math.inf]
    whole = weakest([*private, *([Guarantee("conditional", (SEVERAL_FILES,))] if len(private) > 1 else [])])
    return (
        f"All runs together, on the same private records: ε ≤ {text} at δ = {first['delta']:g}, guarantee: "
        f"{whole.level}{f' ({whole.reason})' if whole.reasons else ''}.{without}"
    )


def markdown_table(results: Sequence[Result]) -> str:
    """Table of test accuracies, mean ± standard deviation over seeds, one row per method and one column per target.

    Results whose guarantee is conditional or none are marked, and the last lines give the reasons. The best method of
    each column is bold and named; methods with a weaker guarantee than others are not ranked, and named where they
    are ahead.
    """
    cells = cells_of(results)
    methods = titles_of(cells)
    targets = sorted({result.target for result in results})
    finite = [target for target in targets if target < math.inf]
    seeds = len({result.seed for result in results})
    lines = [f"| method | {' | '.join(map(head, targets))} |", "|---|" + "---|" * len(targets)]
    best = {target: best_at(cells, target) for target in finite}
    known = guarantees(cells)
    for method, title in methods.items():
        row = [
            cell(cells, (method, target), seeds, "**" if best.get(target) == method else "")
            for target in targets
        ]
        whole = weakest(guarantee for (other, _), guarantee in known.items() if other == method)
        lines.append(f"| {title}{mark(whole)} | {' | '.join(row)} |")
    named = [_best(cells, methods, target) if target < math.inf else "" for target in targets]
    lines.append(f"| *best* | {' | '.join(named)} |")
    return "\n".join([*lines, "", _notes(results, cells)])


def _best(cells: Cells, methods: Mapping[str, str], target: float) -> str:
    first, other = best_at(cells, target), best_at(cells, target, apart=True)
    text = "–" if first is None else methods[first]
    if other is not None:
        ahead = mean_and_spread(cells[other, target])[0]
        if first is None or ahead > mean_and_spread(cells[first, target])[0]:
            text += f" ({methods[other]}{mark(guarantees(cells)[other, target])} is ahead)"
    return text


def head(target: float) -> str:
    """Title of a column."""
    return f"ε ≤ {epsilon_text(target)}" if target < math.inf else "without privacy"


def cell(cells: Cells, key: tuple[str, float], seeds: int, around: str = "") -> str:
    """Mean accuracy and spread of a method at a target, with its mark; ``seeds`` is the expected number of runs."""
    results = cells.get(key, [])
    if not results:
        return "–"
    mean, spread = mean_and_spread(results)
    text = f"{mean:.3f}" if len(results) == 1 else f"{mean:.3f} ± {spread:.3f}"
    if len(results) < seeds:
        text = f"{text} ({len(results)} of {seeds} seeds)"
    return f"{around}{text}{around}{mark(guarantees(cells).get(key, UNCONDITIONAL))}"


def _notes(results: Sequence[Result], cells: Cells) -> str:
    first = results[0].values
    seeds = len({result.seed for result in results})
    counted = f"{seeds} seed{'' if seeds == 1 else 's, mean ± standard deviation'}"
    parts = [
        f"Test accuracy at δ = {first['delta']:g} ({first['adjacency']}, a {first.get('unit', 'record')}), {counted}."
    ]
    reached = [
        max(result.epsilon for result in here) / target
        for (_, target), here in cells.items()
        if target < math.inf
    ]
    if reached:
        parts.append(f"Each run's ε is at most its column's, and at least {min(reached):.2f} of it.")
    return "\n\n".join([" ".join(parts), *mark_footnotes(cells)])
