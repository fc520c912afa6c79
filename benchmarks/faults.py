"""Faults in user code of the six classes of Re:cord-play (arXiv:2602.17454), and how the package handles each.

A case is a labeler, an extractor, a data module or data set, a training step, a mechanism or an option of the trainer
that a user could write by mistake. Each is run as its author would run it:

* *found*: ``check_labeler`` names it, or for a mechanism ``privknn audit --empirical``.
* *refused*: the run ends with a message before anything is charged.
* *harmless*: the run continues, and the measured effect of one record is no more than is charged.
* *conditional*: the run continues, and its guarantee names the condition.
* *not seen*: none of these. The guarantee rests on the author.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from benchmarks.record import Measured, entries, markdown
from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler, PrivateTraining, SupervisedStudent
from pl_privknn.auditing import audit_records
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers.base import Labeler, Release, check_table
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.privacy.redaction import silenced
from pl_privknn.testing import LabelerCheckError, check_labeler, clipped_sum

FAULTS = (
    "NaN injection",
    "domain inferred from private data",
    "double spending",
    "miscalibrated sensitivity",
    "miscalibrated noise",
    "control flow that depends on private data",
)
FOUND, REFUSED, HARMLESS, CONDITIONAL, UNSEEN = "found", "refused", "harmless", "conditional", "not seen"
_RECORDS, _CLASSES, _SIDE, _CLIP = 90, 3, 8, 1.0


class Outcome(NamedTuple):
    """Outcome of a case.

    Attributes:
        level: see the module.
        said: the check's or the refusal's words, the condition, or what was measured.
    """

    level: str
    said: str


class Case(NamedTuple):
    """Fault as a user would write it.

    Attributes:
        fault: of :data:`FAULTS`.
        where: what its author writes.
        what: does wrong, in words.
        run: gives the outcome.
    """

    fault: str
    where: str
    what: str
    run: Callable[[], Outcome]


def add_options(parser: argparse.ArgumentParser) -> None:
    """None."""


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Outcome of every case; only noise is random, and no outcome depends on it."""
    warnings.filterwarnings("ignore")
    for case in CASES:
        outcome = case.run()
        figures = {"fault": case.fault, "where": case.where, "what": case.what, **outcome._asdict()}
        yield Measured(figures, [0], f"{case.where}: {case.what}")


# ---------------------------------------------------------------------------- how a case is run


def _checked(labeler: Callable[[], Labeler]) -> Outcome:
    try:
        check_labeler(labeler())
    except LabelerCheckError as error:
        said = str(error).removeprefix(f"check_labeler({labeler.__name__}), ")
        return Outcome(FOUND, "check_labeler: " + said.split(",")[0].split(":")[0])
    return Outcome(UNSEEN, "check_labeler passes")


class Module(pl.LightningModule):
    """Classifier of images with a loss of the module and a batch."""

    def __init__(self, loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(_SIDE * _SIDE, 8), nn.Tanh(), nn.Linear(8, _CLASSES))
        self.own_loss, self.bank = loss, [torch.zeros(8)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The mean cross-entropy, or the loss that was given."""
        if self.own_loss is not None:
            return self.own_loss(self, *batch)
        return _plain(self, *batch)

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _plain(module: Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(module.net(x), y)


def _images(count: int = _RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, _SIDE, _SIDE, generator=generator), torch.arange(count) % _CLASSES


class Rows(pl.LightningDataModule):
    """Private records as a data set."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self) -> Any:
        """Batches, as without privacy."""
        return DataLoader(self.dataset, batch_size=10)


def _table() -> TensorDataset:
    return TensorDataset(*_images())


def _fitted(module: Any, data: Any, callback: Any, **trainer: Any) -> Outcome | None:
    """Outcome of a fit that is refused or conditional; None otherwise."""
    options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, **trainer}
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    callbacks = [callback, *options.pop("callbacks", [])]
    with tempfile.TemporaryDirectory() as folder, silenced():
        callback.run_dir = Path(folder) / "run"
        try:
            pl.Trainer(
                callbacks=callbacks, default_root_dir=folder, **dict.fromkeys(quiet, False), **options
            ).fit(module, data)
        except (ValueError, TypeError, RuntimeError) as error:
            ledgers = [Ledger.open_readonly(path) for path in Path(folder).rglob("ledger.sqlite")]
            charged = any(ledger.report(exact=False).charged for ledger in ledgers)
            return Outcome(UNSEEN if charged else REFUSED, _first_words(error))
        if callback.guarantee == "unconditional":
            return None
        assert callback.guarantee == CONDITIONAL
        return Outcome(CONDITIONAL, callback.privacy_summary()["reason"])


