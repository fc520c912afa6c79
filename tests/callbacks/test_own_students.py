"""Students of one's own: what their batches hold, and what is refused before the first query."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.functional import cross_entropy

from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule, DatasetsDataModule, EmbeddingsDataModule, TextDataModule
from pl_privknn.students import SupervisedStudent, UDAStudent
from tests.setup.small_fit import easy_images, quiet_trainer, small_student


class Unvalidated(pl.LightningModule):
    """Dense layers without flattening; takes the batches of a data module, or pairs."""

    def __init__(self, size, pairs=False, plateau=False):
        super().__init__()
        self.net, self.pairs, self.plateau = torch.nn.Linear(size, 3), pairs, plateau

    def training_step(self, batch, batch_idx):
        x, y = batch if self.pairs else batch["labeled"]
        self.log("train_loss", loss := cross_entropy(self.net(x), y))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc"}}


class Net(Unvalidated):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean())


def embeddings(truth=True):
    parts = [part.flatten(1) if part.ndim > 1 else part for part in easy_images(90, 30, 30, side=4)]
    private, labels, public, known, *test = parts
    return EmbeddingsDataModule(private, labels, public, known if truth else None, *test, num_classes=3)


def labeling(folder):
    return PrivateLabeler(
        PrivateKNN(5, 0.8, None, Gaussian(sigma=4.0)), queries_per_round=6, features=torch.nn.Flatten(),
        budget={"delta": 1e-4}, run_dir=folder / "run", options={"progress": False},
    )  # fmt: skip


def fit(folder, module, data, *callbacks, **given):
    trainer = quiet_trainer(folder, callbacks=[labeling(folder), *callbacks], **given)
    trainer.fit(module, data)
    return trainer


def test_vectors_arrive_as_rows_in_every_loader(tmp_path):
    data, student = embeddings(), SupervisedStudent("mlp", num_classes=3, in_channels=16, image_size=1)
    trainer = fit(tmp_path, Net(16), data)
    assert data.image_shape == (16,)
    assert trainer.predict(student, data)[0].shape == (30, 3)
    batch = next(iter(data.train_dataloader()))[0]
    assert batch["labeled"][0].shape[1:] == batch["unlabeled"].shape[1:] == (16,)
    assert trainer.validate(Net(16), data, verbose=False)[0]["val_acc"] >= 0


@pytest.mark.parametrize("kind", ["texts of vectors", "data sets"])
def test_other_data_modules_give_vectors_as_rows_too(kind):
    rows = [(torch.rand(5), number % 2) for number in range(8)]
    if kind == "data sets":
        data = DatasetsDataModule(rows[:4], rows[4:], rows[6:], num_classes=2, overlap="ignore")
    else:
        table = {"text": [x.tolist() for x, _ in rows], "label": [y for _, y in rows]}
        data = TextDataModule(private=table, public={**table}, classes=["0", "1"])
    data.setup("fit")
    with pytest.raises(ValueError, match="UDAStudent moves pixels of images"):
        UDAStudent(network="mlp", num_classes=2, in_channels=5, image_size=1)
    assert data.private.images().shape[1:] == data.public.images().shape[1:] == data.image_shape == (5,)


def test_a_module_for_pairs_is_told_what_comes_before_any_query(tmp_path):
    with pytest.raises(ValueError, match=r'Net.training_step expects \(x, y\).*x, y = batch\["labeled"\]'):
        fit(tmp_path, Net(16, pairs=True), embeddings())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "callbacks", "refused"),
    [
        (Net(16), [ModelCheckpoint(monitor="val_acc")], r"ModelCheckpoint\(monitor='val_acc'\)"),
        (Net(16), [EarlyStopping("val_acc")], "there is no validation"),
        (Net(16, plateau=True), [], "ReduceLROnPlateau.monitor"),
        (Unvalidated(16), [EarlyStopping("val_acc")], "give the module a validation_step"),
        (Net(16), [ModelCheckpoint(monitor="train_loss")], ""),
    ],
)
def test_monitors_of_a_validation_that_never_runs_are_told_before_any_query(
    tmp_path, module, callbacks, refused
):
    data = embeddings(truth=not isinstance(module, Net))
    if not refused:
        fit(tmp_path, module, data, *callbacks, enable_checkpointing=True)
        return
    with pytest.raises(ValueError, match=refused):
        fit(tmp_path, module, data, *callbacks, enable_checkpointing=True)
    assert not (tmp_path / "run").exists()


def test_a_longer_fit_renews_the_checkpoint_in_the_run_folder(tmp_path):
    module, data = Net(16), embeddings()
    for epochs in (1, 2):
        fit(tmp_path, module, data, max_epochs=epochs, enable_checkpointing=True)
        kept = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
        assert kept["epoch"] == epochs - 1
        torch.testing.assert_close(kept["state_dict"], module.state_dict(), rtol=0, atol=0)


def test_fit_and_test_print_the_privacy_of_a_run_once(tmp_path, capsys):
    data = ArraysDataModule(*easy_images(90, 30, 30), num_classes=3)
    trainer = fit(tmp_path, student := small_student(), data)
    assert "strongest attack" in (first := capsys.readouterr().out)
    trainer.test(student, data, verbose=False)
    second = capsys.readouterr().out
    assert "test accuracy" not in first
    assert "test accuracy" in second
    assert "strongest attack" not in second
    assert "label accuracy" not in second
