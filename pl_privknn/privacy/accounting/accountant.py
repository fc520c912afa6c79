"""The accountant: total privacy cost of a list of charges under one adjacency.

Three totals, all valid upper bounds for releases chosen adaptively (each may depend on earlier answers):
Rényi DP with the improved and with the classic conversion, and privacy loss distributions. A fourth, the
exact worst case over adaptive adversaries, comes from :mod:`pl_privknn.privacy.accounting.exact`. ε is the
smallest of those that are computed; each holds by itself, so their minimum does.

**What ε means in error rates.** An attacker who sees everything that is released decides whether a record was there.
Of all such tests, the best one at each false-positive rate follows from the privacy loss distribution (Neyman and
Pearson; Dong, Roth, Su 2022; Zhu, Dong, Wang 2022): it says "there" where the loss is large. A dominating pair bounds
every test on the releases, so the rates here are upper bounds, like ε, and need no δ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pl_privknn._checks import at_most, check_choice, check_non_negative, check_open_unit
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.accounting.pld import Composition, Direction
from pl_privknn.privacy.mechanisms.base import (
    Adjacency,
    Charge,
    Level,
    Mechanism,
    Unit,
    check_adjacency,
    check_unit,
    merged,
    weakest,
)

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """Total privacy cost of a list of charges; ``epsilon`` is the smallest of the valid bounds.

    Attributes:
        epsilon: the smallest of the valid totals below (improved RDP, PLD and, where computed, exact).
        epsilon_rdp: from RDP with the improved conversion.
        epsilon_rdp_classic: from RDP with the classic conversion over orders up to 1024, as papers print it.
        epsilon_pld: from privacy loss distributions.
        epsilon_exact: exact worst case; None where it was not asked for or does not apply.
        delta: δ of all of them.
        adjacency: neighbouring relation of all of them.
        guarantee: that of the weakest charge: ``"unconditional"``, ``"conditional"`` or ``"none"``
            (see :class:`~pl_privknn.privacy.mechanisms.base.Guarantee`).
        reason: what weakens it, with the mechanisms that it belongs to; empty if unconditional.
        conditional: names of the conditional mechanisms.
        unit: what one neighbouring table has more than the other, a record or a person.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, account
        >>> report = account([Charge(Gaussian(sigma=4.0))], delta=1e-5)
        >>> f"{report.epsilon:.3f}, by Rényi DP {report.epsilon_rdp:.3f}, {report.guarantee}"
        '0.926, by Rényi DP 1.012, unconditional'
    """

    epsilon: float
    epsilon_rdp: float
    epsilon_rdp_classic: float
    epsilon_pld: float
    epsilon_exact: float | None
    delta: float
    adjacency: Adjacency
    guarantee: Level = "unconditional"
    reason: str = ""
    conditional: tuple[str, ...] = ()
    unit: Unit = "record"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {**dataclasses.asdict(self), "conditional": list(self.conditional)}


Method = Literal["best", "rdp", "pld"]
METHODS: tuple[Method, ...] = ("best", "rdp", "pld")

#: Loss of one release, in nats, beyond which no privacy loss distribution is made: Rényi orders say enough of it.
LARGEST_LOSS = 1e6

# Order at which twice the Rényi divergence over the order approximates the variance of the loss.
_VARIANCE_ORDER = int(np.searchsorted(rdp.ORDERS, 1.05))


def read_records(records: Sequence[dict[str, Any]]) -> list[Charge]:
    """Read a JSON list of records.

    Raises:
        ValueError: naming the record's place in the list, the field, its value and what it must be.

    Example:
        >>> from pl_privknn.privacy import read_records
        >>> read_records([{"mechanism": "laplace", "scale": 20.0, "count": 3}])[0].count
        3
    """
    if not isinstance(records, (list, tuple)):
        raise ValueError(
            f"records: found {type(records).__name__}; expected a JSON list of objects with a 'mechanism' field"
        )
    charges = []
    for place, record in enumerate(records):
        try:
            charges.append(Charge.from_record(record))
        except ValueError as error:
            raise ValueError(f"record {place}: {error}") from error
    return charges


def merge_charges(charges: Iterable[Charge]) -> list[Charge]:
    """Add up the counts of equal mechanisms and compose their guarantees, in order of first appearance.

    Releases in which no record takes part (a sampling rate of 0) cost nothing and are left out.
    """
    return [c for c in merged(charges).values() if getattr(c.mechanism, "sampling_rate", 1.0) > 0]


def account(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
    unit: Unit = "record",
) -> PrivacyReport:
    """Total cost of ``charges`` at ``delta``.

    Equal charges are merged first, so a million identical releases cost no more time than ten. Totals are remembered.

    Args:
        charges: releases, in any order; adaptivity is covered.
        delta: target δ in (0, 1).
        adjacency: neighbouring relation of every charge; sensitivities are taken to be under it.
        exact: also compute the exact worst case where it applies (seconds).
        unit: what sensitivities are about; it changes no figure.

    Raises:
        ValueError: for a δ outside (0, 1), an unknown adjacency or unit, or a mechanism that is not defined under it.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, account
        >>> round(account([Charge(Gaussian(sigma=40.0, l2_sensitivity=2**0.5), 100)], delta=1e-5).epsilon, 3)
        1.356
    """
    delta = check_open_unit("delta", delta)
    adjacency = check_adjacency(adjacency)
    report = _account(tuple(merge_charges(charges)), delta, adjacency, exact)
    return dataclasses.replace(report, unit=check_unit(unit))


@functools.lru_cache(maxsize=1024)
def _account(releases: tuple[Charge, ...], delta: float, adjacency: Adjacency, exact: bool) -> PrivacyReport:
    if not releases:
        return PrivacyReport(0.0, 0.0, 0.0, 0.0, 0.0 if exact else None, delta, adjacency)
    by_rdp = _rdp_epsilon(releases, delta, adjacency)
    by_pld = _pld_epsilon(releases, delta, adjacency)
    by_induction = None
    if exact:
        from pl_privknn.privacy.accounting.exact import exact_epsilon  # loads a compiler

        by_induction = exact_epsilon(releases, delta=delta, adjacency=adjacency)
    guarantee = weakest(charge.guarantee for charge in releases)
    conditional = [c.mechanism.label for c in releases if c.mechanism.guarantee == "conditional"]
    return PrivacyReport(
        epsilon=min(value for value in (by_rdp, by_pld, by_induction) if value is not None),
        epsilon_rdp=by_rdp,
        epsilon_rdp_classic=rdp.epsilon_classic(rdp.ORDERS, total_rdp(releases, adjacency), delta),
        epsilon_pld=by_pld,
        epsilon_exact=by_induction,
        delta=delta,
        adjacency=adjacency,
        guarantee=guarantee.level,
        reason=guarantee.reason,
        conditional=tuple(dict.fromkeys(conditional)),
    )


def epsilon_for_delta(
    charges: Sequence[Charge], delta: float, adjacency: Adjacency = "add_remove", method: Method = "best"
) -> float:
    """ε at which the composition is (ε, δ)-DP, by RDP, by PLD or by the better of both.

    Raises:
        ValueError: as :func:`account`, and for an unknown ``method``.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> round(epsilon_for_delta([Charge(Gaussian(sigma=4.0))], delta=1e-5), 3)
        0.926
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    check_choice("method", method, METHODS)
    releases = merge_charges(charges)
    if not releases:
        return 0.0
    totals = []
    if method != "pld":
        totals.append(_rdp_epsilon(releases, delta, adjacency))
    if method != "rdp":
        totals.append(_pld_epsilon(releases, delta, adjacency))
    return min(totals)


