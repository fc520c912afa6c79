import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace, NoisyScreening
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.refusals import refusals


def literal_private_knn(features, labels, query, *, k, rate, threshold, sigma1, sigma2, c, rng):
    """One query exactly as the paper words it: sample, search, vote, add noise."""

    def votes():
        sample = rng.random(len(features)) < rate
        distance = ((features[sample] - query) ** 2).sum(1)
        return np.bincount(labels[sample][np.argsort(distance, kind="stable")[:k]], minlength=c)

    if votes().max() + rng.normal(0, sigma1) < threshold:
        return -1
    return int(np.argmax(votes() + rng.normal(0, sigma2, c)))


def test_same_distribution_as_the_literal_algorithm():
    rng = np.random.default_rng(0)
    n, c, k, rate = 40, 3, 7, 0.4
    features, query = rng.normal(size=(n, 2)), np.array([0.3, -0.2])
    # Mostly class 0 near the query, so that the noise has something to spoil.
    labels = np.where(((features - query) ** 2).sum(1) < 0.9, 0, rng.integers(1, c, n))
    settings = {"threshold": 4.0, "sigma1": 1.5, "sigma2": 4.0}
    draws = 6000
    literal = [
        literal_private_knn(features, labels, query, k=k, rate=rate, c=c, rng=rng, **settings)
        for _ in range(draws)
    ]
    labeler = PrivateKNN(
        k, rate, Screening(4.0, Gaussian(1.5)), Gaussian(sigma=4.0), noise_source=SeededNoise(1)
    )
    labeler.fit(PrivateRecords.of(torch.tensor(features, dtype=torch.float32), torch.tensor(labels), c))
    queries = torch.tensor(query, dtype=torch.float32).repeat(draws, 1)
    ours = labeler.label(queries, FreeLedger()).labels.numpy()
    table = [[np.sum(np.asarray(who) == outcome) for outcome in range(-1, c)] for who in (literal, ours)]
    # Two-sample chi-square at a fixed seed: a correct labeler fails for one seed in a thousand.
    assert stats.chi2_contingency(table).pvalue > 1e-3
    # The test has power: half the aggregation noise is told apart.
    broken = PrivateKNN(
        k, rate, Screening(4.0, Gaussian(1.5)), Gaussian(sigma=2.0), noise_source=SeededNoise(1)
    )
    broken.fit(PrivateRecords.of(torch.tensor(features, dtype=torch.float32), torch.tensor(labels), c))
    other = broken.label(queries, FreeLedger()).labels.numpy()
    table[1] = [np.sum(other == outcome) for outcome in range(-1, c)]
    assert stats.chi2_contingency(table).pvalue < 1e-3


def _fitted(labeler, n=60, c=3):
    generator = torch.Generator().manual_seed(0)
    labeler.fit(PrivateRecords.of(torch.randn(n, 4, generator=generator), torch.arange(n) % c, c))
    return labeler


@pytest.mark.parametrize("noise", [Laplace(scale=0.01), ExponentialArgmax(scale=0.01), Gaussian(sigma=0.01)])
def test_little_noise_gives_the_plain_majority(noise):
    labeler = _fitted(PrivateKNN(9, 1.0, None, noise, SeededNoise(0)))
    queries = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    votes = labeler._neighbors.votes(labeler._neighbors.rank(queries))
    first, second = votes.sort(dim=1, descending=True).values[:, :2].T
    assert (first > second).sum() > 15
    found = labeler.label(queries, FreeLedger()).labels
    assert torch.equal(found[first > second], votes.argmax(1)[first > second])


test_bad_arguments_are_named = refusals(
    {
        r"sampling_rate=1\.5": lambda: PrivateKNN(10, 1.5),
        r"screening\.threshold=11": lambda: PrivateKNN(10, 0.5, Screening(11, Gaussian(1.0))),
        "sigma=-1": lambda: Screening(5, Gaussian(-1)),
        r"l2_sensitivity=0\.5": lambda: PrivateKNN(10, 0.5, noise=Gaussian(1.0, l2_sensitivity=0.5)),
        "be added to votes": lambda: PrivateKNN(10, 0.5, noise=NoisyScreening(10, 5, 1.0, 3)),
        "fewer than k=100": lambda: _fitted(PrivateKNN(100, 1.0, noise=Gaussian(sigma=1.0))),
        "fit": lambda: PrivateKNN(10).label(torch.zeros(1, 4), FreeLedger()),
    }
)
