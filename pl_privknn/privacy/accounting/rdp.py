"""Rényi differential privacy: curves computed to full relative accuracy, and their conversions to (ε, δ).

Every curve here is built on the identity ``A(α) = E_q[(p/q)^α] = 1 + E_q[φ_α(p/q − 1)]`` with
``φ_α(w) = (1 + w)^α − 1 − αw ≥ 0``, which holds because ``E_q[p/q] = 1``. Sums of φ have no cancellation,
so RDP values of 1e-12 for one release are as accurate as large ones, and stay so when multiplied by millions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Real Rényi orders, dense from just above 1 (large ε) to 100,000 (tiny ε).
ORDERS: Floats = np.sort(np.append(1.0 + np.geomspace(1e-2, 1e5, 561), 1024.0))
ORDERS.setflags(write=False)

#: Largest order of the classic conversion. It is there for comparison with published figures, and the code
#: behind those stops at about this order; larger ones would print a smaller ε than the papers could.
MAX_CLASSIC_ORDER = 1024.0

# Width of a cell of the quadrature grid, standard deviations, and the depth below the peak, nats, at which
# cells are left out.
_CELL = 0.5
_DROP = 80.0

# Orders of a sampled Gaussian that are integrated at once.
_ORDERS_AT_ONCE = 32

# Numbers that are worked on at once; few enough for the processor's cache.
_AT_ONCE = 1 << 14

# Where the quadrature of the sampled Gaussian would need more nodes than are worth computing.
_MAX_TILT = 2000.0


def sampled_loss(losses: Floats, sampling_rate: float) -> Floats:
    """Loss log(1−γ+γe^u) of the Poisson-sampled pair where the loss without sampling is u."""
    if sampling_rate in (0.0, 1.0):
        return sampling_rate * losses
    near = np.log1p(sampling_rate * np.expm1(np.minimum(losses, 1.0)))
    far = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + losses)
    return np.where(losses < 1.0, near, far)


def excess(order: float | Floats, log_ratio: Floats) -> Floats:
    """φ_α(w) = (1 + w)^α − 1 − αw for w = exp(log_ratio) − 1, accurate for tiny w; may overflow to inf."""
    w, a = np.expm1(log_ratio), np.asarray(order, dtype=np.float64)
    use_series = np.maximum(a, 6.0) * np.abs(w) < 1e-2
    found: Floats = np.zeros(np.shape(use_series))
    if not use_series.all():
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.expm1(order * log_ratio) - order * w
    if use_series.any():
        # Binomial series to w^6: with |αw| < 1e-2 the first term left out is below 1e-13 of the sum.
        series = 1 + (a - 5) / 6 * w
        series = 1 + (a - 4) / 5 * w * series
        series = 1 + (a - 3) / 4 * w * series
        series = 1 + (a - 2) / 3 * w * series
        found = np.where(use_series, a * (a - 1) / 2 * w * w * series, found)
    return np.maximum(found, 0.0)


def log_moment(order: float | Floats, log_ratio: Floats, log_weight: Floats) -> Floats:
    """Logarithm of E_q[(p/q)^α] from log(p/q) and log q (or log of quadrature weights) along the last axis.

    Small values come from :func:`excess`, large ones from a log-sum-exp.
    """
    return _accurate(_log_sum(order, log_ratio, log_weight, -1), order, log_ratio, log_weight, -1)


def _accurate(
    large: Floats, order: float | Floats, log_ratio: Floats, log_weight: Floats, axis: int
) -> Floats:
    """Accurate value of :func:`log_moment`, from its log-sum-exp."""
    if np.all(large >= 1.0):
        return large
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        terms = np.exp(log_weight) * excess(order, log_ratio)
        total = np.sum(np.where(np.isnan(terms), 0.0, terms), axis=axis)
        small = np.log1p(total)
    # Above 1 the log-sum-exp is accurate; below it loses digits to the leading 1.
    return np.where((large < 1.0) & np.isfinite(small), small, np.maximum(large, 0.0))


def _log_sum(order: float | Floats, log_ratio: Floats, log_weight: Floats, axis: int) -> Floats:
    exponent = order * log_ratio + log_weight
    peak = np.max(exponent, axis=axis, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        large: Floats = np.squeeze(peak, axis) + np.log(np.sum(np.exp(exponent - peak), axis=axis))
    return large


def largest_log_moments(orders: Floats, log_ratio: Floats, log_weight: Floats) -> Floats:
    """The largest :func:`log_moment` of some pairs at each order.

    Args:
        orders: shape ``(n,)``.
        log_ratio: a column for each pair, shape ``(outcomes, pairs)``.
        log_weight: of the same shape.

    Returns:
        Shape ``(n,)``.
    """
    found: Floats = np.empty(len(orders))
    at_once = max(1, _AT_ONCE // log_ratio.size)
    for start in range(0, len(orders), at_once):
        chosen = slice(start, start + at_once)
        some = orders[chosen, None, None]
        sums = _log_sum(some, log_ratio, log_weight, -2)
        large = np.max(sums, axis=-1)
        few = ~(large >= 1.0)
        if few.any():
            large[few] = np.max(_accurate(sums[few], some[few], log_ratio, log_weight, -2), axis=-1)
        found[chosen] = large
    return found


def pairs_rdp(log_p: Floats, log_q: Floats, orders: Floats) -> Floats:
    """Largest Rényi divergence over a family of pairs and both directions.

    Args:
        log_p: log-probabilities of the outcomes with the record, shape ``(pairs, outcomes)``.
        log_q: the same without it; -inf in both marks an outcome that the pair doesn't have.
        orders: shape ``(n,)``.

    Returns:
        ε(α), shape ``(n,)``: at each order the maximum over the family.
    """
    # Pairs in columns: few outcomes in rows add up fast.
    log_p, log_q = np.ascontiguousarray(log_p.T), np.ascontiguousarray(log_q.T)
    impossible = np.isneginf(log_p) & np.isneginf(log_q)
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(impossible, 0.0, log_p - log_q)
    with_record, without = (np.where(np.isneginf(log), -1e308, log) for log in (log_p, log_q))
    remove = largest_log_moments(orders, log_ratio, without)
    add = largest_log_moments(orders, -log_ratio, with_record)
    return np.maximum(remove, add) / (orders - 1)


def gaussian_rdp(mu: float, sampling_rate: float, orders: Floats) -> Floats:
    """RDP of the (Poisson-sampled) Gaussian mechanism.

    Without sampling ε(α) = αμ²/2 (Mironov 2017). With sampling the remove direction is the larger one at
    every order (Mironov, Talwar, Zhang 2019): A(α) = E_{x~N(0,1)}[(1−γ+γe^{μx−μ²/2})^α], integrated by the
    trapezoidal rule, which converges exponentially for such integrands. Where the tilted mass lies beyond
    2,000 standard deviations the Minkowski bound A(α) ≤ (1−γ+γe^{(α−1)μ²/2})^α takes over; it is valid at
    every order and tight for large ones.

    Args:
        mu: sensitivity divided by the noise's standard deviation.
        sampling_rate: Poisson rate γ in [0, 1].
        orders: Rényi orders above 1, shape ``(n,)``.
    """
    if sampling_rate in (0.0, 1.0):
        return sampling_rate * orders * mu * mu / 2
    log_keep, log_rate = math.log1p(-sampling_rate), math.log(sampling_rate)

    def log_ratio(x: Floats) -> Floats:
        return sampled_loss(mu * x - mu * mu / 2, sampling_rate)

    every = np.arange(-13.0, min(float(np.max(orders)) * mu, _MAX_TILT) + 13.0, _CELL)
    # The integrand's singularities lie π/μ from the real line, which bounds the step for μ above 4.
    steps = max(4, math.ceil(mu))
    offsets = _CELL * (np.arange(steps) / steps)
    log_step = math.log(_CELL / steps / math.sqrt(2 * math.pi))
    heights, ratios = log_ratio(every), log_ratio((every[:, None] + offsets).ravel()).reshape(-1, steps)
    far = orders * mu > _MAX_TILT
    with np.errstate(over="ignore"):
        log_a = orders * np.logaddexp(log_keep, log_rate + (orders - 1) * mu * mu / 2)
    near = np.flatnonzero(~far)
    for chosen in np.array_split(near, math.ceil(len(near) / _ORDERS_AT_ONCE)):
        some = orders[chosen, None]
        cells = every[: math.ceil((float(some.max()) * mu + 26.0) / _CELL)]
        # The integrand's logarithm bends down by at most 1, so between two ends of a cell it exceeds
        # the larger by no more than 1/32: cells with two low ends can go.
        height = some * heights[: len(cells)] - cells * cells / 2
        high = np.maximum(height, np.pad(height[:, 1:], ((0, 0), (0, 1)), constant_values=-np.inf))
        low = high <= np.max(height, axis=1, keepdims=True) - _DROP
        # Each order's cells come first, in their order; the places left over weigh nothing.
        used = np.argsort(low, axis=1, kind="stable")[:, : int(np.max(np.sum(~low, axis=1)))]
        x = cells[used][..., None] + offsets
        log_weight = np.where(np.take_along_axis(low, used, 1)[..., None], -np.inf, log_step - x * x / 2)
        shape = (len(chosen), -1)
        log_a[chosen] = log_moment(some, ratios[used].reshape(shape), log_weight.reshape(shape))
    curve = log_a / (orders - 1)
    return np.minimum(curve, orders * mu * mu / 2)


def epsilon_classic(orders: Floats, curve: Floats, delta: float) -> float:
    """ε = min over α ≤ 1024 of ε(α) + log(1/δ)/(α−1) (Mironov 2017), the conversion of older papers."""
    use = orders <= MAX_CLASSIC_ORDER
    return max(0.0, float(np.min(curve[use] - math.log(delta) / (orders[use] - 1))))


def epsilon_improved(orders: Floats, curve: Floats, delta: float) -> float:
    """ε from RDP by the improved conversion.

    ε = min over α of ε(α) + log(1−1/α) − (log δ + log α)/(α−1) (Balle et al. 2020, Theorem 21; Canonne,
    Kamath, Steinke 2020, Proposition 12), and 0 where the Bretagnolle-Huber bound √(1−e^{−ε(α)}) on the total
    variation is at most δ.
    """
    if bool(np.any(-np.expm1(-curve) <= delta * delta)):
        return 0.0
    candidates = curve + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(np.min(candidates)))


def log_delta_improved(orders: Floats, curve: Floats, epsilon: float | Floats) -> Floats:
    """Logarithm of δ(ε) by the conversion of :func:`epsilon_improved`; at most 0.

    Args:
        orders: shape ``(n,)``.
        curve: ε(α), shape ``(n,)``.
        epsilon: scalar or shape ``(m,)``, at least 0.
    """
    eps = np.atleast_1d(np.asarray(epsilon, dtype=np.float64))[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = (orders - 1) * (curve - eps + np.log1p(-1 / orders)) - np.log(orders)
        total_variation = 0.5 * np.log(-np.expm1(-np.min(curve)))
    best = np.minimum(np.min(bound, axis=1), min(total_variation, 0.0))
    return best if np.ndim(epsilon) else best[0]