def delta_for_epsilon(
    charges: Sequence[Charge], epsilon: float, adjacency: Adjacency = "add_remove", method: Method = "best"
) -> float:
    """δ at which the composition is (ε, δ)-DP, by RDP, by PLD or by the better of both.

    Raises:
        ValueError: for a negative ε, and as :func:`epsilon_for_delta`.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, delta_for_epsilon
        >>> f"{delta_for_epsilon([Charge(Gaussian(sigma=4.0))], epsilon=1.0):.1e}"
        '2.9e-06'
    """
    epsilon, adjacency = check_non_negative("epsilon", epsilon), check_adjacency(adjacency)
    check_choice("method", method, METHODS)
    releases = merge_charges(charges)
    if epsilon >= total_pure_epsilon(releases, adjacency):  # of no release at all, too
        return 0.0
    log_delta = float(rdp.log_delta_improved(rdp.ORDERS, total_rdp(releases, adjacency), epsilon))
    by_rdp = math.exp(log_delta)
    if method == "rdp":
        return by_rdp
    mu, parts = gaussian_and_others(releases, adjacency)
    # The composition is accurate near the δ that RDP points to.
    near = math.exp(min(max(log_delta - 1, -600.0), -1.0))
    by_pld = _carried(
        lambda: (
            float(compose_charges(releases, near, adjacency, epsilon).delta(np.array([epsilon]))[0])
            if parts
            else pld.gaussian_delta(mu, epsilon)
        )
    )
    return min(1.0, by_pld) if method == "pld" else min(by_rdp, by_pld)