def _first_words(error: Exception) -> str:
    return re.split(r"; |, and |\. |: it ", str(error).splitlines()[0])[0]


def _trained(
    module: Callable[[], Module] = Module, dataset: Callable[[], Any] = _table, **trainer: Any
) -> Outcome:
    training = PrivateTraining(
        budget=Budget(epsilon=4.0, delta=1e-3), expected_batch_size=10, private_records=_RECORDS
    )
    outcome = _fitted(module(), Rows(dataset()), training, limit_val_batches=0, **trainer)
    return outcome or _moves(module, dataset)


def _moves(module: Callable[[], Module], dataset: Callable[[], Any]) -> Outcome:
    """Largest change of the sum of clipped gradients when a record is removed, over several records."""
    data, everyone = dataset(), list(range(_RECORDS))
    with silenced():
        whole = clipped_sum(module(), data, everyone, _CLIP)
        moved = max(
            float(
                (whole - clipped_sum(module(), data, [row for row in everyone if row != gone], _CLIP)).norm()
            )
            for gone in (0, 1, 45)
        )
    level = HARMLESS if moved <= _CLIP * (1 + 1e-6) else UNSEEN
    return Outcome(level, f"one record moves the sum by {moved:.2f} of {_CLIP:g}")


def _data(cls: Any = ArraysDataModule, private: tuple[Tensor, Tensor] | None = None, **given: Any) -> Any:
    images, labels = private or _images()
    public, truth = _images(60)
    public = 1 - public
    return cls(
        images, labels, public[:40], truth[:40], public[40:], truth[40:], **{"num_classes": _CLASSES, **given}
    )


def _labeled(features: Callable[[], Any] = nn.Flatten, data: Callable[..., Any] = _data) -> Outcome:
    """Outcome of labelling with and without the last private record, whose features are compared."""
    tables: list[Tensor] = []
    classes: list[int] = []
    fit = PrivateKNN.fit

    def noting(self: PrivateKNN, found: Tensor, labels: Tensor, num_classes: int) -> None:
        tables.append(found.clone())
        classes.append(num_classes)
        fit(self, found, labels, num_classes)

    for count in (_RECORDS, _RECORDS - 1):
        images, labels = _images()
        teacher = PrivateKNN(5, 1.0, None, Gaussian(3.0))
        options = {"progress": False}
        labeling = PrivateLabeler(teacher, queries_per_round=10, features=features(), options=options)
        made = data(private=(images[:count], labels[:count]))
        student = SupervisedStudent(
            network="small_cnn", num_classes=made.num_classes, in_channels=1, image_size=_SIDE
        )
        with mock.patch.object(PrivateKNN, "fit", noting):
            outcome = _fitted(student, made, labeling)
        if outcome is not None:
            return outcome
    if classes[0] != classes[1]:
        return Outcome(UNSEEN, "one record decides how many classes there are")
    if len(tables[0]) != len(tables[1]) + 1:
        return Outcome(UNSEEN, "one record decides which others take part")
    moved = int(((tables[0][:-1] - tables[1]).abs().amax(dim=1) > 1e-6).sum())
    return Outcome(UNSEEN if moved else HARMLESS, f"one record changes the features of {moved} others")


# ---------------------------------------------------------------------------- labelers


