"""Base of teachers that release sums over the private records once and answer by a linear model of them."""

from __future__ import annotations

import abc
import copy
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import (
    InputError,
    check_choice,
    check_int,
    check_non_negative,
    check_open_unit,
    check_positive,
    shape_text,
)
from pl_privknn.features.public import PublicWhitening
from pl_privknn.labelers.base import (
    Capabilities,
    ChargesLedger,
    JoinsRuns,
    MakesModel,
    PayingRun,
    PrivateRecords,
    Release,
    SpendsBudget,
)
from pl_privknn.labelers.centre import Centre, centre_in, centre_of, clipped_differences
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.base import ADJACENCIES, Charge, merged
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.steps import clip_factors, noise_for_steps, step_mechanism
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStore


class Targets(abc.ABC):
    """Labels as vectors, and their exponential family in a linear model.

    A record's part in a gradient is (p − y) xᵀ, y its vector and p what the model expects of it. ``c`` is the number
    of classes or attributes.
    """

    task: ClassVar[str]
    #: Offset that sums subtract from each entry of y, so that errors have length 1 after :meth:`error_scale`.
    midpoint: ClassVar[float] = 0.0
    #: Largest distance of two label vectors.
    farthest: ClassVar[float]

    @abc.abstractmethod
    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Label vectors Y, float64 ``(n, c)``, with entries 0 or 1."""

    @abc.abstractmethod
    def expected(self, scores: Tensor) -> Tensor:
        """E[y] of a model with these scores, ``(n, c)``: the gradient of :meth:`log_partition`."""

    @abc.abstractmethod
    def log_partition(self, scores: Tensor) -> Tensor:
        """Log-partition function: logarithm of the normaliser of exp⟨scores, y⟩, ``(n,)``."""

    @abc.abstractmethod
    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Probabilities nearest to least-squares estimates of y, ``(n, c)``."""

    @abc.abstractmethod
    def answers(self, probabilities: Tensor) -> Tensor:
        """Labels of the most likely vectors, int64 as labels are."""

    @abc.abstractmethod
    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """Labels and probabilities of refused queries."""

    def error_scale(self, num_targets: int) -> float:
        """Public factor of errors p − y, which gives them a length of about 1 before training."""
        return 1.0


class ClassTargets(Targets):
    """One class per record: softmax."""

    task = "multiclass"
    farthest = math.sqrt(2.0)

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Unit vectors: the j-th for class j."""
        return functional.one_hot(labels, num_targets).double()

    def expected(self, scores: Tensor) -> Tensor:
        """Class probabilities."""
        return scores.softmax(dim=1)

    def log_partition(self, scores: Tensor) -> Tensor:
        """Log Σ exp."""
        return scores.logsumexp(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Positive parts of the estimates, divided by their sum."""
        # The largest stays the largest where none is positive.
        positive = (estimates - estimates.amax(dim=1, keepdim=True).clamp(max=0)).clamp(min=0) + 1e-12
        return positive / positive.sum(dim=1, keepdim=True)

    def answers(self, probabilities: Tensor) -> Tensor:
        """Most likely class, ``(n,)``."""
        return probabilities.argmax(dim=1)

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """Labels -1, ``(n,)``, and probabilities of zero."""
        return torch.full((count,), -1), torch.zeros(count, num_targets)


class AttributeTargets(Targets):
    """Independent binary attributes: one sigmoid each."""

    task = "multilabel"
    midpoint, farthest = 0.5, 2.0

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Attributes as numbers."""
        return labels.double()

    def expected(self, scores: Tensor) -> Tensor:
        """Probabilities of the attributes."""
        return scores.sigmoid()

    def log_partition(self, scores: Tensor) -> Tensor:
        """Σ log(1 + exp)."""
        return functional.softplus(scores).sum(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Estimates clipped to [0, 1]."""
        return estimates.clamp(0, 1)

    def answers(self, probabilities: Tensor) -> Tensor:
        """Most likely labels, ``(n, c)``."""
        return (probabilities > 0.5).long()

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """Labels -1, ``(n, c)``, and probabilities of ½."""
        return torch.full((count, num_targets), -1), torch.full((count, num_targets), 0.5)

    def error_scale(self, num_targets: int) -> float:
        """2/√c: before anything is learned, each entry of an error is ½ or −½."""
        return 2 / math.sqrt(num_targets)