def total_rdp(charges: Sequence[Charge], adjacency: Adjacency) -> NDArray[np.float64]:
    """RDP of the composition at :data:`pl_privknn.privacy.accounting.rdp.ORDERS`: curves add up (Mironov 2017)."""
    total = np.zeros(len(rdp.ORDERS))
    with np.errstate(over="ignore"):
        for charge in charges:
            total += charge.count * _curve(charge.mechanism, adjacency)
    return total


@functools.lru_cache(maxsize=256)
def _curve(mechanism: Mechanism, adjacency: Adjacency) -> NDArray[np.float64]:
    """The mechanism's RDP; infinite, which is always valid, at orders where float64 overflows."""
    try:
        with np.errstate(all="ignore"):
            curve = mechanism.rdp(rdp.ORDERS, adjacency)
    except ArithmeticError:
        curve = np.full(len(rdp.ORDERS), math.inf)
    curve = np.where(np.isnan(curve), math.inf, curve)
    curve.setflags(write=False)
    return curve


def _carried(total: Callable[[], float]) -> float:
    """A total, or infinity, which is always valid, where arithmetic or memory does not suffice."""
    try:
        with np.errstate(all="ignore"):
            value = total()
    except (ArithmeticError, MemoryError):
        return math.inf
    return math.inf if math.isnan(value) else value


def gaussian_and_others(charges: Sequence[Charge], adjacency: Adjacency) -> tuple[float, list[Charge]]:
    """Split charges into exactly Gaussian releases, as one total μ, and all others."""
    squares, others = 0.0, []
    for charge in charges:
        mu = charge.mechanism.gaussian_mu(adjacency)
        if mu is None:
            others.append(charge)
        else:
            squares += charge.count * mu * mu
    return math.sqrt(squares), others


def total_pure_epsilon(charges: Sequence[Charge], adjacency: Adjacency) -> float:
    """Largest possible total loss: the Rényi divergence of order ∞."""
    return sum(charge.count * charge.mechanism.pure_epsilon(adjacency) for charge in charges)


def _rdp_epsilon(charges: Sequence[Charge], delta: float, adjacency: Adjacency) -> float:
    by_orders = rdp.epsilon_improved(rdp.ORDERS, total_rdp(charges, adjacency), delta)
    return min(by_orders, total_pure_epsilon(charges, adjacency))


def _pld_epsilon(charges: Sequence[Charge], delta: float, adjacency: Adjacency) -> float:
    mu, parts = gaussian_and_others(charges, adjacency)
    if not parts:
        return _carried(lambda: pld.gaussian_epsilon(mu, delta))
    by_grid = _carried(lambda: compose_charges(charges, delta, adjacency).epsilon(delta))
    # The grid may round the largest loss up.
    return min(by_grid, total_pure_epsilon(charges, adjacency))


