"""Bytes that a process with a shard sends in a round, as docs/scale.md states them."""

import functools

import pytest
import torch

from pl_privknn import Gaussian
from pl_privknn._processes import Shard
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.threads import Threads

CLASSES, QUERIES, DIMENSIONS, STEPS, K = 10, 30, 8, 5, 300
EACH_CLASS = 8 * CLASSES
#: By teacher: how it is made (all queries pass the screening), and the bytes.
TEACHERS = {
    "PrivateKNN": (
        lambda: PrivateKNN(K, 0.15, Screening(1, Gaussian(0.1)), Gaussian(25.0)),
        2 * 16 * K * QUERIES + 8,  # a sample for the screening and one for the answer
    ),
    "ReverseKNN": (lambda: ReverseKNN(1, budget=Budget(epsilon=1.0)), EACH_CLASS * QUERIES),
    "SufficientStatistics": (
        lambda: SufficientStatistics(noise_multiplier=1.0),
        EACH_CLASS * (DIMENSIONS + 1),
    ),
    "PreconditionedGradients": (
        lambda: PreconditionedGradients(noise_multiplier=1.0),
        6 * EACH_CLASS * (DIMENSIONS + 1),
    ),
    "IndKNN": (
        lambda: IndKNN(0.075, Gaussian(0.8), budget=Budget(epsilon=1.0)),
        (8 + EACH_CLASS) * QUERIES + 4,
    ),
    "NoisySGDTeacher": (
        lambda: NoisySGDTeacher(0.1, steps=STEPS, noise_multiplier=1.0, model={"components": 200}),
        STEPS * EACH_CLASS * (DIMENSIONS + 1),
    ),
    "PATE": (lambda: PATE(2, LinearTeachers(STEPS), progress=False), EACH_CLASS * QUERIES),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_bytes_of_a_round_are_those_that_a_process_sends(name):
    make, sent = TEACHERS[name]
    features, queries, threads = torch.randn(700, DIMENSIONS), torch.randn(QUERIES, DIMENSIONS), Threads(2)
    labels = torch.arange(350) % CLASSES

    def in_shard(group):
        teacher = make()
        teacher.noise_source = SeededNoise(0)
        shard = Shard(group, group.rank, 2, len(features))
        part = features[group.rank :: 2]
        teacher.fit(PrivateRecords.of(part, labels, CLASSES, shard=shard, public=queries))
        teacher.label(queries, FreeLedger())

    threads.run([functools.partial(in_shard, group) for group in threads.groups])
    assert max(group.sent for group in threads.groups) == sent
