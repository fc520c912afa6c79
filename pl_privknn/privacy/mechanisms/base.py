"""Base classes of mechanisms: public parameters, the cost of one release, and the guarantee level of that cost."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import MAX_COUNT, check_choice, check_int, shown
from pl_privknn.privacy.accounting import pld, rdp

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource


Level = Literal["unconditional", "conditional", "none"]
#: From strongest to weakest.
LEVELS: tuple[Level, ...] = ("unconditional", "conditional", "none")

SEEDED_NOISE = (
    "the noise came from a seed and not from the operating system's generator: with the seed the noise can be "
    "subtracted, so this ε is what the same run would have with cryptographic noise"
)
UNSTATED_NOISE = (
    "the noise came from the operating system's generator, and the plan holds under the ledger's adjacency, "
    "which the ledger does not state"
)
#: Conditions of code that is not of this package, to be formatted with its name.
READS_ALONE = "reading a record uses that record alone ({})"
STRUCTURE_IS_PUBLIC = "the structure of the first record is public"
PREDICTS_ALONE = "{} predicts a held-out record from that record alone"
MOVES_AS_CHARGED = "{} moves by no more than it charges"
SEVERAL_FILES = (
    "what each file plans was fixed before an answer of another was seen (ordinary composition; runs that share one "
    "ledger need no such condition)"
)


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """Guarantee level of a stated ε: unconditional, conditional or none.

    ``"unconditional"``: for all data, without conditions. ``"conditional"``: if each of ``reasons`` is true.
    ``"none"``: not at all, for each of ``reasons`` that says so.

    Composition is ``a & b``: the weaker level, all reasons. It is the only operation there is, so a guarantee
    can't get stronger; ``Guarantee()`` is its neutral element.

    Attributes:
        level: one of :data:`LEVELS`.
        reasons: what weakens it, in words that a reviewer understands; empty for ``"unconditional"``.

    Raises:
        ValueError: for another level, or reasons that do not fit it.

    Example:
        >>> Guarantee("conditional", ("A",)) & Guarantee("none", ("B",)) & Guarantee()
        Guarantee(level='none', reasons=('A', 'B'))
    """

    level: Level = "unconditional"
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("guarantee", self.level, LEVELS)
        listed = isinstance(self.reasons, list | tuple)
        if not listed or not all(isinstance(r, str) and r.strip() for r in self.reasons):
            raise ValueError(f"reasons={shown(self.reasons)} must be a list of sentences")
        object.__setattr__(self, "reasons", tuple(self.reasons))
        if (self.level == "unconditional") != (not self.reasons):
            raise ValueError(
                f"guarantee={self.level!r} with reasons={shown(list(self.reasons))}: an unconditional one has none, "
                "another one at least one"
            )

    def __and__(self, other: Guarantee) -> Guarantee:
        """Weaker guarantee of two parts, with the reasons of both."""
        level = LEVELS[max(LEVELS.index(self.level), LEVELS.index(other.level))]
        return Guarantee(level, tuple(dict.fromkeys([*self.reasons, *other.reasons])))

    @property
    def reason(self) -> str:
        """All reasons in one line; empty for an unconditional guarantee."""
        return "; ".join(self.reasons)


#: Holds for all data, without conditions.
UNCONDITIONAL = Guarantee()


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """Guarantee of all parts together; unconditional where there is none."""
    total = UNCONDITIONAL
    for guarantee in guarantees:
        total &= guarantee
    return total


def guarantee_rank(level: Level) -> int:
    """Number of the level for charts: 2 unconditional, 1 conditional, 0 none."""
    return len(LEVELS) - 1 - LEVELS.index(level)


def noise_guarantee(source: NoiseSource) -> Guarantee:
    """Guarantee of releases whose noise comes from a source: none, unless its random words are cryptographic."""
    return UNCONDITIONAL if source.cryptographic else Guarantee("none", (SEEDED_NOISE,))


Adjacency = Literal["add_remove", "replace_one"]
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one")

#: Of two neighbouring tables, one has a record more than the other, or all records of a person.
Unit = Literal["record", "person"]
UNITS: tuple[Unit, ...] = ("record", "person")
#: Most outcomes that a mechanism lists one by one.
MAX_LISTED = 10**5

_REGISTRY: dict[str, type[Mechanism]] = {}
# Modules of this package whose mechanisms register when they are imported.
_MODULES = ("local", "noisy_votes", "screening", "stated")


def require_unsampled(kind: str, sampling_rate: float, adjacency: Adjacency) -> None:
    """Raise ``ValueError`` for a sampled release under ``replace_one``.

    A Poisson sample that holds the old record, the new one or neither compares three distributions, so the
    sensitivity of a replacement alone does not bound the cost.
    """
    if adjacency == "replace_one" and sampling_rate < 1:
        raise ValueError(
            f"{kind}: sampling_rate={sampling_rate!r} is accounted under adjacency='add_remove' only; use "
            "that adjacency with the sensitivity of adding or removing one record, or sampling_rate=1"
        )


def check_unit(unit: str) -> Unit:
    """Return ``unit``, or raise ``ValueError`` where it is not one of :data:`UNITS`.

    Example:
        >>> check_unit("person")
        'person'
    """
    return check_choice("unit", unit, UNITS)  # type: ignore[return-value]


def check_adjacency(adjacency: str) -> Adjacency:
    """Return ``adjacency``, or raise ``ValueError`` where it is not one of :data:`ADJACENCIES`.

    Example:
        >>> check_adjacency("add_remove")
        'add_remove'
    """
    return check_choice("adjacency", adjacency, ADJACENCIES)  # type: ignore[return-value]


#: Replaces a draw: from the mechanism, the values as they are compared, the noise source and the draw itself, it
#: makes the release.
Observer = Callable[["Mechanism", Any, "NoiseSource", Callable[[], "Tensor"]], "Tensor"]
_OBSERVER: ContextVar[Observer | None] = ContextVar("observer of draws", default=None)


@contextlib.contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Pass each draw of a mechanism in this thread to ``observer`` while the context lasts; for tests of labelers."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class Mechanism(abc.ABC):
    """Base class of one kind of release. Subclasses are frozen dataclasses whose fields are public parameters.

    A mechanism both draws its noise (:meth:`draw`) and states its cost, so the noise that is drawn and the
    noise that is accounted can't come from two places. Fields are validated in ``__post_init__`` and hold
    nothing that depends on private data.

    Attributes:
        kind: the name of the mechanism in records, for instance ``"gaussian"``.
        guarantee: ``"conditional"`` where the cost holds only under a stated condition.
        reason: the condition, in words; empty for unconditional mechanisms.

    Example:
        >>> import numpy as np
        >>> from pl_privknn.privacy import Gaussian
        >>> Gaussian(sigma=2.0).rdp(np.array([2.0, 8.0]), "add_remove").tolist()  # αμ²/2
        [0.25, 1.0]
    """

    kind: ClassVar[str] = ""
    guarantee: ClassVar[Level] = "unconditional"
    reason: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind := vars(cls).get("kind"):
            _REGISTRY[kind] = cls

    @property
    def label(self) -> str:
        """Name of the mechanism in reports."""
        return self.kind

    @property
    def bare(self) -> Mechanism:
        """The mechanism that draws, without a condition that wraps it."""
        return self

    def draw(
        self,
        values: Any,
        noise: NoiseSource,
        by: Callable[[Any, NoiseSource], Tensor] | None = None,
        compared: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """Release private values with fresh noise. Every draw of every mechanism passes through here.

        Args:
            values: what the noise is for; **private**. A tensor, unless ``by`` takes something else.
            noise: where the noise comes from.
            by: draws in place of the mechanism's own :meth:`_draw`, with the same distribution.
            compared: ``values`` in the form in which neighbouring tables are compared, and in the units of the
                mechanism's fields; called where a test observes the draw. By default ``values`` are.

        Returns:
            What ``by`` or :meth:`_draw` returns.
        """
        sample = self._draw if by is None else by
        observer = _OBSERVER.get()
        if observer is None:
            return sample(values, noise)
        return observer(
            self, values if compared is None else compared(values), noise, lambda: sample(values, noise)
        )

    def _draw(self, values: Any, noise: NoiseSource) -> Tensor:
        """The noise of this mechanism on ``values``; for :meth:`draw` alone."""
        raise TypeError(f"{type(self).__name__} defines no draw; give draw a function for it")

    @abc.abstractmethod
    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """Rényi differential privacy of one release.

        Args:
            orders: Rényi orders above 1, shape ``(n,)``, not necessarily whole.
            adjacency: the neighbouring relation.

        Returns:
            ε(α) for each order, shape ``(n,)``, the larger of both directions; ``inf`` where unbounded.
        """

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """Privacy loss distribution of a pair that dominates one release, in both directions.

        The default is a release that gives the record away: valid for every mechanism, so that ε of a mechanism that
        states its RDP alone comes from that.

        Args:
            adjacency: the neighbouring relation.
            discretization: spacing of the loss grid. The result is pessimistic (an upper bound) at any
                spacing and tight for a small one.

        Raises:
            ValueError: where the mechanism is not defined under ``adjacency``; it says what to do.
        """
        return pld.to_distribution(pld.NOTHING_HIDDEN, None, discretization)

    def dominating_pairs(
        self, adjacency: Adjacency
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """The family of pairs of output distributions, for mechanisms without a single worst pair.

        Args:
            adjacency: the neighbouring relation.

        Returns:
            None for mechanisms with one fixed pair. Otherwise ``(p, q)``, each of shape
            ``(pairs, outcomes)``: row i holds the probabilities of the outcomes with the record (p; for
            sampled releases the mixture over its coin) and without it (q), for the i-th way in which the
            rest of the data can be. Every reachable pair is dominated by some row. Each probability is
            accurate relative to itself, also where it is far smaller than 1e-16; a ``q`` of zero next to a
            ``p`` above zero is an infinite likelihood ratio. Rows cover the remove direction as (p, q) and
            the add direction as (q, p).
        """
        return None

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ where one release is *exactly* μ-Gaussian-DP with the pair N(0, 1), N(μ, 1); None otherwise.

        Such releases compose without error: n of them are √n·μ-Gaussian-DP.
        """
        return None

    def loss_scale(self, adjacency: Adjacency) -> tuple[float, float] | None:
        """About (variance, largest value) of the loss, for mechanisms without a finite RDP; sets grids only."""
        return None

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """ε of pure DP, a bound on the loss of any outcome; ``inf`` where there is none."""
        return math.inf

    def to_record(self) -> dict[str, Any]:
        """The mechanism as JSON: its kind and its fields (no count)."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return {"mechanism": self.kind, **{name: getattr(self, name) for name in names}}


@dataclasses.dataclass(frozen=True)
class Charge:
    """Entry of a plan or a ledger: ``count`` releases of one mechanism.

    Attributes:
        mechanism: what is released.
        count: how often.
        caveat: what weakens the guarantee of these releases beyond the mechanism's own conditions, such as noise
            from a seed. It travels with the charge: into records, sums and reports.

    Raises:
        ValueError: if ``count`` is not a whole number from 1 to :data:`~pl_privknn._checks.MAX_COUNT`.

    Example:
        >>> from pl_privknn.privacy import Charge, Laplace
        >>> record = Charge(Laplace(scale=20.0), count=3).to_record()
        >>> record["mechanism"], record["scale"], record["count"]
        ('laplace', 20.0, 3)
    """

    mechanism: Mechanism
    count: int = 1
    caveat: Guarantee = UNCONDITIONAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", check_int("count", self.count, maximum=MAX_COUNT))

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of the cost of these releases: the conditions of the mechanism and of the charge."""
        mechanism = self.mechanism
        if mechanism.guarantee == "unconditional":
            return self.caveat
        return Guarantee(mechanism.guarantee, (f"{mechanism.label}: {mechanism.reason}",)) & self.caveat

    def with_guarantee(self, guarantee: Guarantee) -> Charge:
        """Copy of the charge with a guarantee no stronger than ``guarantee``."""
        return (
            self if guarantee == UNCONDITIONAL else dataclasses.replace(self, caveat=self.caveat & guarantee)
        )

    def to_record(self) -> dict[str, Any]:
        """The charge as JSON: the mechanism's record and ``count`` and its caveat, if any."""
        caveat = (
            {}
            if not self.caveat.reasons
            else {"guarantee": self.caveat.level, "reasons": list(self.caveat.reasons)}
        )
        return {**self.mechanism.to_record(), "count": self.count, **caveat}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Charge:
        """Read what :meth:`to_record` wrote.

        Raises:
            ValueError: for an unknown mechanism, a missing, unknown or invalid field; it names the field.
        """
        if not isinstance(record, dict):
            raise ValueError(f"record {shown(record)} must be a JSON object with a 'mechanism' field")
        fields = dict(record)
        kind = fields.pop("mechanism", None)
        count = fields.pop("count", 1)
        caveat = {name: fields.pop(name) for name in ("guarantee", "reasons") if name in fields}
        if not isinstance(kind, str) or kind not in _REGISTRY:
            for name in _MODULES:  # a process that only reads a ledger has not imported them all
                importlib.import_module(f"{__package__}.{name}")
        if not isinstance(kind, str) or kind not in _REGISTRY:
            raise ValueError(f"mechanism={shown(kind)} is unknown; known are {', '.join(sorted(_REGISTRY))}")
        mechanism_class = _REGISTRY[kind]
        known = {field.name: field for field in dataclasses.fields(mechanism_class)}  # type: ignore[arg-type]
        if unknown := [name for name in fields if name not in known]:
            raise ValueError(f"{kind}: unknown field {shown(unknown[0])}; its fields are {', '.join(known)}")
        if nothing := [name for name, value in fields.items() if value is None]:
            raise ValueError(f"{kind}: {nothing[0]}=None must be a value, or left out")
        missing = [
            name
            for name, field in known.items()
            if name not in fields
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{kind}: field {missing[0]!r} is missing from {shown(record)}")
        try:
            charge = cls(mechanism_class(**fields), count)
            level, reasons = caveat.get("guarantee", "unconditional"), caveat.get("reasons", ())
            return charge.with_guarantee(Guarantee(level, reasons)) if caveat else charge
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error


def check_known(charge: Charge) -> None:
    """Raise ``ValueError`` unless the charge equals the charge that is read from its record."""
    mechanism = charge.mechanism
    if not isinstance(mechanism, Mechanism) or not mechanism.kind:
        raise ValueError(f"mechanism={mechanism!r} must be a Mechanism with a kind")
    if not _is_faithful(mechanism):
        raise ValueError(
            f"{mechanism.kind}: its record does not read back as the same mechanism; give "
            f"{type(mechanism).__name__} a kind and fields of its own"
        )


@functools.lru_cache(maxsize=1024)
def _is_faithful(mechanism: Mechanism) -> bool:
    # Through text, as the ledger keeps it: NaN and infinity are no JSON.
    text = json.dumps(mechanism.to_record(), allow_nan=False)
    return Charge.from_record(json.loads(text)).mechanism == mechanism


def merged(charges: Iterable[Charge]) -> dict[Mechanism, Charge]:
    """Merge charges of equal mechanisms: counts add up, guarantees compose. In order of first appearance."""
    found: dict[Mechanism, Charge] = {}
    for charge in charges:
        known = found.get(charge.mechanism)
        found[charge.mechanism] = (
            charge
            if known is None
            else dataclasses.replace(known.with_guarantee(charge.caveat), count=known.count + charge.count)
        )
    return found


Floats = NDArray[np.float64]

# Below this both probabilities of an outcome count as zero: e^-660 changes no δ that can be asked for.
_TINY = 1e-287


class OutcomeMechanism(Mechanism):
    """Base for releases of one of a few outcomes (pass or fail, a class).

    Subclasses list their pairs in logarithms. Poisson sampling is exact (:func:`sample_pairs`): a record
    that takes part with probability γ turns the pair (P, Q) into ((1−γ)Q + γP, Q), and by joint convexity
    of every divergence the worst case over the samples of the other records is the worst case over the
    family (Zhu, Yu, Chandraker, Wang 2020, Theorem 7; Zhu and Wang 2019 for the mixture).

    RDP takes the maximum over the family and over both directions at each order. The PLD belongs to the
    upper envelope of the family's privacy profiles: for finitely many outcomes each profile is a maximum of
    lines in e^ε, one for each set of most likely outcomes, so the envelope's pair is the upper convex hull
    of the points (q(S), p(S)): no grid is needed to find it.
    """

    @abc.abstractmethod
    def log_dominating_pairs(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Logarithms of :meth:`dominating_pairs`, finite where probabilities underflow."""

    def dominating_pairs(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """The family of pairs; see :meth:`Mechanism.dominating_pairs`."""
        log_p, log_q = self.log_dominating_pairs(adjacency)
        p, q = np.exp(log_p), np.exp(log_q)
        never = np.maximum(p, q) < _TINY
        p[never] = 0.0
        q[never] = 0.0
        return p, q

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release; see :meth:`Mechanism.rdp`."""
        return rdp.pairs_rdp(*self.log_dominating_pairs(adjacency), orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the family's envelope; see :meth:`Mechanism.pld`."""
        remove, add = _envelope(self, adjacency)
        return pld.to_distribution(remove, add, discretization)


def sample_pairs(log_p: Floats, log_q: Floats, rate: float) -> tuple[Floats, Floats]:
    """The pairs ((1−γ)Q + γP, Q) of Poisson sampling at rate γ, in logarithms."""
    if rate in (0.0, 1.0):
        return (log_p if rate else log_q), log_q
    return np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_p), log_q


@functools.lru_cache(maxsize=64)
def _envelope(mechanism: OutcomeMechanism, adjacency: Adjacency) -> tuple[pld.LossMeasure, pld.LossMeasure]:
    p, q = mechanism.dominating_pairs(adjacency)
    return envelope(p, q), envelope(q, p)


def envelope(upper: Floats, lower: Floats) -> pld.LossMeasure:
    """Pair that dominates every row of a family, as atoms of its loss log(upper/lower).

    Args:
        upper: shape ``(pairs, outcomes)``.
        lower: shape ``(pairs, outcomes)``.

    The hull is walked in two halves. Points of sets with lower mass up to ½ are (lower(S), upper(S)) and
    hold large losses; beyond, the complements' (1−lower(S), 1−upper(S)) are used, so that small
    probabilities are never a difference of numbers near 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(upper > 0, upper / lower, 0.0)
    order = np.argsort(-ratio, axis=1, kind="stable")
    upper = np.take_along_axis(upper, order, axis=1)
    lower = np.take_along_axis(lower, order, axis=1)
    heads_x, heads_y = np.cumsum(lower, axis=1)[:, :-1].ravel(), np.cumsum(upper, axis=1)[:, :-1].ravel()
    tails_x = np.cumsum(lower[:, ::-1], axis=1)[:, ::-1][:, 1:].ravel()
    tails_y = np.cumsum(upper[:, ::-1], axis=1)[:, ::-1][:, 1:].ravel()
    hull = _upper_hull(heads_x, heads_y)
    x, y = np.append(heads_x[hull], 1.0), np.append(heads_y[hull], 1.0)
    cx, cy = np.append(tails_x[hull], 0.0), np.append(tails_y[hull], 0.0)
    lower_mass = np.where(x <= 0.5, np.diff(x, prepend=0.0), -np.diff(cx, prepend=1.0))
    upper_mass = np.where(x <= 0.5, np.diff(y, prepend=0.0), -np.diff(cy, prepend=1.0))
    keep = upper_mass > 0
    upper_mass, lower_mass = upper_mass[keep], np.maximum(lower_mass[keep], 0.0)
    with np.errstate(divide="ignore"):
        losses = np.log(upper_mass) - np.log(lower_mass)
    return pld.LossMeasure(losses, upper_mass, lower_mass)


def _upper_hull(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Indices, by ascending x, of the points on the upper hull of all points with (0, 0) and (1, 1)."""
    order = np.lexsort((y, x))
    hull: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    xs, ys = x.tolist(), y.tolist()
    for i in [*order.tolist(), -1]:
        px, py = (1.0, 1.0) if i < 0 else (xs[i], ys[i])
        while len(hull) >= 2:
            (ax, ay, _), (bx, by, _) = hull[-2], hull[-1]
            if (by - ay) * (px - ax) > (py - ay) * (bx - ax):
                break
            hull.pop()
        # The first point stays unless a point straight above it comes.
        hull.append((px, py, i))
    return np.array([i for _, _, i in hull if i >= 0], dtype=np.int64)


class DominatingPair(Mechanism):
    """Base for mechanisms that can list the outcomes of their worst pair."""

    @abc.abstractmethod
    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Log-probabilities (log p, log q) of the outcomes with and without the record, shape ``(n,)``."""

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release: the larger divergence of both directions."""
        log_p, log_q = self.log_pair(adjacency)
        return rdp.pairs_rdp(log_p[None, :], log_q[None, :], orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots."""
        remove = _measure(self, adjacency)
        return pld.to_distribution(remove, remove.reversed(), discretization)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """Largest loss of any outcome."""
        log_p, log_q = self.log_pair(adjacency)
        return float(np.max(np.abs(log_p - log_q)))


@functools.lru_cache(maxsize=32)
def _measure(mechanism: DominatingPair, adjacency: Adjacency) -> pld.LossMeasure:
    log_p, log_q = mechanism.log_pair(adjacency)
    return pld.LossMeasure(log_p - log_q, np.exp(log_p), np.exp(log_q))


#: Default of the fields that depend on what is noised. Where they are not stated, they become what
#: :meth:`VoteNoise.settle` says, or what :meth:`VoteNoise.for_votes` gets.
UNSTATED: Any = None

#: Noise on whole numbers is rounded to multiples of this, so that ties are rare. A power of two.
STEP = 2.0**-10

_Noise = TypeVar("_Noise", bound="VoteNoise")


class VoteNoise(Mechanism):
    """Base class of noise with which the class with the most votes is chosen.

    Example:
        >>> from pl_privknn.privacy.mechanisms import Gaussian, VoteNoise
        >>> noise = Gaussian(sigma=25.0).for_votes(l1=2.0, l2=2**0.5, rate=0.15)
        >>> isinstance(noise, VoteNoise), noise.deviation, noise.sampling_rate
        (True, 25.0, 0.15)
    """

    _unstated: ClassVar[frozenset[str]] = frozenset()

    @property
    @abc.abstractmethod
    def deviation(self) -> float:
        """Standard deviation of the noise on one vote."""

    @abc.abstractmethod
    def argmax(self, votes: Tensor, noise: NoiseSource) -> Tensor:
        """Draw noise, and choose the class with the largest noisy count.

        Args:
            votes: votes of each class, shape ``(..., c)``.
            noise: where the noise comes from.

        Returns:
            int64, shape ``(...)``.
        """

    def for_votes(self: _Noise, l1: float, l2: float, rate: float = 1.0) -> _Noise:
        """Complete the noise for votes, or other sums, whose sensitivity is known.

        Args:
            l1: L1 distance that one record can move the votes.
            l2: L2 distance.
            rate: Poisson rate in (0, 1] at which records take part.

        Returns:
            The frozen mechanism that both draws and accounts.

        Raises:
            ValueError: if this mechanism states another value.
        """
        return self._completed(l1_sensitivity=l1, l2_sensitivity=l2, sampling_rate=rate)

    def settle(self, **defaults: Any) -> None:
        """Set unstated fields to their values, and remember which they were; for ``__post_init__``."""
        unstated = frozenset(name for name in defaults if getattr(self, name) is UNSTATED)
        for name in unstated:
            object.__setattr__(self, name, defaults[name])
        object.__setattr__(self, "_unstated", unstated)

    def _completed(self: _Noise, **known: Any) -> _Noise:
        names = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        wanted = {name: value for name, value in known.items() if name in names}
        for name, value in wanted.items():
            stated = getattr(self, name)
            if name in self._unstated or stated == value:
                continue
            raise ValueError(f"noise.{name}={stated!r} differs from the labeler's {value!r}; leave it out")
        completed: _Noise = dataclasses.replace(self, **wanted)  # type: ignore[type-var]
        return completed


class AdditiveNoise(VoteNoise):
    """Base class of noise that is added to, and charged for, every number of a release, so that all may be shown.

    Example:
        >>> import torch
        >>> from pl_privknn.privacy import Gaussian, SeededNoise
        >>> noisy = Gaussian(sigma=25.0).add_noise(torch.tensor([200, 60, 40]), SeededNoise(0))
        >>> noisy.shape, noisy.dtype
        (torch.Size([3]), torch.float64)
    """

    def add_noise(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Return ``values`` plus fresh noise, as a new float64 tensor of the same shape.

        Whole numbers x get noise rounded to :data:`STEP`: x + round(Z) = round(x + Z) is post-processing of the
        release with ideal noise, costs what that costs, and no last bits reveal x (Mironov 2012). Sums of weights
        get float64 noise.
        """
        return self.draw(values, noise)

    @abc.abstractmethod
    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """:meth:`add_noise`, for subclasses to define."""

    def argmax(self, votes: Tensor, noise: NoiseSource) -> Tensor:
        """Add noise, and return the class with the largest noisy count; see :meth:`VoteNoise.argmax`."""
        return self.add_noise(votes, noise).argmax(dim=-1)