def compose_charges(
    charges: Sequence[Charge], delta: float, adjacency: Adjacency, epsilon: float | None = None
) -> pld.Composition:
    """Total loss of merged charges, accurate near ``delta`` (see :func:`pld.compose`).

    Raises:
        ArithmeticError, MemoryError: where float64 or memory can't carry it.
    """
    mu, parts = gaussian_and_others(charges, adjacency)
    # Mechanisms that only have an RDP curve compose as curves, which is tighter than as pairs made of them.
    curves = [charge for charge in parts if type(charge.mechanism).pld is Mechanism.pld]
    parts = [charge for charge in parts if type(charge.mechanism).pld is not Mechanism.pld]
    variance = sum(charge.count * loss_variance(charge.mechanism, adjacency) for charge in charges)
    releases = sum(charge.count for charge in parts) + (mu > 0) + bool(curves)
    # Heavy-tailed releases (much noise for most records, little for a sampled one) need a grid that fits memory.
    span = max((loss_span(charge.mechanism, adjacency) for charge in parts), default=0.0)
    if not (span <= LARGEST_LOSS and mu <= LARGEST_LOSS):
        raise OverflowError(f"a loss of {max(span, mu):g}")
    step = pld.choose_discretization(variance, releases, span)
    curve = total_rdp(curves, adjacency) if curves else None
    if curve is not None:
        step = max(step, 2.0 ** math.ceil(math.log2(pld.rdp_reach(rdp.ORDERS, curve)) - 19))
    while True:
        pieces: list[tuple[PrivacyLossDistribution, int]] = []
        if curve is not None:
            pieces.append((pld.from_rdp(rdp.ORDERS, curve, step), 1))
        if mu > 0:
            pieces.append((pld.to_distribution(pld.gaussian_losses(mu, 1.0, step), None, step), 1))
        pieces += [(charge.mechanism.pld(adjacency, step), charge.count) for charge in parts]
        try:
            return pld.compose(pieces, delta, epsilon)
        except pld.GridTooFine as error:
            step *= error.factor


def loss_variance(mechanism: Mechanism, adjacency: Adjacency) -> float:
    """Approximate variance of one release's loss, from its RDP near order 1."""
    if (scale := mechanism.loss_scale(adjacency)) is not None:
        return scale[0]
    return 2 * float(_curve(mechanism, adjacency)[_VARIANCE_ORDER]) / float(rdp.ORDERS[_VARIANCE_ORDER])


def loss_span(mechanism: Mechanism, adjacency: Adjacency) -> float:
    """Approximate largest loss of one release but for a mass of e^−75 (Chernoff's bound from its RDP)."""
    if (scale := mechanism.loss_scale(adjacency)) is not None:
        return scale[1]
    tail = float(np.min(_curve(mechanism, adjacency) + 75.0 / (rdp.ORDERS - 1)))
    return min(tail, mechanism.pure_epsilon(adjacency))


Floats = NDArray[np.float64]

