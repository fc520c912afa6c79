import math

import pytest
import torch

from pl_privknn.callbacks.selection import class_posterior
from pl_privknn.labelers.base import nonnegative_shares
from tests.setup.refusals import refusals

CLASSES = 10


def _world(rows, noise, deviation, seed=0, records=120):
    """True shares (one or two classes a query), and their counts with noise."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.zeros(rows, CLASSES, dtype=torch.float64)
    first = torch.randint(CLASSES, (rows,), generator=generator)
    second = (first + 1 + torch.randint(CLASSES - 1, (rows,), generator=generator)) % CLASSES
    part = 0.5 + 0.5 * torch.rand(rows, generator=generator).double()
    shares[torch.arange(rows), first] = part
    shares[torch.arange(rows), second] += 1 - part
    if noise == "gaussian":
        drawn = torch.randn(rows, CLASSES, generator=generator).double()
    else:
        uniform = torch.rand(rows, CLASSES, generator=generator).double() - 0.5
        drawn = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)
    return shares, records * shares + deviation * drawn


def _loss(shares, estimate):
    return float(-(shares * estimate.clamp(min=1e-9).log()).sum(dim=1).mean())


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_posterior_is_closer_to_the_truth_than_clipping(noise):
    for deviation in (5.0, 30.0):
        shares, noisy = _world(1000, noise, deviation)
        posterior, clipped = class_posterior(noisy, deviation), nonnegative_shares(noisy)
        assert torch.allclose(posterior.sum(dim=1), torch.ones(1000, dtype=torch.float64))
        assert bool((posterior >= 0).all())
        # 1,000 rows: the differences are some 10 standard errors of either mean.
        assert _loss(shares, posterior) < _loss(shares, clipped) - 0.01
        assert float((posterior - shares).square().sum()) < 0.9 * float((clipped - shares).square().sum())


def test_posterior_equals_bayes_rule_by_hand():
    # Half of the scores stand at 0 and half at 100, with hardly any noise between: the prior found from them can
    # only sit at shares 0 and 1, and a score in the middle of another query's row follows from it by Bayes' rule.
    sure = torch.tensor([[100.0, 0.0], [0.0, 100.0]]).repeat(500, 1).double()
    deviation = torch.full((1001,), 1.0)
    deviation[-1] = 30.0
    doubtful = torch.tensor([[60.0, 40.0]]).double()
    found = class_posterior(torch.cat([sure, doubtful]), deviation)[-1]
    # Equal priors of 0 and 1: the odds of "all records" against "none" of a score s are exp((2 s t - t²) / 2σ²),
    # with t = 100 the row's total.
    odds = [math.exp((2 * score * 100 - 100**2) / (2 * 30.0**2)) for score in (60.0, 40.0)]
    shares = [value / (1 + value) for value in odds]
    assert found.tolist() == pytest.approx([share / sum(shares) for share in shares], abs=0.01)


def test_order_of_scores_is_kept_and_rows_without_counts_are_no_trouble():
    scores = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double() * 30
    scores[0] = -1000.0
    scores[1] = 0.0
    posterior = class_posterior(scores, 10.0)
    assert bool(torch.isfinite(posterior).all())
    for row, probabilities in zip(scores[2:], posterior[2:], strict=True):
        sorted_ = probabilities[row.argsort()]
        assert bool((sorted_.diff() >= -1e-12).all())


test_bad_arguments_are_named = refusals(
    {
        "deviation": lambda: class_posterior(torch.ones(2, 3), 0.0),
        "scores": lambda: class_posterior(torch.full((2, 3), math.nan), 1.0),
    }
)
