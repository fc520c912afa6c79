"""Trainings by noisy SGD under attack: one run, and canaries whose gradients have directions of their own.

A canary is a private record like any other: it is drawn by the training's own coins, clipped, and takes part in a sum
that gets noise and is paid for. Only its gradient is the attacker's choice: one weight of its own, on which the other
records hardly depend, and much longer than the clipping norm, so that what is not clipped shows (gradient canaries:
Nasr et al. 2023, Steinke et al. 2023). The attacker sees the noisy sums of all steps, and knows whom else each of
them drew; the guarantee allows for that.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, Audit, IndependentCanaries, Scores, judge
from pl_privknn.auditing.releases import CANARIES
from pl_privknn.config import ConfigurationError, get
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ChosenImages, JoinedImages, LabeledImages
from pl_privknn.labelers.canaries import Evidence, SampledEvidence
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.redaction import silenced
from pl_privknn.training.clipped_sums import ClippedSum
from pl_privknn.training.configured import made_data, made_training, private_trainings
from pl_privknn.training.noisy_sgd import NoisySGD
from pl_privknn.training.private_training import PrivateTraining
from pl_privknn.training.training_run import TrainingRun

# Labels from here on are numbers of canaries.
_FIRST = 1_000_000
# Length of a canary's gradient over the clipping norm.
_LENGTH = 100.0
# Values of gradients that are computed in a step to tell what all others add to its sum, and of how many records.
_VALUES, _FEWEST, _MOST = 1 << 22, 64, 1024


@dataclasses.dataclass(frozen=True)
class TrainingTarget:
    """A private training as a run would do it.

    Attributes:
        make: makes the module afresh, and the callback that trains it.
        data: the data module.
        trainer: options of the trainer that fix the number of steps.
        name: what trains, for messages.
    """

    make: Callable[[], tuple[pl.LightningModule, PrivateTraining]]
    data: PrivatePublicDataModule
    trainer: Mapping[str, Any]
    name: str


def attack_training(
    target: TrainingTarget,
    *,
    canaries: int = CANARIES,
    confidence: float = CONFIDENCE,
    noise: NoiseSource | None = None,
    breach: bool = True,
) -> Audit:
    """Attack a training by noisy SGD from its noisy sums; see the module.

    Args:
        target: what is attacked.
        canaries: at least; trainings with fresh coins are added until there are so many.
        confidence: of the lower bounds.
        noise: of trainings and coins; the operating system's generator by default.
        breach: whether to find the smallest breach that would have been noticed.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries = check_int("canaries", canaries, minimum=2)
    confidence = check_open_unit("confidence", confidence)
    seen, stated, runs = score_training(target, canaries, noise if noise is not None else default_noise())
    charges, delta = stated
    return judge(
        target.name, seen, charges,
        delta=delta, confidence=confidence, runs=runs, canaries=len(seen.present), breach=breach,
    )  # fmt: skip


def score_training(
    target: TrainingTarget, canaries: int, noise: NoiseSource
) -> tuple[Scores, tuple[list[Charge], float], int]:
    """Train with canaries, as often as it takes to have ``canaries`` of them; each run has fresh coins.

    Returns:
        What the attacker knows of them, the releases and δ that the training stated, and the number of runs.
    """
    target.data.setup("fit")
    coins: list[Tensor] = []
    sums: list[list[Evidence]] = []
    while not coins or sum(map(len, coins)) < canaries:
        drawn, planting = _one_run(target, canaries, noise.stream("training", len(coins)))
        assert planting.evidence is not None
        coins.append(drawn)
        sums.append([planting.evidence])
    scores, contrast = (
        np.concatenate([getattr(evidence, name)().numpy() for (evidence,) in sums])
        for name in ("scores", "contrast")
    )
    present = torch.cat(coins).numpy()
    seen = Scores("one_run", "sums", present, scores, [contrast], mixture=IndependentCanaries.of(sums))
    assert planting.statement is not None
    return seen, planting.statement, len(coins)


