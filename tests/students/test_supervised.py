"""Mixup of the supervised student: images and labels in the same shares, and what is left out."""

import torch
from refusals import refusals
from scipy.stats import beta, kstest

from pl_privknn.students import SupervisedStudent
from pl_privknn.students.supervised import mixed

COUNT = 40


def test_images_and_labels_are_mixed_in_one_share():
    """Images that are their own labels: each mixture has two of them, and its label says which and how much."""
    labels = torch.eye(COUNT)
    images = labels.clone().view(COUNT, 1, 5, 8)
    shares = []
    torch.manual_seed(0)
    for _ in range(400):
        made, targets = mixed(images, labels, 0.4)
        torch.testing.assert_close(made.flatten(1), targets)
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(COUNT))
        assert int((targets > 0).sum(dim=1).max()) <= 2
        moved = targets.diagonal() < 1 - 1e-6
        if bool(moved.any()):
            (share,) = set(targets.diagonal()[moved].round(decimals=5).tolist())
            shares.append(share)
    assert kstest(shares, beta(0.4, 0.4).cdf).pvalue > 1e-4


def test_what_has_no_label_is_mixed_into_nothing():
    labels = torch.eye(4)
    labels[2] = 0
    images, targets = mixed(torch.arange(4.0)[:, None] + 10, labels, 1.0)
    assert len(images) == len(targets) == 3
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(3))
    # An image is the mean of the numbers 10, 11 and 13 that its label names.
    torch.testing.assert_close(images[:, 0], targets @ (torch.arange(4.0) + 10))


def test_mixtures_are_for_training_alone(monkeypatch):
    monkeypatch.setattr("pl_privknn.students.supervised.mixed", lambda x, y, alpha: (0 * x, y))
    torch.manual_seed(0)
    module = SupervisedStudent(image_size=8, mixup=0.4)
    x, y = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, -1, 5])
    (found,) = module.train().objective(x, y).values()
    (black,) = module.objective(0 * x, y).values()
    torch.testing.assert_close(found, black)
    (plain,) = module.eval().objective(x, y).values()
    assert float((plain - module.label_loss(module.logits(x), y)).abs()) < 1e-6
    assert module.hparams["mixup"] == 0.4


test_bad_arguments_are_named = refusals(
    {
        "mixup=-1": lambda: SupervisedStudent(image_size=8, mixup=-1),
        "mixup=0.4 is for classes, and task='multilabel'": lambda: SupervisedStudent(
            mixup=0.4, task="multilabel"
        ),
    }
)
