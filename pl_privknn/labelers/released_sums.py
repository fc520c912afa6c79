"""Teachers that release sums over the private records once and fit a linear model to them by public data."""

from __future__ import annotations

import abc
import copy
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from pl_privknn.labelers.linear_models import (
    LEFT_BITS,
    RIGHT_BITS,
    TARGETS,
    Centre,
    centre_of,
    clipped_differences,
    fit_least_squares,
    fit_maximum_likelihood,
    not_too_long,
    step_for,
    whole_steps,
    within,
)
from pl_privknn.privacy.mechanisms.base import ADJACENCIES, Charge, merged
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.steps import clip_factors, noise_for_steps, step_mechanism
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_store import FILE_NAME, PrivateStore
from pl_privknn.privacy.settings import Budget


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

    **Centre.** With ``centre`` the first release is the sum of the differences of f / |f| from the public mean, each
    clipped to length 1 (of a person the mean of at most ``records_per_person``): its sensitivity is 1, and 2 under
    ``replace_one``. Over N it estimates the shift of private features from public ones. Where that is more than
    chance (:class:`~pl_privknn.labelers.linear_models.Centre`), it is subtracted from f / |f| of private records and
    of examples that the released model is for, and the rest is scaled to length 1 again.

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
        centre: r in (0, 1), share of the run's μ that a released centre takes; √(1 − r²) of it is left to the other
            releases, so that the budget covers all of them. None releases none. ``noise_multiplier`` is that of the
            other releases.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for arguments out of range, or both a budget's ε and ``noise_multiplier``.
    """

    releases_once = True
    free_parameters = ("noise_multiplier",)
    _noise_multiplier: float | None = None

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
        centre: float | None = None,
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
        self.share = None if centre is None else check_open_unit("centre", centre)
        self.numbers = range(0 if self.share is None else CENTRE, self.releases)
        if noise_multiplier is not None:
            self._set_noise(check_positive("noise_multiplier", noise_multiplier))
        self._table: tuple[Tensor, Tensor, int] | None = None
        self._persons: Tensor | None = None  # of the table's rows, in order; None where each has one row
        self._public: Tensor | None = None  # x of the public examples
        self._public_mean: Tensor | None = None
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
        """The exact sum of the records of this process, **private**, int64 ``(c, p)``, in steps.

        Args:
            release: its number.
            weights: the model before it, 0 at first.
        """

    @abc.abstractmethod
    def step(self, release: int) -> float:
        """The public power of two of which :meth:`private_sum` counts multiples."""

    @abc.abstractmethod
    def sensitivity(self, release: int) -> float:
        """L2 distance that one record can move the sum of a release under :attr:`adjacency`."""

    @abc.abstractmethod
    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """The model's weights, float64 ``(c, p)``: post-processing.

        Args:
            public: x of the public examples, float64 ``(m, p)``.
            releases: what was released, by number; some may be missing, not all.
        """

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities from scores, float64 ``(n, c)``."""
        return self.targets.expected(scores)

    def transformed(self, features: Tensor) -> Tensor:
        """Vectors to be scaled to unit length, float64 ``(n, d)``: functions of a row and of public examples."""
        return features.double() if self._change is None else self._change(features).double()

    def learn_publicly(self, features: Tensor) -> None:
        """Learn what :meth:`transformed` needs from public features."""
        self._change = None
        if self.components is not None:
            kept = min(self.components, *features.shape)
            self._change = PublicWhitening(features.shape[1], kept, self.whitening).fit(features)

    def learned(self) -> dict[str, Tensor]:
        """State that :meth:`learn_publicly` learned, as tensors."""
        change, centre = self._change, self.centre
        found = {} if change is None else {"mean": change.mean, "directions": change.directions}
        if centre is not None:
            found |= {"offset": centre.offset, "chance": torch.tensor(centre[1:], dtype=torch.float64)}
        return found

    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Restore the state of :meth:`learned`."""
        self._change, self.centre = None, _centre_in(learned)
        if "directions" in learned:
            width, kept = learned["directions"].shape
            self._change = PublicWhitening(width, kept, self.whitening)
            state = {name: learned[name] for name in ("mean", "directions")}
            self._change.load_state_dict({**state, "fitted": torch.tensor(True)})

    def whole_sum(self, release: int, weights: Tensor) -> Tensor:
        """**Private.** :meth:`private_sum`, or the centre's sum of differences ``(1, d)``, int64, in steps."""
        if release != CENTRE:
            return self.private_sum(release, weights)
        assert self._public_mean is not None
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

    def exact_sum(self, release: int, weights: Tensor) -> Tensor:
        """**Private.** :meth:`whole_sum` in the units of the released sum, float64."""
        return self.whole_sum(release, weights).double() * self._step(release)

    def _step(self, release: int) -> float:
        return step_for(1.0) if release == CENTRE else self.step(release)

    # ------------------------------------------------------------------ costs

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on a sum over the sum's L2 sensitivity.

        Raises:
            ValueError: before a budget has set it.
        """
        return self.set_by_budget(self._noise_multiplier)

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set the noise of all releases, which are made once whatever the rounds; see the base."""
        self.adjacencies = (budget.adjacency,)
        if not self._own_noise:
            assert budget.epsilon is not None
            noise = noise_for_steps(budget.epsilon, budget.delta, 1.0, self.releases)
            self._set_noise(noise / self._left)

    @property
    def _left(self) -> float:
        """Share of μ that the centre leaves: Gaussian releases compose in quadrature."""
        return math.sqrt(1 - (self.share or 0.0) ** 2)

    def _set_noise(self, noise_multiplier: float) -> None:
        if noise_multiplier > 2**20:
            raise ValueError(f"noise_multiplier={noise_multiplier!r} must be at most 2**20; use less noise")
        self._noise_multiplier, self.centre_noise = noise_multiplier, 0.0
        if self.share is not None:
            self.centre_noise = noise_multiplier * self._left / (self.share * math.sqrt(self.releases))
            if self.centre_noise > 2**20:
                raise ValueError(f"centre={self.share!r} leaves noise above 2**20; use a larger share")

    def mechanism(self, release: int) -> Gaussian:
        """Mechanism that a release is charged as, and that draws its noise."""
        if release == CENTRE:
            return step_mechanism(self.centre_noise, 1.0 if self.adjacency == "add_remove" else 2.0, 1.0)
        return step_mechanism(self.noise_multiplier, self.sensitivity(release), 1.0)

    def length_of_centre_noise(self, width: int) -> float:
        """Expected length of the noise on a centre of so many features, over N: a public constant."""
        return self.mechanism(CENTRE).sigma * math.sqrt(width) / self.private_records

    def penalty(self, num_targets: int) -> float:
        """λ of a model of so many classes or attributes."""
        divisor = self.private_records * self.targets.error_scale(num_targets)
        return self.ridge * self.noise_multiplier / math.sqrt(self.releases) / divisor

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """All releases, once, however many rounds there are; see :meth:`Labeler.plan`."""
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
        """Persons, whose part of a sum is clipped, and shards: sums of whole numbers are the same in any number."""
        return Capabilities(persons=True, shards=ADJACENCIES)

    def _learn_public(self, features: Tensor | None) -> None:
        """Learn curvature, directions, or centres from the features of all public examples, float32 ``(m, d)``."""
        if features is None or features.ndim != 2 or not features.is_floating_point() or len(features) < 1:
            given = None if features is None else f"shape {tuple(features.shape)}, {features.dtype}"
            raise ValueError(
                f"records.public={given}: {type(self).__name__} learns from public features; expected float of shape "
                "(m, d)"
            )
        self.learn_publicly(features)
        public = self.inputs(features)
        if self.share is not None:
            width = public.shape[1] - bool(self.bias)
            if (length := self.length_of_centre_noise(width)) >= 1:
                raise InputError(
                    f"centre={self.share!r}: of {width} features its noise has length {length:.2g}, and a feature "
                    "vector 1; leave centre out, raise ε, or use fewer features"
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
            probabilities = self.predict(asked, self._released(run))
            released[: len(asked)] = self.targets.answers(probabilities)
            soft[: len(asked)] = probabilities.float()
        return Release(released, soft)

    def with_table(self, features: Tensor, labels: Tensor, num_classes: int) -> StatisticsTeacher:
        """A shallow copy with another table, for audits."""
        made = copy.copy(self)
        made._table = features, labels, num_classes
        made._persons = None if self._persons is None else torch.arange(len(features))
        return made

    def head_state(self) -> dict[str, Tensor] | None:
        """Weights, float64 ``(c, p)``, the centre, and what public features were learned."""
        return None if self._weights is None else {"weights": self._weights, **self.learned()}

    def head(self, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Model of a state, independent of this labeler and its private table; see :meth:`MakesModel.head`."""
        model, learned = copy.copy(self), dict(state)
        model._table = model._records = model._paid_by = model._kept = None
        weights = learned.pop("weights")
        model.relearn(learned)
        return functools.partial(model.predict, weights=weights, private=True)

    def remark(self, state: dict[str, Tensor]) -> str:
        """Result of the test of the released centre; see :meth:`MakesModel.remark`."""
        return "" if (centre := _centre_in(state)) is None else str(centre)

    def unit_vectors(self, features: Tensor) -> Tensor:
        """Vectors of length 1 at most, float64 ``(n, d)``, each from its own row of features."""
        unit = functional.normalize(self.transformed(features), dim=1) * _INSIDE
        # One record whose features are too large to compute with must not be able to spoil a release.
        return torch.where(unit.isfinite().all(dim=1, keepdim=True), unit, 0.0)

    def inputs(self, features: Tensor, private: bool = False) -> Tensor:
        """X of features ``(n, d)``, float64 ``(n, p)``, each from its own row; of length √(1 + bias²) at most.

        Args:
            features: float.
            private: whether they are of the private records' kind, so that a released shift is subtracted.
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
        assert self._table is not None
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
        assert self._table is not None
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
        """Weights of the model, after the releases that are still due."""
        first = run.processes.from_first
        weights, charged, learned, self._public_mean = first(lambda: self._so_far(run.ledger))
        if run.processes.rank:
            self.relearn(learned)
        for number in self.numbers[charged:]:
            exact = run.processes.sum(self.whole_sum(number, weights))
            noise = run.pay(self.mechanism(number), 1, "statistics")
            weights, self.centre = first(functools.partial(self._take, number, exact, noise, weights))
        self._weights = weights
        return weights

    def _so_far(self, ledger: ChargesLedger | None) -> tuple[Tensor, int, dict[str, Tensor], Tensor]:
        """Model of the releases so far, number of paid releases, learned state, and the public mean."""
        assert self._public_mean is not None
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
        assert self._public_mean is not None
        self._charged += 1
        noisy = self.mechanism(number).add_noise_to_multiples(exact, self._step(number), noise)
        self.noisy_sums[number], self._sketch = NoisySum(noisy, weights), self._public_mean
        if self._kept is not None:
            write_release(self._kept, number, self.noisy_sums[number], self._sketch)
        return self._model()

    def _model(self) -> tuple[Tensor, Centre | None]:
        """Model and centre of the releases so far; weights of 0 before the first sum."""
        assert self._public is not None
        assert self._table is not None
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


def _centre_in(state: Mapping[str, Tensor]) -> Centre | None:
    """Centre in the state of :meth:`StatisticsTeacher.learned`; None where none was released."""
    return Centre(state["offset"], *state["chance"].tolist()) if "offset" in state else None


FITS = ("least_squares", "maximum_likelihood")


class SufficientStatistics(StatisticsTeacher):
    """Teacher that is a linear model from one noisy release of Σ y xᵀ, the sums of unit features by class.

    In least squares and in softmax regression labels enter by E[y xᵀ] alone. The other part, E[x xᵀ] or
    E[log Σ exp(Wx)], is taken from public examples, without noise (Mehta et al. 2022, arXiv:2211.13403).

    **Sensitivity.** A record adds x in its class's row and nothing elsewhere, so under ``add_remove`` the sum moves
    by |x| ≤ R = √(1 + bias²). Under ``replace_one`` it moves by √(|x|² + |x'|²) ≤ √2·R where the class changes and
    by |x − x'| ≤ 2 where it does not (the bias cancels), so by max(2, √2·R).

    **Attributes** (``task="multilabel"``): t = (2y − 1)/√a takes the place of y, with a attributes. Every record's t
    has length 1, whichever attributes it has, so the sum moves by R under ``add_remove`` and by 2R at most under
    ``replace_one``, and nothing is clipped. E[y xᵀ] follows from E[t xᵀ] and the public E[x].

    Args:
        *args: ``budget`` or ``noise_multiplier``.
        fit: ``"least_squares"`` or ``"maximum_likelihood"``.
        **kwargs: see :class:`~pl_privknn.labelers.released_sums.StatisticsTeacher`.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import SufficientStatistics
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = SufficientStatistics(noise_multiplier=4.0)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), 1e-5), 3)
        0.926
    """

    def __init__(
        self,
        *args: Any,
        fit: str = "least_squares",
        **kwargs: Any,
    ) -> None:
        self.fitted_by = check_choice("fit", fit, FITS)
        super().__init__(1, *args, **kwargs)

    def sensitivity(self, release: int) -> float:
        """R, or max(2, √2·R), of attributes and of several records a person 2R; see the class."""
        longest = math.sqrt(1 + self.bias**2)
        if self.adjacency == "add_remove":
            return longest
        if self.records_per_person > 1:
            return 2 * longest
        return max(2.0, self.targets.farthest * longest)

    def step(self, release: int) -> float:
        """2⁻²⁴ for a bias below 2; of attributes, whose t are no whole numbers, 2⁻³²."""
        left, right = self._steps
        return left * right

    @property
    def _steps(self) -> tuple[float, float]:
        """Steps of labels and of x."""
        longest = max(1.0, self.bias)
        if not self.targets.centre:  # whole numbers already
            return 1.0, step_for(longest)
        return step_for(1.0, LEFT_BITS), step_for(longest, RIGHT_BITS)

    def _vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Y of classes, t of attributes, float64 ``(n, c)``, of length 1."""
        vectors = self.targets.vectors(labels, num_targets) - self.targets.centre
        return vectors * self.targets.error_scale(num_targets)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ y xᵀ in steps, the unit vector in x of length 1 at most and the bias the same for all."""
        total, (left, right) = torch.zeros(weights.shape, dtype=torch.int64), self._steps
        if self._persons is not None:
            longest = math.sqrt(1 + self.bias**2)
            return total + self.sum_over_persons(
                lambda _, labels: self._vectors(labels, len(weights)), longest, self.step(release)
            )
        for inputs, labels in self.private_parts():
            unit = inputs[:, :-1] if self.bias else inputs
            rows = torch.cat(
                [within(unit, 1.0, right), whole_steps(inputs[:, unit.shape[1] :], right)], dim=1
            )
            total += (within(self._vectors(labels, len(weights)), 1.0, left).T @ rows).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """The public fit."""
        num_targets = len(releases[0].noisy)
        moment = releases[0].noisy / (self.private_records * self.targets.error_scale(num_targets))
        moment = moment + self.targets.centre * public.mean(dim=0)
        penalty = self.penalty(num_targets)
        if self.fitted_by == "least_squares":
            return fit_least_squares(public, moment, penalty)
        return fit_maximum_likelihood(public, moment, penalty, targets=self.targets)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Those of the model; the scores of least squares estimate probabilities themselves."""
        if self.fitted_by == "maximum_likelihood":
            return self.targets.expected(scores)
        return self.targets.probabilities_of(scores)


# Clipping norms of the first releases, and of all later ones: gradients shrink as the model learns.
_NORMS = (1.0, 0.5, 0.5, 0.25)


class PreconditionedGradients(StatisticsTeacher):
    """Teacher that is a softmax regression from a few noisy full-batch gradients and public features.

    The gradient Σ (p_W(x) − y) xᵀ needs private records for its label part alone. Release t is the sum of the clipped
    gradients of all records at the model W_t, plus noise; over N that is G_t. With public examples it gives the
    moment E[y xᵀ] by M_t = E_public[p_{W_t}(x) xᵀ] − G_t. The next model maximises the likelihood with the mean of
    all M so far, weighted by the inverse of their variances (see
    :func:`~pl_privknn.labelers.linear_models.fit_maximum_likelihood`). Gradients shrink as the model learns, and
    with them clipping norms and noise.

    Of attributes (``task="multilabel"``) the same goes for one logistic regression each, whose errors p − y a record
    has together: they are clipped as one gradient, after the public factor 2/√a that makes them as long at first,
    with a attributes, as the errors of classes are.

    **Cost.** T Gaussian releases compose to one Gaussian, exactly. **Sensitivity.** A sum of gradients clipped to C
    moves by C under ``add_remove`` and by 2C under ``replace_one``; the model at which they are taken is public.

    Args:
        *args: ``budget`` or ``noise_multiplier``.
        releases: T.
        clip_norms: C of each release, public constants; by default 1, 0.5, 0.5 and then 0.25.
        **kwargs: see :class:`~pl_privknn.labelers.released_sums.StatisticsTeacher`.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.labelers import PreconditionedGradients
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PreconditionedGradients(noise_multiplier=4.0)
        >>> round(epsilon_for_delta(teacher.plan(5000, 5000, 10), 1e-5), 3)
        2.502
    """

    def __init__(
        self,
        *args: Any,
        releases: int = 6,
        clip_norms: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(releases, *args, **kwargs)
        if clip_norms is None:
            clip_norms = [*_NORMS, *_NORMS[-1:] * self.releases][: self.releases]
        self.clip_norms = [check_positive("clip_norms", norm) for norm in clip_norms]
        if len(self.clip_norms) != self.releases:
            raise ValueError(
                f"clip_norms={list(clip_norms)!r}: expected one for each of releases={self.releases}"
            )

    def sensitivity(self, release: int) -> float:
        """C, or 2C."""
        return self.clip_norms[release] * (1.0 if self.adjacency == "add_remove" else 2.0)

    def step(self, release: int) -> float:
        """2⁻³² for a clipping norm of 1."""
        return step_for(self.clip_norms[release], LEFT_BITS) * step_for(1.0, RIGHT_BITS)

    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """Σ of the clipped gradients (p_W(x) − y) xᵀ, in steps."""
        total, clip_norm = torch.zeros(weights.shape, dtype=torch.int64), self.clip_norms[release]

        def errors_of(inputs: Tensor, labels: Tensor) -> Tensor:
            errors = self.targets.expected(inputs @ weights.T) - self.targets.vectors(labels, len(weights))
            return errors * self.targets.error_scale(len(weights))

        if self._persons is not None:
            return total + self.sum_over_persons(errors_of, clip_norm, self.step(release))
        for inputs, labels in self.private_parts():
            errors = errors_of(inputs, labels)
            # The norm of an outer product is the product of the norms.
            norms = errors.norm(dim=1) * inputs.norm(dim=1)
            clipped = errors * clip_factors(norms, clip_norm)[:, None]
            left, right = (
                whole_steps(clipped, step_for(clip_norm, LEFT_BITS)),
                whole_steps(inputs, step_for(1.0, RIGHT_BITS)),
            )
            squares = left.square().sum(dim=1) * right.square().sum(dim=1)
            kept = not_too_long(squares, clip_norm, self.step(release))
            total += (torch.where(kept[:, None], left, 0.0).T @ right).long()
        return total

    def model(self, public: Tensor, releases: Mapping[int, NoisySum]) -> Tensor:
        """Maximum likelihood at the mean of all moments."""
        total, precision = torch.zeros_like(releases[min(releases)].noisy), 0.0
        divisor = self.private_records * self.targets.error_scale(len(total))
        for number, taken in releases.items():
            expected = self.targets.expected(public @ taken.weights.T).T @ public / len(public)
            weight = self.clip_norms[number] ** -2
            total += weight * (expected - taken.noisy / divisor)
            precision += weight
        start, penalty = releases[max(releases)].weights, self.penalty(len(total))
        return fit_maximum_likelihood(public, total / precision, penalty, start, self.targets)
