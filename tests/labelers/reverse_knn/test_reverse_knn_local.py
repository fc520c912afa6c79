"""Local randomisers: privacy by enumeration of messages, estimates by Monte Carlo against closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from pl_privknn.labelers.local import RANDOMIZERS, Bloom, hash_cells, make_randomizer
from pl_privknn.labelers.reverse_knn import CountTable, true_counts
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.refusals import refusals


def bloom_probabilities(bloom, hashed):
    """Literal definition 5: every value that is hit has e^ε/Ω, the others share the rest."""
    marked = set(hashed)
    rest = (bloom.total - len(marked) * bloom.gain) / ((bloom.length - len(marked)) * bloom.total)
    return np.array([bloom.hit if value in marked else rest for value in range(bloom.length)])


@pytest.mark.parametrize(("epsilon", "ones", "length"), [(0.5, 1, None), (2.0, 3, 5), (0.1, 2, 4)])
def test_every_pair_of_answers_under_every_hash_is_private(epsilon, ones, length):
    bloom = Bloom(epsilon, ones, length)
    tables = [
        bloom_probabilities(bloom, hashed) for hashed in itertools.product(range(bloom.length), repeat=ones)
    ]
    for p in tables:
        assert p.sum() == pytest.approx(1)
    largest = np.max(tables, axis=0) / np.min(tables, axis=0)
    assert np.log(largest).max() == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("hashed", [[0, 1], [2, 2], [4, 0]])
def test_values_are_sent_with_their_probabilities(hashed):
    bloom = Bloom(1.0, 2, 6)
    sent = bloom.choose(torch.tensor([hashed]).expand(60_000, 2), SeededNoise(sum(hashed)))
    share = torch.bincount(sent, minlength=6).numpy() / 60_000
    expected = bloom_probabilities(bloom, hashed)
    # 18 shares in all, each within five standard errors: an honest sampler fails once in 10^5.
    assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / 60_000)).all()


@pytest.mark.parametrize("table", [CountTable(4, 3), CountTable(3, 3, k=2)], ids=["k1", "k2"])
def test_hashed_messages_are_private_as_a_whole(table, monkeypatch):
    parts, original = [], Bloom.messages

    def noting(bloom, ones, noise):
        parts.append((bloom, ones.shape[1]))
        return original(bloom, ones, noise)

    monkeypatch.setattr(Bloom, "messages", noting)
    make_randomizer("collision", 1.2, table).randomize(*clients(table, 3, 0), SeededNoise(0))
    spent = 0.0
    for bloom, ones in parts:
        # Any two answers, under any hash: the parts of a message are independent of one another.
        values = range(min(bloom.length, 2 * ones + 1))
        tables = [bloom_probabilities(bloom, hashed) for hashed in itertools.product(values, repeat=ones)]
        spent += np.log(np.max(tables, axis=0) / np.min(tables, axis=0)).max()
    assert spent == pytest.approx(1.2, rel=1e-9)


def clients(table, n, seed):
    generator = torch.Generator().manual_seed(seed)
    nearest = torch.rand(n, table.queries, generator=generator).argsort(dim=1)[:, : table.k]
    # The first cells get most votes, the last query none.
    nearest = nearest % (table.queries - 1) if table.k == 1 else nearest
    labels = torch.rand(n, table.classes, generator=generator).pow(2).argsort(dim=1)[:, : table.labels]
    return nearest, labels


@pytest.mark.parametrize("name", list(RANDOMIZERS))
@pytest.mark.parametrize("table", [CountTable(4, 3), CountTable(5, 4, k=2, labels=2)], ids=["k1r1", "k2r2"])
def test_estimates_are_unbiased_and_messages_are_simulated_exactly(name, table):
    randomizer = make_randomizer(name, 1.5, table)
    nearest, labels = clients(table, 200, 0)
    true = true_counts(table, nearest, labels).view(table.queries, table.classes).double()
    messages, simulated = [], []
    for seed in range(200):
        sent = randomizer.randomize(nearest, labels, SeededNoise(seed))
        messages.append(randomizer.aggregate(sent[torch.randperm(200)]))
        simulated.append(randomizer.simulate(nearest, labels, SeededNoise(10_000 + seed)))
    for runs in (messages, simulated):
        found = torch.stack(runs)
        # Up to 20 cells in 8 cases: four standard errors each, an honest estimate fails once in 100 such runs.
        assert ((found.mean(dim=0) - true).abs() < 4.2 * found.std(dim=0) / math.sqrt(200)).all()
    for cell in ((0, 0), (2, 1)):
        # Eight tests at 1e-4.
        assert ks_2samp(*([float(run[cell]) for run in runs] for runs in (messages, simulated))).pvalue > 1e-4


@pytest.mark.parametrize("name", list(RANDOMIZERS))
@pytest.mark.parametrize("epsilon", [0.4, 3.0])
def test_variance_of_absent_votes_is_its_formula(name, epsilon):
    # All records vote for the first query and class; the last query has no vote, and the last classes none.
    table = CountTable(40, 30)
    randomizer = make_randomizer(name, epsilon, table)
    n = 400
    nearest = labels = torch.zeros(n, 1, dtype=torch.int64)
    cells = torch.stack(
        [randomizer.simulate(nearest, labels, SeededNoise(seed))[1:, 1:] for seed in range(120)]
    )
    # 39·29 cells of 120 runs: the variance's relative standard error is below 0.4 % for independent cells; those
    # of one query share its hits, which leaves about 1 %. Three per cent are asked for.
    assert float(cells.var(unbiased=False)) == pytest.approx(randomizer.deviation(n) ** 2, rel=0.03)
    assert abs(float(cells.mean())) < 0.05 * randomizer.deviation(n)


def test_hashes_look_uniform_and_independent_of_one_another():
    keys = torch.arange(20_000) * 7919
    hashed = hash_cells(keys, torch.arange(4).expand(20_000, 4), 5)
    joint = torch.bincount((hashed[:, 0] * 5 + hashed[:, 3]), minlength=25).double()
    # χ² with 24 degrees of freedom at 1e-4.
    assert float(((joint - 800) ** 2 / 800).sum()) < 60.0


test_bad_arguments_are_named = refusals(
    {
        "randomizer='sketch'": lambda: make_randomizer("sketch", 1.0, CountTable(2, 2)),
        "epsilon=0": lambda: make_randomizer("collision", 0, CountTable(2, 2)),
    }
)
