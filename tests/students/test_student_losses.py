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


def test_hard_labels_are_one_hot_rows(logits):
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    for robustness in (0.0, 0.7):
        hard = losses.label_loss(logits, labels, 0.1, robustness)
        assert torch.equal(hard, losses.label_loss(logits, F.one_hot(labels, 4).float(), 0.1, robustness))


@pytest.mark.parametrize("q", [0.3, 0.7, 1.0])
def test_generalized_cross_entropy_is_its_formula(logits, q):
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    p = logits.double().softmax(dim=1)[range(6), labels]
    want = (1 - p**q) / q
    assert torch.allclose(losses.label_loss(logits, labels, robustness=q).double(), want, atol=1e-6)


def test_generalized_cross_entropy_tends_to_cross_entropy(logits):
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    near = losses.label_loss(logits, labels, robustness=1e-4)
    assert torch.allclose(near, losses.label_loss(logits, labels), rtol=1e-3)


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


@pytest.mark.parametrize(
    "targets", [torch.zeros(6), torch.zeros(6, 3), torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 1)]
)
def test_targets_of_other_forms_are_refused(targets):
    with pytest.raises(ValueError, match=r"want int64 \(n,\) or float \(n, 4\)"):
        losses.label_loss(torch.zeros(6, 4), targets)


def test_label_confidence_is_the_models_own(logits):
    p = logits.detach().softmax(dim=1)
    labels = torch.tensor([0, 1, -1, 3, 1, 0])
    got = losses.label_confidence(logits, labels)
    assert not got.requires_grad
    assert got[2] == 0
    assert torch.allclose(got[[0, 1]], p[[0, 1], [0, 1]])
    assert torch.allclose(losses.label_confidence(logits, torch.full((6, 4), 0.25)), torch.full((6,), 0.25))


def test_divergence_and_entropy_are_torchs(logits):
    other = torch.randn(6, 4)
    p, q = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=other)
    want = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(losses.kl_divergence(logits, other), want, atol=1e-6)
    assert torch.allclose(losses.entropy(logits), p.entropy(), atol=1e-6)


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


def test_alignment_moves_the_mean_to_the_prior():
    p = torch.rand(500, 3).softmax(dim=1)
    prior = torch.tensor([0.6, 0.3, 0.1])
    aligned = losses.align(p, p.mean(dim=0), prior)
    assert torch.allclose(aligned.sum(dim=1), torch.ones(500))
    row = p[0] * prior / p.mean(dim=0)
    assert torch.allclose(aligned[0], row / row.sum())
    assert torch.allclose(aligned.mean(dim=0), prior, atol=0.02)  # exact only where all rows are alike
    assert torch.allclose(losses.align(p, prior, prior), p)


@pytest.mark.parametrize(
    ("schedule", "halfway"), [("linear", 0.5), ("log", 1 - math.exp(-2.5)), ("exp", math.exp(-2.5))]
)
def test_annealing_rises_to_one(schedule, halfway):
    assert losses.annealed_threshold(schedule, 0.5, 10) == pytest.approx(halfway * 0.9 + 0.1)
    assert losses.annealed_threshold(schedule, 0.0, 10) == pytest.approx(0.1, abs=0.01)
    assert losses.annealed_threshold(schedule, 1.0, 10) == pytest.approx(1.0, abs=0.01)


def test_losses_of_16_bit_logits_are_float32():
    half = torch.randn(3, 4, dtype=torch.bfloat16)
    for value in (losses.label_loss(half, torch.tensor([0, 1, 2])), losses.entropy(half)):
        assert value.dtype == torch.float32
    assert losses.kl_divergence(half, half).dtype == torch.float32
