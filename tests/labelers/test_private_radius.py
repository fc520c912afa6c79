"""Radius votes: a public radius. Their sensitivity of one is in ``testing/test_check_labeler.py``."""

import numpy as np
import torch
from refusals import refusals

from pl_privknn.labelers import PrivateRadius, Screening
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def draw(n, seed):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, 3)), dtype=torch.float32)


TABLE, QUERIES, PUBLIC = draw(90, 0), draw(20, 1), draw(50, 2)
LABELS = torch.arange(90) % 4


def test_answers_are_the_plurality_within_the_radius():
    teacher = PrivateRadius(1.0, None, sampling_rate=1.0, noise=Gaussian(1e-6), noise_source=SeededNoise(0))
    teacher.fit(TABLE, LABELS, 4)
    labels = teacher.label(QUERIES, FreeLedger()).labels
    inside = (QUERIES.double()[:, None] - TABLE.double()).square().sum(2) <= 1.0
    literal = torch.stack([(inside & (label == LABELS)).sum(dim=1) for label in range(4)], dim=1)
    clear = literal.topk(2, dim=1).values.diff(dim=1)[:, 0] < 0
    assert clear.sum() >= 10
    assert labels[clear].equal(literal.argmax(dim=1)[clear])
    few = PrivateRadius(1.0, None, sampling_rate=1.0, max_votes=2)
    few.fit(TABLE, LABELS, 4)
    votes = few._neighbors.votes(few._neighbors.rank(QUERIES))
    assert torch.equal(votes, literal.clamp(max=2))


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
