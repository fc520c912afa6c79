"""Attacks on training by noisy SGD with gradient canaries.

A canary is sampled, clipped and summed like any other private record. Only its gradient is chosen by the attacker: it
is nonzero in a single weight, which differs between canaries and on which the other records hardly depend, and far
above the clipping norm, which reveals missing clipping (gradient canaries: Nasr et al. 2023, Steinke et al. 2023).
The attacker sees the noisy sums of all steps, and knows which other records each of them sampled, as the guarantee
allows.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, Audit, Scores, audit_scores
from pl_privknn.auditing.labelers import CANARIES
from pl_privknn.config import ConfigurationError, get
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ChosenImages, LabeledImages
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.redaction import silenced
from pl_privknn.training.clipped_sums import ClippedSum
from pl_privknn.training.configured import made_data, made_training, private_trainings
from pl_privknn.training.noisy_sgd import NoisySGD
from pl_privknn.training.private_training import PrivateTraining
from pl_privknn.training.training_run import TrainingRun

# Norm of a canary's gradient relative to the clipping norm.
_LENGTH = 100.0
# Gradient values computed to find weights on which other records hardly depend; fewest and most records for it.
_VALUES, _FEWEST, _MOST = 1 << 22, 64, 1024


@dataclasses.dataclass(frozen=True)
class TrainingTarget:
    """Private training under attack, with its data and trainer options.

    Attributes:
        make: constructs the module, and the callback that trains it.
        data: the data module.
        trainer: options of the trainer that fix the number of steps.
        name: name of the training, for messages.
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
) -> Audit:
    """Attack a training by noisy SGD from its noisy sums; see this module's docstring.

    Args:
        target: what is attacked.
        canaries: minimum number; trainings with fresh coins are added until it is reached.
        confidence: of the lower bound.
        noise: of trainings and coins; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range, or a training without noise.
    """
    canaries, confidence = check_int("canaries", canaries, 2), check_open_unit("confidence", confidence)
    seen, charge, delta, runs = score_training(target, canaries, noise or default_noise())
    return audit_scores(target.name, seen, [charge], delta=delta, confidence=confidence, runs=runs)


def score_training(
    target: TrainingTarget, canaries: int, noise: NoiseSource
) -> tuple[Scores, Charge, float, int]:
    """Scores of at least ``canaries`` canaries over trainings with fresh coins.

    Returns:
        The scores, the releases and δ that the training stated, and the number of runs.
    """
    target.data.setup("fit")
    coins: list[Tensor] = []
    scores: list[Tensor] = []
    while sum(map(len, coins)) < canaries:
        drawn, training = _one_run(target, canaries, noise.stream("training", len(coins)))
        coins.append(drawn)
        scores.append(training.scores)
    seen = Scores("sums", torch.cat(coins).numpy(), torch.cat(scores).numpy())
    return seen, training.planned, training.delta, len(coins)