#: False-positive rates that reports name.
RATES = (0.001, 0.01, 0.1)
# δ near which totals are composed: masses are hardly tilted there, and what is cut off is below 1e-12 in all.
_NEAR = 0.01
# Error rates below this one are lost in what is cut off.
_SMALLEST_RATE = 1e-9
# Losses above this have no float64 ratio.
_LARGEST_LOSS = 700.0


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Trade-off curve: bounds on an attacker's missed detections at each rate of false positives.

    Attributes:
        totals: distributions of the total loss, each of which dominates the releases.
        gaussian: μ where the releases are together exactly one Gaussian release, so that no grid is needed.
        smallest_rate: the error rate down to which :attr:`mu` holds.

    Example:
        >>> from pl_privknn.privacy import Charge, PureDP, trade_off
        >>> found = trade_off([Charge(PureDP(epsilon=1.0))])
        >>> {name: round(rate, 3) for name, rate in found.to_dict().items()}["advantage"]
        0.462
    """

    totals: tuple[Composition, ...]
    gaussian: float | None
    smallest_rate: float

    def true_positive_rate(self, fpr: ArrayLike) -> Floats:
        """Largest true-positive rate at each false-positive rate in [0, 1], same shape.

        The attacker's question may be put either way, "was the record there" or "was it not"; this is the larger.

        Raises:
            ValueError: for a rate outside [0, 1].
        """
        rates = np.asarray(fpr, dtype=np.float64)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise ValueError(f"fpr={fpr!r} must lie in [0, 1]")
        if self.gaussian is not None:
            return _gaussian_rate(self.gaussian, rates)
        ways = [
            [_rate(total.remove, total.add, rates) for total in self.totals],
            [_rate(total.add, total.remove, rates) for total in self.totals],
        ]
        return np.max([np.min(way, axis=0) for way in ways], axis=0)

    @property
    def advantage(self) -> float:
        """Largest difference of true- and false-positive rate; the total variation distance, δ at ε = 0."""
        if self.gaussian is not None:
            return math.erf(self.gaussian / math.sqrt(8))
        zero = np.zeros(1)
        return min(float(side.delta(zero)[0]) for t in self.totals for side in (t.remove, t.add))

    @functools.cached_property
    def mu(self) -> float:
        """μ such that no test does better than the best one against a single Gaussian release of that μ.

        Exact for Gaussian releases. For others it covers all tests whose error rates are both at least
        :attr:`smallest_rate`: rarer events may reveal more, as where a sampled record is drawn every time.
        """
        if self.gaussian is not None:
            return self.gaussian
        return min(_mu(total, self.smallest_rate) for total in self.totals)

    def to_dict(self) -> dict[str, float]:
        """The rates at :data:`RATES`, the advantage and μ, as reports show them."""
        found = self.true_positive_rate(RATES)
        return {
            **{f"tpr_at_fpr_{rate:g}": float(value) for rate, value in zip(RATES, found, strict=True)},
            "advantage": self.advantage,
            "gaussian_dp_mu": self.mu,
        }

    def plot(self, path: str | Path) -> None:
        """Plot the true- against the false-positive rate to a file in the format of its suffix.

        Raises:
            ValueError: for an ending that matplotlib doesn't know.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rates = np.geomspace(1e-4, 1.0, 400)
        figure = Figure(figsize=(5.5, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(rates, self.true_positive_rate(rates), label="strongest attack, at most")
        if self.gaussian is None and math.isfinite(self.mu):
            bound = _gaussian_rate(self.mu, rates)
            axes.plot(rates, bound, ":", label=f"Gaussian DP with μ = {self.mu:.3g}")
        axes.plot(rates, rates, "--", color="gray", label="guessing")
        axes.plot(RATES, self.true_positive_rate(RATES), "o", color="tab:blue")
        axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.1))
        axes.set_xlabel("false-positive rate")
        axes.set_ylabel("true-positive rate")
        axes.legend()
        figure.savefig(str(path))


