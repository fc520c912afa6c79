"""Answers spread by a kernel: sums, labels, cluster selection, and what the store keeps."""

import math

import torch

from pl_privknn.callbacks import UncertainSelection
from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.callbacks.selection import (
    ClusterSelection,
    PublicPool,
    Selection,
    Spread,
    kernel_spread,
    label_by_spread,
    mean_features,
    spread_scores,
)
from pl_privknn.labelers.base import Release
from pl_privknn.privacy import Budget, Charge, Gaussian
from tests.setup.refusals import refusals


def _points(n, d=3, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def _literal_sums(examples, centres, scores, bandwidth):
    """Kernel smoothing written as a loop over all pairs; up to a factor a row."""
    distance = [[math.dist(x, c) for c in centres.tolist()] for x in examples.tolist()]
    nearest = [min(row) for row in distance]
    width = bandwidth * sum(nearest) / len(nearest)
    sums = []
    for row in distance:
        weights = [math.exp(-(d**2) / (2 * width**2)) for d in row]
        sums.append([sum(w * s[c] for w, s in zip(weights, scores.tolist(), strict=True)) for c in range(4)])
    return torch.tensor(sums, dtype=torch.float64)


def test_kernel_spread_equals_a_literal_loop():
    examples, centres = _points(50), _points(8, seed=1)
    scores = 20 * torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).double()
    spread = kernel_spread(examples, centres, bandwidth=0.6)
    sums, deviation = spread_scores(spread, scores, 3.0)
    literal = _literal_sums(examples, centres, scores, 0.6)
    scale = sums[:, :1] / literal[:, :1]
    assert torch.allclose(sums, literal * scale, rtol=1e-4, atol=1e-6)
    assert bool((scale > 0).all())
    # The nearest query has weight one, so the noise is at least that of one count.
    assert torch.equal(spread.weights[:, 0], torch.ones(50))
    assert torch.allclose(deviation, 3 * spread.weights.double().square().sum(dim=1).sqrt())


def test_deviation_is_that_of_the_sums():
    spread = kernel_spread(_points(5), _points(6, seed=1), 1.0)
    generator = torch.Generator().manual_seed(0)
    drawn = (7 * torch.randn(6, 2, generator=generator, dtype=torch.float64) for _ in range(4000))
    draws = torch.stack([spread_scores(spread, scores, 7.0)[0] for scores in drawn])
    # 8,000 draws each: a standard error of 0.8 %; six of them.
    assert torch.allclose(draws.std(dim=(0, 2)), spread_scores(spread, torch.zeros(6, 2), 7.0)[1], rtol=0.05)


def test_smoothing_recovers_labels_that_noise_hides():
    # Ten classes along a line, 200 queries with 20 records each, noise nearly as large as the counts.
    examples = torch.arange(2000.0)[:, None]
    centres = torch.arange(5.0, 2000.0, 10.0)[:, None]
    truth = (examples[:, 0] // 200).long()
    counts = 20.0 * torch.nn.functional.one_hot((centres[:, 0] // 200).long(), 10).double()
    noisy = counts + 15 * torch.randn(counts.shape, generator=torch.Generator().manual_seed(0)).double()
    accuracy = {}
    for width in (0.01, 10.0):
        labels, _ = label_by_spread(kernel_spread(examples, centres, width), noisy, 15.0)
        accuracy[width] = float((labels == truth).double().mean())
    assert accuracy[0.01] < 0.6
    assert accuracy[10.0] > 0.9


def _pool(features):
    n = len(features)
    return PublicPool(torch.full((n,), -1), torch.zeros(n, dtype=torch.bool), lambda: features)


def test_rounds_of_different_noise_count_by_inverse_variance():
    one, other = (kernel_spread(_points(20), _points(4 + 2 * n, seed=n + 1), 0.7) for n in (0, 1))
    joined = Spread.joined([one, other], [4, 6])
    truth = torch.rand(10, 3, generator=torch.Generator().manual_seed(3)).double() * 100
    deviations = torch.tensor([5.0] * 4 + [10.0] * 6).double()
    sums, noise = spread_scores(joined, truth, deviations)
    parts = [spread_scores(one, truth[:4], 5.0), spread_scores(other, truth[4:], 10.0)]
    assert torch.allclose(sums, parts[0][0] + parts[1][0] / 4)
    assert torch.allclose(noise, (parts[0][1].square() + parts[1][1].square() / 16).sqrt())


def test_later_rounds_smooth_the_counts_of_all_rounds_with_their_own_features():
    features, later = _points(200, d=4), _points(200, d=4, seed=9)
    select = ClusterSelection(components=4, ask="means", spread="kernel", neighbors=8)
    first = select(_pool(features), 12, torch.Generator().manual_seed(0))
    pool = PublicPool(torch.zeros(200).long(), torch.zeros(200).bool(), lambda: later, (first,))
    second = select(pool, 10, torch.Generator().manual_seed(1))
    asked = len(first.examples)
    alone = kernel_spread(later, mean_features(later, first.assignment, first.examples), select.bandwidth, 8)
    assert torch.equal(second.spread.queries[:, :8], alone.queries)
    assert torch.allclose(second.spread.weights[:, :8], alone.weights, atol=1e-5)
    assert int(second.spread.queries[:, 8:].min()) == asked
    # A round without queries of its own smooths the earlier ones alone.
    none = select(pool, 0, torch.Generator().manual_seed(1))
    assert len(none.examples) == 0
    assert torch.equal(none.spread.queries, alone.queries)


def test_the_uncertain_are_those_that_the_student_is_unsure_of():
    features = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    unsure = features[:, 0] > 0.5
    probabilities = torch.where(unsure[:, None], torch.tensor([0.5, 0.5]), torch.tensor([0.999, 0.001]))
    pool = PublicPool(
        torch.zeros(2000).long(), torch.zeros(2000).bool(), lambda: features, (), lambda: probabilities
    )
    asked = UncertainSelection()(pool, 300, torch.Generator().manual_seed(0)).examples
    assert bool(unsure[asked].all())
    assert len(set(asked.tolist())) == 300


def test_a_run_rebuilds_the_same_labels_after_reopening(tmp_path):
    examples = _points(30)
    spread = kernel_spread(examples, examples[:6], 0.8)
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).double() * 30
    assignment = spread.queries[:, 0]
    terms = {"plan": [Charge(Gaussian(5.0))], "description": {}, "public": {}, "budget": Budget()}
    run = LabelRun(tmp_path, **terms)
    run.open_round(0, lambda: Selection(torch.arange(6), assignment, spread, ask_means=True))
    run.mark_asked(0, list(range(6)))
    run.put(0, list(range(6)), Release(scores.argmax(dim=1), None, scores, 5.0))
    first = run.stored.answers(1)
    run.close()
    again = LabelRun(tmp_path, **terms).stored
    assert torch.equal(again.selections(1)[0].assignment, assignment)
    assert again.selections(1)[0].ask_means
    labels, soft = label_by_spread(spread, scores, 5.0)
    for found in (first, again.answers(1)):
        assert found[0].tolist() == list(range(30))
        assert torch.equal(found[1], labels)
        assert torch.equal(found[2], soft)
    assert again.answers(0)[0].tolist() == []


test_bad_arguments_are_named = refusals(
    {
        "bandwidth=0": lambda: ClusterSelection(spread="kernel", bandwidth=0),
        "spread='wide'": lambda: ClusterSelection(spread="wide"),
        "ask='all'": lambda: ClusterSelection(ask="all"),
        "weights": lambda: Spread(torch.zeros(1, 1).long(), torch.tensor([[-1.0]])),
    }
)