def _one_run(target: TrainingTarget, canaries: int, noise: NoiseSource) -> tuple[Tensor, _Planting]:
    module, training = target.make()
    training.noise_source = noise.stream("owner")
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    # Half of the weights at most, those on which the other records depend least.
    count = max(2, min(canaries, size // 2))
    present = noise.stream("coins").bernoulli((count,), 0.5)
    data = copy.copy(target.data)
    drawn = torch.nonzero(present).flatten()
    data._private = _with_canaries(target.data, drawn)
    if (owners := data.private_groups) is not None:  # a canary is a person with one record
        data.private_groups = torch.cat([owners, int(owners.max()) + 1 + drawn])
    planting = _Planting(training, count, len(target.data.private), noise.stream("known"))
    with tempfile.TemporaryDirectory() as folder, silenced():
        training.run_dir = folder
        trainer = pl.package_of(module, data).Trainer(
            **target.trainer,
            devices=1,
            default_root_dir=folder,
            callbacks=[*([] if isinstance(module, NoisySGD) else [training]), planting],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, data)
    return present.bool(), planting


def _with_canaries(data: PrivatePublicDataModule, numbers: Tensor) -> LabeledImages:
    """The private records, and public images that stand for canaries, whose labels are their numbers."""
    private, public = data.private, data.public.store
    store = JoinedImages([private.store, ChosenImages(public, numbers % len(public))])
    labels = torch.zeros(len(numbers), *private.labels.shape[1:], dtype=torch.int64)
    made = LabeledImages(store, torch.cat([private.labels, labels]), data.num_classes, task=private.task)
    codes = (_FIRST + numbers).reshape(-1, *[1] * (labels.ndim - 1)).expand_as(labels)
    made.labels = torch.cat([private.labels, codes])
    return made


class _Planting(pl.Callback):
    """Puts the canaries' gradients into a training, and notes what it releases.

    Args:
        owner: the callback that trains.
        count: number of canaries, those among them that are not there.
        known: number of the other records, which come first.
        noise: says which of them are looked at in a step.
    """

    def __init__(self, owner: PrivateTraining, count: int, known: int, noise: NoiseSource) -> None:
        self.statement: tuple[list[Charge], float] | None = None
        self.evidence: SampledEvidence | None = None
        self._owner, self._count, self._known, self._noise = owner, count, known, noise
        self._places: Tensor | None = None
        self._gradients: Any = None
        self._others = torch.zeros(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of what sums up, and of what adds noise; note what is stated."""
        self._gradients = self._owner._gradients
        self._sum, self._release = self._gradients.sum, self._owner.release
        self._gradients.sum, self._owner.release = self._summed, self._released  # type: ignore[method-assign]
        run = self._owner.run
        assert isinstance(run, TrainingRun)
        if not isinstance(run.mechanism, Gaussian):
            raise ValueError("epsilon=inf: a training without noise has nothing to audit; state an epsilon")
        self.statement = [Charge(run.mechanism, run.planned)], run.plan.delta
        self.evidence = SampledEvidence(self._count, run.mechanism)

    def _summed(self, places: list[int], batch_idx: int = 0, persons: list[int] | None = None) -> Tensor:
        """The clipped sum of a sample with canaries; what all others add to it is computed beside it.

        The attacker knows whom else the step drew, which the guarantee allows. So nothing but noise and a canary's
        own draws is in its direction.
        """
        private = self._owner.private
        assert private is not None
        assert private.images is not None
        numbers = private.images.labels[places].reshape(len(places), -1)[:, :1].flatten()
        if self._places is None:
            self._places = self._quiet(batch_idx)
        known = (numbers < _FIRST).tolist()
        others, owners = (
            None if of is None else [each for each, here in zip(of, known, strict=True) if here]
            for of in (places, persons)
        )
        self._others = self._sum(others, batch_idx, owners).cpu()
        own = numbers[numbers >= _FIRST] - _FIRST
        sizes = [parameter.numel() for parameter in self._gradients.parameters]
        total = ClippedSum(sizes, self._gradients.max_grad_norm, torch.device("cpu"))
        for place in self._places[own].tolist():
            gradient = torch.zeros(sum(sizes))
            gradient[place] = _LENGTH * self._gradients.max_grad_norm
            total.add([part[None] for part in gradient.split(sizes)])
        return self._others + total.finish()

    def _quiet(self, batch_idx: int) -> Tensor:
        """The weights on which some of the other records depend least."""
        size = sum(parameter.numel() for parameter in self._gradients.parameters)
        chunk = min(max(_FEWEST, min(_MOST, _VALUES // size)), self._known)
        some = self._noise.integers(chunk, self._known) if chunk < self._known else torch.arange(chunk)
        known = self._sum(some.tolist(), batch_idx)
        return known.cpu().abs().argsort(stable=True)[: self._count]

    def _released(self, total: Tensor) -> Tensor:
        noisy = self._release(total)
        assert self._places is not None
        assert self.evidence is not None
        rest = (noisy.cpu().double() * self._owner.expected_batch_size - self._others)[self._places]
        length = self.evidence.mechanism.l2_sensitivity
        self.evidence.add_step(rest, torch.full((self._count,), length))
        return noisy


#: What of the trainer's options a training's plan or its sums depend on.
_TRAINER = ("max_epochs", "max_steps", "accelerator", "precision")


def training_of_config(document: Mapping[str, Any], path: str | Path) -> TrainingTarget:
    """The training of a configuration; like ``privknn fit``, it runs the code that the configuration names.

    Other callbacks of the trainer are left out: they see what the training released alone.

    Args:
        document: the configuration, with sections ``model``, ``data`` and ``trainer``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse.
    """
    try:
        trainer = {name: get(document, f"trainer.{name}") for name in _TRAINER}
        data = made_data(document.get("data") or {})
        if not isinstance(data, PrivatePublicDataModule):
            raise ConfigurationError(
                "data.class_path: want a data module with a private part (PrivatePublicDataModule)"
            )
        name = "NoisySGD" if "model" in private_trainings(document) else "PrivateTraining"

        def make() -> tuple[Any, PrivateTraining]:
            return made_training(document, data, name)

        make()  # what can't be made is said before anything is trained
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return TrainingTarget(
        make, data, {key: value for key, value in trainer.items() if value is not None}, name
    )
