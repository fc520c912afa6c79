"""What tests of reports share: a small run of a student on a teacher's answers, with everything that it leaves."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent
from tests.setup.small_fit import easy_images, quiet_trainer

CLASSES, SIDE, QUERIES = 3, 6, 8


def small_data(class_names=("cat", "dog", "eel")):
    parts = easy_images(60, 24, 30, classes=CLASSES, side=SIDE, noise=0.2)
    return ArraysDataModule(*parts, num_classes=CLASSES, batch_size=8, class_names=class_names)


def small_run(folder, noise=None, rounds=2, loggers=(), **labeling):
    """Fit and test a student; returns the callback and the data."""
    data = small_data()
    callback = PrivateLabeler(
        PrivateKNN(5, 0.8, None, Gaussian(4.0), noise or SeededNoise(1)), rounds=rounds, epochs_per_round=1,
        queries_per_round=QUERIES, features=torch.nn.Flatten(), run_dir=folder, options={"progress": False},
        **labeling,
    )  # fmt: skip
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, CLASSES))
    student = SupervisedStudent(network=network, num_classes=CLASSES)
    pl.seed_everything(0)
    trainer = quiet_trainer(
        folder, rounds, logger=[CSVLogger(folder, "", ""), *loggers], callbacks=[callback, RunReport(folder)],
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(student, data)
    trainer.test(student, data, verbose=False)
    return callback, data
