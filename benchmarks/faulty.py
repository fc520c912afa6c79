"""Small tables and trainings for every method, and faults injected end to end.

A fault keeps what is stated and changes what is done. Its size says how large it is: 2 is half the noise, coins at
twice the rate, a second round that is not charged, a budget that is spent twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from pl_privknn import Gaussian
from pl_privknn.auditing import Audit, Target, attack_labeler
from pl_privknn.auditing.labelers import FixedPartition, small_target
from pl_privknn.auditing.training import TrainingTarget, attack_training
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    Labeler,
    LocalReverseKNN,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    ShuffledReverseKNN,
    reverse_knn,
)
from pl_privknn.labelers.ind_knn.engine import IndKNNEngine
from pl_privknn.labelers.pate_training import Teachers, TrainedTeachers
from pl_privknn.labelers.statistics import not_too_long
from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import negative_binomial
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import PaidSteps, clip_factors, poisson_sample
from pl_privknn.privacy.record_budgets import BudgetTable
from pl_privknn.training import NoisySGD, PrivateTraining
from pl_privknn.training.session import PrivateSession

QUERIES, CLASSES, RECORDS, DELTA = 20, 5, 60, 1e-5
_TEACHERS = 4
_RATE = 0.25


class NearestTeachers(Teachers):
    """Teachers that answer with the label of their nearest record, so one record decides nearby answers."""

    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: Any,
    ) -> TrainedTeachers:
        """See :meth:`~pl_privknn.labelers.pate_training.Teachers.train`."""
        empty = torch.bincount(parts, minlength=num_teachers) == 0
        return _Nearest(empty, features, labels, parts)


class _Nearest(TrainedTeachers):
    def __init__(self, empty: Tensor, features: Tensor, labels: Tensor, parts: Tensor) -> None:
        super().__init__(empty, torch.zeros_like(empty))
        self._features, self._labels, self._parts = features, labels, parts

    def predict(self, queries: Tensor) -> Tensor:
        """See the base."""
        distances = torch.cdist(queries.double(), self._features.double())
        votes = torch.full((len(queries), self.num_teachers), -1)
        for teacher in torch.nonzero(~self.empty).flatten():
            nearest = torch.where(self._parts == teacher, distances, torch.inf).argmin(dim=1)
            votes[:, teacher] = self._labels[nearest]
        return votes


class SeveralTeachers(PATE):
    """Partition that assigns records of the first part to several teachers."""

    copies = 2

    def _train(self, features: Tensor, labels: Tensor, num_classes: int, groups: Any) -> Any:
        assert isinstance(self.partitioner, FixedPartition)
        own = self.partitioner.parts
        parts = nn.functional.pad(own, (0, len(labels) - len(own)))
        first, more = torch.nonzero(parts == 0).flatten(), range(1, self.copies)
        rows = torch.cat([torch.arange(len(labels)), *[first] * len(more)])
        dealt = torch.cat([parts, *[torch.full_like(first, teacher) for teacher in more]])
        records = features[rows], labels[rows], dealt
        return self.teachers.train(*records, num_classes, self.num_teachers, lambda share: None)


@functools.cache
def noise_for(
    made: Callable[[float], Labeler],
    epsilon: float,
    delta: float = DELTA,
    queries: int = QUERIES,
    classes: int = CLASSES,
) -> float:
    """σ of a labeler's noise with which all queries cost ε."""
    free = Parameter("sigma", start=10.0, low=0.01, high=1e6, rising=False)
    settings: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "exact": False}
    return calibrate(lambda sigma: made(sigma).plan(queries, queries, classes), free, **settings).value


def _voting(sigma: float) -> Labeler:
    return PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(sigma))


def _sampled(sigma: float, rate: float = _RATE) -> Labeler:
    return PrivateKNN(k=1, sampling_rate=rate, noise=Gaussian(sigma))


def _pate(sigma: float, made: type[PATE] = PATE) -> PATE:
    return made(num_teachers=_TEACHERS, teachers=NearestTeachers(), noise=Gaussian(sigma), progress=False)


def _sgd(epsilon: float) -> Labeler:
    settings = {"sampling_rate": _RATE, "steps": 8, "max_grad_norm": 0.1, "expected_batch_size": 15}
    return NoisySGDTeacher(budget=Budget(epsilon=epsilon, delta=DELTA), **settings)  # type: ignore[arg-type]


