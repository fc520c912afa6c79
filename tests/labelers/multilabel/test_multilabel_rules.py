"""Multi-label votes: sensitivities by brute force, sums by literal sampling, rules."""

import itertools
import math

import pytest
import torch

from pl_privknn.labelers import FixedThresholds, LearnedThresholds
from pl_privknn.labelers.attributes import clip_attributes, denoised, single_vote_norms, swapped_vote_norms
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from tests.labelers.multilabel.attributes_setup import attribute_knn
from tests.setup.refusals import refusals

# ---------------------------------------------------------------------------- sensitivities


@pytest.mark.parametrize("attributes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tau", [None, 0.5, 1, 1.5, 2.7, 10])
def test_norms_are_those_of_all_pairs_of_label_vectors(attributes, tau):
    rows = torch.tensor(list(itertools.product([0, 1], repeat=attributes)))
    votes = clip_attributes(rows, tau)
    if tau is not None:
        assert float(votes.sum(dim=1).max()) <= tau + 1e-12
    differences = votes[:, None] - votes[None]
    l1, l2 = swapped_vote_norms(tau, attributes)
    assert l1 == pytest.approx(float(differences.abs().sum(dim=2).max()), rel=1e-12)
    assert l2 == pytest.approx(float((differences**2).sum(dim=2).max().sqrt()), rel=1e-12)
    single_l1, single_l2 = single_vote_norms(tau, attributes)
    assert single_l1 == pytest.approx(float(votes.sum(dim=1).max()), rel=1e-12)
    assert single_l2 == pytest.approx(float(votes.norm(dim=1).max()), rel=1e-12)
    if tau is not None:
        assert l1 <= 2 * tau + 1e-12
        assert l2 <= min(math.sqrt(2 * tau), math.sqrt(attributes)) + 1e-12


def test_paper_sensitivity_and_theorem_5():
    # CelebA: 40 attributes leave room for two rows of τ = 10 ones, so √(2τ) is exact and RDP is α·τ/σ².
    assert swapped_vote_norms(10, 40) == (20.0, pytest.approx(math.sqrt(20.0), rel=1e-15))
    mechanism = (
        attribute_knn(k=800, sampling_rate=1.0, tau=10, noise=Gaussian(50.0)).plan(1, 1, 40)[0].mechanism
    )
    orders = torch.tensor([2.0, 8.0, 32.0]).double().numpy()
    assert mechanism.rdp(orders, "add_remove") == pytest.approx(orders * 10 / 50**2, rel=1e-12)
    # Without clipping all ten attributes may turn over.
    assert swapped_vote_norms(None, 10)[1] == pytest.approx(math.sqrt(10))


# ---------------------------------------------------------------------------- sums over samples


def test_sums_are_those_of_literal_samples():
    generator = torch.Generator().manual_seed(2)
    table, query = torch.randn(60, 2, generator=generator), torch.zeros(1, 2)
    values = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    order = table.norm(dim=1).argsort()
    # list_length=12 is often too short for 8 of a sample at rate ½, so longer lists are walked as well.
    sums = PoissonSums(table, values, 8, 0.5, list_length=12)
    noise, draws = SeededNoise(4), 3000
    walked = sums.votes(sums.rank(query.expand(draws, 2)), noise.bernoulli)
    literal = torch.empty(draws, 3, dtype=torch.float64)
    for i in range(draws):
        drawn = order[torch.rand(60, generator=generator) < 0.5][:8]
        literal[i] = values[drawn].sum(dim=0)
    # Six comparisons at five standard errors: a right implementation fails with probability below 4e-6.
    error = (walked.var(dim=0) / draws + literal.var(dim=0) / draws).sqrt()
    assert bool(((walked.mean(dim=0) - literal.mean(dim=0)).abs() < 5 * error).all())
    spread = literal.var(dim=0)
    assert bool(((walked.var(dim=0) / spread).log().abs() < 5 * math.sqrt(4 / draws)).all())


# ---------------------------------------------------------------------------- rules


