"""What teachers share that release statistics: one charge each, releases that last, answers that are free."""

from __future__ import annotations

import abc
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._checks import (
    check_choice,
    check_int,
    check_non_negative,
    check_open_unit,
    check_positive,
    shape_text,
)
from pl_privknn.argument_groups import renamed
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release
from pl_privknn.labelers.canaries import Canaries, Evidence
from pl_privknn.labelers.protocols import HasCanaries, JoinsRuns, MakesModel, UsesPublicFeatures
from pl_privknn.labelers.statistics.audited import Taken, canaries_of, evidence_of
from pl_privknn.labelers.statistics.releases_file import read_releases, write_releases
from pl_privknn.labelers.statistics.shards import SumsOverShards
from pl_privknn.labelers.statistics.targets import TARGETS
from pl_privknn.privacy.ledger.run import LedgerRun
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Gaussian
from pl_privknn.privacy.mechanisms.base import Mechanism, check_adjacency, merged
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import noise_for_steps, step_mechanism

#: Releases of one teacher.
MOST_RELEASES = 1000

_ROWS_AT_ONCE = 8192
# Public features that were made again may differ by the order of sums.
_SAME = 1e-3
# A hair below 1: rounding must not let a unit vector be longer.
_INSIDE = 1.0 - 1e-12


class ReleaseLostError(RuntimeError):
    """What was paid for did not survive; nothing may be drawn in its place."""


