"""Noise for votes: what a labeler fills in, what a user may state, and what is drawn."""

import dataclasses
import math
import warnings
from typing import ClassVar

import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PrivateKNN, ReverseKNN
from pl_privknn.privacy.mechanisms import (
    AdditiveNoise,
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    VoteNoise,
)
from pl_privknn.privacy.mechanisms.base import UNSTATED
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

NOISES = (Gaussian(3.0), Laplace(3.0), ExponentialArgmax(3.0))
SWAPPED = (2, math.sqrt(2), 0.5)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.kind)
def test_what_nobody_states_is_filled_in_and_recorded(noise):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        completed = noise.for_votes(*SWAPPED)
        assert completed.for_votes(*SWAPPED) == completed
    wanted = {"l1_sensitivity": 2, "l2_sensitivity": math.sqrt(2), "sampling_rate": 0.5, "votes": "swap"}
    record = completed.to_record()
    assert {name: record[name] for name in wanted if name in record} == {
        name: value for name, value in wanted.items() if hasattr(noise, name)
    }
    assert isinstance(noise, VoteNoise)
    # Left alone it stands for one number that moves by one, as records without these fields are read.
    assert Charge.from_record({"mechanism": noise.kind, **_scale(noise)}).mechanism == noise
    assert noise.sampling_rate == 1.0


def _scale(noise):
    return {name: 3.0 for name in ("sigma", "scale") if hasattr(noise, name)}


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (Gaussian(3.0, sampling_rate=0.25), r"noise\.sampling_rate=0\.25 differs from the labeler's 0\.5"),
        (ExponentialArgmax(3.0, votes="add"), r"noise\.votes='add'"),
        (Laplace(3.0, l1_sensitivity=1.0), r"noise\.l1_sensitivity=1\.0 differs from the labeler's 2"),
    ],
)
def test_another_stated_value_is_refused(noise, told):
    with pytest.raises(ValueError, match=told):
        noise.for_votes(*SWAPPED)


def test_an_argmax_by_gumbel_noise_covers_one_vote_added_or_swapped():
    assert ExponentialArgmax(3.0).for_votes(1, 1.0).votes == "add"
    assert ExponentialArgmax(3.0).for_votes(2.0, math.sqrt(2.0)).votes == "swap"
    assert ExponentialArgmax(3.0).deviation == pytest.approx(stats.gumbel_r(scale=3.0).std())
    for l1, l2 in ((2, 2.0), (4, 2.0), (1, math.sqrt(2))):
        with pytest.raises(ValueError, match="one vote added or swapped"):
            ExponentialArgmax(3.0).for_votes(l1, l2)


@pytest.mark.parametrize("noise", NOISES[:-1], ids=lambda noise: noise.kind)
def test_additive_noise_chooses_the_largest_noisy_count_and_states_its_deviation(noise):
    votes = torch.randint(0, 5, (20_000, 3))
    noisy = noise.add_noise(votes, SeededNoise(1))
    assert torch.equal(noise.argmax(votes, SeededNoise(1)), noisy.double().argmax(dim=1))
    assert isinstance(noise, AdditiveNoise)
    # 60,000 draws: the standard error of a deviation is below 0.7 %; five of them.
    assert float((noisy - votes).double().std()) == pytest.approx(noise.deviation, rel=0.035)


def test_noise_of_ones_own_is_filled_in_and_drawn_from():
    @dataclasses.dataclass(frozen=True)
    class Own(AdditiveNoise):
        kind: ClassVar[str] = "noise_of_ones_own"
        width: float
        l1_sensitivity: float = UNSTATED
        deviation = 0.1

        def __post_init__(self):
            self.settle(l1_sensitivity=1.0)

        def _draw(self, values, noise):
            return values + self.width * (2 * noise.uniform(tuple(values.shape)) - 1)

        def rdp(self, orders, adjacency):
            return orders * math.inf

    teacher = PrivateKNN(5, 0.5, noise=Own(0.25), noise_source=SeededNoise(0), release_counts=True)
    assert teacher.noise == Own(0.25, l1_sensitivity=2.0)
    teacher.fit(PrivateRecords.of(torch.randn(60, 2), torch.zeros(60, dtype=torch.int64), 2))
    release = teacher.label(torch.zeros(9, 2), FreeLedger())
    assert release.score_deviation == 0.1
    assert float((release.scores - torch.tensor([5.0, 0.0])).abs().max()) <= 0.25


def test_counts_are_not_noised_by_a_mechanism_for_winners():
    with pytest.raises(ValueError, match="can't be added to counts"):
        ReverseKNN(noise=ExponentialArgmax(3.0))
