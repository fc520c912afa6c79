"""Whole runs on two neighbouring private sets, with the same noise and coins, leave the same traces.

What may differ is what was paid for, and what was made of it: see ``traces``.
"""

import copy
import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.callbacks import ClusterSelection, PrivateLabeler, RunReport
from pl_privknn.datamodules import ArraysDataModule, LabeledImages, PublicDataset, TensorImages
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers import (
    PATE,
    FixedThresholds,
    GuidedPartition,
    IndKNN,
    LinearTeachers,
    LocalReverseKNN,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
    ShuffledReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from pl_privknn.training import NoisySGD
from tests.callbacks.traces import released, report_traces, traces, undeclared
from tests.labelers.multilabel.attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from tests.setup.grouped import grouped
from tests.setup.nearest_teachers import NearestTeachers
from tests.setup.small_fit import easy_images
from tests.training.noisy_sgd_setup import Flat
from tests.training.training_setup import Lit, training

RECORDS, PUBLIC, CLASSES, SIDE = 40, 24, 3, 6


@functools.cache
def examples():
    """Images of three classes for each part, and one image that looks like no other."""
    centres = easy_images(CLASSES, classes=CLASSES, side=SIDE, noise=0.0)[0]
    parts = easy_images(RECORDS, PUBLIC, 9, classes=CLASSES, side=SIDE, noise=0.2)
    return parts[:2], parts[2:4], parts[4:], 1 - centres[:1]


def private_set(kind):
    """The private records, or those of a neighbour."""
    (images, labels), _, _, stranger = examples()
    if kind == "one more":
        return torch.cat([images, stranger]), torch.cat([labels, labels[2:3]])
    images, labels = images.clone(), labels.clone()
    if kind == "another":
        images[7], labels[7] = stranger[0], 2
    return images, labels


def data_module(kind):
    _, public, test, _ = examples()
    return ArraysDataModule(*private_set(kind), *public, *test, num_classes=CLASSES, batch_size=8)


class Attributes(PrivatePublicDataModule):
    """The same images with attributes: class 0 has two, class 1 one, class 2 all of four."""

    ROWS = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]])

    def __init__(self, kind):
        super().__init__(
            num_classes=4, image_shape=(1, SIDE, SIDE), task="multilabel", overlap="ignore", batch_size=8
        )
        self.kind = kind

    def part(self, images, labels):
        return LabeledImages(TensorImages(images), self.ROWS[labels], 4, task="multilabel")

    def load_private(self):
        return self.part(*private_set(self.kind))

    def load_public(self):
        images, labels = examples()[1]
        return PublicDataset(TensorImages(images), 4, self.ROWS[labels], task="multilabel")

    def load_test(self):
        return self.part(*examples()[2])


def fit(folder, module, callbacks, data, epochs):
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=CSVLogger(folder, "", ""), default_root_dir=folder,
        callbacks=[*callbacks, RunReport(folder), ModelCheckpoint(folder, "last", enable_version_counter=False)],
        log_every_n_steps=1, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)


def fit_teacher(make, multilabel=False, rounds=1, adjacency="add_remove", **labeling):
    """A run of a student on a teacher's answers."""

    def run(folder, kind):
        labeler, asked = make(), []
        labeler.noise_source = SeededNoise(1)
        answer = labeler.label

        def label(queries, *others, **named):
            asked.append(queries.clone())
            return answer(queries, *others, **named)

        labeler.label = label
        callback = PrivateLabeler(
            labeler, rounds=rounds, epochs_per_round=1, queries_per_round=8, features=Flat(), run_dir=folder,
            budget={"adjacency": adjacency}, **grouped(PrivateLabeler, query_batch_size=4, **labeling),
        )  # fmt: skip
        outputs = 4 if multilabel else CLASSES
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, outputs))
        task = "multilabel" if multilabel else "multiclass"
        student = SupervisedStudent(network=network, num_classes=outputs, task=task)
        fit(folder, student, [callback], Attributes(kind) if multilabel else data_module(kind), rounds)
        assert asked
        return torch.cat(asked).tolist()

    run.adjacency = adjacency
    return run


def fit_noisy_sgd(**options):
    """A run of noisy SGD."""

    def run(folder, kind):
        module = NoisySGD(
            num_classes=CLASSES, image_size=SIDE, expected_batch_size=10, private_records=RECORDS,
            noise_multiplier=1.0, optimization={"lr": 1.0}, run_dir=folder,
            **grouped(NoisySGD, noise_source=SeededNoise(1), **copy.deepcopy(options)),
        )  # fmt: skip
        fit(folder, module, [], data_module(kind), 2)

    run.adjacency = "add_remove"
    return run