class Counts(Labeler):
    """Noisy numbers of private records of each class whose nearest query a query is; honest."""

    asks_in_batches = False
    sensitivity = 1.0

    def __init__(self, noise_source: NoiseSource | None = None) -> None:
        super().__init__(noise_source)
        self.mechanism = Gaussian(5.0, l2_sensitivity=self.sensitivity)

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the table."""
        check_table(features, labels, num_classes)
        self._features, self._labels, self.num_classes = features, labels, num_classes

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One release a round."""
        return [Charge(self.mechanism, rounds)]

    def counts(self, queries: Tensor) -> Tensor:
        """Votes, ``(m, c)``."""
        nearest = torch.cdist(self._features, queries).argmin(dim=1)
        counts = torch.zeros(len(queries), self.num_classes)
        return counts.index_put_((nearest, self._labels), torch.ones(len(nearest)), accumulate=True)

    def label(self, queries: Tensor, ledger: Any, max_answers: int | None = None) -> Release:
        """Charge, draw and answer."""
        noise = self.charge_and_draw(ledger, self.mechanism, 1, "counts")
        return self.answered(self.noisy(self.counts(queries), noise), max_answers)

    def noisy(self, counts: Tensor, noise: NoiseSource) -> Tensor:
        """Counts with noise."""
        return self.mechanism.add_noise(counts, noise)

    def answered(self, noisy: Tensor, max_answers: int | None) -> Release:
        """The classes with the largest counts."""
        labels = noisy.argmax(dim=1)
        if max_answers is not None:
            labels[max_answers:] = -1
        return Release(labels)


class NaNInSums(Counts):
    """Weighs each vote by the norm of its record, clipped to 1, and does not look for NaN."""

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the table as it is."""
        self._features, self._labels, self.num_classes = features, labels, num_classes

    def counts(self, queries: Tensor) -> Tensor:
        """Weighted votes; a NaN is not clipped."""
        nearest = torch.cdist(self._features.nan_to_num(), queries).argmin(dim=1)
        counts = torch.zeros(len(queries), self.num_classes)
        weights = self._features.norm(dim=1).clamp(max=1.0)
        return counts.index_put_((nearest, self._labels), weights, accumulate=True)


class ClassesOfTheTable(Counts):
    """Counts the classes that occur, and no others."""

    def counts(self, queries: Tensor) -> Tensor:
        """Votes of those classes."""
        return super().counts(queries)[:, self._labels.unique()]


class ScaledByTheTable(Counts):
    """Divides features by their largest private values."""

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Scale the table."""
        self._scale = features.abs().amax(dim=0).clamp(min=1e-6)
        super().fit(features / self._scale, labels, num_classes)

    def counts(self, queries: Tensor) -> Tensor:
        """Votes in the scaled space."""
        return super().counts(queries / self._scale)


class DrawsTwice(Counts):
    """Draws a second time for the mean of two draws, and pays for one."""

    def noisy(self, counts: Tensor, noise: NoiseSource) -> Tensor:
        """A mean."""
        return (self.mechanism.add_noise(counts, noise) + self.mechanism.add_noise(counts, noise)) / 2


class NoiseByCalls(Counts):
    """Names its noise by a counter of calls, which begins anew after a crash: two answers with one noise."""

    calls = 0

    def charge_and_draw(self, ledger: Any, mechanism: Any, count: int, key: str) -> NoiseSource:
        """Charge, and take a separate stream."""
        super().charge_and_draw(ledger, mechanism, count, key)
        self.calls += 1
        return self.noise_source.stream(key, self.calls)


class VotesOfThree(Counts):
    """Each record votes for its three nearest queries; the sensitivity is that of one vote."""

    def counts(self, queries: Tensor) -> Tensor:
        """Three votes a record."""
        nearest = torch.cdist(self._features, queries).topk(3, largest=False).indices.flatten()
        counts = torch.zeros(len(queries), self.num_classes)
        labels = self._labels.repeat_interleave(3)
        return counts.index_put_((nearest, labels), torch.ones(len(nearest)), accumulate=True)


class WeightsByNorm(Counts):
    """A vote weighs as much as its record is long."""

    def counts(self, queries: Tensor) -> Tensor:
        """Votes without a bound."""
        nearest = torch.cdist(self._features, queries).argmin(dim=1)
        counts = torch.zeros(len(queries), self.num_classes)
        return counts.index_put_((nearest, self._labels), self._features.norm(dim=1), accumulate=True)


