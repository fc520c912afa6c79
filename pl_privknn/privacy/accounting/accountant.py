"""The accountant: total privacy cost of a list of charges under one adjacency.

Three totals, all valid upper bounds for releases chosen adaptively (each may depend on earlier answers):
Rényi DP with the improved and with the classic conversion, and privacy loss distributions. A fourth, the
exact worst case over adaptive adversaries, comes from :mod:`pl_privknn.privacy.accounting.exact`. ε is the
smallest of those that are computed; each holds by itself, so their minimum does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_choice, check_non_negative, check_open_unit
from pl_privknn.privacy.accounting import pld, rdp
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
    unit: Unit = "record"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return dataclasses.asdict(self)


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
    )


def epsilon_for_delta(charges: Sequence[Charge], delta: float, adjacency: Adjacency = "add_remove") -> float:
    """ε at which the composition is (ε, δ)-DP, by the better of RDP and PLD; see :func:`account`.

    Raises:
        ValueError: as :func:`account`.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> round(epsilon_for_delta([Charge(Gaussian(sigma=4.0))], delta=1e-5), 3)
        0.926
    """
    return account(charges, delta=delta, adjacency=adjacency, exact=False).epsilon


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
    """Result of an accountant; infinity, a valid bound, where arithmetic or memory does not suffice."""
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
    variance = sum(charge.count * loss_variance(charge.mechanism, adjacency) for charge in charges)
    releases = sum(charge.count for charge in parts) + (mu > 0)
    # Heavy-tailed releases (much noise for most records, little for a sampled one) need a grid that fits memory.
    span = max((loss_span(charge.mechanism, adjacency) for charge in parts), default=0.0)
    if not (span <= LARGEST_LOSS and mu <= LARGEST_LOSS):
        raise OverflowError(f"a loss of {max(span, mu):g}")
    step = pld.choose_discretization(variance, releases, span)
    while True:
        pieces: list[tuple[PrivacyLossDistribution, int]] = []
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


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """Running total of Rényi divergences at one fixed order and at order ∞.

    If every release is admitted only while the sum stays within a bound ρ fixed beforehand, the whole is
    (order, ρ)-RDP although mechanisms and parameters may depend on all earlier answers (Feldman and Zrnic
    2021; Haney et al. 2023 for interleaved runs). For minima over several orders and for privacy
    loss distributions that is not proven. ρ turns into ε by the improved conversion (Balle et al. 2020;
    Canonne et al. 2020).

    Order ∞ may join the one order: a sum of pure ε bounds the loss of every outcome, whatever the releases depended
    on. Take E, any set of outcomes, apart into those whose pure ε add up to at most ε, for which
    P(E₁) ≤ e^ε Q(E₁) outcome by outcome, and the others, all of which the filter at the one order admits:
    P(E₂) ≤ e^ε Q(E₂) + δ. Together that is (ε, δ).

    Attributes:
        order: α > 1, fixed before the first release.
        delta: δ of the budget.
        adjacency: neighbouring relation.
    """

    order: float
    delta: float
    adjacency: Adjacency

    def total(self, charges: Iterable[Charge]) -> float:
        """ρ: sum of the charges' Rényi divergences at the order; ``inf`` where one has none there."""
        return sum(
            charge.count * _divergence(charge.mechanism, self.order, self.adjacency) for charge in charges
        )

    def epsilon(self, charges: Iterable[Charge]) -> float:
        """ε of :meth:`total`, or the sum of pure ε where that is less."""
        releases = list(charges)
        total = self.total(releases)
        by_order = max(0.0, total + _conversion(self.order, self.delta)) if total else 0.0
        return min(by_order, total_pure_epsilon(releases, self.adjacency))


def best_order(max_epsilon: float, delta: float) -> float:
    """Order at which a Gaussian mechanism that spends (ε, δ) exactly has its best conversion.

    For a Gaussian ε(α) = αB, and the order that admits the largest B is the one sought.
    """
    orders = 1 + np.geomspace(1e-3, 1e4, 4000)
    conversion = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(orders[np.argmax((max_epsilon - conversion) / orders)])


def _conversion(order: float, delta: float) -> float:
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@functools.lru_cache(maxsize=1024)
def _divergence(mechanism: Mechanism, order: float, adjacency: Adjacency) -> float:
    return float(mechanism.rdp(np.array([order]), adjacency)[0])
