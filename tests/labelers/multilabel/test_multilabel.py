"""Multi-label labelers: a fit, the documentation, and what they refuse.

What they draw and charge is in ``testing/test_check_labeler.py``.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.partitions import ClassBalancedPartition
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from pl_privknn.testing import FreeLedger
from tests.labelers.multilabel.attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from tests.setup.refusals import refusals
from tests.students.student_setup import trainer as trainer_of


def clusters(per_cluster=60, seed=0):
    """Four far clusters, each with its own attributes (1 to 4 of 5), and queries near them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    attributes = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 1, 1, 1, 1]])
    which = torch.arange(4).repeat(per_cluster)
    features = centres[which] + torch.randn(len(which), 2, generator=generator)
    asked = torch.arange(4).repeat(20)
    queries = centres[asked] + torch.randn(80, 2, generator=generator)
    return features, attributes[which], queries, attributes[asked]


# ---------------------------------------------------------------------------- the label store and a fit


def fit(folder, labeler):
    features, labels, queries, truth = clusters()
    truth[::7, 2] = -1
    _, _, tested, of_tested = clusters(seed=1)
    data = EmbeddingsDataModule(
        private_embeddings=features, private_labels=labels, public_embeddings=queries, public_truth=truth,
        test_embeddings=tested, test_labels=of_tested, num_classes=5, class_names=list("abcde"),
        task="multilabel", batch_size=16,
    )  # fmt: skip
    callback = PrivateLabeler(
        labeler, rounds=2, epochs_per_round=1, queries_per_round=30, run_dir=folder, options={"progress": False},
        features=torch.nn.Flatten(), budget={"delta": 1e-5},
    )  # fmt: skip
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
    )
    student = SupervisedStudent(network=network, num_classes=5, task="multilabel", optimization={"lr": 0.05})
    run = trainer_of(folder, max_epochs=2, callbacks=[callback])
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


# ---------------------------------------------------------------------------- what is refused


MAKERS = [
    lambda: attribute_knn(5, 0.5),
    lambda: attribute_pate(3, progress=False),
    lambda: attribute_reverse_knn(epsilon=1.0),
]


@pytest.mark.parametrize("make", MAKERS)
def test_tables_that_do_not_fit_are_refused(make):
    features, labels, queries, _ = clusters()
    for bad in (labels[:, 0], labels[:, :4], labels.float(), labels * 2):
        with pytest.raises(ValueError, match="labels"):
            make().fit(PrivateRecords.of(features, bad, 5))
    with pytest.raises(ValueError, match="features"):
        make().fit(PrivateRecords.of(features * math.nan, labels, 5))
    with pytest.raises(RuntimeError, match="private table"):
        make().label(queries, FreeLedger())


def few():
    teacher = attribute_reverse_knn(k=3, epsilon=1.0)
    teacher.fit(PrivateRecords.of(*clusters()[:2], 5))
    teacher.label(torch.zeros(2, 2), FreeLedger())


test_parameters_that_do_not_fit_are_refused = refusals(
    {
        "noise": lambda: attribute_knn(noise=ExponentialArgmax(5.0)),
        "tau": lambda: attribute_knn(tau=0),
        "l2_sensitivity": lambda: attribute_knn(tau=2, noise=Gaussian(5.0, 1.4)).plan(5, 5, 10),
        "k=300": lambda: attribute_knn(sampling_rate=1.0).fit(PrivateRecords.of(*clusters()[:2], 5)),
        "partitioner": lambda: attribute_pate(partitioner=ClassBalancedPartition()),
        "give exactly one": attribute_reverse_knn,
        r"attributes=.* task=.multiclass.": lambda: attribute_knn(task="multiclass"),
        "fewer than k=3": few,
    }
)