@renamed(target_epsilon="epsilon")
class StatisticsTeacher(SumsOverShards, UsesPublicFeatures, JoinsRuns, MakesModel, HasCanaries):
    """Releases sums over all private records, makes a linear model of them, and answers by it.

    The releases are made once, when the first query comes, and paid for one by one before each is drawn. They lie in
    the run's private folder from then on: every later query, of every round and of a resumed run, is answered by
    post-processing and costs nothing. A release that was paid for and lost in a crash is not drawn again.

    What enters a sum is x = (f / |f|, bias) of each record, f its features, or what public examples make of them. So
    |x| ≤ √(1 + bias²), a public constant, whatever the features.

    Args:
        releases: number of sums.
        epsilon: find the least noise with which all releases cost at most this at ``delta``. Give it or
            ``noise_multiplier``.
        noise_multiplier: standard deviation of the noise on a sum over the sum's L2 sensitivity.
        delta: δ of ``epsilon``.
        expected_records: N, what sums are divided by: a public constant, about the number of private records.
        ridge: the model's penalty is λ = ridge · σ₁ / N, σ₁ the noise that a single release of sensitivity 1 would
            have at the cost of all. Public constants alone, so one ridge serves many ε.
        bias: a constant beside the unit features.
        components: keep so many principal directions of the public features first; None takes features as they are.
        whitening: divide each direction by its public standard deviation to this power.
        adjacency: neighbouring relation.
        task: ``"multiclass"``, or ``"multilabel"`` for attributes, each of which holds or doesn't.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for arguments out of range, or unless exactly one of ``epsilon`` and
            ``noise_multiplier`` is given.
    """

    releases_once = True

    def __init__(
        self,
        releases: int,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        expected_records: int = 60_000,
        ridge: float = 0.4,
        bias: float = 0.3,
        components: int | None = None,
        whitening: float = 0.5,
        adjacency: Adjacency = "add_remove",
        task: str = "multiclass",
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.targets = TARGETS[check_choice("task", task, tuple(TARGETS))]
        self.tasks = (self.targets.task,)
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                f"epsilon={epsilon!r}, noise_multiplier={noise_multiplier!r}: give exactly one of them"
            )
        self.releases = check_int("releases", releases, maximum=MOST_RELEASES)
        self.adjacency = check_adjacency(adjacency)
        self.adjacencies = (self.adjacency,)
        self.expected_records = check_int("expected_records", expected_records)
        self.ridge = check_positive("ridge", ridge)
        self.bias = check_non_negative("bias", bias)
        self.components = None if components is None else check_int("components", components)
        self.whitening = check_non_negative("whitening", whitening)
        if noise_multiplier is None:
            epsilon = check_positive("epsilon", epsilon)
            noise_multiplier = noise_for_steps(epsilon, check_open_unit("delta", delta), 1.0, self.releases)
        self.noise_multiplier = check_positive("noise_multiplier", noise_multiplier)
        if self.noise_multiplier > 2**20:
            raise ValueError(f"noise_multiplier={noise_multiplier!r} must be at most 2**20; use less noise")
        self._table: tuple[Tensor, Tensor, int] | None = None
        self._public: Tensor | None = None  # x of the public examples
        self._change: PublicWhitening | None = None
        self._place: Path | None = None
        self._paid_by: ChargesLedger | None = None
        self._charged = 0
        self._taken: dict[int, Taken] = {}
        self._sketch: Tensor | None = None
        self._weights: Tensor | None = None

    # ------------------------------------------------------------------ of subclasses

    @abc.abstractmethod
    def sensitivity(self, release: int) -> float:
        """L2 distance that one record can move the sum of a release under :attr:`adjacency`."""

    @abc.abstractmethod
    def model(self, public: Tensor, releases: Mapping[int, Taken]) -> Tensor:
        """The model's weights, float64 ``(c, p)``: post-processing.

        Args:
            public: x of the public examples, float64 ``(m, p)``.
            releases: what was released, by number; some may be missing, not all.
        """

    def drawn(self, release: int, mechanism: Mechanism, exact: Tensor, noise: NoiseSource) -> Tensor:
        """What is released of a sum in steps, float64 ``(c, p)``."""
        assert isinstance(mechanism, Gaussian)
        return mechanism.add_noise_to_multiples(exact, self.step(release), noise)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities from scores, float64 ``(n, c)``."""
        return self.targets.expected(scores)

    def transformed(self, features: Tensor) -> Tensor:
        """What is scaled to unit length, float64 ``(n, d)``: depends on each row alone, and on public examples."""
        return features.double() if self._change is None else self._change(features).double()

    def learn_publicly(self, features: Tensor) -> None:
        """Learn what :meth:`transformed` needs from public features."""
        self._change = None
        if self.components is not None:
            kept = min(self.components, *features.shape)
            self._change = PublicWhitening(features.shape[1], kept, self.whitening).fit(features)

    def learned(self) -> dict[str, Tensor]:
        """What :meth:`learn_publicly` learned, as tensors."""
        change = self._change
        return {} if change is None else {"mean": change.mean, "directions": change.directions}

    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Take what :meth:`learned` gave."""
        self._change = None
        if "directions" in learned:
            width, kept = learned["directions"].shape
            self._change = PublicWhitening(width, kept, self.whitening)
            self._change.load_state_dict({**learned, "fitted": torch.tensor(True)})

    # ------------------------------------------------------------------ costs

    def mechanism(self, release: int) -> Mechanism:
        """What a release costs; draws its noise as well."""
        return step_mechanism(self.noise_multiplier, self.sensitivity(release), 1.0)

    def penalty(self, num_targets: int) -> float:
        """λ of a model of so many classes or attributes."""
        divisor = self.expected_records * self.targets.error_scale(num_targets)
        return self.ridge * self.noise_multiplier / math.sqrt(self.releases) / divisor

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """All releases, once, however many rounds there are; see :meth:`Labeler.plan`."""
        return list(merged(Charge(self.mechanism(release)) for release in range(self.releases)).values())

    # ------------------------------------------------------------------ a run

    def join_run(self, folder: Path, ledger: ChargesLedger) -> None:
        """Take up what the run has released; see :meth:`JoinsRuns.join_run`.

        Raises:
            ReleaseLostError: if all releases are paid for and none is there.
        """
        self._place = folder
        if self._paid_by is ledger:
            return
        self._forget(ledger)
        if isinstance(ledger, LedgerRun):
            self._charged = sum(
                ledger.charged(kind) for kind in {part.mechanism for part in self.plan(1, 1, 2)}
            )
        self._taken, self._sketch = read_releases(folder)
        if len(self._taken) > self._charged:
            raise ReleaseLostError(
                f"{folder}: it holds releases that this run's ledger did not pay for; restore the ledger that "
                "belongs to it"
            )
        self._check_left()

    def leave_run(self) -> None:
        """Write nothing more into the run's folder; see :meth:`JoinsRuns.leave_run`."""
        self._place = None

    def fit_public(self, features: Tensor) -> None:
        """Take the features of all public examples, float32 ``(m, d)``: curvature, directions, or centres."""
        if features.ndim != 2 or not features.is_floating_point() or len(features) < 1:
            raise ValueError(
                f"features: shape {tuple(features.shape)}, {features.dtype}; want float of shape (m, d)"
            )
        self.learn_publicly(features)
        public = self.inputs(features)
        if self._public is None or not torch.equal(self._public, public):
            self._public, self._weights = public, None

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`. Nothing is computed before the first query."""
        self.targets.check(features, labels, num_classes)
        self._table = (features, labels, num_classes)

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answer the first ``max_answers`` queries; the first call releases, and pays. See :meth:`Labeler.label`.

        Raises:
            RuntimeError: before :meth:`fit` and :meth:`fit_public`.
            ReleaseLostError: where the features of the public examples are no more those of the releases.
        """
        if self._table is None or self._public is None:
            raise RuntimeError(
                f"{type(self).__name__}.label needs public features and the private table: call fit_public(features) "
                "and fit(features, labels, num_classes) first"
            )
        num_classes = self._table[2]
        released, soft = self.targets.unknown(len(queries), num_classes)
        asked = queries[:max_answers]
        if len(asked):
            probabilities = self.predict(asked, self._released(ledger))
            released[: len(asked)] = self.targets.answers(probabilities)
            soft[: len(asked)] = probabilities.float()
        return Release(released, soft)

    def canaries(self, public: Tensor, num_classes: int) -> Canaries:
        """In directions of their own."""
        return canaries_of(self, public, num_classes)

    def evidence(self, canaries: Canaries, known: Labeler) -> Evidence | None:
        """By all releases; see :meth:`HasCanaries.evidence`."""
        assert isinstance(known, StatisticsTeacher)
        return evidence_of(self, self._taken, canaries, known)

    def with_table(self, features: Tensor, labels: Tensor, num_classes: int) -> StatisticsTeacher:
        """A shallow copy with another table, for audits."""
        made = copy.copy(self)
        made._table = features, labels, num_classes
        return made

    def head_state(self) -> dict[str, Tensor] | None:
        """Weights, float64 ``(c, p)``, and what public features were learned; see :meth:`MakesModel.head_state`."""
        return None if self._weights is None else {"weights": self._weights, **self.learned()}

    def head(self, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """The model of a state, apart from this labeler and its private table; see :meth:`MakesModel.head`."""
        model, learned = copy.copy(self), dict(state)
        model._table = model._paid_by = model._place = None
        weights = learned.pop("weights")
        model.relearn(learned)
        return functools.partial(model.predict, weights=weights)

    def inputs(self, features: Tensor) -> Tensor:
        """X of features ``(n, d)``, float64 ``(n, p)``, each from its own row; of length √(1 + bias²) at most."""
        unit = torch.nn.functional.normalize(self.transformed(features), dim=1) * _INSIDE
        # One record whose features are too large to compute with must not be able to spoil a release.
        unit = torch.where(unit.isfinite().all(dim=1, keepdim=True), unit, 0.0)
        return torch.cat([unit, unit.new_full((len(unit), 1), self.bias)], dim=1) if self.bias else unit

    def predict(self, features: Tensor, weights: Tensor) -> Tensor:
        """Probabilities of features ``(n, d)`` under a model, float64 ``(n, c)``."""
        if features.ndim != 2:
            raise ValueError(f"features: shape {shape_text(features.shape)}; want (n, d)")
        return self.probabilities(self.inputs(features) @ weights.T)

    def private_parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """X and labels of this process's private records, some at a time: **private**."""
        assert self._table is not None
        features, labels, _ = self._table
        for part, classes in zip(features.split(_ROWS_AT_ONCE), labels.split(_ROWS_AT_ONCE), strict=True):
            yield self.inputs(part), classes

    def _released(self, ledger: ChargesLedger) -> Tensor:
        """The model's weights; releases what was not released yet."""
        assert self._public is not None
        if self._paid_by is not ledger:  # a table asked directly, outside of a run
            self._forget(ledger)
        sketch = self._public.mean(dim=0)
        if self._sketch is not None and (
            self._sketch.shape != sketch.shape or not torch.allclose(self._sketch, sketch, rtol=0, atol=_SAME)
        ):
            raise ReleaseLostError(
                f"{type(self).__name__}: the features of the public examples are others than those of its releases, "
                "which serve one kind of features alone; use the same features in all rounds, or start a new run"
            )
        weights = self._weights
        if weights is None and self._taken:
            weights = self.model(self._public, self._taken)
        if weights is None:
            assert self._table is not None
            weights = self._public.new_zeros(self._table[2], self._public.shape[1])
        self._check_left()
        while self._charged < self.releases:
            number, mechanism = self._charged, self.mechanism(self._charged)
            exact = self.whole_sum(number, weights)
            noise = self.paid(ledger, mechanism, 1, "statistics")
            self._charged += 1
            noisy = self.drawn(number, mechanism, exact, noise)
            self._taken[number], self._sketch = Taken(noisy, weights), sketch
            if self._place is not None:
                write_releases(self._place, self._taken, self._sketch)
            weights = self.model(self._public, self._taken)
        self._weights = weights
        return weights

    def _check_left(self) -> None:
        if self._charged >= self.releases and not self._taken:
            raise ReleaseLostError(
                "all releases were paid for, and a kill or an error came before one was kept; they are not drawn "
                "again. Start a new run in another folder, with this run's ledger as ledger_path"
            )

    def _forget(self, ledger: ChargesLedger) -> None:
        self._paid_by, self._charged = ledger, 0
        self._taken, self._sketch, self._weights = {}, None, None