#: Makes the labeler of each method for an ε.
LABELERS: dict[str, Callable[[float], Labeler]] = {
    "reverse kNN": lambda epsilon: ReverseKNN(budget=Budget(epsilon=epsilon)),
    "reverse kNN, local": lambda epsilon: LocalReverseKNN(
        budget=Budget(epsilon=epsilon, adjacency="replace_one")
    ),
    "reverse kNN, shuffle": lambda epsilon: ShuffledReverseKNN(
        budget=Budget(epsilon=epsilon, delta=DELTA, adjacency="replace_one"),
        randomizer="shares",
        num_clients=RECORDS,
    ),
    "Private-kNN": lambda epsilon: _voting(noise_for(_voting, epsilon)),
    "Private-kNN, sampled": lambda epsilon: _sampled(noise_for(_sampled, epsilon)),
    "PATE": lambda epsilon: _pate(noise_for(_pate, epsilon)),
    "Ind-KNN": lambda epsilon: IndKNN(
        0.5, Gaussian(1.0), budget=Budget(epsilon=epsilon, delta=DELTA), num_queries=1000
    ),
    "statistics": lambda epsilon: PreconditionedGradients(
        budget=Budget(epsilon=epsilon, delta=DELTA), private_records=RECORDS, releases=2
    ),
    "noisy SGD teacher": _sgd,
}
TRAININGS = ("NoisySGD", "PrivateTraining")
METHODS = (*LABELERS, *TRAININGS)


def attack(
    method: str,
    epsilon: float,
    noise: NoiseSource,
    fault: str | None = None,
    size: float = 2.0,
    **settings: int,
) -> Audit:
    """Attack a method, with or without a fault.

    Args:
        method: of :data:`METHODS`.
        epsilon: stated.
        noise: of the attack.
        fault: of :func:`faults_of`; None for none.
        size: of the fault.
        **settings: ``canaries``.
    """
    training = method in TRAININGS
    made: Any = small_training(method, epsilon) if training else small_target(LABELERS[method](epsilon))
    with contextlib.ExitStack() as stack:
        if fault == "less noise" and method == "reverse kNN, local":  # chance answers are its noise
            made = dataclasses.replace(made, labeler=LABELERS[method](epsilon * size))
        elif fault == "less noise" and method == "reverse kNN, shuffle":
            made = stack.enter_context(_fewer_shares(made, size))
        elif fault == "less noise":
            noise = LessNoise(size, noise)
        elif fault == "shared noise":
            noise = SharedNoise(1.0, noise)
        elif fault is not None:
            made = stack.enter_context(_FAULTS[fault](made, method, epsilon, size))
        if isinstance(made, TrainingTarget):
            return attack_training(made, noise=noise, **settings)
        return attack_labeler(made, noise=noise, **settings)  # type: ignore[arg-type]


@contextlib.contextmanager
def _fewer_shares(made: Any, size: float) -> Iterator[Any]:
    """Fault that loses noise shares, so that the noise is too small by a factor."""
    literal = negative_binomial._shares

    def drawn(shape: float, *given: Any) -> Tensor:
        return literal(shape / size**2, *given)

    with mock.patch.object(negative_binomial, "_shares", drawn):
        yield made


@contextlib.contextmanager
def _coins(made: Any, method: str, epsilon: float, size: float) -> Iterator[Any]:
    if method == "Private-kNN, sampled":
        more = _sampled(noise_for(_sampled, epsilon), min(1.0, size * _RATE))
        yield dataclasses.replace(made, labeler=more)
        return
    place = "labelers.noisy_sgd" if method == "noisy SGD teacher" else "training.session"

    def drawn(count: int, rate: float, coins: NoiseSource) -> Tensor:
        return poisson_sample(count, min(1.0, size * rate), coins)

    with mock.patch(f"pl_privknn.{place}.poisson_sample", drawn):
        yield made


