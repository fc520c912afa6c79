"""A run of two rounds in one process or several."""

import os

import pytorch_lightning as pl
import torch

from pl_privknn import _processes as processes
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    PrivateKNN,
    Screening,
    SufficientStatistics,
)
from pl_privknn.labelers.ind_knn import RecordBudgets
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.setup.small_fit import easy_images, quiet_trainer

RECORDS, SIDE = 61, 6


TEACHERS = {
    "private_knn": lambda: PrivateKNN(9, 1.0, Screening(4.0, Gaussian(1.0)), Gaussian(1.0)),
    "class sums": lambda: SufficientStatistics(noise_multiplier=1.0, components=6),
    "ind knn": lambda: IndKNN(
        0.9, Gaussian(0.5), record_budgets=RecordBudgets(rho=1.0, count_noise=Gaussian(4.0)), soft=True
    ),
    "pate": lambda: PATE(4, LinearTeachers(60), noise=Gaussian(0.01), release_counts=True, progress=False),
}
#: Two unless said otherwise.
PROCESSES = {"class sums": 3, "ind knn": 3}


def fit(folder, name, devices):
    """The labels of a run of two rounds, and the soft ones: noisy counts, of which each vote is a part."""
    pl.seed_everything(0)
    processes._BEAT = 0.1
    parts = easy_images(RECORDS, 30, 9, side=SIDE, noise=0.3)
    # Many records are equal: ties cross the borders of shards.
    parts[::2] = [images.mul(2).round().div(2) for images in parts[::2]]
    if name == "pate" and devices > 1:  # each process has a file of its own, as it were
        parts[:2] = [part[int(os.environ["RANK"]) :: devices] for part in parts[:2]]
    data = ArraysDataModule(*parts, num_classes=3, batch_size=8)
    data.private_in_shards = name == "pate"
    teacher = TEACHERS[name]()
    teacher.noise_source = SeededNoise(4)
    labeling = PrivateLabeler(
        teacher, rounds=2, epochs_per_round=1, queries_per_round=12, features=torch.nn.Flatten(),
        run_dir=folder, options={"query_batch_size": 5, "progress": False, "sharded": True},
    )  # fmt: skip
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, 3))
    strategy = "ddp" if devices > 1 else "auto"
    trainer = quiet_trainer(folder, 2, callbacks=[labeling], devices=devices, strategy=strategy)
    trainer.fit(SupervisedStudent(network=network, num_classes=3), data)
    soft = data.public.soft_labels
    return [data.public.labels.tolist(), None if soft is None else soft[data.public.soft_mask].tolist()]
