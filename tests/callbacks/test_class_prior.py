"""Shares of classes in use move released probabilities by Bayes' rule, of labels and of a teacher's own model."""

import pytest
import torch

from pl_privknn.callbacks import ClusterSelection, FullSelection, PrivateLabeler
from pl_privknn.callbacks.labeling_round import load_head
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.labelers import PreconditionedGradients, PrivateKNN, ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.setup.small_fit import quiet_trainer

PRIOR = [0.6, 0.3, 0.1]


def answered(folder, teacher, class_prior, balanced_loss=False, **more):
    """The data module with the answers of a run; ``class_prior`` is True for balanced classes."""
    generator, parts = torch.Generator().manual_seed(0), []
    for count in (300, 40, 30):
        labels = torch.arange(count) % 3
        parts += [torch.eye(3)[labels] + 0.5 * torch.randn(count, 3, generator=generator), labels]
    data = EmbeddingsDataModule(*parts, num_classes=3, batch_size=16)
    labeling = PrivateLabeler(
        teacher, features=torch.nn.Flatten(), budget=Budget(delta=1e-4), run_dir=folder,
        options={"progress": False, "balanced" if class_prior is True else "class_prior": class_prior}, **more,
    )  # fmt: skip
    student = SupervisedStudent(
        network="linear_probe", num_classes=3, in_channels=3, image_size=1, loss={"balanced": balanced_loss}
    )
    quiet_trainer(folder, callbacks=[labeling]).fit(student, data)
    return data


def by_bayes(soft, prior):
    """Written apart: each class's odds times the ratio of the share in use and the mean released one."""
    moved = torch.stack([row / soft.mean(0) * torch.tensor(prior) for row in soft])
    return moved / moved.sum(1, keepdim=True)


@pytest.mark.parametrize(("kind", "given"), [("votes", PRIOR), ("sums", PRIOR), ("sums", True)])
def test_labels_move_with_the_shares_in_use(kind, given, tmp_path):
    prior = [1 / 3] * 3 if given is True else given

    def teacher():
        noise = SeededNoise(0)
        if kind == "votes":
            return ReverseKNN(budget=Budget(epsilon=1.0), k=1, noise_source=noise)
        return PreconditionedGradients(
            budget=Budget(epsilon=1.0, delta=1e-4), private_records=300, noise_source=noise
        )

    asked = {"selection": FullSelection()}
    if kind == "votes":
        asked = {"queries_per_round": 12, "selection": ClusterSelection(ask="means", spread="kernel")}
    before = answered(tmp_path / "a", teacher(), None, **asked).public.soft_labels
    data = answered(tmp_path / "b", teacher(), given, **asked)
    torch.testing.assert_close(data.public.soft_labels, by_bayes(before, prior), atol=1e-5, rtol=1e-4)
    assert torch.equal(data.public.labels, by_bayes(before, prior).argmax(1))
    if kind == "sums":
        images = data.test.images()
        heads = [load_head(tmp_path / run, teacher(), torch.nn.Flatten())(images) for run in "ab"]
        ratio = torch.tensor(prior) / before.mean(0)
        expected = heads[0] * ratio / (heads[0] * ratio).sum(1, keepdim=True)
        torch.testing.assert_close(heads[1], expected, atol=1e-5, rtol=1e-4)


def test_bad_priors_are_refused_in_one_line(tmp_path):
    for prior in ([1.0], [0.5, 0.6], [0.0, 1.0]):
        with pytest.raises(ValueError, match="class_prior"):
            PrivateLabeler(options={"class_prior": prior})
    with pytest.raises(ValueError, match="balanced=True with class_prior"):
        PrivateLabeler(options={"class_prior": PRIOR, "balanced": True})
    with pytest.raises(ValueError, match="class_prior: 2 shares, the data has 3 classes"):
        answered(tmp_path / "a", ReverseKNN(budget=Budget(epsilon=1.0)), [0.5, 0.5])
    votes = PrivateKNN(3, sampling_rate=1.0, noise=Gaussian(1.0))
    with pytest.raises(ValueError, match="releases no probabilities"):
        answered(tmp_path / "b", votes, PRIOR, queries_per_round=4)


def test_a_balanced_loss_weighs_classes_by_released_labels(tmp_path, monkeypatch):
    seen, loss_of = [], SupervisedStudent.label_loss

    def label_loss(student, logits, y):
        loss = loss_of(student, logits, y)
        seen.append((student.trainer.datamodule.public.labels, logits.detach(), y, float(loss.detach())))
        return loss

    monkeypatch.setattr(SupervisedStudent, "label_loss", label_loss)
    votes = PrivateKNN(3, sampling_rate=1.0, noise=Gaussian(1.0))
    answered(tmp_path, votes, None, True, queries_per_round=20)
    for labels, logits, y, loss in seen:
        counts = labels[labels >= 0].bincount(minlength=3)
        weight = 1 / counts[y].double()
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        assert loss == pytest.approx(float((weight * losses).sum() / weight.sum()), rel=1e-5)
    assert len(seen) > 1
