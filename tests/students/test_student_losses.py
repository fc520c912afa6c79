import math

import pytest
import torch
import torch.nn.functional as F

from pl_privknn.students import losses


@pytest.fixture
def logits():
    return (torch.randn(6, 4) * 2).requires_grad_()


def test_label_loss_is_torchs_cross_entropy(logits):
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    soft = torch.rand(6, 4).softmax(dim=1)
    for smoothing in (0.0, 0.1):
        for targets in (labels, soft):
            want = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
            assert torch.allclose(losses.label_loss(logits, targets, smoothing), want, atol=1e-6)


@pytest.mark.parametrize("q", [0.3, 0.7, 1.0])
def test_generalized_cross_entropy_is_its_formula(logits, q):
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    p = logits.double().softmax(dim=1)[range(6), labels]
    want = (1 - p**q) / q
    assert torch.allclose(losses.label_loss(logits, labels, robustness=q).double(), want, atol=1e-6)


def test_unlabelled_rows_cost_nothing(logits):
    labels = torch.tensor([0, -1, 2, -1, 1, 0])
    cost = losses.label_loss(logits, labels, 0.1)
    assert cost[[1, 3]].abs().sum() == 0
    assert torch.allclose(
        cost[[0, 2, 4, 5]], losses.label_loss(logits[[0, 2, 4, 5]], labels[[0, 2, 4, 5]], 0.1)
    )
    mean = losses.weighted_mean(losses.label_loss(logits, torch.full((6,), -1)), torch.zeros(6))
    mean.backward()
    assert mean == 0
    assert logits.grad.abs().sum() == 0


def test_the_divergence_is_torchs(logits):
    other = torch.randn(6, 4)
    p, q = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=other)
    want = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(losses.kl_divergence(logits, other), want, atol=1e-6)


def test_uda_loss_is_its_formula(logits):
    weak = torch.tensor(
        [[3.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 0, 0], [0, 0, 2.5, 0], [5.0, 5, 0, 0]]
    )
    weak.requires_grad_()
    got, confident = losses.uda_loss(weak, logits, temperature=0.4, threshold=0.8)
    for row in range(6):
        p = [math.exp(value) for value in weak[row].tolist()]
        p = [value / sum(p) for value in p]
        sharp = [value ** (1 / 0.4) for value in p]
        sharp = [value / sum(sharp) for value in sharp]
        log_q = logits[row].log_softmax(dim=0).tolist()
        want = sum(t * (math.log(t) - lq) for t, lq in zip(sharp, log_q, strict=True)) if max(p) > 0.8 else 0
        assert got[row].item() == pytest.approx(want, abs=1e-5)
        assert confident[row].item() == (max(p) > 0.8)
    assert 0 < confident.sum() < 6
    got.sum().backward()
    assert weak.grad is None
    assert logits.grad is not None


def test_fixmatch_loss_is_its_formula(logits):
    weak = torch.tensor(
        [[4.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 0, 0], [0, 0, 3.8, 0], [5.0, 5, 0, 0]]
    )
    weak.requires_grad_()
    got, confident = losses.fixmatch_loss(weak.softmax(dim=1), logits, threshold=0.95)
    for row in range(6):
        p = [math.exp(value) for value in weak[row].tolist()]
        p = [value / sum(p) for value in p]
        want = -logits[row].log_softmax(dim=0)[p.index(max(p))].item() if max(p) >= 0.95 else 0
        assert got[row].item() == pytest.approx(want, abs=1e-5)
    assert confident.tolist() == [False, False, True, False, False, False] or confident.sum() > 0
    got.sum().backward()
    assert weak.grad is None
