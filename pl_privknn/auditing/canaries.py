"""Canaries for attacks on labelers, and their scores in released sums.

:func:`canaries_of` and :func:`true_votes` dispatch on the labeler's class; ``register`` adds a class to them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers import PATE, IndKNN, Labeler, NoisySGDTeacher, PrivateKNN, ReverseKNN
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.labelers.reverse_knn_clients import ClientReverseKNN
from pl_privknn.labelers.statistics import StatisticsTeacher
from pl_privknn.labelers.voting import NeighborVoting, VotingLabeler
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource

# Most canaries of one run of a model, since more would interfere, and their norm relative to public examples.
_MOST, _LENGTH = 500, 100.0
# Neighbours that measure the density of public examples, examples compared, and the period of distant queries.
_NEAR, _MOST_COMPARED, AWAY = 20, 2000, 10
#: What an adversary controls. ``worst``: the record and all queries; see :func:`canaries_of`. ``natural``: all
#: queries, about a random record of the private table. ``poisoned_private``: the record, all queries, and
#: further records at its place; see :func:`poison`. ``poisoned_public``: the record, and one public example in ten.
#: ``no_control``: the record alone; queries are those of the run.
Adversary = Literal["worst", "natural", "poisoned_private", "poisoned_public", "no_control"]
ADVERSARIES: tuple[Adversary, ...] = get_args(Adversary)
# Share of the records that an adversary adds at most.
_POISONED = 0.05
# Samples over which votes are averaged, where records take part by chance.
_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Records that are easy to detect in a labeler's releases; each is included by an independent coin.

    Attributes:
        features: float32, shape ``(m, d)``.
        labels: int64, shape ``(m,)``.
        others: int64, shape ``(m,)``; under ``replace_one`` the label that a canary has where its coin falls the
            other way.
        queries: float32, shape ``(q, d)``; what the attacker asks.
        about: int64, shape ``(m,)``; the most informative query about each canary; 0 if there is none.
        apart: canaries share neither queries nor noise; see :class:`~pl_privknn.auditing.bounds.Scores`.
        alone: the table holds no other records.
        fixed: a single canary keeps its label; otherwise it gets the class with the fewest votes at its place.

    Example:
        >>> import torch
        >>> from pl_privknn.auditing.canaries import one_in_each_cell
        >>> canaries = one_in_each_cell(torch.eye(3), num_classes=2)
        >>> len(canaries.labels), canaries.about.tolist()
        (6, [0, 0, 1, 1, 2, 2])
    """

    features: Tensor
    labels: Tensor
    others: Tensor
    queries: Tensor
    about: Tensor
    apart: bool = False
    alone: bool = False
    fixed: bool = False

    def chosen(self, rows: Tensor) -> Canaries:
        """Subset of the canaries, with all queries."""
        kept = {name: getattr(self, name)[rows] for name in ("features", "labels", "others", "about")}
        return dataclasses.replace(self, **kept)


def one_in_each_cell(public: Tensor, num_classes: int) -> Canaries:
    """One canary for each query and class, placed at the query, so that it votes in that cell only."""
    about = torch.arange(len(public)).repeat_interleave(num_classes)
    labels = torch.arange(num_classes).repeat(len(public))
    return Canaries(public[about], labels, (labels + 1) % num_classes, public, about)


