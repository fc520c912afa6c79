"""The epoch on copies before the first charge: what fails in it fails before any ε is paid; it changes nothing."""

import threading

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torchmetrics.classification import BinaryAUROC

from pl_privknn.training import private_training
from tests.training.training_setup import Lit, fit, training, weights


class Stacks(Lit):
    """The pattern of Lightning's own guide: append in training_step, stack at the end of the epoch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("train_mean", torch.stack(self.losses).mean())


class Measures(Lit):
    def __init__(self):
        super().__init__()
        self.area = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        self.area.update(self(batch[0]).softmax(1)[:, 1], batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("area", self.area.compute())


class ReadsBatch(Lit):
    def on_train_batch_start(self, batch, batch_idx):
        self.seen = batch[0].shape


class Validates(Lit):
    def on_validation_epoch_end(self):
        raise KeyError("no such figure")


class Plateau(Lit):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_lose"}}


class OfEpoch(Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else loss * float(loss)


class Fails(pl.Callback):
    def on_train_batch_end(self, *_):
        raise OSError("no such host")


KEEPS_NOTHING = "training_step keeps nothing of a private record"
MONITOR = "monitor a name that validation_step logs"
FAULTS = {
    "a list of losses": (Stacks, [], "Stacks.on_train_epoch_end", "non-empty TensorList", KEEPS_NOTHING),
    "a metric": (Measures, [], "Measures.on_train_epoch_end", "No samples", KEEPS_NOTHING),
    "a batch": (ReadsBatch, [], "ReadsBatch.on_train_batch_start", "IndexError", "are empty"),
    "validation": (Validates, [], "Validates.on_validation_epoch_end", "no such figure", "mend it"),
    "a callback": (Lit, [Fails], "Fails.on_train_batch_end", "no such host", KEEPS_NOTHING),
    "a scheduler": (Plateau, [], "Plateau", "val_lose", MONITOR),
    "early stopping": (Lit, [lambda: EarlyStopping("val_acc")], "EarlyStopping.on_", "val_acc", MONITOR),
    "a checkpoint": (
        Lit,
        [lambda: ModelCheckpoint(monitor="val_acc")],
        "ModelCheckpoint.on_",
        "val_acc",
        MONITOR,
    ),
    "a later epoch": (
        OfEpoch,
        [],
        "can't in epoch 2",
        "DataDependent",
        "every epoch",
    ),
}


@pytest.mark.parametrize(("kind", "callbacks", "where", "error", "remedy"), FAULTS.values(), ids=FAULTS)
def test_what_fails_in_an_epoch_fails_before_any_charge(tmp_path, kind, callbacks, where, error, remedy):
    private = training()
    with pytest.raises(ValueError, match=error) as raised:
        fit(kind(), tmp_path, private, 4, callbacks=[make() for make in callbacks])
    said = str(raised.value)
    assert where in said
    assert remedy in said
    assert "\n" not in said
    assert private.epsilon_spent == 0


class Counts(Lit):
    """A module with state of all kinds that a step, a hook and an optimizer change."""

    def __init__(self):
        super().__init__()
        self.calls, self.ends = [], 0
        self.register_buffer("steps", torch.zeros(1))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(self.global_step)
        self.steps += 1

    def on_train_epoch_end(self):
        self.ends += 1

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_the_epoch_on_copies_changes_nothing(tmp_path, monkeypatch):
    """Weights, state, metrics, files and the checkpoint of an earlier run are those without such an epoch."""
    found = []
    for name, tries in (("with", True), ("without", False)):
        folder = tmp_path / name
        (folder / "kept").mkdir(parents=True)
        (folder / "kept" / "last.ckpt").write_text("of an earlier run")
        if not tries:
            monkeypatch.setattr(private_training, "try_epoch", lambda *args: None)
        module, stop = Counts(), EarlyStopping("val_loss", patience=5)
        keep = ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=1)
        torch.manual_seed(3)
        logger = CSVLogger(folder, "", "")
        _, trainer = fit(
            module, folder, training(), 2, callbacks=[stop, keep], logger=logger, log_every_n_steps=1
        )
        found.append(
            {
                "weights": weights(module).tolist(),
                "calls": (module.calls, module.ends, module.steps.item()),
                "stop": (stop.wait_count, float(stop.best_score)),
                "rate": trainer.optimizers[0].param_groups[0]["lr"],
                "drawn": torch.rand(2).tolist(),
                "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt")),
                "rows": (folder / "metrics.csv").read_text(),
                "kept": (folder / "kept" / "last.ckpt").read_text(),
            }
        )
    assert found[0] == found[1]


def test_attributes_of_optimizers_are_copied(tmp_path):
    class Scaled(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.scale, self.calls = 2.0, []

        def step(self, closure=None):
            self.calls.append(self.scale)
            return super().step(closure)

    class Module(Lit):
        def configure_optimizers(self):
            self.own = Scaled(self.parameters())
            return self.own

    module = Module()
    _, trainer = fit(module, tmp_path, epochs=2)
    assert len(module.own.calls) == trainer.global_step == 6


def test_callbacks_that_cannot_be_copied_are_shared(tmp_path):
    class Locked(pl.Callback):
        def __init__(self):
            self.lock, self.epochs = threading.Lock(), 0

        def on_train_epoch_end(self, trainer, pl_module):
            with self.lock:
                self.epochs += 1

    locked = Locked()
    fit(Lit(), tmp_path, epochs=2, callbacks=[locked])
    assert locked.epochs == 2
