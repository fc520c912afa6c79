"""Students on attributes: binary losses against torch and closed forms, metrics, training, and what is refused."""

import math

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.distributions import Bernoulli, kl_divergence
from torchmetrics.classification import MultilabelAccuracy

from pl_privknn.students import (
    FixMatchStudent,
    LabelLoss,
    StudentOptimization,
    SupervisedStudent,
    UDAStudent,
    VATStudent,
)
from pl_privknn.students.losses import TASKS, AttributeAccuracy, fixmatch_loss, uda_loss
from pl_privknn.students.vat import adversarial_direction

OUTPUTS = TASKS["multilabel"]
STUDENTS = [SupervisedStudent, VATStudent, UDAStudent, FixMatchStudent]


def random_case(seed=0, n=7, a=4):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, a, generator=generator)
    hard = torch.randint(0, 2, (n, a), generator=generator)
    unknown = torch.rand(n, a, generator=generator) < 0.2
    return logits, torch.where(unknown, -1, hard)


def student(kind, **kwargs):
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
    )
    return kind(network=network, num_classes=3, image_size=8, task="multilabel", **kwargs)


def stripes(n=300, seed=0):
    """8×8 images with up to three bright bars: the attributes say which."""
    generator = torch.Generator().manual_seed(seed)
    attributes = torch.randint(0, 2, (n, 3), generator=generator)
    images = 0.3 * torch.rand(n, 1, 8, 8, generator=generator)
    for which, (rows, columns) in enumerate(
        [(slice(1, 3), slice(None)), (slice(5, 7), slice(None)), (slice(None), slice(3, 5))]
    ):
        images[:, 0, rows, columns] += 0.6 * attributes[:, which, None, None]
    return images, attributes


# ---------------------------------------------------------------------------- losses


def test_cross_entropy_of_known_attributes():
    logits, targets = random_case()
    expected = F.binary_cross_entropy_with_logits(logits, targets.clamp(min=0).float(), reduction="none")
    torch.testing.assert_close(OUTPUTS.losses(logits, targets), torch.where(targets >= 0, expected, 0.0))
    soft = torch.rand(7, 4)
    torch.testing.assert_close(
        OUTPUTS.losses(logits, soft, smoothing=0.2),
        F.binary_cross_entropy_with_logits(logits, 0.8 * soft + 0.1, reduction="none"),
    )
    assert torch.equal(OUTPUTS.known(logits, targets).bool(), targets >= 0)


