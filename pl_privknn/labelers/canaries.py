"""Records with which an attack finds out whether a labeler keeps its promise, and what releases say of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms import Gaussian

Form = Literal["one_run", "many_runs"]
# Canaries of one run of a model: more of them are in each other's way.
_MOST = 500
# Neighbours that say how close public examples lie, examples looked at, and how often is asked far away.
_NEAR, _MOST_COMPARED, _AWAY = 20, 2000, 10


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Records that are easy to find in what a labeler releases.

    Attributes:
        form: ``"one_run"`` where a run holds about half of them, each by its own coin; ``"many_runs"`` for a single
            record that many pairs of runs are made with and without.
        features: float32, shape ``(m, d)``.
        labels: int64, shape ``(m,)``.
        others: int64, shape ``(m,)``; under ``replace_one`` the label that a canary has where its coin falls the
            other way.
        queries: float32, shape ``(q, d)``; what the attacker asks.
        about: int64, shape ``(m,)``; the query whose answer tells most of each canary; 0 where that is none.
        spent_after: how often each query is asked until nothing is left of a canary's own budget; 0 where records
            have no budgets of their own, and each query is asked once.
        apart: canaries share neither queries nor noise, so that each counts as a run of its own.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers.canaries import one_in_each_cell
        >>> canaries = one_in_each_cell(torch.eye(3), num_classes=2)
        >>> len(canaries.labels), canaries.about.tolist()
        (6, [0, 0, 1, 1, 2, 2])
    """

    form: Form
    features: Tensor
    labels: Tensor
    others: Tensor
    queries: Tensor
    about: Tensor
    spent_after: int = 0
    apart: bool = False


def one_in_each_cell(public: Tensor, num_classes: int) -> Canaries:
    """One canary for each query and class, at the query itself: it is the nearest record of its own cell alone."""
    about = torch.arange(len(public)).repeat_interleave(num_classes)
    labels = torch.arange(num_classes).repeat(len(public))
    return Canaries("one_run", public[about], labels, (labels + 1) % num_classes, public, about)


def one_in_each_pair(public: Tensor, num_classes: int) -> Canaries:
    """As :func:`one_in_each_cell` where labels are exchanged: no two canaries have a cell in common."""
    cells = one_in_each_cell(public, num_classes)
    first = (cells.labels % 2 == 0) & (cells.labels + 1 < num_classes)
    kept = {name: getattr(cells, name)[first] for name in ("features", "labels", "about")}
    return dataclasses.replace(cells, others=kept["labels"] + 1, **kept)


