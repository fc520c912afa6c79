"""Data without public images: private training, and teachers that release a model of their own."""

import json

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from pl_privknn import NoisySGD, PrivateLabeler, PrivateTraining
from pl_privknn.callbacks import FullSelection
from pl_privknn.datamodules import ArraysDataModule, DigitsDataModule, EmbeddingsDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import SufficientStatistics
from pl_privknn.privacy import Budget
from pl_privknn.students import SupervisedStudent
from pl_privknn.training import NoisyOptimization


class Linear(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(400, 10)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trainer(folder, *callbacks, epochs=1):
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def digits(**kwargs):
    return DigitsDataModule(private_records=1000, public_examples=1, public="none", **kwargs)


def test_the_public_part_is_one_blank_image():
    data = digits()
    data.setup("fit")
    assert len(data.public) == 1
    assert not data.public.images([0]).any()
    assert data.public.truth is None
    assert data.val_dataloader() == []
    data.setup("test")
    assert len(data.test) > 700


def test_private_training_and_its_baseline_need_no_public_image(tmp_path):
    stated = {"budget": {"epsilon": 8.0, "delta": 1e-4}, "expected_batch_size": 500, "private_records": 1000}
    training = PrivateTraining(**stated, run_dir=tmp_path / "own")
    trainer(tmp_path, training).fit(Linear(), datamodule=digits())
    assert json.loads((tmp_path / "own" / "summary.json").read_text())["epsilon"] <= 8
    baseline = NoisySGD(
        network="linear", extractor=HOG(), image_size=20, **stated, optimization=NoisyOptimization(lr=4.0),
        run_dir=tmp_path / "baseline",
    )  # fmt: skip
    fitted = trainer(tmp_path, epochs=8)
    fitted.fit(baseline, datamodule=digits())
    found = fitted.test(baseline, datamodule=digits(), verbose=False)[0]["test/accuracy"]
    assert found > 0.6  # 0.1 by chance


def test_a_released_head_needs_no_public_image(tmp_path):
    labeler = PrivateLabeler(
        SufficientStatistics(budget=Budget(epsilon=2.0, delta=1e-4), private_records=1000),
        features=HOG(), selection=FullSelection(), released="head",
        budget={"epsilon": 2.0, "delta": 1e-4}, run_dir=tmp_path / "run",
    )  # fmt: skip
    student = SupervisedStudent(network="small_cnn", num_classes=10, in_channels=1)
    fitted = trainer(tmp_path, labeler)
    fitted.fit(student, datamodule=digits())
    fitted.test(student, datamodule=digits(), verbose=False)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] <= 2
    assert summary["head_test_accuracy"] > 0.6


@pytest.mark.parametrize("kind", ["images", "embeddings"])
def test_tables_without_a_public_part(kind):
    generator = np.random.default_rng(0)
    table = generator.random((30, 5, 5) if kind == "images" else (30, 7))
    make = ArraysDataModule if kind == "images" else EmbeddingsDataModule
    data = make(table, np.arange(30) % 3, num_classes=3, public="none")
    data.setup("fit")
    assert len(data.private) == 30
    assert data.public.image_shape == data.private.image_shape
    for given in ({"public": "none", f"public_{kind}": table}, {}):
        with pytest.raises(ValueError, match=f'public_{kind}, public="none": expected one of the two'):
            make(table, np.arange(30) % 3, num_classes=3, **given)


def test_what_needs_public_images_says_so():
    with pytest.raises(ValueError, match='train_on_truth=True, and public="none"'):
        digits(train_on_truth=True)
    with pytest.raises(ValueError, match="public='nothing'"):
        DigitsDataModule(public="nothing")
    baseline = NoisySGD(
        budget=Budget(epsilon=8.0, delta=1e-4),
        network="linear",
        extractor=HOG(),
        feature_head={"components": 20},
        image_size=20,
        expected_batch_size=500,
        private_records=1000,
    )
    with pytest.raises(ValueError, match="components=20 needs at least as many public"):
        trainer(None).fit(baseline, datamodule=digits())