@contextlib.contextmanager
def _rounds(made: Any, method: str, epsilon: float, size: float) -> Iterator[Any]:
    times = int(size)
    if isinstance(made, Target):
        # Answers that come one by one are asked for more often than is paid for.
        more = made.queries.repeat(times, 1) if method.startswith(("Private-kNN", "PATE")) else made.queries
        yield dataclasses.replace(made, rounds=times, queries=more)
        return
    literal_plan, literal, calls = PrivateSession._plan, PaidSteps.release, [0]

    def planned(self: PrivateSession, *given: Any) -> Any:
        found = literal_plan(self, *given)
        return dataclasses.replace(found, steps=found.steps // times)

    def released(self: PaidSteps, gradients: Tensor, noise: NoiseSource) -> Tensor:
        calls[0] += 1
        if calls[0] % times == 0:
            return literal(self, gradients, noise)
        self.pay(noise)
        return self.mechanism.add_noise(gradients, noise.stream("unpaid", calls[0]))

    with (
        mock.patch.object(PrivateSession, "_plan", planned),
        mock.patch.object(PaidSteps, "release", released),
    ):
        yield made


@contextlib.contextmanager
def _unclipped(made: Any, method: str, epsilon: float, size: float) -> Iterator[Any]:
    if method == "reverse kNN":
        literal = reverse_knn.true_counts
        with mock.patch.object(reverse_knn, "true_counts", lambda *given: int(size) * literal(*given)):
            yield made
        return
    place = {"statistics": "labelers.preconditioned_gradients", "noisy SGD teacher": "labelers.noisy_sgd"}
    module = f"pl_privknn.{place.get(method, 'training.clipped_sums')}"
    # A sum in whole steps checks what it clips, and would refuse.
    with contextlib.ExitStack() as stack:
        for honest, create in ((clip_factors, False), (not_too_long, True)):
            longer = functools.partial(_longer, honest, size)
            stack.enter_context(mock.patch(f"{module}.{honest.__name__}", longer, create=create))
        yield made


def _longer(honest: Any, size: float, lengths: Tensor, bound: float, *rest: Any) -> Any:
    return honest(lengths, size * bound, *rest)


@contextlib.contextmanager
def _parts(made: Any, method: str, epsilon: float, size: float) -> Iterator[Any]:
    several = _pate(noise_for(_pate, epsilon), SeveralTeachers)
    several.copies = int(size)  # type: ignore[attr-defined]
    yield dataclasses.replace(made, labeler=several)


@contextlib.contextmanager
def _budget(made: Any, method: str, epsilon: float, size: float) -> Iterator[Any]:
    literal, spend = IndKNNEngine.add, BudgetTable.spend

    def added(self: IndKNNEngine, *given: Any, **named: Any) -> None:
        literal(self, *given, **named)
        self.budgets.left *= size

    def paid_nothing(self: BudgetTable, mark: str) -> None:
        self._written = self.left.copy()
        spend(self, mark)

    with mock.patch.object(IndKNNEngine, "add", added), mock.patch.object(BudgetTable, "spend", paid_nothing):
        yield made


_FAULTS: dict[str, Any] = {
    "more coins": _coins,
    "unpaid rounds": _rounds,
    "unclipped": _unclipped,
    "several teachers": _parts,
    "budget spent again": _budget,
}
_SIZES = (2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
#: Faults, the methods that they fit, and the sizes that are tried until one is found; the first is the one asked for.
FAULTS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "less noise": (METHODS, _SIZES),
    "shared noise": (tuple(name for name in METHODS if not name.startswith("reverse kNN, ")), (1.0,)),
    "more coins": (("Private-kNN, sampled", "noisy SGD teacher", *TRAININGS), (2.0, 3.0, 4.0, 6.0, 8.0)),
    "unpaid rounds": (
        ("reverse kNN", "reverse kNN, shuffle", "Private-kNN", "PATE", "noisy SGD teacher", *TRAININGS),
        (2.0, 3.0, 4.0, 8.0, 16.0),
    ),
    "unclipped": (
        ("reverse kNN", "statistics", "noisy SGD teacher", *TRAININGS),
        (2.0, 3.0, 4.0, 8.0, 100.0),
    ),
    "several teachers": (("PATE",), (2.0, 3.0, 4.0)),
    "budget spent again": (("Ind-KNN",), (2.0, 3.0, 4.0, 6.0)),
}


def sizes_of(method: str, fault: str) -> tuple[float, ...]:
    """Possible sizes of a fault of a method: a training of ten steps charges at least one."""
    _, sizes = FAULTS[fault]
    few = fault == "unpaid rounds" and method in TRAININGS
    return tuple(size for size in sizes if size <= 10) if few else sizes


# -- noise that is too small, or that comes again -----------------------------------------------------------------


def _smaller(name: str) -> Any:
    """Draw with a smaller scale."""
    return lambda self, given, scale: getattr(NoiseSource, name)(self, given, scale / self.factor)


def _shared(name: str) -> Any:
    """Draw with one row shared by all, also for queries that are answered one by one."""

    def drawn(self: SharedNoise, shape: Any, scale: Any) -> Tensor:
        made: Tensor = getattr(NoiseSource, name)(self, shape, scale)
        if made.ndim > 1:
            return made[:1].expand(made.shape).clone()
        if name != "normal":
            return made
        first: Tensor = self.first.setdefault(len(made), made / scale)
        return first * scale

    return drawn


class LessNoise(NoiseSource):
    """Noise source whose normal and Laplace noise is too small by a factor."""

    cryptographic = False

    def __init__(self, factor: float, source: NoiseSource) -> None:
        self.factor, self.source = factor, source

    def random_words(self, count: int) -> Any:
        """Those of the source."""
        return self.source.random_words(count)

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source, with the same fault."""
        return type(self)(self.factor, self.source.stream(*key))

    normal = _smaller("normal")
    rounded_normal = _smaller("rounded_normal")
    laplace = _smaller("laplace")
    rounded_laplace = _smaller("rounded_laplace")
    normal_at_least = _smaller("normal_at_least")
    exponential_choice = _smaller("exponential_choice")


class SharedNoise(LessNoise):
    """Noise source that repeats the noise of the first query or step."""

    def __init__(self, factor: float, source: NoiseSource) -> None:
        super().__init__(factor, source)
        self.first: dict[int, Tensor] = {}

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source; that of steps is always the same."""
        return super().stream(*(key[:1] if key[:1] == ("step",) else key))

    normal = _shared("normal")
    rounded_normal = _shared("rounded_normal")
    laplace = _shared("laplace")
    rounded_laplace = _shared("rounded_laplace")


# -- a private training of seconds, by the baseline and by the callback --------------------------------------------

_IMAGES, _PUBLIC, _SIDE, _BATCH = 90, 40, 8, 9


class PlainClassifier(pl.LightningModule):
    """Plain classifier without any code for privacy.

    Args:
        pixels: of an image.
        num_classes: number of classes.
        hidden: width of the hidden layer.
    """

    def __init__(self, pixels: int = 400, num_classes: int = 10, hidden: int = 64) -> None:
        super().__init__()
        self.net = network(pixels, num_classes, hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def network(pixels: int, num_classes: int, hidden: int) -> nn.Sequential:
    """Network with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))


def dealt(images: Tensor, labels: Tensor, private: int, public: int, **settings: Any) -> ArraysDataModule:
    """Data module of images split in order into private, public and test examples."""
    sizes = [private, public, len(images) - private - public]
    parts = zip(("private", "public", "test"), images.split(sizes), labels.split(sizes), strict=True)
    for name, pictures, known in parts:
        settings |= {f"{name}_images": pictures, f"{name}_{'truth' if name == 'public' else 'labels'}": known}
    return ArraysDataModule(**settings)


def small_training(
    method: str, epsilon: float, delta: float = DELTA, records_of_a_person: int = 0
) -> TrainingTarget:
    """Training of ten steps on synthetic images; with persons as the unit where they own several."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_IMAGES + _PUBLIC + 20, 1, _SIDE, _SIDE, generator=generator)
    labels = (images.mean(dim=(1, 2, 3)) > 0.5).long()
    groups = torch.arange(_IMAGES) // records_of_a_person if records_of_a_person else None
    data = dealt(images, labels, _IMAGES, _PUBLIC, num_classes=2, private_groups=groups)
    pixels, hidden = _SIDE * _SIDE, 96
    budget = Budget(epsilon, delta, unit="person" if records_of_a_person else "record")
    drawn: dict[str, Any] = {"budget": budget, "expected_batch_size": _BATCH, "private_records": _IMAGES}
    if records_of_a_person:
        drawn["options"] = {"records_per_person": 2}

    def make() -> tuple[pl.LightningModule, PrivateTraining]:
        torch.manual_seed(0)
        if method == "NoisySGD":
            net = network(pixels, 2, hidden)
            module = NoisySGD(net, num_classes=2, image_size=_SIDE, **drawn)
            return module, module.private_training
        training = PrivateTraining(**drawn)
        return PlainClassifier(pixels, 2, hidden), training

    return TrainingTarget(make, data, {"max_epochs": 1, "accelerator": "cpu"}, method)
