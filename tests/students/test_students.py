"""Students: trained, resumed, rebuilt and asked, and what they log."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.networks import build_network
from pl_privknn.students import FixMatchStudent, SupervisedStudent, UDAStudent, VATStudent
from tests.setup.grouped import grouped
from tests.setup.refusals import refusals
from tests.students.student_setup import STUDENTS, held_out, loaders, shuffled_digits, trainer


@pytest.fixture(scope="session")
def digits():
    return shuffled_digits()


class SeedEachStep(Callback):
    """What a resumed run needs to draw the same random numbers as one that wasn't interrupted."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(trainer.global_step)


@pytest.mark.parametrize("student", [VATStudent, FixMatchStudent])
def test_a_resumed_run_equals_an_uninterrupted_one(student, digits, tmp_path):
    def build():
        torch.manual_seed(7)
        return student(image_size=8, ema_decay=0.95, optimization={"schedule_epochs": 2})

    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = build()
    run = trainer(tmp_path, max_epochs=2, callbacks=[SeedEachStep(), keep], enable_checkpointing=True)
    run.fit(whole, loaders(digits))
    torch.manual_seed(99)
    resumed = student(image_size=8, ema_decay=0.95, optimization={"schedule_epochs": 2})
    again = trainer(tmp_path, max_epochs=2, callbacks=[SeedEachStep()])
    again.fit(resumed, loaders(digits), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert again.global_step == run.global_step == 8
    assert resumed.ema.updates == 8
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert any(name.startswith("ema.network.") for name in ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("student", "part"), [(VATStudent, "vat"), (FixMatchStudent, "consistency")])
def test_every_weight_gets_a_gradient_of_each_part_under_autocast(student, part):
    module = student(image_size=8, **({"threshold": 0.05} if student is FixMatchStudent else {}))
    images, labels = torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = module.objective(images, labels, torch.rand(16, 1, 8, 8))
    gradients = torch.autograd.grad(parts[part], list(module.network.parameters()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_weak_views_of_labelled_images(monkeypatch):
    images, seen = torch.rand(16, 1, 8, 8), {}
    for augment in (False, True):
        module = SupervisedStudent(image_size=8, augment_labeled=augment, augmentation={"shift": 0.25})
        monkeypatch.setattr(
            module, "objective", lambda x, y, u: seen.update(x=x) or {"supervised": x.sum() * 0}
        )
        module.training_step((images, torch.zeros(16, dtype=torch.int64)), 0)
        assert torch.equal(seen["x"], images) != augment


def test_targets_of_consistency_leave_no_gradient_and_strong_views_no_statistics():
    module = FixMatchStudent(image_size=8, threshold=0.05, consistency_weight=2.0)
    calls, logits = [], module.logits

    def spy(x):
        result = logits(x)
        calls.append((len(x), result.requires_grad, int(module.network.encoder[1].num_batches_tracked)))
        return result

    module.logits = spy
    labels = torch.zeros(8, dtype=torch.int64)
    parts = module.objective(torch.rand(8, 1, 8, 8), labels, torch.rand(24, 1, 8, 8))
    # Labelled, weak and strong pass: rows, gradient, batches that the running statistics have seen.
    assert calls == [(8, True, 1), (24, False, 2), (24, True, 2)]
    assert parts["consistency"].requires_grad


@pytest.mark.parametrize("student", STUDENTS)
def test_training_logs_predicts_and_is_rebuilt_from_plain_hyperparameters(student, digits, tmp_path):
    constants = {"mean": (0.5,), "std": (0.25,)}
    module = student(image_size=8, ema_decay=0.9, normalization=constants, optimization={"lr": 0.002})
    keep = ModelCheckpoint(tmp_path, filename="last")
    run = trainer(tmp_path, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, loaders(digits), held_out(digits))
    parts = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("train/")}
    loss = parts.pop("train/loss")
    parts.pop("train/confident", None)
    assert loss == pytest.approx(sum(parts.values()), rel=1e-4)
    assert "val/accuracy" in run.callback_metrics
    (results,) = run.test(module, held_out(digits), verbose=False)
    probabilities = torch.cat(run.predict(module, held_out(digits)))
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(797))
    accuracy = (probabilities.argmax(dim=1) == digits[1][1000:]).float().mean().item()
    assert results["test/accuracy"] == pytest.approx(accuracy, abs=1e-6)
    hparams = torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"]
    assert (hparams["optimization"]["lr"], hparams["normalization"]["mean"]) == (0.002, [0.5])
    assert ("radius" in hparams) == (student is VATStudent)
    assert ("threshold" in hparams) == (student in (UDAStudent, FixMatchStudent))
    loaded = student.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu").eval()
    with torch.no_grad():
        assert torch.equal(loaded(digits[0][:9]), module.eval()(digits[0][:9]))


def test_a_module_as_network_stays_out_of_the_hyperparameters():
    assert "network" not in SupervisedStudent(network=build_network("small_cnn", 10, 1, 8)).hparams


# ---------------------------------------------------------------------------- means over an epoch


class Noted(SupervisedStudent):
    """Notes each loss, and logs a value of its own at its odd batches alone."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.__dict__.setdefault("noted", []).append((len(batch[0]), loss.item()))
        if batch_idx % 2:
            self.log_training({"odd": torch.tensor(float(batch_idx))}, len(batch[0]))
        return loss


class Seen(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def logged(records, **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(records, 1, 8, 8), torch.arange(records) % 3)
    student = Noted(network="small_cnn", num_classes=3, image_size=8)
    seen = Seen()
    trainer = pl.Trainer(accelerator="cpu", callbacks=[seen], **{**TRAINS_ALONE, **options})
    trainer.fit(student, DataLoader(data, 8))
    return student.noted, seen.epochs, trainer.callback_metrics


def mean(noted):
    return sum(size * loss for size, loss in noted) / sum(size for size, _ in noted)


def test_callbacks_see_the_means_of_each_epoch():
    noted, epochs, _ = logged(29, max_epochs=2)
    assert [size for size, _ in noted] == [8, 8, 8, 5] * 2
    for epoch, part in zip(epochs, (noted[:4], noted[4:]), strict=True):
        assert epoch["train/loss"] == pytest.approx(mean(part), rel=1e-6)
        assert epoch["train/odd"] == pytest.approx((8 * 1 + 5 * 3) / 13)


def test_what_the_last_batch_lacks_is_logged():
    _, _, metrics = logged(24, max_epochs=1)
    assert float(metrics["train/odd"]) == 1


def test_an_epoch_that_max_steps_ends_is_logged():
    noted, _, metrics = logged(80, max_epochs=-1, max_steps=13)
    assert len(noted) == 13
    assert float(metrics["train/loss"]) == pytest.approx(mean(noted[10:]), rel=1e-6)


# ---------------------------------------------------------------------------- arguments

WRONG = {
    "num_classes": 1, "optimizer": "lion", "lr": 0, "momentum": 1.0, "weight_decay": -1, "scheduler": "sine",
    "schedule_epochs": 0, "ema_decay": 1.0, "label_smoothing": 1.0, "label_robustness": 1.1,
    "confidence_weighting": -0.5, "augment_labeled": "strong", "shift": 2, "mean": [0.5], "network": "nothing",
    "temperature": 0, "threshold": 1.0, "consistency_weight": -1, "num_ops": -2,
}  # fmt: skip


def made(**arguments):
    return UDAStudent(**grouped(UDAStudent, **{"image_size": 8, **arguments}))


test_bad_arguments_are_named = refusals(
    {f"{name}=": functools.partial(made, **{name: value}) for name, value in WRONG.items()}
)