def test_robust_loss_is_the_generalised_cross_entropy():
    logits, targets = random_case()
    targets = targets.clamp(min=0)
    p = logits.double().sigmoid()
    right = torch.where(targets == 1, p, 1 - p)
    for q in (0.3, 0.7, 1.0):
        torch.testing.assert_close(
            OUTPUTS.losses(logits, targets, robustness=q), ((1 - right**q) / q).float()
        )
    small = OUTPUTS.losses(logits, targets, robustness=1e-6)
    torch.testing.assert_close(small, OUTPUTS.losses(logits, targets), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(OUTPUTS.confidence(logits, targets), right.float())


def test_losses_survive_extreme_logits():
    logits = torch.tensor([[200.0, -200.0, 200.0, -200.0]], requires_grad=True)
    loss = OUTPUTS.losses(logits, torch.tensor([[1, 0, 0, 1]]))
    assert loss.tolist() == [[0.0, 0.0, 200.0, 200.0]]
    total = loss.sum() + OUTPUTS.divergence(logits.detach(), logits).sum()
    total.backward()
    assert bool(logits.grad.isfinite().all())


def test_the_divergence_is_that_of_bernoulli_variables():
    logits, other = random_case(0)[0], random_case(1)[0]
    first, second = Bernoulli(logits=logits), Bernoulli(logits=other)
    torch.testing.assert_close(OUTPUTS.divergence(logits, other), kl_divergence(first, second).mean(dim=1))


def test_uda_counts_each_confident_attribute_by_itself():
    weak = torch.tensor([[3.0, 0.5, -3.0]], requires_grad=True)
    strong = torch.tensor([[1.0, 1.0, 1.0]], requires_grad=True)
    losses, confident = uda_loss(OUTPUTS.rows(weak), OUTPUTS.rows(strong), temperature=0.5, threshold=0.8)
    assert confident.tolist() == [True, False, True]
    sharp, seen = Bernoulli(logits=weak.detach() / 0.5), Bernoulli(logits=strong.detach())
    each = kl_divergence(sharp, seen)[0]
    assert float(losses.sum()) == pytest.approx(float(each[0] + each[2]), rel=1e-5)
    losses.sum().backward()
    assert weak.grad is None
    assert float(strong.grad[0, 1]) == 0
    assert float(strong.grad[0, 0]) != 0


def test_fixmatch_learns_hard_attributes():
    weak = torch.tensor([[4.0, 1.0, -4.0]])
    strong = torch.tensor([[0.3, 0.3, 0.3]])
    losses, confident = fixmatch_loss(OUTPUTS.rows(weak).softmax(dim=1), OUTPUTS.rows(strong), threshold=0.95)
    assert confident.tolist() == [True, False, True]
    p = 1 / (1 + math.exp(-0.3))
    assert float(losses.sum()) == pytest.approx(-(math.log(p) + math.log(1 - p)), rel=1e-6)


@pytest.mark.parametrize("targets", [torch.zeros(4), torch.zeros(4, 2), torch.zeros(4, 3, 1)])
def test_targets_of_another_shape_are_refused(targets):
    with pytest.raises(ValueError, match="targets"):
        OUTPUTS.targets(targets, 3)


def test_adversarial_direction_is_the_top_eigenvector_of_the_bernoulli_hessian():
    torch.manual_seed(0)
    weight = torch.randn(3, 6)
    x = torch.randn(1, 6)
    logits = x @ weight.T
    p = logits.sigmoid()[0]
    # KL(p(x) ‖ p(x + d)) ≈ ½ dᵀ H d with H = (1/a) Wᵀ diag(p(1 − p)) W.
    hessian = weight.T @ torch.diag(p * (1 - p)) @ weight / 3
    top = torch.linalg.eigh(hessian).eigenvectors[:, -1]
    found = adversarial_direction(
        lambda at: at @ weight.T, x, logits, xi=1e-2, iterations=60, divergence_of=OUTPUTS.divergence
    )
    assert float((found[0] @ top).abs()) > 0.99


# ---------------------------------------------------------------------------- metrics


def test_accuracy_of_attributes():
    logits, targets = random_case(3, n=50)
    metric = AttributeAccuracy(4)
    for part, wanted in zip(logits.split(17), targets.split(17), strict=True):
        metric.update(part, wanted)
    reference = MultilabelAccuracy(num_labels=4, average="none", ignore_index=-1)
    torch.testing.assert_close(metric.compute(), reference(logits.sigmoid(), targets))
    unknown = AttributeAccuracy(2)
    unknown.update(torch.zeros(3, 2), torch.tensor([[-1, 0], [-1, 1], [-1, 0]]))
    assert math.isnan(unknown.compute()[0])
    assert float(unknown.compute()[1]) == pytest.approx(2 / 3)


# ---------------------------------------------------------------------------- students


@pytest.mark.parametrize("kind", STUDENTS)
def test_students_learn_attributes(kind):
    images, attributes = stripes()
    model = student(kind, optimization=StudentOptimization(lr=0.01, scheduler="none"))
    labels = attributes[:40].clone()
    labels[:5, 0] = -1  # what isn't known is left out
    batches = [
        {"labeled": (images[:40], labels), "unlabeled": images[start : start + 40]} for start in (40, 80, 120)
    ]
    trainer = pl.Trainer(
        max_epochs=25, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    assert all(math.isfinite(value) for value in trainer.callback_metrics.values())
    loader = torch.utils.data.DataLoader([(images[160:], attributes[160:])], batch_size=None)
    metrics = trainer.test(model, loader, verbose=False)[0]
    each = [metrics[f"test/accuracy_{i}"] for i in range(3)]
    assert metrics["test/accuracy"] == pytest.approx(sum(each) / 3)
    assert metrics["test/accuracy"] > 0.9
    probabilities = model.eval().predict_step(images[160:], 0)
    right = (probabilities > 0.5) == attributes[160:].bool()
    assert float(right.float().mean()) == pytest.approx(metrics["test/accuracy"])
    # The state of one test does not reach the next.
    again = trainer.test(
        model, torch.utils.data.DataLoader([(images[:40], attributes[:40])], batch_size=None), verbose=False
    )
    assert again[0]["test/accuracy"] != metrics["test/accuracy"] or metrics["test/accuracy"] == 1


def test_soft_attributes_and_weights():
    images, attributes = stripes(20)
    model = student(SupervisedStudent, loss=LabelLoss(confidence_weighting=1.0))
    logits = model.logits(images)
    plain = F.binary_cross_entropy_with_logits(logits, attributes.float())
    torch.testing.assert_close(model.label_loss(logits, attributes), plain)
    soft = torch.where(attributes == 1, 0.8, 0.1)
    soft[0, 1] = -1
    known = soft >= 0
    expected = F.binary_cross_entropy_with_logits(logits, soft.clamp(min=0), reduction="none")[known].mean()
    torch.testing.assert_close(model.label_loss(logits, soft), expected)
    # A later moment of the schedule: doubtful labels weigh less.
    model.__class__ = type("Late", (SupervisedStudent,), {"progress": 1.0})
    losses = F.binary_cross_entropy_with_logits(logits, attributes.float(), reduction="none")
    p = logits.sigmoid()
    weights = torch.where(attributes == 1, p, 1 - p)
    torch.testing.assert_close(model.label_loss(logits, attributes), (losses * weights).sum() / weights.sum())
    nothing = model.label_loss(logits, torch.full_like(attributes, -1))
    assert float(nothing) == 0.0


def test_vat_divergence_is_that_of_attributes():
    images, _ = stripes(12)
    model = student(VATStudent, radius=0.5, xi=1e-3)
    clean = model.clean_logits(images, update_statistics=True)
    torch.manual_seed(1)
    worst = model.divergence(images, clean)
    step = torch.nn.functional.normalize(torch.randn(12, 64), dim=1).view_as(images)
    at_random = OUTPUTS.divergence(clean.detach(), model.logits(images + 0.5 * step))
    assert float(worst.mean()) > 2 * float(at_random.mean())


def test_what_needs_classes_is_refused():
    with pytest.raises(ValueError, match="task"):
        SupervisedStudent(task="attributes")
    with pytest.raises(ValueError, match="targets"):
        student(SupervisedStudent).label_loss(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


def test_task_is_kept_in_checkpoints(tmp_path):
    model = VATStudent(network="small_cnn", num_classes=3, image_size=8, task="multilabel")
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "student.ckpt")
    restored = VATStudent.load_from_checkpoint(tmp_path / "student.ckpt", map_location="cpu")
    assert restored.task == "multilabel"
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(restored.eval()(images), model.eval()(images))