#: By the name of what data modules call a task.
TARGETS: dict[str, Targets] = {kind.task: kind for kind in (ClassTargets(), AttributeTargets())}


#: Binary digits of a record's coordinates, counted from its greatest length.
BITS = 24
#: Of the two sides of an outer product, whose steps are products of theirs.
LEFT_BITS, RIGHT_BITS = 14, 18
# Squares of whole numbers are exact in float64 below this, and wrong by less than so much of them above.
_EXACT, _ROUNDING = 2**53, 2.0**-40


def step_for(length: float, bits: int = BITS) -> float:
    """Largest power of two that is at most ``length`` · 2**−bits."""
    return math.ldexp(0.5, math.frexp(length)[1] - bits)


def whole_steps(rows: Tensor, step: float) -> Tensor:
    """Multiples of ``step`` (a power of two) next to ``rows``, towards zero: whole numbers, float64."""
    return (rows.double() / step).trunc()


def not_too_long(squares: Tensor, length: float, step: float) -> Tensor:
    """Whether vectors of these squared lengths, in steps, are at most as long as ``length``; bool."""
    bound = math.floor((Fraction(length) / Fraction(step)) ** 2)
    return squares <= (bound if bound < _EXACT else bound * (1 - _ROUNDING))


def within(rows: Tensor, length: float, step: float) -> Tensor:
    """:func:`whole_steps` of rows that are no longer than ``length``, float64 ``(n, p)``.

    A row that is longer, which an error alone could make, counts as none.

    Args:
        rows: shape ``(n, p)``.
        length: public bound.
        step: power of two.
    """
    steps = whole_steps(rows, step)
    kept = not_too_long(steps.square().sum(dim=1, keepdim=True), length, step)
    return torch.where(kept, steps, 0.0)


class NoisySum(NamedTuple):
    """A released noisy sum and the model at which it was computed, both float64 ``(c, p)`` and public."""

    noisy: Tensor
    weights: Tensor


#: In the run's private file: releases by their number, each a tensor file of what was drawn and of the model then.
_SCHEMA = "CREATE TABLE releases (number INTEGER PRIMARY KEY, taken BLOB NOT NULL);"


def write_release(store: PrivateStore, number: int, taken: NoisySum, sketch: Tensor) -> None:
    """Write a release to a file with the public facts that identify its public examples."""
    buffer = io.BytesIO()
    torch.save(tuple(taken), buffer)
    with store.writing() as db:
        db.execute("INSERT INTO releases VALUES (?, ?)", (number, buffer.getvalue()))
        store.note("public", sketch.tolist())


def read_noisy_sums(store: PrivateStore) -> tuple[dict[int, NoisySum], Tensor | None]:
    """Read the release that :func:`write_release` wrote."""
    rows = store.read("SELECT number, taken FROM releases")
    taken = {
        number: NoisySum(*torch.load(io.BytesIO(kept), "cpu", weights_only=True)) for number, kept in rows
    }
    sketch = store.fact("public")
    return taken, None if sketch is None else torch.tensor(sketch, dtype=torch.float64)


#: Releases of one teacher.
MOST_RELEASES = 1000
#: Number of the release before all others, of the centre.
CENTRE = -1

_ROWS_AT_ONCE, _PERSONS_AT_ONCE = 8192, 256
# Public features that were made again may differ by the order of sums.
_SAME = 1e-3
# A hair below 1: rounding must not let a unit vector be longer.
_INSIDE = 1.0 - 1e-12


class ReleaseLostError(RuntimeError):
    """Raised where a paid release was lost; nothing may be drawn in its place."""


