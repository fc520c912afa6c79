"""Noisy counts at the price of the winner alone: same draws, same charges, and what they are good for."""

import pytest
import torch

from pl_privknn.callbacks.selection import ClusterSelection
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE, LinearTeachers, PrivateKNN
from pl_privknn.labelers.voting import Screening
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.refusals import refusals
from tests.setup.small_fit import fit_student


def table(n=400, d=5, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    features = torch.randn(n, d, generator=generator) + 2 * torch.nn.functional.one_hot(labels, d)
    return features, labels


def knn(**given):
    teacher = PrivateKNN(40, 0.5, noise_source=SeededNoise(0), **given)
    teacher.fit(PrivateRecords.of(*table(), 3))
    return teacher


def pate(**given):
    brief = LinearTeachers(steps=20, batch_size=8)
    teacher = PATE(12, brief, progress=False, noise_source=SeededNoise(3), **given)
    teacher.fit(PrivateRecords.of(*table(), 3))
    return teacher


TEACHERS = {
    "knn": (knn, {"noise": Gaussian(6.0)}),
    "knn, laplace": (knn, {"noise": Laplace(5.0)}),
    "knn, screened": (knn, {"noise": Laplace(5.0), "screening": Screening(22, Gaussian(4.0))}),
    "pate": (pate, {"noise": Laplace(2.0)}),
    "pate, screened": (pate, {"noise": Gaussian(2.0), "screening": Screening(6, Gaussian(2.0))}),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_counts_cost_nothing_and_change_no_answer(name):
    make, given = TEACHERS[name]
    queries, _ = table(60, seed=1)
    silent, open_, counting = FreeLedger(), FreeLedger(), make(release_counts=True, **given)
    hidden, shown = make(**given).label(queries, silent), counting.label(queries, open_)
    assert open_.rows == silent.rows
    assert shown.score_deviation == given["noise"].deviation
    assert torch.equal(shown.labels, hidden.labels)
    assert hidden.scores is None
    answered = shown.labels >= 0
    assert bool(answered.all()) == ("screening" not in given)
    assert torch.equal(shown.scores[answered].argmax(dim=1), shown.labels[answered])
    # Of a refused query nothing but the refusal is let out.
    assert bool(torch.isnan(shown.scores[~answered]).all())
    if make is pate:
        with pytest.raises(ValueError, match="winner alone"):
            counting.data_dependent_report(1e-5)


test_a_mechanism_that_is_paid_for_the_winner_alone_shows_no_counts = refusals(
    {
        r"release_counts=True.*Gaussian": lambda: PrivateKNN(
            noise=ExponentialArgmax(0.5), release_counts=True
        ),
        r"release_counts=True.*Laplace": lambda: PATE(noise=ExponentialArgmax(0.5), release_counts=True),
        "release_counts": lambda: PrivateKNN(release_counts="yes"),
    }
)


def test_counts_of_screened_queries_are_smoothed_over_their_neighbours(tmp_path):
    teacher = PrivateKNN(
        40, 0.5, Screening(40, Gaussian(4.0)), Gaussian(8.0), SeededNoise(0), release_counts=True
    )
    selection = ClusterSelection(components=8, ask="means", spread="kernel")
    callback, data = fit_student(tmp_path, teacher, 0.3, public=90, queries_per_round=30, selection=selection)
    counts = callback.label_counts()
    assert 0 < counts["answered"] < 30
    # Examples of refused clusters follow their neighbours' counts.
    assert bool((data.public.labels >= 0).all())
    assert callback.metrics["labels/accuracy"] > 0.9