class Own(Lit):
    """A module that nobody shaped for private training."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def fit_own(folder, kind):
    module = Own(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, CLASSES)))
    module.accuracy = MulticlassAccuracy(CLASSES)
    made = training(expected_batch_size=10, private_records=RECORDS, run_dir=folder)
    fit(folder, module, [made], data_module(kind), 2)


fit_own.adjacency = "add_remove"
CONVOLUTION = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(32, CLASSES))
attributes = functools.partial(fit_teacher, multilabel=True)
REPLACED = {"adjacency": "replace_one"}
STATISTICS = {"noise_multiplier": 0.5, "private_records": RECORDS}
RUNS = {
    "private_knn": fit_teacher(
        lambda: PrivateKNN(3, 0.5, Screening(2.0, Gaussian(0.5)), Gaussian(1.0)), rounds=2, retrain=False
    ),
    "private_knn counts": fit_teacher(
        lambda: PrivateKNN(3, 1.0, None, Gaussian(0.5), release_counts=True), selection=ClusterSelection()
    ),
    "private_knn winners": fit_teacher(lambda: PrivateKNN(3, 0.9, noise=ExponentialArgmax(0.5))),
    "pate": fit_teacher(lambda: PATE(3, LinearTeachers(20), noise=Gaussian(0.5))),
    "pate confident": fit_teacher(
        lambda: PATE(3, NearestTeachers(), screening=Screening(2.0, Gaussian(0.5)), noise=Gaussian(0.5)),
        **REPLACED,
    ),
    "pate guided": fit_teacher(
        lambda: PATE(3, LinearTeachers(20), GuidedPartition(5, features="given"), noise=Gaussian(0.5))
    ),
    "reverse_knn": fit_teacher(lambda: ReverseKNN(1, budget=Budget(epsilon=4.0))),
    "reverse_knn local": fit_teacher(
        lambda: LocalReverseKNN(1, budget=Budget(epsilon=8.0, adjacency="replace_one")), **REPLACED
    ),
    "reverse_knn shuffle": fit_teacher(
        lambda: ShuffledReverseKNN(1, budget=Budget(epsilon=4.0, adjacency="replace_one"), num_clients=3),
        **REPLACED,
    ),
    "ind_knn": fit_teacher(
        lambda: IndKNN(0.5, Gaussian(0.1), budget=Budget(epsilon=8.0), num_queries=8, release_counts=True),
        rounds=2,
    ),
    "noisy_sgd teacher": fit_teacher(
        lambda: NoisySGDTeacher(0.5, 20, 10, noise_multiplier=0.5, model={"components": None})
    ),
    "class_sums": fit_teacher(lambda: SufficientStatistics(**STATISTICS), rounds=2),
    "public_curvature": fit_teacher(lambda: PreconditionedGradients(**STATISTICS, releases=3)),
    "multilabel_knn": attributes(lambda: attribute_knn(3, 0.5, 2.0, Gaussian(0.5))),
    "public_curvature of attributes": attributes(
        lambda: PreconditionedGradients(**STATISTICS, releases=2, task="multilabel")
    ),
    "multilabel_pate": attributes(lambda: attribute_pate(3, LinearTeachers(20), noise=Gaussian(0.5))),
    "multilabel_reverse_knn": attributes(
        lambda: attribute_reverse_knn(1, 2.0, epsilon=4.0, rule=FixedThresholds())
    ),
    "noisy_sgd": fit_noisy_sgd(network=CONVOLUTION),
    "noisy_sgd head": fit_noisy_sgd(extractor=Flat()),
    "private training": fit_own,
}

#: Whose pages are compared too: one that answers query by query, one that releases once, one that trains itself.
REPORTED = ("private_knn", "reverse_knn", "noisy_sgd head")


@pytest.mark.parametrize("name", RUNS)
def test_neighbouring_private_sets_leave_the_same_traces(tmp_path, capfd, name):
    run = RUNS[name]
    # Where a record is replaced, how many there are is no secret.
    kinds = ["as it is", "one more" if run.adjacency == "add_remove" else "another"]
    left, answers = [], []
    for kind in kinds:
        asked = run(tmp_path / "run", kind)
        left.append({"asked": asked, **traces(tmp_path / "run", "".join(capfd.readouterr()))})
        assert undeclared(tmp_path / "run") == (set(), set())
        if name in REPORTED:
            left[-1]["report"] = report_traces(tmp_path / "run")
        answers.append(released(tmp_path / "run"))
        # The next run has the same folder, and begins with nothing.
        for made in ("run", "run.private"):
            if (tmp_path / made).exists():
                (tmp_path / made).rename(tmp_path / f"{kind} {made}")
    for part, content in left[0].items():
        assert content == left[1][part], part
    assert left[0].keys() == left[1].keys()
    # Answers and weights may differ, and do: the runs did see other records.
    assert answers[0] != answers[1]
