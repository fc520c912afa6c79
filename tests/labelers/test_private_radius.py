"""Radius votes: a public radius, and a sensitivity of one."""

import numpy as np
import pytest
import torch
from refusals import refusals

from pl_privknn.labelers import PrivateKNN, PrivateRadius, Screening
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def draw(n, seed):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, 3)), dtype=torch.float32)


TABLE, QUERIES, PUBLIC = draw(90, 0), draw(20, 1), draw(50, 2)
LABELS = torch.arange(90) % 4


def counts(teacher, table=TABLE, labels=LABELS):
    """Private votes of all queries, as they enter the noise."""
    teacher.fit(table, labels, 4)
    return teacher._neighbors.votes(teacher._neighbors.rank(QUERIES))


def test_answers_are_the_plurality_within_the_radius():
    teacher = PrivateRadius(1.0, None, sampling_rate=1.0, noise=Gaussian(1e-6), noise_source=SeededNoise(0))
    teacher.fit(TABLE, LABELS, 4)
    labels = teacher.label(QUERIES, FreeLedger()).labels
    inside = (QUERIES.double()[:, None] - TABLE.double()).square().sum(2) <= 1.0
    literal = torch.stack([(inside & (label == LABELS)).sum(dim=1) for label in range(4)], dim=1)
    clear = literal.topk(2, dim=1).values.diff(dim=1)[:, 0] < 0
    assert clear.sum() >= 10
    assert labels[clear].equal(literal.argmax(dim=1)[clear])


@pytest.mark.parametrize("max_votes", [None, 4])
def test_one_record_moves_one_count_by_one(max_votes):
    arguments = {"public_share": None, "sampling_rate": 1.0, "max_votes": max_votes}
    votes = counts(PrivateRadius(1.2, **arguments))
    assert max_votes is None or int(votes.max()) == max_votes
    largest = 0
    for left_out in range(len(TABLE)):
        kept = torch.arange(len(TABLE)) != left_out
        moved = votes - counts(PrivateRadius(1.2, **arguments), TABLE[kept], LABELS[kept])
        assert int(moved.min()) >= 0
        assert int(moved.sum(dim=1).max()) <= 1
        largest = max(largest, int(moved.max()))
    assert largest == 1


def test_an_arg_max_costs_half_of_that_of_nearest_neighbours():
    noise = ExponentialArgmax(4.0)
    (ours,), (theirs,) = (
        teacher.plan(1, 1, 10)
        for teacher in (PrivateRadius(1.0, None, 1.0, noise=noise), PrivateKNN(5, 1.0, noise=noise))
    )
    assert ours.mechanism.pure_epsilon("add_remove") == pytest.approx(0.25, rel=1e-12)
    assert theirs.mechanism.pure_epsilon("add_remove") == pytest.approx(0.5, rel=1e-12)


def test_half_of_the_public_examples_have_their_share_within_the_radius():
    teacher = PrivateRadius(public_share=0.2)
    teacher.fit_public(PUBLIC)
    distances = torch.cdist(PUBLIC.double(), PUBLIC.double())
    others = (distances <= teacher._radius * (1 + 1e-6)).sum(dim=1) - 1
    assert (others >= 10).double().mean() >= 0.5
    assert ((distances < teacher._radius * (1 - 1e-6)).sum(dim=1) - 1 >= 10).double().mean() <= 0.5


def made(**given):
    return lambda: PrivateRadius(**given)


test_bad_arguments_are_named_and_a_radius_is_never_guessed = refusals(
    {
        "radius=0.0": made(radius=0.0),
        "public_share=1.5": made(public_share=1.5),
        "radius=None, public_share=None": made(public_share=None),
        "max_votes=0": made(max_votes=0),
        "screening.threshold=5 can't be reached by max_votes=None": made(screening=Screening(5, 1.0)),
        "can't be reached by max_votes=4": made(screening=Screening(5, 1.0), max_votes=4),
        "release_counts=True": made(release_counts=True),
        "needs fit_public": lambda: PrivateRadius().fit(TABLE, LABELS, 4),
        "tell no radius above 0": lambda: PrivateRadius().fit_public(torch.ones(30, 3)),
        "tell no radius above 0.": lambda: PrivateRadius().fit_public(torch.ones(1, 3)),
    }
)
