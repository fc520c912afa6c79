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


def answered(folder, teacher, class_prior, **more):
    """The data module with the answers of a run."""
    generator, parts = torch.Generator().manual_seed(0), []
    for count in (300, 40, 30):
        labels = torch.arange(count) % 3
        parts += [torch.eye(3)[labels] + 0.5 * torch.randn(count, 3, generator=generator), labels]
    data = EmbeddingsDataModule(*parts, num_classes=3, batch_size=16)
    labeling = PrivateLabeler(
        teacher, features=torch.nn.Flatten(), budget=Budget(delta=1e-4), run_dir=folder,
        options={"progress": False, "class_prior": class_prior}, **more,
    )  # fmt: skip
    student = SupervisedStudent(network="linear_probe", num_classes=3, in_channels=3, image_size=1)
    quiet_trainer(folder, callbacks=[labeling]).fit(student, data)
    return data


def by_bayes(soft):
    """Written apart: each class's odds times the ratio of the share in use and the mean released one."""
    moved = torch.stack([row / soft.mean(0) * torch.tensor(PRIOR) for row in soft])
    return moved / moved.sum(1, keepdim=True)


@pytest.mark.parametrize("kind", ["votes", "sums"])
def test_labels_move_with_the_shares_in_use(kind, tmp_path):
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
    data = answered(tmp_path / "b", teacher(), PRIOR, **asked)
    torch.testing.assert_close(data.public.soft_labels, by_bayes(before), atol=1e-5, rtol=1e-4)
    assert torch.equal(data.public.labels, by_bayes(before).argmax(1))
    if kind == "sums":
        images = data.test.images()
        heads = [load_head(tmp_path / run, teacher(), torch.nn.Flatten())(images) for run in "ab"]
        ratio = torch.tensor(PRIOR) / before.mean(0)
        expected = heads[0] * ratio / (heads[0] * ratio).sum(1, keepdim=True)
        torch.testing.assert_close(heads[1], expected, atol=1e-5, rtol=1e-4)


def test_bad_priors_are_refused_in_one_line(tmp_path):
    for prior in ([1.0], [0.5, 0.6], [0.0, 1.0]):
        with pytest.raises(ValueError, match="class_prior"):
            PrivateLabeler(options={"class_prior": prior})
    with pytest.raises(ValueError, match="class_prior: 2 shares, the data has 3 classes"):
        answered(tmp_path / "a", ReverseKNN(budget=Budget(epsilon=1.0)), [0.5, 0.5])
    votes = PrivateKNN(3, sampling_rate=1.0, noise=Gaussian(1.0))
    with pytest.raises(ValueError, match="releases no probabilities"):
        answered(tmp_path / "b", votes, PRIOR, queries_per_round=4)
