"""A person with several records moves what enters noise by no more than is charged; labelers of records move it more.

PATE's dealing and the gradients of persons have tests of their own.
"""

import functools

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import (
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget
from pl_privknn.testing.distances import moves
from pl_privknn.testing.observe import ObservedRun
from pl_privknn.testing.tables import Examples

EACH, CLASSES = 3, 5


class EachRecordCounts(ReverseKNN):
    def drawn_records(self, records, most=1):
        return torch.arange(len(records))


class EachRecordAdds(SufficientStatistics):
    def drawn_records(self, records, most=1):
        return torch.arange(len(records))


class EachRecordIsClipped(PreconditionedGradients):
    def fit(self, records):
        super().fit(records)
        self._persons = None


class EachRecordVotes(PrivateKNN):
    def _find(self, records):
        return super()._find(PrivateRecords.of(records.table(), records.labels, records.num_classes))


#: A labeler of persons, one that protects records alone, and their arguments.
KINDS = {
    "reverse knn": (ReverseKNN, EachRecordCounts, {"k": 1, "budget": Budget(epsilon=1.0)}),
    "private knn": (PrivateKNN, EachRecordVotes, {"k": 5, "sampling_rate": 1.0}),
    "class sums": (SufficientStatistics, EachRecordAdds, {"noise_multiplier": 2.0, "private_records": 30}),
    "several class sums": (
        SufficientStatistics, None, {"noise_multiplier": 2.0, "private_records": 30, "records_per_person": 3},
    ),
    "gradients": (
        PreconditionedGradients, EachRecordIsClipped,
        {"noise_multiplier": 2.0, "releases": 2, "records_per_person": 3, "private_records": 30},
    ),
}  # fmt: skip


def exceeded(kind, settings):
    """Largest move by the last person of three tables, as a share of what is charged."""
    examples = Examples("multiclass", 30, 8, CLASSES, 6, torch.Generator().manual_seed(0))
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
    ours, broken, settings = KINDS[name]
    assert 0.1 < exceeded(ours, settings) <= 1 + 1e-6
    if broken is not None:
        assert exceeded(broken, settings) > 1.1