def in_directions(
    public: Tensor,
    num_classes: int,
    directions: Tensor,
    origin: Tensor | None = None,
    length: float = 100.0,
    each_class: bool = True,
) -> Canaries:
    """One canary for each direction and class, so that the gradients of a linear model are almost at right angles.

    They are much longer than a public example, so that what is not clipped shows.

    Args:
        public: float32 ``(m, d)``.
        num_classes: c.
        directions: at right angles, ``(r, d)``; as many are taken as make 500 canaries.
        origin: where they start, ``(d,)``; 0 by default.
        length: of a canary over that of a public example.
        each_class: False takes one class for each direction, so that they are at right angles, but fewer.
    """
    each = num_classes if each_class else 1
    rows = torch.nn.functional.normalize(directions[: max(1, _MOST // each)], dim=1).float()
    features = rows * public.norm(dim=1).median().clamp(min=1e-6) * length
    if origin is not None:
        features = features + origin
    which = torch.arange(len(rows)).repeat_interleave(each)
    labels = torch.arange(len(which)) % num_classes
    return Canaries(
        "one_run", features[which], labels, (labels + 1) % num_classes, public, torch.zeros_like(labels)
    )


def at_one_place(public: Tensor, num_classes: int) -> Canaries:
    """One record at the public example with the closest neighbours, about which the attacker asks again and again.

    There the votes hardly depend on who is drawn, so that the record shows most. Every tenth question is about the
    public example that is farthest away, where the record changes nothing: noise that questions share shows so.
    """
    some = public[:_MOST_COMPARED]
    distances = torch.cdist(some, some)
    near = distances.kthvalue(min(_NEAR, len(some)), dim=1).values
    place = int(near.argmin())
    asked = some[[place]].repeat(len(public), 1)
    asked[::_AWAY] = some[int(distances[place].argmax())]
    label = torch.tensor([num_classes - 1])
    return Canaries(
        "many_runs", some[[place]], label, label - 1, asked, torch.tensor([len(public) > 1]).long()
    )


def far_apart(public: Tensor, num_classes: int, spent_after: int) -> Canaries:
    """Records along axes of their own, none near another one nor near public examples, which point the other way.

    Each is alone in its place, so that what is answered there depends on no other record.

    Args:
        public: float32 ``(m, d)``.
        num_classes: c.
        spent_after: see :class:`Canaries`.
    """
    axes = torch.eye(public.shape[1])[:_MOST]
    features = torch.where(public.mean(dim=0)[: len(axes)] > 0, -1.0, 1.0)[:, None] * axes
    about = torch.arange(len(features))
    # All of one class: noise that queries share is then the same for all of them.
    labels = torch.full_like(about, num_classes - 1)
    return Canaries("one_run", features, labels, labels - 1, features, about, spent_after)


def hub(public: Tensor, num_classes: int) -> Canaries:
    """One record that reaches every query: the mean of the public features, with some label."""
    features = public.mean(dim=0, keepdim=True)
    label = torch.tensor([num_classes - 1])
    return Canaries("many_runs", features, label, label - 1, public, torch.tensor([0]))


class Evidence:
    """Scores of each canary in released sums, where an attacker knows all that the other records add to them.

    A sum is Σ pᵢ gᵢ + noise, less what is known: gᵢ what canary i adds, pᵢ its coin. Sums may come one after another;
    of all together the coins are estimated by least squares, with the coins' own variance ¼ as a penalty, so canaries
    whose directions are not at right angles do not stand in each other's way more than they must.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers.canaries import Evidence
        >>> evidence = Evidence(2)
        >>> evidence.add(torch.tensor([3.0, 0.0]), torch.tensor([[3.0, 0.0], [0.0, 3.0]]), deviation=1.0)
        >>> [round(score, 2) for score in evidence.scores().tolist()]
        [0.25, -0.25]
    """

    def __init__(self, count: int) -> None:
        self._products = torch.zeros(count, count, dtype=torch.float64)
        self._matches = torch.zeros(count, dtype=torch.float64)

    def add(self, rest: Tensor, each: Tensor, deviation: float) -> None:
        """Take a sum, ``(d,)`` less what is known, what each canary adds, ``(m, d)``, and the noise's deviation."""
        unknown = rest.double() - each.double().sum(dim=0) / 2
        # Who is drawn adds noise as well, much of it where gradients are not clipped; the sum itself shows how much.
        spread = max(deviation, float(unknown.square().mean().sqrt()))
        rows = each.double() / spread
        self._products += rows @ rows.T
        self._matches += rows @ (unknown / spread)

    def scores(self) -> Tensor:
        """Estimates of all coins less ½, float64 ``(m,)``."""
        penalty = 4 * torch.eye(len(self._matches), dtype=torch.float64)
        return torch.linalg.solve(self._products + penalty, self._matches)

    def contrast(self) -> Tensor:
        """Parts of sums that are not shared, float64 ``(m,)``; 0 where that is not looked at."""
        return torch.zeros(len(self._matches), dtype=torch.float64)


# The fault that is looked for by a likelihood of its own: noise of so much of what is stated.
_SUSPECTED = 0.5


class SampledEvidence(Evidence):
    """Scores of canaries that are drawn by chance, where an attacker knows whom else a step drew.

    Canaries' directions are at right angles, so that each is seen by itself: of a step x = b·l + noise, along its own
    direction, l the length of what it adds, b whether it was drawn. The score is the log-likelihood ratio of all
    steps, Σ log(1 − q + q·exp((l·x − l²/2) / σ²)): the best test there is, and far better than a plain sum of x where
    q is small, since a canary is not in most of the steps.

    Args:
        count: number of canaries m.
        mechanism: the release of one step.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers.canaries import SampledEvidence
        >>> from pl_privknn.privacy import Gaussian
        >>> evidence = SampledEvidence(2, Gaussian(sigma=1.0, l2_sensitivity=1.0, sampling_rate=0.1))
        >>> evidence.add_step(torch.tensor([3.0, 0.0]), torch.ones(2))
        >>> [round(score, 2) for score in evidence.scores().tolist()]
        [0.75, -0.04]
    """

    def __init__(self, count: int, mechanism: Gaussian) -> None:
        super().__init__(count)
        self.mechanism = mechanism
        self._odds, self._suspected, self._sum, self._squares = torch.zeros(4, count, dtype=torch.float64)
        self._lengths: list[Tensor] = []

    def add_step(self, along: Tensor, lengths: Tensor) -> None:
        """Take a sum, less what all others add, along each canary's direction, and the lengths, both ``(m,)``."""
        x, length = along.double(), lengths.double()
        self._odds += self._log_odds(x, length, self.mechanism.sigma)
        self._suspected += self._log_odds(x, length, _SUSPECTED * self.mechanism.sigma)
        self._sum += x
        self._squares += x.square()
        self._lengths.append(length.float())

    def _log_odds(self, x: Tensor, length: Tensor, sigma: float) -> Tensor:
        rate = self.mechanism.sampling_rate
        fits = (length * x - length.square() / 2) / sigma**2
        away = math.log1p(-rate) if rate < 1 else -math.inf
        return torch.logaddexp(torch.full_like(fits, away), math.log(rate) + fits)

    @property
    def lengths(self) -> Tensor:
        """Of what each canary would have added to each step, float32 ``(steps, m)``."""
        return torch.stack(self._lengths)

    def scores(self) -> Tensor:
        """Log-likelihood ratios, float64 ``(m,)``."""
        return self._odds

    def suspected(self) -> Tensor:
        """The same of half the stated noise, in which too little noise shows most, float64 ``(m,)``."""
        return self._suspected

    def contrast(self) -> Tensor:
        """Differences of x between steps, which cancel noise that they share."""
        return self._squares - self._sum.square() / max(len(self._lengths), 1)