def in_directions(
    public: Tensor,
    num_classes: int,
    directions: Tensor,
    origin: Tensor | float = 0.0,
    each_class: bool = True,
) -> Canaries:
    """One canary for each direction and class, with nearly orthogonal gradients in a linear model.

    Their norm is far above that of public examples, which reveals missing clipping.

    Args:
        public: float32 ``(m, d)``.
        num_classes: c.
        directions: orthogonal, ``(r, d)``; used up to a total of 500 canaries.
        origin: added to each direction, ``(d,)``.
        each_class: False takes one class for each direction: exactly orthogonal, but fewer.
    """
    each = num_classes if each_class else 1
    rows = functional.normalize(directions[: max(1, _MOST // each)], dim=1).float()
    features = rows * public.norm(dim=1).median().clamp(min=1e-6) * _LENGTH + origin
    which = torch.arange(len(rows)).repeat_interleave(each)
    labels = torch.arange(len(which)) % num_classes
    others = (labels + 1) % num_classes
    return Canaries(features[which], labels, others, public, torch.zeros_like(labels))


def at_one_place(public: Tensor, num_classes: int) -> Canaries:
    """One record at the public example with the closest neighbours, and repeated queries about it.

    There the votes depend least on the sample, so the record is most visible. Every tenth query is the most distant
    public example, where the record has no effect; this reveals noise shared between queries.
    """
    some = public[:_MOST_COMPARED]
    distances = torch.cdist(some, some)
    near = distances.kthvalue(min(_NEAR, len(some)), dim=1).values
    place = int(near.argmin())
    asked = some[[place]].repeat(len(public), 1)
    asked[::AWAY] = some[int(distances[place].argmax())]
    label = torch.tensor([num_classes - 1])
    return Canaries(some[[place]], label, label - 1, asked, torch.tensor([len(public) > 1]).long())


def poison(labeler: Labeler, canary: Canaries, features: Tensor, labels: Tensor) -> tuple[Canaries, Tensor]:
    """Records that an adversary adds next to a canary, so that the canary decides between two classes.

    Args:
        labeler: half of its neighbors or teachers are poisoned; for other teachers, and at most, 5 % of the table.
        canary: a single one.
        features: of the private table, ``(n, d)``.
        labels: int64 ``(n,)``.

    Returns:
        The canary with the class that is rarest among its neighbors, and the features ``(p, d)`` of the added
        records, which have the same class.
    """
    most = int(_POISONED * len(labels))
    if isinstance(labeler, PrivateKNN):
        most = min(most, int(labeler.k / labeler.sampling_rate) // 2)
    elif isinstance(labeler, PATE):
        most = min(most, labeler.num_teachers // 2)
    near = torch.cdist(canary.features, features)[0].topk(min(_NEAR, len(labels)), largest=False).indices
    rarest = torch.bincount(labels[near], minlength=int(labels.max()) + 1).argmin()[None]
    chosen = dataclasses.replace(
        canary, labels=rarest, others=torch.where(rarest > 0, rarest - 1, 1), fixed=True
    )
    return chosen, canary.features.expand(most, -1)


def far_apart(public: Tensor, num_classes: int) -> Canaries:
    """Isolated records along separate axes.

    Args:
        public: float32 ``(m, d)``.
        num_classes: c.
    """
    axes = torch.eye(public.shape[1])[:_MOST]
    features = torch.where(public.mean(dim=0)[: len(axes)] > 0, -1.0, 1.0)[:, None] * axes
    about = torch.arange(len(features))
    # A single class, so that noise shared between queries is equal for all of them.
    labels = torch.full_like(about, num_classes - 1)
    return Canaries(features, labels, labels - 1, features, about, apart=True, alone=True)


# ---------------------------------------------------------------------------- by class of labelers


@functools.singledispatch
def canaries_of(labeler: Labeler, public: Tensor, num_classes: int) -> Canaries:
    """Canaries for a labeler; by default one record that affects every query: the mean of the public features.

    Args:
        labeler: with its settings; decides by its class.
        public: float32 features of the public examples that are asked about, shape ``(m, d)``.
        num_classes: number of classes.
    """
    label = torch.tensor([num_classes - 1])
    return Canaries(public.mean(dim=0, keepdim=True), label, label - 1, public, torch.tensor([0]))


_hub = canaries_of.dispatch(object)


@canaries_of.register
def _of_voting(labeler: VotingLabeler, public: Tensor, num_classes: int) -> Canaries:
    if labeler.attributes is not None:
        return _hub(labeler, public, num_classes)
    return at_one_place(public, num_classes)


@canaries_of.register
def _of_reverse_knn(labeler: ReverseKNN, public: Tensor, num_classes: int) -> Canaries:
    if labeler.attributes is not None:
        return _hub(labeler, public, num_classes)
    cells = one_in_each_cell(public, num_classes)
    return cells if labeler.adjacency != "replace_one" else _exchanged(cells, num_classes)


@canaries_of.register
def _of_clients(labeler: ClientReverseKNN, public: Tensor, num_classes: int) -> Canaries:
    cells = one_in_each_cell(public, num_classes)
    if labeler.trust == "local":
        return cells
    # With shares, the noise of cells is independent; a single message replaces one cell by another.
    return dataclasses.replace(_exchanged(cells, num_classes), apart=labeler.randomizer == "shares")


def _exchanged(cells: Canaries, num_classes: int) -> Canaries:
    """Canaries that share no cell after labels are exchanged."""
    return cells.chosen((cells.labels % 2 == 0) & (cells.labels + 1 < num_classes))


@canaries_of.register
def _of_ind_knn(labeler: IndKNN, public: Tensor, num_classes: int) -> Canaries:
    placed = far_apart(public, num_classes)
    if labeler.parameters.similarity(labeler.parameters.threshold) > 0:
        return placed
    # Orthogonal records are neighbours under such a kernel: use a single one, and repeat its query.
    return dataclasses.replace(placed.chosen(torch.tensor([0])), queries=placed.queries[:1])


@canaries_of.register
def _of_statistics(labeler: StatisticsTeacher, public: Tensor, num_classes: int) -> Canaries:
    if labeler.components is None:
        return in_directions(public, num_classes, torch.eye(public.shape[1]))
    kept = min(labeler.components, *public.shape)
    change = PublicWhitening(public.shape[1], kept, labeler.whitening).fit(public)
    return in_directions(public, num_classes, change.directions.T, change.mean)


@canaries_of.register
def _of_noisy_sgd(labeler: NoisySGDTeacher, public: Tensor, num_classes: int) -> Canaries:
    change = labeler.whitening_of(public)
    directions = torch.eye(public.shape[1]) if labeler.model.components is None else change.directions.T
    placed = in_directions(public, num_classes, directions, change.mean, each_class=False)
    return dataclasses.replace(placed, apart=True)


@functools.singledispatch
def true_votes(labeler: Labeler, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    """**Private.** Votes before noise, ``(m, c)``, for an attacker who knows the table; None if unknown.

    Args:
        labeler: fitted.
        queries: float32 ``(m, d)``.
        noise: of sampling, where records are sampled; the mean over samples is returned.
    """
    return None


@true_votes.register
def _neighbors_votes(labeler: NeighborVoting, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    if labeler.attributes is not None:
        return None
    samples = 1 if labeler.sampling_rate == 1 else _SAMPLES
    votes = labeler.votes(queries.repeat(samples, 1), noise.bernoulli)
    return votes.view(samples, len(queries), -1).double().mean(dim=0)


@true_votes.register(PATE)
def _teachers_votes(labeler: PATE, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    return labeler.votes(queries).double() if labeler.attributes is None else None


@true_votes.register(IndKNN)
def _kernel_votes(labeler: IndKNN, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    return labeler.kernel_votes(queries)


@true_votes.register(RecordVotes)
def _counts(labeler: RecordVotes, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    return labeler.counts(queries).double() if labeler.attributes is None else None


# ---------------------------------------------------------------------------- released sums


class Evidence:
    """Scores of canaries in released sums, for an attacker who knows the contributions of all other records.

    A sum, with the known contributions subtracted, is Σ pᵢ gᵢ + noise: gᵢ is the contribution of canary i, pᵢ its
    coin. Sums may be added one by one; the coins are estimated from all sums by least squares, with their variance ¼
    as a penalty, which handles canaries whose directions are not orthogonal.

    Example:
        >>> import torch
        >>> from pl_privknn.auditing.canaries import Evidence
        >>> evidence = Evidence(2)
        >>> evidence.add(torch.tensor([3.0, 0.0]), torch.tensor([[3.0, 0.0], [0.0, 3.0]]), deviation=1.0)
        >>> [round(score, 2) for score in evidence.scores().tolist()]
        [0.25, -0.25]
    """

    def __init__(self, count: int) -> None:
        self._products = torch.zeros(count, count, dtype=torch.float64)
        self._matches = torch.zeros(count, dtype=torch.float64)

    def add(self, rest: Tensor, each: Tensor, deviation: float) -> None:
        """Add a sum ``(d,)`` minus known contributions, the canaries' contributions ``(m, d)`` and the noise's σ."""
        unknown = rest.double() - each.double().sum(dim=0) / 2
        # Sampling adds noise as well, much of it where gradients are not clipped; the sum itself shows how much.
        spread = max(deviation, float(unknown.square().mean().sqrt()))
        rows = each.double() / spread
        self._products += rows @ rows.T
        self._matches += rows @ (unknown / spread)

    def scores(self) -> Tensor:
        """Estimates of all coins minus ½, float64 ``(m,)``."""
        penalty = 4 * torch.eye(len(self._matches), dtype=torch.float64)
        return torch.linalg.solve(self._products + penalty, self._matches)


class StepEvidence:
    """Scores of canaries with orthogonal directions in noisy steps that sample records.

    Args:
        count: number of canaries m.
        mechanism: the release of one step.

    Example:
        >>> import torch
        >>> from pl_privknn.auditing.canaries import StepEvidence
        >>> from pl_privknn.privacy import Gaussian
        >>> evidence = StepEvidence(2, Gaussian(sigma=1.0, l2_sensitivity=1.0, sampling_rate=0.1))
        >>> evidence.add(torch.tensor([3.0, 0.0]), torch.ones(2))
        >>> [round(score, 2) for score in evidence.scores.tolist()]
        [0.75, -0.04]
    """

    def __init__(self, count: int, mechanism: Gaussian) -> None:
        self.mechanism, self._steps = mechanism, 0
        #: Log-likelihood ratios Σ log(1 − q + q·exp((l·x − l²/2) / σ²)), float64 ``(m,)``. A canary is in few of the
        #: steps, so that a sum of x would be less sensitive.
        self.scores = torch.zeros(count, dtype=torch.float64)
        self._sum, self._squares = torch.zeros(2, count, dtype=torch.float64)

    def add(self, along: Tensor, lengths: Tensor) -> None:
        """Add a sum minus other records' contributions, along each direction, and gradient norms, both ``(m,)``."""
        x, length, rate = along.double(), lengths.double(), self.mechanism.sampling_rate
        fits = (length * x - length.square() / 2) / self.mechanism.sigma**2
        away = torch.full_like(fits, math.log1p(-rate) if rate < 1 else -math.inf)
        self.scores += torch.logaddexp(away, math.log(rate) + fits)
        self._sum, self._squares, self._steps = self._sum + x, self._squares + x.square(), self._steps + 1

    def contrast(self) -> Tensor:
        """Squared differences of x between steps, float64 ``(m,)``, in which noise shared between steps cancels."""
        return self._squares - self._sum.square() / max(self._steps, 1)
