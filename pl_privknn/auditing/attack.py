"""Attacks on labelers and trainings: canaries among the private records, and guesses which of them were included.

**Trainings.** A canary is sampled, clipped and summed like any other private record. Only its gradient is chosen by
the attacker: it is nonzero in a single weight, which differs between canaries and on which the other records hardly
depend, and far above the clipping norm, which reveals missing clipping (gradient canaries: Nasr et al. 2023, Steinke
et al. 2023). The attacker sees the noisy sums of all steps, and knows which other records each of them sampled, as
the guarantee allows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, AttackResult, Scores, audit_scores
from pl_privknn.auditing.canaries import Canaries, canaries_of, true_votes
from pl_privknn.config import ConfigurationError, build, get
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ChosenImages, LabeledImages
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.base import (
    Labeler,
    MakesModel,
    Release,
)
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.partitions import Partitioner
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.labelers.voting import VotingLabeler
from pl_privknn.planning import labeling_plan, private_trainings
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.privacy.ledger import FreeLedger
from pl_privknn.privacy.mechanisms.base import AdditiveNoise, Adjacency, Charge, Unit
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.redaction import silenced
from pl_privknn.training.noisy_sgd import NoisySGD
from pl_privknn.training.private_training import PrivateTraining
from pl_privknn.training.training_run import TrainingRun

#: Canaries of an attack, over all its runs.
CANARIES = 3000
# Records of a person, where persons are the unit.
_RECORDS_OF_A_PERSON = 5
# Images of one batch.
_BATCH = 1024
# Of a small target.
_QUERIES, _CLASSES, _RECORDS = 20, 5, 60
# Norm of a canary's gradient relative to the clipping norm.
_LENGTH = 100.0
# Gradient values computed to find weights on which other records hardly depend; fewest and most records for it.
_VALUES, _FEWEST, _MOST = 1 << 22, 64, 1024
# Options of the trainer that a training's plan or its sums depend on.
_TRAINER = ("max_epochs", "max_steps", "accelerator", "precision")


@dataclasses.dataclass(frozen=True)
class Target:
    """Labeler under attack, with its data and plan as in a run.

    Attributes:
        labeler: with its settings; only copies of it are fitted.
        features: of the private table, float32 ``(n, d)``.
        labels: int64 ``(n,)``.
        public: features of all public examples, float32 ``(p, d)``.
        queries: features of the run's queries, float32 ``(m, d)``.
        num_classes: number of classes.
        rounds: number of rounds with queries; they repeat the same queries, unless queries are answered one by one.
        max_answers: largest number of answers; None for all.
        plan: planned releases of the run.
        delta: δ of the guarantee.
        adjacency: neighbouring relation of the guarantee.
        unit: with ``person``, each record of the table, and each canary, becomes a person with several equal records.
    """

    labeler: Labeler
    features: Tensor
    labels: Tensor
    public: Tensor
    queries: Tensor
    num_classes: int
    rounds: int
    max_answers: int | None
    plan: Sequence[Charge]
    delta: float
    adjacency: Adjacency
    unit: Unit = "record"

    @property
    def swaps(self) -> bool:
        """Whether neighbouring tables differ by the exchange of a record."""
        return self.adjacency == "replace_one"

    def records(self, rows: Tensor) -> Tensor:
        """Rows of a table, repeated for each record of a unit of privacy."""
        return rows.repeat_interleave(_RECORDS_OF_A_PERSON, dim=0) if self.unit == "person" else rows

    def fitted(self, noise: NoiseSource, features: Tensor, labels: Tensor) -> Labeler:
        """Copy of the labeler fitted to another table, which releases everything that it charges."""
        made = copy.deepcopy(self.labeler)
        made.noise_source = noise
        release_everything(made)
        owners = self.records(torch.arange(len(labels))) if self.unit == "person" else None
        features, labels = self.records(features), self.records(labels)
        records = PrivateRecords.of(
            features,
            labels,
            self.num_classes,
            owners=owners,
            ids=torch.arange(len(labels)),  # saves the identification of records
            public=self.public,
        )
        made.fit(records)
        return made

    def with_canaries(self, noise: NoiseSource, placed: Canaries, present: Tensor) -> Labeler:
        """:meth:`fitted` to the table and the canaries that are ``present``, bool ``(m,)``; see :class:`Canaries`."""
        taken = torch.ones_like(present) if self.swaps else present
        labels = torch.where(present, placed.labels, placed.others) if self.swaps else placed.labels
        return self.fitted(
            noise,
            torch.cat([self.features, placed.features[taken]]),
            torch.cat([self.labels, labels[taken]]),
        )


def attack_labeler(
    target: Target,
    *,
    canaries: int = CANARIES,
    confidence: float = CONFIDENCE,
    noise: NoiseSource | None = None,
) -> AttackResult:
    """Attack a labeler with canaries; see :func:`~pl_privknn.auditing.canaries.canaries_of`.

    Args:
        target: what is attacked.
        canaries: minimum number; runs with fresh coins are added until it is reached.
        confidence: of the lower bound.
        noise: of labelers and coins; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries, confidence = check_int("canaries", canaries, 2), check_open_unit("confidence", confidence)
    seen, runs = score_labeler(target, canaries, noise or default_noise())
    return audit_scores(
        type(target.labeler).__name__, seen, target.plan,
        delta=target.delta, adjacency=target.adjacency, confidence=confidence, runs=runs,
    )  # fmt: skip


