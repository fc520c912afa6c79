"""A person with several records moves what enters noise by no more than is charged.

PATE's dealing and the gradients of persons have tests of their own.
"""

import functools

import pytest
import torch

from pl_privknn.labelers import PreconditionedGradients, PrivateKNN, ReverseKNN, SufficientStatistics
from pl_privknn.privacy import Budget
from pl_privknn.testing.check import ExampleTables
from pl_privknn.testing.observe import ObservedRun, moves

EACH, CLASSES = 3, 5


SUMS = {"noise_multiplier": 2.0, "private_records": 30}
#: A labeler of persons, and its arguments.
KINDS = {
    "reverse knn": (ReverseKNN, {"k": 1, "budget": Budget(epsilon=1.0)}),
    "private knn": (PrivateKNN, {"k": 5, "sampling_rate": 1.0}),
    "class sums": (SufficientStatistics, SUMS),
    "several class sums": (SufficientStatistics, {**SUMS, "records_per_person": 3}),
    "gradients": (PreconditionedGradients, {**SUMS, "records_per_person": 3, "releases": 2}),
}


def exceeded(kind, settings):
    """Largest move by the last person of three tables, as a share of what is charged."""
    examples = ExampleTables("multiclass", 30, 8, CLASSES, 6, torch.Generator().manual_seed(0))
    public, shares = examples.public(), []
    for table in (examples.all()[0], examples.tied(), *examples._decisive()):
        # Records of a person lie together, the last person's at the end, so that all others have the same draws.
        features, labels = (
            part.flip(0).repeat_interleave(EACH, dim=0) for part in (table.features, table.labels)
        )
        runs = []
        for persons in (30, 29):
            owners = torch.arange(persons).repeat_interleave(EACH)
            few = type(table)("", features[: len(owners)], labels[: len(owners)], table.queries)
            after = runs[0] if runs else None
            run = ObservedRun(functools.partial(kind, **settings), CLASSES, public, 0, after=after)
            runs.append(run.fit(few, owners).label(table.queries))
        found = moves(*(run.pools.values() for run in runs))
        shares += [(move.amount - move.rounding) / move.allowed for move in found]
    return max(shares)


@pytest.mark.parametrize("name", KINDS)
def test_a_person_moves_no_more_than_is_charged(name):
    assert 0.1 < exceeded(*KINDS[name]) <= 1 + 1e-6
