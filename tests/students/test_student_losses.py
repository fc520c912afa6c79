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


def weak_logits(*sure):
    """Weak views, two of whose rows are confident."""
    return torch.tensor(
        [[sure[0], 0, 0, 0], [1.0, 0, 0, 0], [0, 9.0, 0, 0], [0] * 4, [0, 0, sure[1], 0], [5, 5, 0, 0]]
    )


def check_consistency(found, confident, wanted, bar, weak, logits):
    """``wanted`` of the rows whose largest probability reaches the bar; gradients of strong views alone."""
    sure = weak.softmax(dim=1).max(dim=1).values > bar
    assert 0 < sure.sum() < 6
    assert torch.equal(confident, sure)
    torch.testing.assert_close(found, torch.where(sure, wanted, 0.0), atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert weak.grad is None
    assert logits.grad is not None


def test_uda_loss_is_its_formula(logits):
    weak = weak_logits(3.0, 2.5).requires_grad_()
    sharp = weak.detach().softmax(dim=1) ** (1 / 0.4)
    sharp /= sharp.sum(dim=1, keepdim=True)
    wanted = (sharp * (sharp.log() - logits.detach().log_softmax(dim=1))).sum(dim=1)
    check_consistency(
        *losses.uda_loss(weak, logits, temperature=0.4, threshold=0.8), wanted, 0.8, weak, logits
    )


def test_fixmatch_loss_is_its_formula(logits):
    weak = weak_logits(4.0, 3.8).requires_grad_()
    wanted = F.cross_entropy(logits.detach(), weak.argmax(dim=1), reduction="none")
    found = losses.fixmatch_loss(weak.softmax(dim=1), logits, threshold=0.95)
    check_consistency(*found, wanted, 0.95, weak, logits)