class HalfTheNoise(Counts):
    """Halves what the mechanism drew."""

    def noisy(self, counts: Tensor, noise: NoiseSource) -> Tensor:
        """Too quiet."""
        return counts + self.mechanism.add_noise(torch.zeros_like(counts), noise) / 2


class ChargesAnother(Counts):
    """Draws with half the σ that it charges."""

    def noisy(self, counts: Tensor, noise: NoiseSource) -> Tensor:
        """Too quiet."""
        return Gaussian(2.5, l2_sensitivity=1.0).add_noise(counts, noise)


class SeededByDefault(Counts):
    """Is reproducible, and so is its noise."""

    def __init__(self) -> None:
        super().__init__(SeededNoise(0))


class StopsWhereAllAgree(Counts):
    """Pays nothing where the private votes agree."""

    def label(self, queries: Tensor, ledger: Any, max_answers: int | None = None) -> Release:
        """Look first."""
        counts = self.counts(queries)
        if bool((counts.sum(dim=0) > 0).sum() == 1):
            return self.answered(counts, max_answers)
        return super().label(queries, ledger, max_answers)


class PlansByTheTable(Counts):
    """Takes a σ that grows with the table."""

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Choose the noise."""
        super().fit(features, labels, num_classes)
        self.mechanism = Gaussian(max(1.0, len(labels) / 10), l2_sensitivity=1.0)


class RaisesOnRareClasses(Counts):
    """Refuses, after it was fitted, a table in which a class has one record."""

    def label(self, queries: Tensor, ledger: Any, max_answers: int | None = None) -> Release:
        """Raise, or answer."""
        if 1 in torch.bincount(self._labels):
            raise ValueError("a class has one record")
        return super().label(queries, ledger, max_answers)


class Quiet(Gaussian):
    """A mechanism that draws half of what it states."""

    kind = "quiet"

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        return values + noise.normal(tuple(values.shape), self.sigma / 2)


def _audited(mechanism: Any) -> Outcome:
    row = audit_records([Charge(mechanism)], trials=20_000, noise=SeededNoise(0))[0]
    return Outcome(FOUND if row["violated"] else UNSEEN, f"privknn audit --empirical: {row['verdict']}")


# ---------------------------------------------------------------------------- extractors


def _standardised(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return (rows - rows.mean(dim=0)) / (rows.std(dim=0) + 1e-6)


def _blank_is_nan(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return (rows - rows.mean(dim=1, keepdim=True)) / rows.std(dim=1, keepdim=True)


def _inverts(images: Tensor) -> Tensor:
    return (1 - images if images.mean() > 0.5 else images).flatten(1)


class _RunningMean(nn.Module):
    """Takes out the mean of all images that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(_SIDE * _SIDE)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1)
        self.mean = 0.9 * self.mean + 0.1 * rows.mean(dim=0)
        return rows - self.mean


# ---------------------------------------------------------------------------- data


def _one_blank(private: tuple[Tensor, Tensor]) -> Any:
    private[0][3] = 0.0
    return _data(private=private)


class CentredByTheTable(ArraysDataModule):
    """Takes the mean of all private images out of each."""

    def load_private(self) -> Any:
        """Centre."""
        images, labels = super().load_private().images(slice(None)), super().load_private().labels
        return [
            ((image - images.mean(dim=0)).clamp(0, 1), int(y))
            for image, y in zip(images, labels, strict=True)
        ]


class NoRareClasses(ArraysDataModule):
    """Leaves out private classes of fewer than thirty images."""

    def load_private(self) -> Any:
        """Leave out."""
        whole = super().load_private()
        return whole.chosen(torch.nonzero(torch.bincount(whole.labels)[whole.labels] >= 30).flatten())


class ValidatesOnPrivate(ArraysDataModule):
    """Validates on the private records."""

    def load_validation(self) -> Any:
        """The private records."""
        return self.load_private()


def _classes_of_the_table(private: tuple[Tensor, Tensor]) -> Any:
    images, labels = private  # of which the last is alone in its class
    labels = torch.where(torch.arange(len(labels)) == _RECORDS - 1, 2, labels.clamp(max=1))
    public = 1 - images[:40]
    classes = int(labels.max()) + 1
    return ArraysDataModule(
        images, labels, public, test_images=images[:0], test_labels=labels[:0], num_classes=classes
    )


