"""Advice on a run whose accuracy is low."""

from __future__ import annotations

import math
from typing import Any

from pl_privknn.config import as_section
from pl_privknn.features.base import Extractor
from pl_privknn.labelers.base import MakesModel

# Share of the way from a constant answer to no error below which a run's result is called poor.
_POOR = 0.3
#: Of ``benchmarks/results/recipes.json``, data sets with public examples of the private ones' kind: up to each value
#: of records · ε / classes, medians in points of accuracy that votes and released gradients lose to privacy, and that
#: twice as much ε brings the recommended run.
BATTERY = (
    (20.0, 9.7, 46.9, 7.0),
    (50.0, 4.3, 13.9, 1.0),
    (100.0, 2.4, 6.1, 0.4),
    (200.0, 2.9, 3.4, 1.5),
    (500.0, 2.5, 2.3, 0.6),
    (math.inf, 2.8, 1.7, 0.4),
)
#: Mean points of accuracy between the recommended run and the best of several settings of all teachers.
REGRET = 0.9


def advice_for(trainer: Any, labeling: Any, summary: dict[str, Any]) -> str:
    """Likely cause of a poor result, and what to try with what it brought elsewhere; empty for a good result.

    A result is poor below 0.3 of the way from the share of the largest class to 1; the paid accuracy counts where
    there is no test accuracy, unless its error hides that.
    """
    accuracy, baseline, reach = summary.get("test_accuracy"), summary.get("test_baseline"), 0.0
    if accuracy is None and "holdout_baseline" in summary:
        accuracy, baseline = summary["holdout_accuracy"], summary["holdout_baseline"]
        reach = summary["holdout_deviation"]
    data = trainer.datamodule
    if labeling is None or labeling.labeler is None or accuracy is None or data.task != "multiclass":
        return ""
    if baseline is None or baseline + _POOR * (1 - baseline) <= accuracy + reach or baseline == 1:
        return ""
    said = f"always predicting the most frequent class gets {baseline:.3f}. "
    first = labeling.features[0]
    parts = first if isinstance(first, list | tuple) else [first]
    within = str([as_section(part) for part in parts if isinstance(part, Extractor)])
    if "PublicFeatures" not in within and len(data.image_shape) == 3:
        named = ", ".join(sorted(part if isinstance(part, str) else type(part).__name__ for part in parts))
        return f"{said}Features: {named}; try PublicFeatures, and pip install 'pl-privknn[imagenet]' for it"
    known = labeling.metrics.get("labels/accuracy")
    if known is not None and known > accuracy + 0.1:
        return f"{said}The labels are better than the student: try more public examples, or released: head"
    unlabelled = bool(len(data.public)) and summary.get("label_baseline") is None
    return said + _tries(labeling, data.num_classes, unlabelled)


def _tries(labeling: Any, num_classes: int, unlabelled: bool) -> str:
    """Suggestions for a poor result, each with the gain of accuracy that the stored benchmark measured."""
    records, epsilon = getattr(labeling.labeler, "private_records", None), labeling.budget.epsilon
    most = "more records, a larger ε or fewer classes"
    if not isinstance(labeling.labeler, MakesModel) or records is None or epsilon is None:
        (few, *_, first), (some, *_, second), (_, _, _, third) = BATTERY[:3]
        *_, (start, _, _, _), (_, votes, gradients, _) = BATTERY
        tries = [
            f"{most} (by records × ε / classes, twice as much brought {first:g} points up to {few:g}, {second:g} up "
            f"to {some:g}, {third:g} above)",
            f"released gradients instead of votes ({votes - gradients:.1f} points above {start:g})",
        ]
    else:
        ratio = records * epsilon / num_classes
        _, votes, gradients, rise = next(row for row in BATTERY if ratio <= row[0])
        tries = [f"{most} (records × ε / classes is {ratio:.3g}; twice as much brought {rise:g} points)"]
        if votes < gradients:
            tries.append(f"votes instead of released gradients ({gradients - votes:.1f} points)")
    if unlabelled:
        tries.append(
            "labelled public examples, on which teachers are compared before anything is charged (at most "
            f"{REGRET:g} points on average)"
        )
    return f"Try {'; '.join(tries)}. Points are those of the data sets on which the rules were measured"
