"""Multi-label labels in a fit and in the documentation."""

import re
from pathlib import Path

import pytest
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import LabeledImages, PublicDataset, TensorImages
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.labelers.multilabel.attributes_setup import attribute_knn
from tests.labelers.multilabel.multilabel_setup import clusters
from tests.students.student_setup import trainer as trainer_of

# ---------------------------------------------------------------------------- the label store and a fit


class Clusters(PrivatePublicDataModule):
    """2×1 images whose pixels are the features of :func:`clusters`."""

    def __init__(self, **kwargs):
        names = {"class_names": "abcde", "task": "multilabel", "overlap": "ignore"}
        super().__init__(num_classes=5, image_shape=(1, 2, 1), **names, **kwargs)

    @staticmethod
    def images(features):
        return TensorImages(((features + 4) / 17).clamp(0, 1).view(-1, 1, 2, 1))

    def load_private(self):
        features, labels, _, _ = clusters()
        self.private_groups = torch.arange(len(labels))
        return LabeledImages(self.images(features), labels, 5, task="multilabel")

    def load_public(self):
        _, _, queries, truth = clusters()
        truth = truth.clone()
        truth[::7, 2] = -1
        return PublicDataset(self.images(queries), 5, truth, task="multilabel")

    def load_test(self):
        _, _, queries, truth = clusters(seed=1)
        return LabeledImages(self.images(queries), truth, 5, task="multilabel")


def fit(folder, labeler, data=None):
    callback = PrivateLabeler(
        labeler, rounds=2, epochs_per_round=1, queries_per_round=30, run_dir=folder, options={"progress": False},
        features=torch.nn.Flatten(), budget={"delta": 1e-5},
    )  # fmt: skip
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
    )
    student = SupervisedStudent(network=network, num_classes=5, task="multilabel", optimization={"lr": 0.05})
    run = trainer_of(folder, max_epochs=2, callbacks=[callback] if labeler else [])
    data = data or Clusters(batch_size=16)
    run.fit(student, data)
    return callback, data, run, student


def test_two_rounds_of_a_fit(tmp_path):
    labeler = attribute_knn(k=20, sampling_rate=0.5, tau=4, noise=Gaussian(2.0), noise_source=SeededNoise(0))
    callback, data, trainer, student = fit(tmp_path, labeler)
    assert callback.label_counts() == {"queried": 60, "answered": 60, "refused": 0, "lost": 0}
    assert int(data.public.table.labeled.sum()) == 60
    assert callback.epsilon == account(labeler.plan(60, 60, 5), delta=1e-5, exact=False).epsilon
    labeled = data.public.table.labeled
    known = data.public.truth[labeled] >= 0
    right = (data.public.labels == data.public.truth)[labeled]
    assert callback.metrics["labels/accuracy"] == pytest.approx(float(right[known].double().mean()))
    assert callback.metrics["labels/accuracy"] > 0.95
    metrics = trainer.validate(student, data, verbose=False)[0]
    each = [metrics[f"val/accuracy_{name}"] for name in "abcde"]
    assert metrics["val/accuracy"] == pytest.approx(sum(each) / 5)
    # Asked again in the same folder, the run restores its labels and asks nothing.
    again, other, _, _ = fit(tmp_path, attribute_knn(20, 0.5, 4, Gaussian(2.0), noise_source=SeededNoise(9)))
    assert torch.equal(other.public.labels, data.public.labels)
    assert again.epsilon_spent == callback.epsilon_spent


def test_labeler_of_another_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task='multilabel'"):
        fit(tmp_path, PrivateKNN(k=5))


def test_example_of_the_documentation_runs(capsys):
    page = (Path(__file__).resolve().parents[3] / "docs/methods/multilabel.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL).group(1), {})
    assert capsys.readouterr().out == "1.0\n"