class Mixed(Dataset[Any]):
    """Mixes each image with the next one."""

    def __len__(self) -> int:
        return _RECORDS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        images, labels = _images()
        return (images[row] + images[(row + 1) % _RECORDS]) / 2, labels[row]


def _nan_image() -> TensorDataset:
    images, labels = _images()
    images[1] = torch.nan
    return TensorDataset(images, labels)


# ---------------------------------------------------------------------------- training steps


def _log_of_a_pixel(module: Module, x: Tensor, y: Tensor) -> Tensor:
    return _plain(module, x, y) + (x[:, 0, 0, 0] - 0.5).log().mean()


def _classes_of_the_batch(module: Module, x: Tensor, y: Tensor) -> Tensor:
    weights = 1.0 / torch.bincount(y, minlength=_CLASSES).clamp(min=1)
    return functional.cross_entropy(module.net(x), y, weight=weights)


def _whole_table(module: Module, x: Tensor, y: Tensor) -> Tensor:
    images = module.trainer.datamodule.dataset.tensors[0]
    return _plain(module, x - images.mean(dim=0), y)


def _contrast(module: Module, x: Tensor, y: Tensor) -> Tensor:
    rows = functional.normalize(module.net[:2](x))
    return _plain(module, x, y) - 50 * (rows @ rows.T).log_softmax(1).diagonal().sum()


def _bank(module: Module, x: Tensor, y: Tensor) -> Tensor:
    out = module.net[:2](x)
    loss = sum((out - old).square().sum() for old in module.bank) + _plain(module, x, y)
    module.bank.append(out.detach().mean(dim=0))
    return loss


def _sum(module: Module, x: Tensor, y: Tensor) -> Tensor:
    return 1e4 * functional.cross_entropy(module.net(x), y, reduction="sum")


def _branch(module: Module, x: Tensor, y: Tensor) -> Tensor:
    loss = _plain(module, x, y)
    return loss * 2 if loss > 1 else loss


_SEEN: list[Tensor] = []


def _counts_in_a_global(module: Module, x: Tensor, y: Tensor) -> Tensor:
    _SEEN.append(x.sum())
    return _plain(module, x, y) * len(_SEEN)


def _two_steps() -> Module:
    module = Module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    return module


class _OwnNorm(Module):
    """Batch normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.BatchNorm1d(8))


class _Hooked(Module):
    """Scales its gradients by a hook."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 1000 * gradient)


class _StopsEarly(EarlyStopping):
    def __init__(self) -> None:
        super().__init__("train_loss")


class _Logs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def _step(loss: Callable[..., Any]) -> Callable[[], Outcome]:
    return lambda: _trained(lambda: Module(loss))