def _one_run(target: TrainingTarget, canaries: int, noise: NoiseSource) -> tuple[Tensor, _WithCanaries]:
    module, training = target.make()
    training.noise_source = noise.stream("owner")
    training.evaluate = None  # a hold-out is charged to other records than the training
    size = sum(each.numel() for each in module.parameters() if each.requires_grad)
    # Half of the weights at most, those on which the other records depend least.
    count = max(2, min(canaries, size // 2))
    present = noise.stream("coins").bernoulli((count,), 0.5).bool()
    numbers = torch.nonzero(present).flatten()
    private, public = target.data.private, target.data.public
    labels = torch.zeros(len(numbers), *private.labels.shape[1:], dtype=torch.int64)
    store = ChosenImages(public.store, numbers % len(public))
    more = LabeledImages(store, labels, target.data.num_classes, task=private.task)
    data = target.data.with_private(more) if len(numbers) else target.data
    # The training is the owner's own class with the attacker's steps.
    training.__class__ = type("Attacked", (_WithCanaries, type(training)), {})
    assert isinstance(training, _WithCanaries)
    training.place(count, numbers, len(private), noise.stream("known"))
    with tempfile.TemporaryDirectory() as folder, silenced():
        training.run_dir = folder
        trainer = pl.package_of(module, data).Trainer(
            **target.trainer,
            devices=1,
            default_root_dir=folder,
            callbacks=[] if isinstance(module, NoisySGD) else [training],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, data)
    return present, training


def log_likelihood_ratios(along: Tensor, step: Gaussian) -> Tensor:
    """Log-likelihood ratios log(1 − q + q·exp((l·x − l²/2) / σ²)) of a step's sum with and without each canary.

    A canary is in few of the steps, so that a sum of x over all steps would be less sensitive.

    Args:
        along: the sum x minus other records' contributions, along each canary's direction, ``(m,)``.
        step: states the sensitivity l, σ and the sampling rate q.

    Returns:
        float64 ``(m,)``.

    Example:
        >>> import torch
        >>> from pl_privknn.auditing.training import log_likelihood_ratios
        >>> from pl_privknn.privacy import Gaussian
        >>> step = Gaussian(sigma=1.0, l2_sensitivity=1.0, sampling_rate=0.1)
        >>> [round(ratio, 2) for ratio in log_likelihood_ratios(torch.tensor([3.0, 0.0]), step).tolist()]
        [0.75, -0.04]
    """
    length, rate = step.l2_sensitivity, step.sampling_rate
    fits = (length * along.double() - length**2 / 2) / step.sigma**2
    away = torch.full_like(fits, math.log1p(-rate) if rate < 1 else -math.inf)
    return torch.logaddexp(away, math.log(rate) + fits)


class _WithCanaries(PrivateTraining):
    """Training whose last private records are canaries, and which scores them from its releases.

    Attributes:
        scores: sums of :func:`log_likelihood_ratios` over the steps so far, float64 ``(m,)``.
        planned: the releases of all planned steps.
    """

    scores: Tensor
    planned: Charge

    def place(self, count: int, numbers: Tensor, known: int, noise: NoiseSource) -> None:
        """Set the canaries.

        Args:
            count: number of canaries, present or absent.
            numbers: indices of the present canaries, in order.
            known: number of the other records, which come first.
            noise: chooses which of these are inspected.
        """
        self.scores = torch.zeros(count, dtype=torch.float64)
        self._count, self._numbers, self._known, self._noise = count, numbers, known, noise
        self._others = self._weights = torch.zeros(0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the plan, and choose for each canary a weight on which other records hardly depend."""
        super().on_train_start(trainer, pl_module)
        assert isinstance(self.run, TrainingRun)
        if not isinstance(self.run.mechanism, Gaussian):
            raise ValueError("epsilon=inf: a training without noise has nothing to audit; state an epsilon")
        self._step, self.planned = self.run.mechanism, Charge(self.run.mechanism, self.run.planned)
        self._sizes = [each.numel() for each in pl_module.parameters() if each.requires_grad]
        chunk = min(max(_FEWEST, min(_MOST, _VALUES // sum(self._sizes))), self._known)
        some = self._noise.integers(chunk, self._known) if chunk < self._known else torch.arange(chunk)
        total = super().clipped_sum(some).cpu()
        self._weights = total.abs().argsort(stable=True)[: self._count]

    def clipped_sum(self, places: Tensor, batch_idx: int = 0) -> Tensor:
        """Clipped sum of a sample with canaries; the attacker knows the sum of all others."""
        self._others = super().clipped_sum(places[places < self._known], batch_idx).cpu()
        total = ClippedSum(self._sizes, self.max_grad_norm, torch.device("cpu"))
        for place in self._weights[self._numbers[places[places >= self._known] - self._known]].tolist():
            gradient = torch.zeros(sum(self._sizes))
            gradient[place] = _LENGTH * self.max_grad_norm
            total.add([part[None] for part in gradient.split(self._sizes)])
        return self._others + total.finish()

    def release(self, total: Tensor) -> Tensor:
        """Release the sum, and score the canaries with it."""
        noisy = super().release(total)
        rest = (noisy.cpu().double() * self.expected_batch_size - self._others)[self._weights]
        self.scores += log_likelihood_ratios(rest, self._step)
        return noisy


#: Options of the trainer that a training's plan or its sums depend on.
_TRAINER = ("max_epochs", "max_steps", "accelerator", "precision")


def training_of_config(document: Mapping[str, Any], path: str | Path) -> TrainingTarget:
    """Attack target of a configuration; like ``privknn fit``, it runs the code that the configuration names.

    Other callbacks of the trainer are left out, since they see only releases of the training.

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
                "data.class_path: expected a data module with a private part (PrivatePublicDataModule)"
            )
        name = "NoisySGD" if "model" in private_trainings(document) else "PrivateTraining"

        def make() -> tuple[Any, PrivateTraining]:
            return made_training(document, data, name)

        make()  # raises errors of construction before anything is trained
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return TrainingTarget(
        make, data, {key: value for key, value in trainer.items() if value is not None}, name
    )