class StatisticsTeacher(JoinsRuns, MakesModel, SpendsBudget):
    """Base class of teachers that release sums over all private records and answer by a linear model of them.

    The releases are made once, when the first query comes, and paid for one by one before each is drawn. They lie in
    the run's private folder from then on: every later query, of every round and of a resumed run, is answered by
    post-processing and costs nothing. A release that was paid for and lost in a crash is not drawn again.

    **Shards.** Every process takes the model, and what was learned from public examples, from global rank 0, so that
    every record enters by the same function in any shard. Global rank 0 alone pays, draws noise, and keeps releases.

    **Persons.** Where the unit of privacy is a person, ``records_per_person`` of each take part, drawn by private
    coins at each fit; what they add together is clipped to what one record may add.

    What enters a sum is x = (f / |f|, bias) of each record, f its features, or what public examples make of them. So
    |x| ≤ √(1 + bias²), a public constant, whatever the features.

    **Centre.** With ``centre_share`` the first release is the sum of the differences of f / |f| from the public
    mean, each clipped to length 1 (of a person the mean of at most ``records_per_person``): its sensitivity is 1, and
    2 under ``replace_one``. Over N it estimates the shift of private features from public ones. Where that is more
    than chance (:class:`~pl_privknn.labelers.centre.Centre`), it is subtracted from f / |f| of private records
    and of examples that the released model is for, and the rest is scaled to length 1 again.
    Answers about public examples are those of the released model: means also differ where shares of classes do, as a
    mean over persons weighs each alike, and the public one each row. Only above
    :data:`~pl_privknn.labelers.centre.OTHER_KIND` their features are taken as they are.

    Args:
        releases: number of sums.
        budget: sets the least noise with which all releases cost at most its ε; by default the budget of the run.
        noise_multiplier: standard deviation of the noise on a sum over the sum's L2 sensitivity, instead.
        private_records: N, what sums are divided by: a public constant, about the number of private records.
        ridge: the model's penalty is λ = ridge · σ₁ / N, σ₁ the noise that a single release of sensitivity 1 would
            have at the cost of all. Public constants alone, so one ridge serves many ε.
        bias: a constant appended to the unit features.
        components: keep so many principal directions of the public features first; None takes features as they are.
        whitening: divide each direction by its public standard deviation to this power.
        task: ``"multiclass"``, or ``"multilabel"`` for attributes, each of which holds or doesn't.
        records_per_person: m, a public constant: most records of a person that take part, where the unit is a person.
        centre_share: r in (0, 1), share of the run's μ that a released centre takes; √(1 − r²) of it is left to
            the other releases, so that the budget covers all of them. None releases none. ``noise_multiplier`` is
            that of the other releases.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for arguments out of range, or both a budget's ε and ``noise_multiplier``.
    """

    releases_once = True
    free_parameters = ("noise_multiplier",)
    _noise_multiplier: float | None = None
    _table: tuple[Tensor, Tensor, int]  # features, labels and the number of classes
    _public_mean: Tensor

    def __init__(
        self,
        releases: int,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        private_records: int = 60_000,
        ridge: float = 0.4,
        bias: float = 0.3,
        components: int | None = None,
        whitening: float = 0.5,
        task: str = "multiclass",
        records_per_person: int = 1,
        centre_share: float | None = None,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(budget, noise_multiplier, noise_source)
        self.records_per_person = check_int("records_per_person", records_per_person)
        self.targets = TARGETS[check_choice("task", task, tuple(TARGETS))]
        self.tasks = (self.targets.task,)
        self.releases = check_int("releases", releases, maximum=MOST_RELEASES)
        self.private_records = check_int("private_records", private_records)
        self.ridge = check_positive("ridge", ridge)
        self.bias = check_non_negative("bias", bias)
        self.components = None if components is None else check_int("components", components)
        self.whitening = check_non_negative("whitening", whitening)
        self.share = None if centre_share is None else check_open_unit("centre_share", centre_share)
        self.numbers = range(0 if self.share is None else CENTRE, self.releases)
        if noise_multiplier is not None:
            self._set_noise(check_positive("noise_multiplier", noise_multiplier))
        self._persons: Tensor | None = None  # of the table's rows, in order; None where each has one row
        self._public: Tensor | None = None  # x of the public examples
        self._change: PublicWhitening | None = None
        self._kept: PrivateStore | None = None
        self._paid_by: ChargesLedger | None = None
        self._charged = 0
        self.noisy_sums: dict[int, NoisySum] = {}
        self.centre: Centre | None = None
        self._sketch: Tensor | None = None
        self._weights: Tensor | None = None
        self._begin()

    # ------------------------------------------------------------------ of subclasses

    @abc.abstractmethod
    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """**Private.** Exact sum over the records of this process, int64 ``(c, p)``, in steps.

        Args:
            release: its number.
            weights: the model before it, 0 at first.
        """

    @abc.abstractmethod
    def step(self, release: int) -> float:
        """Public step of :meth:`private_sum`, a power of two."""

    @abc.abstractmethod
    def sensitivity(self, release: int) -> float:
        """L2 distance that one record can move the sum of a release under :attr:`adjacency`."""

    @abc.abstractmethod
    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """Weights of the model, float64 ``(c, p)``: post-processing.

        Args:
            public: x of the public examples, float64 ``(m, p)``.
            releases: what was released, by number; some may be missing, not all.
        """

    def confident(self, public: Tensor, releases: Mapping[int, NoisySum], weights: Tensor) -> Tensor:
        """:meth:`model` of all releases, as certain as it is right: post-processing; as it is by default."""
        return weights

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities from scores, float64 ``(n, c)``."""
        return self.targets.expected(scores)

    def transformed(self, features: Tensor) -> Tensor:
        """Vectors to be scaled to unit length, float64 ``(n, d)``: functions of a row and of public examples."""
        return features.double() if self._change is None else self._change(features).double()

    def learned(self) -> dict[str, Tensor]:
        """State learned from public features, and the released centre, as tensors."""
        change, centre = self._change, self.centre
        found = {} if change is None else {"mean": change.mean, "directions": change.directions}
        if centre is not None:
            found |= {"offset": centre.offset, "chance": torch.tensor(centre[1:], dtype=torch.float64)}
        return found

    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Restore the state of :meth:`learned`."""
        self._change, self.centre = None, centre_in(learned)
        if "directions" in learned:
            width, kept = learned["directions"].shape
            self._change = PublicWhitening(width, kept, self.whitening)
            state = {name: learned[name] for name in ("mean", "directions")}
            self._change.load_state_dict({**state, "fitted": torch.tensor(True)})

    def whole_sum(self, release: int, weights: Tensor) -> Tensor:
        """**Private.** :meth:`private_sum`, or the centre's sum of differences ``(1, d)``, int64, in steps."""
        if release != CENTRE:
            return self.private_sum(release, weights)
        mean, step = self._public_mean[: len(self._public_mean) - bool(self.bias)], step_for(1.0)

        def parts(features: Tensor) -> Tensor:
            return clipped_differences(self.unit_vectors(features), mean)

        total = torch.zeros(1, len(mean), dtype=torch.int64)
        if self._persons is not None:
            return total + self.sum_over_persons(
                lambda rows, _: torch.ones_like(rows[:, :1]), 1.0, step, parts
            )
        for rows, _ in self.private_parts(parts):
            total += within(rows, 1.0, step).long().sum(dim=0)
        return total

    # ------------------------------------------------------------------ costs

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on a sum over the sum's L2 sensitivity.

        Raises:
            ValueError: before a budget has set it.
        """
        return self.set_by_budget(self._noise_multiplier)

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set the noise of all releases, which are made once for all rounds; see the base."""
        self.adjacencies = (budget.adjacency,)
        if not self._own_noise:
            assert budget.epsilon is not None
            noise = noise_for_steps(budget.epsilon, budget.delta, 1.0, self.releases)
            self._set_noise(noise / self._left)

    @property
    def _left(self) -> float:
        """Share of μ left after the centre's release: Gaussian releases compose in quadrature."""
        return math.sqrt(1 - (self.share or 0.0) ** 2)

    def _set_noise(self, noise_multiplier: float) -> None:
        if noise_multiplier > 2**20:
            raise ValueError(f"noise_multiplier={noise_multiplier!r} must be at most 2**20; use less noise")
        self._noise_multiplier, self.centre_noise = noise_multiplier, 0.0
        if self.share is not None:
            self.centre_noise = noise_multiplier * self._left / (self.share * math.sqrt(self.releases))
            if self.centre_noise > 2**20:
                raise ValueError(f"centre_share={self.share!r} leaves noise above 2**20; use a larger share")

    def mechanism(self, release: int) -> Gaussian:
        """Mechanism that a release is charged as, and that draws its noise."""
        if release == CENTRE:
            return step_mechanism(self.centre_noise, 1.0 if self.adjacency == "add_remove" else 2.0, 1.0)
        return step_mechanism(self.noise_multiplier, self.sensitivity(release), 1.0)

    def length_of_centre_noise(self, width: int) -> float:
        """Expected length of the noise on a centre of this number of features, over N: a public constant."""
        return self.mechanism(CENTRE).sigma * math.sqrt(width) / self.private_records

    def penalty(self, num_targets: int) -> float:
        """Ridge penalty λ of a model of this number of classes or attributes."""
        divisor = self.private_records * self.targets.error_scale(num_targets)
        return self.ridge * self.noise_multiplier / math.sqrt(self.releases) / divisor

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Charges of all releases, which are made once for all rounds; see :meth:`Labeler.plan`."""
        return list(merged(Charge(self.mechanism(release)) for release in self.numbers).values())

    # ------------------------------------------------------------------ a run

    def join_run(self, folder: Path, run: PayingRun) -> None:
        """Read the releases of the run so far; see :meth:`JoinsRuns.join_run`.

        Raises:
            ReleaseLostError: if all releases are paid for and none is there.
        """
        if run.ledger is None:  # another process keeps what is released
            return
        if self._kept is None or self._kept.path != (folder / FILE_NAME).resolve():
            self.leave_run()
            self._kept = PrivateStore(folder / FILE_NAME, _SCHEMA, one_place=False)
        if self._paid_by is run.ledger:
            return
        self._forget(run.ledger)
        self._charged = sum(map(run.ledger.charged, {part.mechanism for part in self.plan(1, 1, 2)}))
        self.noisy_sums, self._sketch = read_noisy_sums(self._kept)
        if len(self.noisy_sums) > self._charged:
            raise ReleaseLostError(
                f"{folder}: it holds releases that this run's ledger did not pay for; restore the ledger that "
                "belongs to it"
            )
        self._check_left()

    def leave_run(self) -> None:
        """Stop writing to the run's folder; see :meth:`JoinsRuns.leave_run`."""
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: persons, whose contribution is clipped; shards, since sums of whole numbers are exact."""
        return Capabilities(persons=True, shards=ADJACENCIES)

    def _learn_public(self, features: Tensor | None) -> None:
        """Learn curvature, directions, or centres from the features of all public examples, float32 ``(m, d)``."""
        if features is None or features.ndim != 2 or not features.is_floating_point() or len(features) < 1:
            given = None if features is None else f"shape {tuple(features.shape)}, {features.dtype}"
            raise ValueError(
                f"records.public={given}: {type(self).__name__} learns from public features; expected float of shape "
                "(m, d)"
            )
        self._change = None
        if self.components is not None:
            kept = min(self.components, *features.shape)
            self._change = PublicWhitening(features.shape[1], kept, self.whitening).fit(features)
        public = self.inputs(features)
        if self.share is not None:
            width = public.shape[1] - bool(self.bias)
            if (length := self.length_of_centre_noise(width)) >= 1:
                raise InputError(
                    f"centre_share={self.share!r}: of {width} features the noise has length {length:.2g}, and a "
                    "feature vector 1; leave it out, raise ε, or use fewer features"
                )
        if self._public is None or not torch.equal(self._public, public):
            self._public, self._public_mean = public, public.mean(dim=0)
            self._weights = self.centre = None

    def learn(self, records: PrivateRecords) -> None:
        """Take the private records; see :meth:`Labeler.learn`. No sum is computed before the first query.

        Raises:
            ValueError: also without public features, or where a released centre would be no more than noise.
        """
        self._learn_public(records.public)
        features, labels, owners = records.table(), records.labels, records.owners
        self._persons = None
        if owners is not None:
            rows = self.drawn_records(self.records_per_person)
            if self.records_per_person > 1:
                rows = rows[owners[rows].argsort(stable=True)]
                self._persons = owners[rows].unique_consecutive(return_inverse=True)[1]
            features, labels = features[rows], labels[rows]
        self._table = (features, labels, records.num_classes)

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Answer the first ``max_answers`` queries; the first call charges and releases. See :meth:`Labeler.answer`.

        Raises:
            ReleaseLostError: where the features of the public examples are no more those of the releases.
        """
        num_classes = self.records.num_classes
        released, soft = self.targets.unknown(len(queries), num_classes)
        asked = queries[:max_answers]
        if len(asked):
            weights = self._released(run)
            one_kind = self.centre is None or not self.centre.is_other_kind
            probabilities = self.predict(asked, weights, private=one_kind)
            released[: len(asked)] = self.targets.answers(probabilities)
            soft[: len(asked)] = probabilities.float()
        return Release(released, soft)

    def head_state(self) -> dict[str, Tensor] | None:
        """Weights, float64 ``(c, p)``, the centre, and the state learned from public features."""
        return None if self._weights is None else {"weights": self._weights, **self.learned()}

    def head(self, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Model of a state, independent of this labeler and its private table; see :meth:`MakesModel.head`."""
        model, learned = copy.copy(self), dict(state)
        model._records = model._paid_by = model._kept = None
        vars(model).pop("_table", None)
        weights = learned.pop("weights")
        model.relearn(learned)
        return functools.partial(model.predict, weights=weights, private=True)

    def remark(self, state: dict[str, Tensor]) -> str:
        """Sentence about public examples of another kind, by the released centre; see :meth:`MakesModel.remark`."""
        return "" if (centre := centre_in(state)) is None else str(centre)

    def unit_vectors(self, features: Tensor) -> Tensor:
        """Vectors of length 1 at most, float64 ``(n, d)``, each from its own row of features."""
        unit = functional.normalize(self.transformed(features), dim=1) * _INSIDE
        # One record whose features are too large to compute with must not be able to spoil a release.
        return torch.where(unit.isfinite().all(dim=1, keepdim=True), unit, 0.0)

    def inputs(self, features: Tensor, private: bool = False) -> Tensor:
        """X of features ``(n, d)``, float64 ``(n, p)``, each from its own row; of length √(1 + bias²) at most.

        Args:
            features: float.
            private: whether a released shift is subtracted.
        """
        unit = self.unit_vectors(features)
        if private and self.centre is not None and self.centre.is_shift:
            unit = functional.normalize(unit - self.centre.offset, dim=1) * _INSIDE
        return torch.cat([unit, unit.new_full((len(unit), 1), self.bias)], dim=1) if self.bias else unit

    def predict(self, features: Tensor, weights: Tensor, private: bool = False) -> Tensor:
        """Probabilities of features ``(n, d)`` under a model, float64 ``(n, c)``; see :meth:`inputs`."""
        if features.ndim != 2:
            raise InputError(f"features: shape {shape_text(features.shape)}; expected (n, d)")
        return self.probabilities(self.inputs(features, private) @ weights.T)

    def private_parts(
        self, vectors: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """X (or other vectors) and labels of this process's private records, some at a time: **private**."""
        features, labels, _ = self._table
        for part, classes in zip(features.split(_ROWS_AT_ONCE), labels.split(_ROWS_AT_ONCE), strict=True):
            yield self.inputs(part, private=True) if vectors is None else vectors(part), classes

    def sum_over_persons(
        self,
        left: Callable[[Tensor, Tensor], Tensor],
        bound: float,
        step: float,
        vectors: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Σ over this process's persons of the sum of their records, clipped to ``bound``: **private**.

        Args:
            left: of x ``(n, p)`` and labels, what each record multiplies its x with, ``(n, c)``.
            bound: longest that a person's part may be.
            step: the power of two of which whole numbers are counted.
            vectors: of features, in the place of x; a person adds the mean of their records then.

        Returns:
            In steps, int64 ``(c, p)``.
        """
        assert self._persons is not None
        features, labels, _ = self._table
        total = torch.zeros((), dtype=torch.int64)
        ends = self._persons.bincount().cumsum(0).tolist()
        for first in range(0, len(ends), _PERSONS_AT_ONCE):
            rows = slice(ends[first - 1] if first else 0, ends[min(len(ends), first + _PERSONS_AT_ONCE) - 1])
            inputs = self.inputs(features[rows], private=True) if vectors is None else vectors(features[rows])
            given, persons = left(inputs, labels[rows]), self._persons[rows] - first
            parts = given.new_zeros(int(persons[-1]) + 1, given.shape[1], inputs.shape[1])
            for place in range(self.records_per_person):  # the first record of each person, the second, …
                which = torch.arange(len(persons)) - torch.searchsorted(persons, persons) == place
                parts[persons[which]] += given[which, :, None] * inputs[which, None, :]
            flat = parts.flatten(1)
            if vectors is not None:
                flat = flat / persons.bincount()[:, None]
            total = total + within(
                flat * clip_factors(flat.norm(dim=1), bound)[:, None], bound, step
            ).long().sum(dim=0).view(parts.shape[1:])
        return total

    def _released(self, run: PayingRun) -> Tensor:
        """Charge and draw all outstanding releases; returns the model's weights."""
        first = run.processes.from_first
        weights, charged, learned, self._public_mean = first(lambda: self._so_far(run.ledger))
        if run.processes.rank:
            self.relearn(learned)
        for number in self.numbers[charged:]:
            exact = run.processes.sum(self.whole_sum(number, weights))
            noise = run.pay(self.mechanism(number), 1, "statistics")
            weights, self.centre = first(functools.partial(self._take, number, exact, noise, weights))
        self._weights, learned = first(functools.partial(self._final, weights))
        if run.processes.rank:
            self.relearn(learned)
        return self._weights

    def _final(self, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights of the model that answers, and the learned state."""
        assert self._public is not None
        if self._weights is None:
            sums = {number: taken for number, taken in self.noisy_sums.items() if number != CENTRE}
            weights = self.confident(self._public, sums, weights)
        return weights, self.learned()

    def _so_far(self, ledger: ChargesLedger | None) -> tuple[Tensor, int, dict[str, Tensor], Tensor]:
        """Model of the releases so far, number of paid releases, learned state, and the public mean."""
        if self._paid_by is not ledger:  # a table asked directly, outside of a run
            self._forget(ledger)
        sketch = self._public_mean
        if self._sketch is not None and (
            self._sketch.shape != sketch.shape or not torch.allclose(self._sketch, sketch, rtol=0, atol=_SAME)
        ):
            raise ReleaseLostError(
                f"{type(self).__name__}: the features of the public examples are others than those of its releases, "
                "which serve one kind of features alone; use the same features in all rounds, or start a new run"
            )
        weights = self._model()[0] if self._weights is None else self._weights
        self._check_left()
        return weights, self._charged, self.learned(), sketch

    def _take(
        self, number: int, exact: Tensor, noise: NoiseSource, weights: Tensor
    ) -> tuple[Tensor, Centre | None]:
        """Draw a paid release, store it, and return the model and the centre of all releases."""
        self._charged += 1
        step = step_for(1.0) if number == CENTRE else self.step(number)
        noisy = self.mechanism(number).add_noise_to_multiples(exact, step, noise)
        self.noisy_sums[number], self._sketch = NoisySum(noisy, weights), self._public_mean
        if self._kept is not None:
            write_release(self._kept, number, self.noisy_sums[number], self._sketch)
        return self._model()

    def _model(self) -> tuple[Tensor, Centre | None]:
        """Model and centre of the releases so far; weights of 0 before the first sum."""
        assert self._public is not None
        sums = dict(self.noisy_sums)
        if (centre := sums.pop(CENTRE, None)) is not None:
            noisy, sigma = centre.noisy[0], self.mechanism(CENTRE).sigma
            self.centre = centre_of(noisy, sigma, self.private_records, self._public[:, : len(noisy)])
        if sums:
            return self.model(self._public, sums), self.centre
        return self._public.new_zeros(self._table[2], self._public.shape[1]), self.centre

    def _check_left(self) -> None:
        if self._charged >= len(self.numbers) and max(self.noisy_sums, default=CENTRE) == CENTRE:
            raise ReleaseLostError(
                "all releases were paid for, and a kill or an error came before one was kept; they are not drawn "
                "again. Start a new run in another folder, with this run's ledger as ledger_path"
            )

    def _forget(self, ledger: ChargesLedger | None) -> None:
        self._paid_by, self._charged = ledger, 0
        self.noisy_sums, self.centre, self._sketch, self._weights = {}, None, None, None
