"""Students on attributes: binary losses against torch and closed forms, metrics, training, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Bernoulli, kl_divergence
from torchmetrics.classification import MultilabelAccuracy

from pl_privknn.students import FixMatchStudent, LabelLoss, StudentOptimization, SupervisedStudent, VATStudent
from pl_privknn.students.losses import TASKS, fixmatch_loss, uda_loss
from pl_privknn.students.metrics import AttributeAccuracy
from tests.setup.refusals import refusals
from tests.students.student_setup import trainer

OUTPUTS = TASKS["multilabel"]


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


# ---------------------------------------------------------------------------- losses


def test_losses_are_those_of_bernoulli_variables():
    logits, targets = random_case()
    expected = F.binary_cross_entropy_with_logits(logits, targets.clamp(min=0).float(), reduction="none")
    torch.testing.assert_close(OUTPUTS.losses(logits, targets), torch.where(targets >= 0, expected, 0.0))
    soft = torch.rand(7, 4)
    expected = F.binary_cross_entropy_with_logits(logits, 0.8 * soft + 0.1, reduction="none")
    torch.testing.assert_close(OUTPUTS.losses(logits, soft, smoothing=0.2), expected)
    assert torch.equal(OUTPUTS.known(logits, targets).bool(), targets >= 0)
    other, extreme = random_case(1)[0], torch.tensor([[200.0, -200.0, 200.0, -200.0]])
    divergence = kl_divergence(Bernoulli(logits=logits), Bernoulli(logits=other)).mean(dim=1)
    torch.testing.assert_close(OUTPUTS.divergence(logits, other), divergence)
    assert OUTPUTS.losses(extreme, torch.tensor([[1, 0, 0, 1]])).tolist() == [[0.0, 0.0, 200.0, 200.0]]


def test_robust_loss_is_the_generalised_cross_entropy():
    logits, targets = random_case()
    p = logits.double().sigmoid()
    right = torch.where(targets.clamp(min=0) == 1, p, 1 - p)
    for q in (0.3, 1.0):
        found = OUTPUTS.losses(logits, targets.clamp(min=0), robustness=q)
        torch.testing.assert_close(found, ((1 - right**q) / q).float())
    torch.testing.assert_close(OUTPUTS.confidence(logits, targets.clamp(min=0)), right.float())


def test_each_confident_attribute_counts_by_itself():
    weak, strong = torch.tensor([[3.0, 0.5, -3.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    losses, confident = uda_loss(OUTPUTS.rows(weak), OUTPUTS.rows(strong), temperature=0.5, threshold=0.8)
    each = kl_divergence(Bernoulli(logits=weak / 0.5), Bernoulli(logits=strong))[0]
    assert confident.tolist() == [True, False, True]
    torch.testing.assert_close(losses.sum(), each[0] + each[2])
    losses, confident = fixmatch_loss(OUTPUTS.rows(weak).softmax(dim=1), OUTPUTS.rows(strong), threshold=0.8)
    assert confident.tolist() == [True, False, True]
    expected = F.binary_cross_entropy_with_logits(
        strong[:, [0, 2]], torch.tensor([[1.0, 0.0]]), reduction="sum"
    )
    torch.testing.assert_close(losses.sum(), expected)


test_what_does_not_fit_is_refused = refusals(
    {
        "targets: ": lambda: OUTPUTS.targets(torch.zeros(4, 2), 3),
        "task='attributes'": lambda: SupervisedStudent(task="attributes"),
        "targets": lambda: student(SupervisedStudent).label_loss(torch.zeros(4, 3), torch.zeros(4).long()),
    }
)


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


def stripes(n=300, seed=0):
    """8×8 images with up to three bright bars: the attributes say which."""
    generator = torch.Generator().manual_seed(seed)
    attributes = torch.randint(0, 2, (n, 3), generator=generator)
    images = 0.3 * torch.rand(n, 1, 8, 8, generator=generator)
    for which, (rows, columns) in enumerate([(slice(1, 3), ...), (slice(5, 7), ...), (..., slice(3, 5))]):
        images[:, 0][:, rows, columns] += 0.6 * attributes[:, which, None, None]
    return images, attributes


@pytest.mark.parametrize("kind", [VATStudent, FixMatchStudent])
def test_students_learn_attributes(kind, tmp_path):
    images, attributes = stripes()
    model = student(kind, optimization=StudentOptimization(lr=0.01, scheduler="none"))
    labels = attributes[:40].clone()
    labels[:5, 0] = -1  # what isn't known is left out
    batches = [{"labeled": (images[:40], labels), "unlabeled": images[at : at + 40]} for at in (40, 80, 120)]
    run = trainer(tmp_path, max_epochs=25)
    run.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    assert all(math.isfinite(value) for value in run.callback_metrics.values())
    loader = torch.utils.data.DataLoader([(images[160:], attributes[160:])], batch_size=None)
    metrics = run.test(model, loader, verbose=False)[0]
    each = [metrics[f"test/accuracy_{i}"] for i in range(3)]
    assert metrics["test/accuracy"] == pytest.approx(sum(each) / 3)
    assert metrics["test/accuracy"] > 0.9
    right = (model.eval().predict_step(images[160:], 0) > 0.5) == attributes[160:].bool()
    assert float(right.float().mean()) == pytest.approx(metrics["test/accuracy"])


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