def score_labeler(target: Target, canaries: int, noise: NoiseSource) -> tuple[Scores, int]:
    """Scores of at least ``canaries`` canaries over runs with fresh coins.

    Returns:
        The scores, and the number of runs.
    """
    placed = canaries_of(target.labeler, target.queries, target.num_classes)
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))
    placed, votes, moves = _known(target, placed, noise.stream("known"))
    reused: dict[bool, Labeler] = {}
    coins, scores, released, runs = [], [], "", -(-canaries // len(placed.labels))
    for run in range(runs):
        stream = noise.stream("run", run)
        present = stream.stream("canaries").bernoulli((len(placed.labels),), 0.5).bool()
        if bool(present[0]) in reused:
            labeler = reused[bool(present[0])]
            labeler.noise_source = stream.stream("labeler")
        else:
            labeler = target.with_canaries(stream.stream("labeler"), placed, present)
        if isinstance(labeler, VotingLabeler) and len(present) == 1:  # runs share the table, and nothing else
            reused[bool(present[0])] = labeler
        released, score = observe(labeler, target, placed, votes, moves)
        # Low bits of data plus floating-point noise reveal more than the ideal noise that is claimed (Mironov 2012).
        scores.append(score.numpy().round(9))
        coins.append(present.numpy())
    return Scores(released, np.concatenate(coins), np.concatenate(scores)), runs


def _known(target: Target, placed: Canaries, noise: NoiseSource) -> tuple[Canaries, Tensor, Tensor | None]:
    """**Private.** Canaries and votes of all other records, as the attacker knows them.

    Returns:
        The canaries, a single one with the class that has the fewest votes at its place; votes of all other records,
        float64 ``(q, c)``, 0 where they are unknown; and the difference that a single canary makes in them, float64
        ``(q, c)``, None for several canaries.
    """
    here = torch.ones(len(placed.labels), dtype=torch.bool)
    labeler = target.with_canaries(noise.stream("without"), placed, ~here)
    votes = true_votes(labeler, placed.queries, noise.stream("samples"))
    if len(here) > 1:
        return placed, torch.zeros(()) if votes is None else votes, None
    if votes is None:
        moves = functional.one_hot(placed.labels, target.num_classes).double()
        return placed, torch.zeros(()), moves.expand(len(placed.queries), -1)
    if not target.swaps:
        placed = dataclasses.replace(placed, labels=votes[placed.about].argmin(dim=1))
    more = target.with_canaries(noise.stream("with"), placed, here)
    moved = true_votes(more, placed.queries, noise.stream("samples"))
    assert moved is not None
    return placed, votes, moved - votes


@dataclasses.dataclass(frozen=True, repr=False)
class FixedPartition(Partitioner):
    """Fixed partition; records beyond its length join the first part."""

    takes_groups: ClassVar[bool] = True
    parts: Tensor

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return functional.pad(self.parts, (0, len(labels) - len(self.parts)))


def _with_parts(target: Target, noise: NoiseSource) -> Target:
    """Copy of a PATE target with a fixed partition: a canary is assumed to change its own part alone."""
    made = copy.deepcopy(target.labeler)
    assert isinstance(made, PATE)
    table, count = (target.features, target.labels), made.num_teachers
    parts = made.partitioner.assign(*table, num_classes=target.num_classes, num_parts=count, noise=noise)
    made.partitioner = FixedPartition(parts)
    return dataclasses.replace(target, labeler=made)


def release_everything(labeler: Labeler) -> None:
    """Make a copy release everything that it charges, and drop its state from other tables."""
    if isinstance(labeler, VotingLabeler):
        labeler.release_counts = isinstance(labeler.noise, AdditiveNoise)
    if isinstance(labeler, PATE):
        labeler.progress = False
    if isinstance(labeler, RecordVotes):
        labeler.soft = True
    if isinstance(labeler, IndKNN):
        labeler.soft = labeler.release_counts = True
        labeler.state_dir = labeler.ids = None
        # Earlier answers take part again: the attacker has them, and would only have to subtract them.
        labeler.switches = dataclasses.replace(labeler.switches, reuse=False)


def observe(
    labeler: Labeler, target: Target, placed: Canaries, votes: Tensor, moves: Tensor | None
) -> tuple[str, Tensor]:
    """Query a fitted labeler as all rounds do, and score the canaries by its releases.

    Args:
        labeler: fitted to a table with some of the canaries.
        target: states rounds and answers.
        placed: the canaries.
        votes: of all other records, as the attacker knows them; see :func:`_known`.
        moves: difference that a single canary makes in them.

    Returns:
        The kind of release, and scores, float64 ``(m,)``.
    """
    paying, batches = FreeLedger(), labeler.capabilities.in_batches
    once = batches or (isinstance(labeler, MakesModel) and labeler.releases_once)
    name, total = "", torch.zeros(len(placed.labels), dtype=torch.float64)
    for _ in range(1 if once else target.rounds):
        release = labeler.label(placed.queries, paying, target.max_answers if batches else None)
        name, values = values_of(release, target.num_classes)
        rest = (values - votes).nan_to_num(0.0)
        total += _about(rest, placed, target.swaps) if moves is None else (rest * moves).sum()
    return name, total


def values_of(release: Release, num_classes: int) -> tuple[str, Tensor]:
    """Most detailed released values, and their name: counts, else log-probabilities, else one-hot labels.

    Returns:
        The name, and float64 ``(m, c)``; rows of queries without an answer are NaN.
    """
    if release.scores is not None:
        return "counts", release.scores.double()
    if release.probabilities is not None:
        name, values = "probabilities", release.probabilities.double().clamp(min=1e-30).log()
    else:
        name, values = "labels", functional.one_hot(release.labels + 1, num_classes + 1)[:, 1:].double()
    return name, torch.where(release.answered[:, None], values, torch.nan)


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Released value of each canary's class at its query; where labels are exchanged, minus its other label's."""
    rows = values[canaries.about]
    own = rows.gather(1, canaries.labels[:, None])[:, 0]
    return own - rows.gather(1, canaries.others[:, None])[:, 0] if swaps else own


def small_target(labeler: Labeler, delta: float = 1e-5, unit: Unit = "record") -> Target:
    """Attack target with a small table: random records, and public examples along the axes.

    Large tables hide the effect of one record, and faults with it; a small table reveals faults of the code.
    """
    generator = torch.Generator().manual_seed(3)
    public = torch.eye(_QUERIES) + 0.01 * torch.randn(_QUERIES, _QUERIES, generator=generator)
    features = torch.randn(_RECORDS, _QUERIES, generator=generator)
    labels = torch.randint(0, _CLASSES, (_RECORDS,), generator=generator)
    plan, adjacency = labeler.plan(_QUERIES, _QUERIES, _CLASSES, rounds=1), labeler.adjacencies[0]
    return Target(labeler, features, labels, public, public, _CLASSES, 1, None, plan, delta, adjacency, unit)


def target_of_config(document: dict[str, Any], path: str | Path) -> Target:
    """Attack target of a configuration: its labeler, private table in the features of the first round, and queries.

    Later rounds are attacked as if they used those features too, since no student is trained. A user's own data
    module is not run; attack it in Python, with :class:`Target`.

    Args:
        document: the configuration, with sections ``labeling`` and ``data``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse, or labelers of other data than one class an image.
    """
    from pl_privknn.callbacks.labeling_arguments import STUDENT, extractor_of
    from pl_privknn.callbacks.labeling_round import public_extractor

    try:
        sections = {name: document.get(name) or {} for name in ("labeling", "data")}
        data, _, (labeling,) = build(sections, own_code=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if labeling.labeler is None or data.task != "multiclass" or labeling.labeler.tasks != ("multiclass",):
        raise ValueError(f"{path}: labeling.labeler must answer one class per example to be attacked")
    data.setup("fit")
    first = labeling.features[0]
    if first == STUDENT:
        raise ValueError(
            f"{path}: labeling.features starts with the student, which is not trained here; start with an extractor"
        )
    extract, _ = public_extractor(extractor_of(first, nn.Identity()), data, torch.device("cpu"))
    everything = torch.arange(len(data.public)).split(_BATCH)
    public = torch.cat([extract(data.public.images(part)) for part in everything]).float()
    tables = [(extract(images), labels) for images, labels in data.private_batches(_BATCH)]
    asking = [count for count in labeling.queries_per_round if count] or [len(public)]
    return Target(
        labeler=labeling.labeler,
        features=torch.cat([features for features, _ in tables]).float(),
        labels=torch.cat([labels for _, labels in tables]),
        public=public,
        queries=_queries(labeling, public, asking),
        num_classes=data.num_classes,
        rounds=len(asking),
        max_answers=labeling.max_answers,
        plan=labeling_plan(labeling, data.num_classes, len(public)),
        delta=labeling.budget.delta,
        adjacency=labeling.budget.adjacency,
        unit=labeling.budget.unit,
    )


def _queries(labeling: Any, public: Tensor, asking: list[int]) -> Tensor:
    """Queries of all rounds for teachers that answer one by one; else of the first round, which later ones repeat."""
    from pl_privknn.callbacks.selection import PublicPool

    count = sum(asking) if labeling.labeler.capabilities.in_batches else asking[0]
    unlabelled = torch.full((len(public),), -1)
    pool = PublicPool(unlabelled, torch.zeros(len(public), dtype=torch.bool), lambda: public)
    generator = torch.Generator().manual_seed(labeling.options.seed)
    return labeling.select(pool, min(count, len(public)), generator).query_features(public)


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
) -> AttackResult:
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
        >>> from pl_privknn.auditing.attack import log_likelihood_ratios
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
        if self.private is None:  # in the trial epoch
            return
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
        data = build({"data": document.get("data") or {}}).data
        if not isinstance(data, PrivatePublicDataModule):
            raise ConfigurationError(
                "data.class_path: expected a data module with a private part (PrivatePublicDataModule)"
            )
        place = next(private_trainings(document))
        name = "NoisySGD" if place == "model" else "PrivateTraining"
        callbacks = [] if place == "model" else [get(document, place)]
        sections = {"model": document.get("model") or {}, "trainer": {"callbacks": callbacks}}

        def make() -> tuple[Any, PrivateTraining]:
            _, module, made = build(sections, data=data)
            return module, made[0] if made else module.private_training

        make()  # raises errors of construction before anything is trained
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return TrainingTarget(
        make, data, {key: value for key, value in trainer.items() if value is not None}, name
    )