def test_fixed_threshold_is_the_stated_one():
    sums = torch.tensor([[39.0, 41.0, 0.0]]).double()
    assert FixedThresholds()(sums, 100, 2, 1.0).gt(0.5).tolist() == [[False, False, False]]
    assert FixedThresholds(denoise=True).learns > FixedThresholds().learns
    # 100 votes, τ = 2, five attributes expected: 100 · ½ · 2/5 = 20; with a fraction of 1/4, 10.
    assert FixedThresholds(expected_positives=5)(sums, 100, 2, 1.0).gt(0.5).tolist() == [[True, True, False]]
    assert FixedThresholds(fraction=0.4)(sums, 100, None, 1.0).gt(0.5).tolist() == [[False, True, False]]
    totals = torch.tensor([10.0, 30.0]).double()  # of each query
    each = FixedThresholds()(torch.tensor([[10.0, 2.0]] * 2).double(), totals, None, 0.1)
    assert each.gt(0.5).tolist() == [[True, False], [False, False]]
    probability = FixedThresholds(fraction=0.4)(sums, 100, None, 3.0)[0, 1]
    scale = math.sqrt(3**2 + 10**2)
    assert float(probability) == pytest.approx(0.5 * (1 + math.erf(1 / scale / math.sqrt(2))), rel=1e-12)


def test_learned_threshold_finds_where_clipping_moved_the_heaps():
    generator = torch.Generator().manual_seed(3)
    truth = (torch.rand(600, 2, generator=generator) < torch.tensor([0.5, 0.2])).long()
    # Agreement gives 90 where 300 would be expected without clipping: half the votes is never reached.
    sums = 90.0 * truth + 12.0 * torch.randn(600, 2, generator=generator, dtype=torch.float64)
    rule = LearnedThresholds(denoise=False)
    assert float(((rule(sums, 300, 2, 12.0) > 0.5).long() == truth).double().mean()) > 0.99
    assert float(((FixedThresholds()(sums, 300, 2, 12.0) > 0.5).long() == truth).double().mean()) < 0.7
    # Few answers: the public threshold.
    few = rule(sums[:20], 300, 2, 12.0)
    assert torch.equal(few, FixedThresholds()(sums[:20], 300, 2, 12.0))
    # One heap, since nobody has the attribute: a threshold between its halves would give it to many.
    alone = 10.0 * torch.randn(500, 3, generator=generator, dtype=torch.float64)
    assert float((LearnedThresholds()(alone, 100, None, 10.0) > 0.5).double().mean()) < 0.01


def test_denoising_comes_nearer_to_the_sums_and_knows_how_near():
    generator = torch.Generator().manual_seed(5)
    basis = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    clean = 50 + 30 * torch.randn(2000, 2, generator=generator, dtype=torch.float64) @ basis
    noisy = clean + 20 * torch.randn(2000, 12, generator=generator, dtype=torch.float64)
    estimate, left = denoised(noisy, 20.0)
    error = ((estimate - clean) ** 2).mean(dim=0).sqrt()
    assert bool((error < 0.6 * 20).all())
    # The optimal linear estimate of the true covariance, and the error it should have.
    covariance = 900 * basis.T @ basis
    optimal = covariance @ torch.linalg.inv(covariance + 400 * torch.eye(12, dtype=torch.float64))
    best = (((noisy - 50) @ optimal.T + 50 - clean) ** 2).mean(dim=0).sqrt()
    assert bool((error < 1.1 * best).all())
    # What the rest of the noise is said to be: within a tenth, but where next to nothing is left.
    assert bool(((left - error).abs() < 0.1 * error + 2).all())
    # Too few rows to learn a covariance from: nothing is changed.
    same, untouched = denoised(noisy[:23], 20.0)
    assert torch.equal(same, noisy[:23])
    assert untouched.tolist() == [20.0] * 12


def sums_of(values):
    return lambda: PoissonSums(torch.zeros(4, 2), values, 2, 0.5)


test_what_does_not_fit_is_refused = refusals(
    {
        "fraction=0": lambda: FixedThresholds(fraction=0.0),
        "fraction=1": lambda: FixedThresholds(fraction=1.0),
        "expected_positives": lambda: FixedThresholds(expected_positives=0),
        "denoise": lambda: FixedThresholds(denoise=1),
        "FixedThresholds": lambda: LearnedThresholds()(torch.zeros(2, 2), torch.ones(2), None, 0.1),
        "values: shape": sums_of(torch.zeros(5, 2)),
        "values.*int64": sums_of(torch.zeros(4, 2).long()),
        "values.*": sums_of(torch.tensor([[math.nan]] * 4)),
    }
)