def trade_off(
    charges: Sequence[Charge],
    *,
    delta: float = 1e-5,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> TradeOff:
    """Error rates of the best attack on all releases together, chosen adaptively or not.

    Args:
        charges: as in :func:`~pl_privknn.privacy.accounting.accountant.account`.
        delta: the error rate down to which :attr:`TradeOff.mu` is to hold (to 1e-9 at least); the rates themselves
            need none.
        adjacency: neighbouring relation of every charge.
        exact: use the exact worst case too, where it applies (seconds).

    Raises:
        ValueError: for a δ outside (0, 1), an unknown adjacency, or a mechanism that is not defined under it.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, trade_off
        >>> found = trade_off([Charge(Gaussian(sigma=4.0))])  # ε = 0.926 at δ = 1e-5
        >>> found.true_positive_rate([0.001, 0.01, 0.1]).round(4).tolist(), round(found.mu, 2)
        ([0.0023, 0.0189, 0.1511], 0.25)
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    return _trade_off(tuple(merge_charges(charges)), delta, adjacency, exact)


@functools.lru_cache(maxsize=16)
def _trade_off(charges: tuple[Charge, ...], delta: float, adjacency: Adjacency, exact: bool) -> TradeOff:
    smallest = max(delta, _SMALLEST_RATE)
    mu, others = gaussian_and_others(charges, adjacency)
    if not others:
        return TradeOff((), mu, smallest)
    # What dominates everything: a release that gives the record away.
    totals = [_symmetric(Direction(np.zeros(1), np.zeros(1), 1.0))]
    try:
        with np.errstate(all="ignore"):
            totals.append(compose_charges(charges, _NEAR, adjacency))
    except (ArithmeticError, MemoryError):
        pass
    if (pure := total_pure_epsilon(charges, adjacency)) < _LARGEST_LOSS:
        # Randomised response dominates every ε-DP release (Kairouz, Oh, Viswanath 2015, Theorem 3.4).
        likely = 1 / (1 + math.exp(-pure))
        totals.append(_symmetric(Direction(np.array([pure]), np.array([likely]), 0.0)))
    if exact:
        from pl_privknn.privacy.accounting.exact import exact_compositions  # loads a compiler

        totals += exact_compositions(charges, delta=delta, adjacency=adjacency, near=_NEAR)
    return TradeOff(tuple(totals), None, smallest)


def attack_in_words(rates: Mapping[str, Any], unit: str = "record") -> str:
    """Sentence about the strongest attack from the result of :meth:`TradeOff.to_dict`."""
    return (
        f"detects at most {at_most(100 * rates['tpr_at_fpr_0.01'], 3)} % of the private {unit}s at 1 % false alarms; "
        f"guessing detects 1 % (advantage {at_most(rates['advantage'], 3)}, Gaussian DP μ = "
        f"{at_most(rates['gaussian_dp_mu'], 3)})"
    )


def _symmetric(direction: Direction) -> Composition:
    return Composition(direction, direction)


def _gaussian_rate(mu: float, fpr: Floats) -> Floats:
    from scipy.special import ndtr, ndtri

    return np.maximum(ndtr(ndtri(fpr) + mu), fpr)


def _rate(ahead: Direction, behind: Direction, fpr: Floats) -> Floats:
    """TPR at each FPR where ``ahead`` is the loss under the distribution that the test is to find.

    Every ε gives a valid line, TPR ≤ e^ε·FPR + δ(ε); the loss of the atom at which the test's threshold lies
    gives the tightest. Losses below 0 come from the other direction, with the roles of both errors exchanged.
    """
    upper, lower = ahead.above
    at = _last_reaching(lower, fpr)
    ratio = np.exp(np.minimum(ahead.losses, _LARGEST_LOSS))
    found = upper[at + 1] + ratio[np.maximum(at, 0)] * np.maximum(fpr - lower[at + 1], 0.0)
    found = np.where(at >= 0, found, fpr + float(ahead.delta(np.zeros(1))[0]) - ahead.infinity)
    found = np.minimum(found + ahead.infinity, 1.0)

    upper, lower = behind.above
    rest = 1.0 - fpr
    reached = upper + behind.infinity
    at = _last_reaching(reached, rest)
    ratio = np.exp(-behind.losses)
    missed = lower[at + 1] + ratio[np.maximum(at, 0)] * np.maximum(rest - reached[at + 1], 0.0)
    missed = np.where(at >= 0, missed, rest - float(behind.delta(np.zeros(1))[0]))
    return np.clip(np.minimum(found, 1.0 - missed), fpr, 1.0)


def _last_reaching(falling: Floats, values: Floats) -> NDArray[np.int64]:
    """Last atom at and above which at least each value lies; −1 where all atoms together fall short."""
    at: NDArray[np.int64] = len(falling) - 1 - np.searchsorted(falling[::-1], values, side="left")
    return np.minimum(at, len(falling) - 2)


def _mu(total: Composition, smallest: float) -> float:
    """Smallest μ whose trade-off covers the total's wherever both error rates are at least ``smallest``.

    The total's trade-off is a polygon and the Gaussian one is concave, so its corners and the ends decide.
    """
    from scipy.special import ndtri

    edge = np.array([smallest])
    ends = [_rate(*pair, edge) for pair in ((total.remove, total.add), (total.add, total.remove))]
    largest = float(np.max(ndtri(np.concatenate(ends)) - ndtri(edge)))
    for side in (total.remove, total.add):
        upper, lower = side.above
        reached = upper + side.infinity
        corners = (lower >= smallest) & (reached <= 1 - smallest)
        largest = max(largest, float(np.max(ndtri(reached[corners]) - ndtri(lower[corners]), initial=0.0)))
    return largest
