"""The stored battery of recommended runs, and the rules that were chosen by it."""

import itertools

from benchmarks.recipes import SETS, rows
from benchmarks.record import entries
from pl_privknn.recommendation.rules import Sizes

_NOISE = 0.015


def test_more_epsilon_does_not_lower_the_measured_accuracy_where_the_rule_changes_teacher():
    changed = set()
    stored = {name: entry["results"] for name, entry in entries("recipes").items()}
    for (name, records), cells in itertools.groupby(rows(), key=lambda row: row[:2]):
        if SETS[name].group == "another kind":  # released gradients at every ε
            continue
        chosen = []
        for _, _, epsilon, means in cells:
            sizes = Sizes(
                records, epsilon, 1e-5, stored[name]["classes"], stored[name]["public"], SETS[name].examples
            )
            chosen.append((sizes.rule().teacher, means))
        for (less, few), (more, many) in itertools.pairwise(chosen):
            if less != more and less in few and more in many:
                assert many[more] >= few[less] - _NOISE, (name, records)
                changed.add((name, records))
    assert len(changed) >= 4
