"""The search for settings: on public data, in the paper's two passes, and it finds what is good."""

import pytest
import torch
from grouped import grouped

from pl_privknn.labelers.ind_knn.algorithm import PublicDensity
from pl_privknn.labelers.ind_knn.hyperparameters import search_ind_knn
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.prediction import IndKNNSwitches
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def blobs(count, seed, spread=0.35):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    return torch.eye(10)[labels] + spread * torch.randn(count, 10, generator=generator), labels


def accuracy(settings, private, queries):
    labeler = IndKNN(**grouped(IndKNN, epsilon=1.0, delta=1e-5, noise_source=SeededNoise(1), **settings))
    labeler.fit(*private, 5)
    return float((labeler.label(queries[0], FreeLedger()).labels == queries[1]).double().mean())


def test_settings_found_on_public_data_are_good_on_private_data():
    public, private, queries = blobs(600, 0), blobs(4000, 1), blobs(200, 2)
    trials = search_ind_knn(
        *public, 5, epsilon=1.0, delta=1e-5, num_queries=200, num_records=4000, sigmas=(0.2, 0.5, 0.9, 1.4)
    )
    assert len(trials) == 11 * 4  # τ* ± 0.05 in steps of 0.01, and four noise levels
    assert [trial.accuracy for trial in trials] == sorted((t.accuracy for t in trials), reverse=True)
    best, worst = (accuracy(trial.settings, private, queries) for trial in (trials[0], trials[-1]))
    assert best > 0.85
    assert best > worst
    again = search_ind_knn(
        *public, 5, epsilon=1.0, delta=1e-5, num_queries=200, num_records=4000, sigmas=(0.2, 0.5, 0.9, 1.4)
    )
    assert again == trials


def test_neighbours_are_searched_for_where_thresholds_follow_density():
    public, private, queries = blobs(600, 0), blobs(4000, 1), blobs(200, 2)
    trials = search_ind_knn(
        *public, 5, epsilon=1.0, delta=1e-5, num_queries=200, num_records=4000, by_density=True,
        sigmas=(0.3, 0.9), neighbors=(20, 200, 10_000),
    )  # fmt: skip
    densities = [PublicDensity(**trial.settings["switches"]["density"]) for trial in trials]
    assert {density.neighbors for density in densities} == {20, 200}
    settings = {**trials[0].settings, "switches": IndKNNSwitches(density=densities[0])}
    assert accuracy(settings, private, queries) > 0.85


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_queries=600"):
        search_ind_knn(*blobs(600, 0), 5, epsilon=1.0, delta=1e-5, num_queries=600, num_records=10)