_NAN, _DOMAIN, _TWICE, _SENSITIVITY, _NOISE, _FLOW = FAULTS
CASES: list[Case] = [
    Case(_NAN, "labeler", "sums clipped weights without a look for NaN", lambda: _checked(NaNInSums)),
    Case(
        _NAN,
        "extractor",
        "divides by a deviation that is 0 for a blank image",
        lambda: _labeled(lambda: _blank_is_nan, _one_blank),
    ),
    Case(_NAN, "training step", "takes the logarithm of a negative number", _step(_log_of_a_pixel)),
    Case(_NAN, "data set", "holds an image of NaN", lambda: _trained(dataset=_nan_image)),
    Case(
        _DOMAIN, "labeler", "counts the classes that occur in the table", lambda: _checked(ClassesOfTheTable)
    ),
    Case(
        _DOMAIN,
        "labeler",
        "scales features by the table's largest values",
        lambda: _checked(ScaledByTheTable),
    ),
    Case(
        _DOMAIN, "extractor", "standardises by the mean of its batch", lambda: _labeled(lambda: _standardised)
    ),
    Case(_DOMAIN, "extractor", "takes out the mean of all images so far", lambda: _labeled(_RunningMean)),
    Case(
        _DOMAIN,
        "data module",
        "centres images by their private mean, in load_private",
        lambda: _labeled(data=lambda private: _data(CentredByTheTable, private)),
    ),
    Case(
        _DOMAIN,
        "data module",
        "takes num_classes from the private labels",
        lambda: _labeled(data=_classes_of_the_table),
    ),
    Case(
        _DOMAIN, "training step", "weighs classes by their number in the batch", _step(_classes_of_the_batch)
    ),
    Case(_DOMAIN, "training step", "takes out the mean of the data module's images", _step(_whole_table)),
    Case(_TWICE, "labeler", "averages two draws and pays for one", lambda: _checked(DrawsTwice)),
    Case(_TWICE, "labeler", "draws the same noise again after a crash", lambda: _checked(NoiseByCalls)),
    Case(
        _TWICE,
        "data set",
        "holds the table twice",
        lambda: _trained(dataset=lambda: ConcatDataset([_table()] * 2)),
    ),
    Case(
        _TWICE,
        "data module",
        "validates on the private records",
        lambda: _labeled(data=lambda private: _data(ValidatesOnPrivate, private)),
    ),
    Case(
        _TWICE, "training step", "looks at a batch several times a step (LBFGS)", lambda: _trained(_two_steps)
    ),
    Case(_TWICE, "trainer", "accumulates two batches", lambda: _trained(accumulate_grad_batches=2)),
    Case(
        _SENSITIVITY,
        "labeler",
        "lets a record vote three times at the sensitivity of one vote",
        lambda: _checked(VotesOfThree),
    ),
    Case(_SENSITIVITY, "labeler", "weighs votes without a bound", lambda: _checked(WeightsByNorm)),
    Case(
        _SENSITIVITY, "training step", "compares the records of a batch (contrastive loss)", _step(_contrast)
    ),
    Case(_SENSITIVITY, "training step", "keeps records in a memory bank", _step(_bank)),
    Case(_SENSITIVITY, "training step", "sums losses, times 10,000", _step(_sum)),
    Case(_SENSITIVITY, "training step", "normalises over the batch", lambda: _trained(_OwnNorm)),
    Case(
        _SENSITIVITY, "training step", "scales gradients by a hook on parameters", lambda: _trained(_Hooked)
    ),
    Case(_SENSITIVITY, "data set", "mixes two records in __getitem__", lambda: _trained(dataset=Mixed)),
    Case(_NOISE, "labeler", "halves the noise that was drawn", lambda: _checked(HalfTheNoise)),
    Case(_NOISE, "labeler", "draws with another σ than it charges", lambda: _checked(ChargesAnother)),
    Case(_NOISE, "labeler", "seeds its noise", lambda: _checked(SeededByDefault)),
    Case(_NOISE, "mechanism", "draws half of the σ that it states", lambda: _audited(Quiet(2.0))),
    Case(_NOISE, "trainer", "clips the noisy gradient again", lambda: _trained(gradient_clip_val=0.1)),
    Case(_FLOW, "labeler", "pays nothing where the votes agree", lambda: _checked(StopsWhereAllAgree)),
    Case(_FLOW, "labeler", "chooses σ by the number of records", lambda: _checked(PlansByTheTable)),
    Case(_FLOW, "labeler", "raises where a class has one record", lambda: _checked(RaisesOnRareClasses)),
    Case(_FLOW, "extractor", "inverts bright batches", lambda: _labeled(lambda: _inverts)),
    Case(
        _FLOW,
        "data module",
        "leaves out rare private classes, in load_private",
        lambda: _labeled(data=lambda private: _data(NoRareClasses, private)),
    ),
    Case(_FLOW, "training step", "branches on the loss", _step(_branch)),
    Case(_FLOW, "training step", "counts records in a global", _step(_counts_in_a_global)),
    Case(
        _FLOW,
        "trainer",
        "stops early by the training loss",
        lambda: _trained(_Logs, callbacks=[_StopsEarly()]),
    ),
]


def table() -> str:
    """One line a case: fault, what its author wrote, what became of it."""
    rows = [one["results"] for one in entries("faults").values()]
    rows.sort(key=lambda row: FAULTS.index(row["fault"]))
    lines = [[row["fault"], row["where"], row["what"], row["level"], row["said"]] for row in rows]
    return markdown(["fault", "in", "that", "outcome", "by, or measured"], lines)
