"""Certificates of ε: numeric witnesses that can be checked without this package.

A certificate names the releases by their public parameters and gives, for each, a pair of distributions on a grid of
losses that dominates it; for one family of pairs (screening, arg-max) it gives the value functions of the backward
induction of :mod:`~pl_privknn.privacy.accounting.exact` on their grid, whose last one is the profile of a block.
``examples/check_certificate.py`` derives each privacy profile anew from the parameters, compares it with that of the
pair at every grid point, repeats the induction from one value function to the next, composes the pairs with a bound
on rounding, and refuses a certificate whose ε does not follow.

Everything is rounded in the safe direction. Masses are whole numbers of 2^-62, rounded down; what is lost counts as
an infinite loss in both directions (an atom (a, b) split into (a, 0) and (0, b), which reveals more). Pairs are moved
to infinite loss by a little more than double precision can err in a profile, and value functions are raised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting import exact, pld
from pl_privknn.privacy.accounting.accountant import (
    account,
    gaussian_and_others,
    loss_span,
    loss_variance,
    merge_charges,
)
from pl_privknn.privacy.mechanisms.argmax import ExponentialArgmax, cells
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency
from pl_privknn.privacy.mechanisms.negative_binomial import NegativeBinomial
from pl_privknn.privacy.mechanisms.randomized_response import RandomizedResponse
from pl_privknn.privacy.mechanisms.stated import PureDP

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]
#: Mechanisms whose profile the checker derives from their parameters.
CHECKED = (
    "gaussian", "gaussian_dp_stream", "laplace", "pure_dp", "randomized_response", "negative_binomial",
    "noisy_screening", "exponential_argmax",
)  # fmt: skip
#: Masses are whole numbers of 2^-UNIT.
UNIT = 62
# Releases of a family in one block: ε is about 0.05 % above that of one block for all.
_BLOCK = 128
# Grid cells in the root mean square loss of the widest pair.
_DIVISIONS = 24
# Value functions that are written down between the first and the last.
_STOPS = 8
# Mass that a pair gives up to infinite losses over 1 − TV, and rise of a value function at each stop, relative
# and times min(r, 1).
_SLACK = 1e-13
_RISE = 1e-9
_LEAST = 1e-14
# The stated ε belongs to a δ this much smaller, which covers the checker's own bound on rounding.
_MARGIN = 1e-5


def certify(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    report: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A certificate of ε of all releases together, as plain JSON.

    Args:
        charges: as in :func:`~pl_privknn.privacy.accounting.accountant.account`.
        delta: target δ.
        adjacency: neighbouring relation of every charge.
        report: ``epsilon``, ``guarantee`` and ``reason`` as they are stated; by default those of the accountant.

    Returns:
        ``epsilon`` that the certificate proves and ``epsilon_stated`` by the accountant, ``delta``, ``adjacency``,
        ``guarantee`` and ``reason``; ``charges``; ``parts`` with their pairs (and value functions), on one grid of
        spacing ``step``; ``composed``, δ in both directions at ε; ``windows`` of the checker's FFT; ``digest``.

    Raises:
        ValueError: for a δ outside (0, 1), an unknown adjacency, or a mechanism that the checker does not derive.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, certify
        >>> found = certify([Charge(Gaussian(sigma=4.0))], delta=1e-5)
        >>> f"{found['epsilon_stated']:.3f} {found['epsilon']:.3f}"
        '0.926 0.926'
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    releases = merge_charges(Charge(c.mechanism.bare, c.count) for c in charges)
    for charge in releases:
        if charge.mechanism.kind not in CHECKED:
            raise ValueError(
                f"mechanism {charge.mechanism.label!r}: no certificate covers it; those are for {', '.join(CHECKED)}"
            )
    report = report or account(charges, delta=delta, adjacency=adjacency).to_dict()
    found: dict[str, Any] = {"epsilon": 0.0, "composed": [], "step": 1.0, "windows": [], "parts": []}
    if releases:
        families: list[Charge | None] = [
            c for c in releases if c.mechanism.dominating_pairs(adjacency) is not None
        ]
        tried = [_witness(releases, blocked, delta, adjacency) for blocked in families or [None]]
        found = min(tried, key=lambda witness: float(witness["epsilon"]))
    document = {
        "certificate": "privacy loss of listed releases, version 1",
        "adjacency": adjacency,
        "delta": delta,
        "epsilon": found["epsilon"],
        "epsilon_stated": report["epsilon"],
        "guarantee": report["guarantee"],
        "reason": report["reason"],
        "charges": [charge.to_record() for charge in releases],
        **{name: value for name, value in found.items() if name != "epsilon"},
    }
    return {**document, "digest": digest(document)}


def write_certificate(path: str | Path, charges: Sequence[Charge], **options: Any) -> dict[str, Any]:
    """Write what :func:`certify` returns as JSON, and return it."""
    document = certify(charges, **options)
    Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")
    return document


def digest(document: dict[str, Any]) -> str:
    """SHA-256 of a certificate without its ``digest``, so that any changed digit is detected."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _witness(
    releases: Sequence[Charge], blocked: Charge | None, delta: float, adjacency: Adjacency
) -> dict[str, Any]:
    """Parts of a certificate in which one family, if any, is taken in blocks."""
    mu, others = gaussian_and_others(releases, adjacency)
    blocks = None if blocked is None else _blocks(blocked, delta, adjacency)
    number = sum(c.count for c in others if c is not blocked) + (mu > 0)
    number += sum(times for _, times in blocks[1]) if blocks else (blocked.count if blocked else 0)
    step = _step(releases, number, adjacency)
    pairs: list[tuple[PrivacyLossDistribution, int]] = []
    parts: list[dict[str, Any]] = []

    def add(pair: PrivacyLossDistribution, count: int, size: int = 1) -> None:
        first, masses, safe = _rounded(pair, step)
        pairs.append((safe, count))
        parts[-1]["pairs"].append({"count": count, "size": size, "first": first, "masses": masses})

    if mu > 0:
        parts.append({"pairs": []})
        add(pld.to_distribution(pld.gaussian_losses(mu, 1.0, step), None, step), 1)
    for charge in others:
        mechanism, count = charge.mechanism, charge.count
        parts.append({"pairs": []})
        if charge is blocked and blocks is not None:
            parts[-1]["values"], sizes = blocks
            for size, times in sizes:
                losses = exact.Profile(**_profile(parts[-1]["values"], size)).losses()
                add(pld.to_distribution(losses, losses.reversed(), step), times, size)
            continue
        # Cells of noise, and places of a message, are releases of their own.
        if isinstance(mechanism, NegativeBinomial):
            count, mechanism = count * mechanism.moved, dataclasses.replace(mechanism, moved=1)
        if isinstance(mechanism, RandomizedResponse):
            count, mechanism = count * mechanism.differing, PureDP(mechanism.loss * (1 + 1e-14))
        if isinstance(mechanism, NegativeBinomial):
            one = mechanism.pld("add_remove", step)
            add(one, count)
            if adjacency == "replace_one":
                parts.append({"pairs": []})
                add(type(one)(one._pmf_add, one._pmf_remove), count)
        else:
            add(mechanism.pld(adjacency, step), count)
    total = pld.compose(pairs, delta)
    epsilon = total.epsilon(delta * (1 - _MARGIN))
    reached = [float(way.delta(np.array([epsilon]))[0]) for way in (total.remove, total.add)]
    return {
        "epsilon": epsilon,
        "composed": [min(delta, value + delta * _MARGIN / 2) for value in reached],
        "step": step,
        "windows": [_window(pairs, way, step, epsilon, delta) for way in ("_pmf_remove", "_pmf_add")],
        "parts": parts,
    }


def _profile(values: dict[str, Any], size: int) -> dict[str, Any]:
    excess = np.array(values["steps"][str(size)])
    return {"spacing": values["spacing"], "first": values["first"], "excess": excess}


def _window(
    pairs: Sequence[tuple[PrivacyLossDistribution, int]], way: str, step: float, epsilon: float, delta: float
) -> list[float]:
    """Exponential tilt, last grid index and length of the checker's FFT: all valid, these accurate near ``delta``."""
    from scipy.special import logsumexp

    tilts = np.geomspace(1e-2, 1e6, 160) / max(epsilon, 1e-3)
    tilts = np.concatenate([-tilts[::-1], tilts])
    moments = np.zeros(len(tilts))
    for pair, count in pairs:
        pmf = getattr(pair, way)
        losses = step * (pmf._lower_loss + np.arange(len(pmf._probs)))
        with np.errstate(divide="ignore"):
            log_masses = np.log(pmf._probs)
        moments += count * np.array([logsumexp(log_masses + tilt * losses) for tilt in tilts])
    best = int(np.argmin(np.where(tilts > 0, moments - tilts * epsilon, math.inf)))
    tilt, moment = float(tilts[best]), float(moments[best])
    far = moments[best + 1 :] - moment
    # Between, all but e^-46 of the tilted total, and but 1e-10·δ of the total itself.
    above = np.min((far + 46)[np.isfinite(far)] / (tilts[best + 1 :] - tilt)[np.isfinite(far)])
    top = math.ceil(max((moment - math.log(1e-10 * delta)) / tilt, above) / step)
    bottom = math.floor(np.max((moment - moments[:best] - 46) / (tilt - tilts[:best])) / step)
    # Losses below ε play no part.
    bottom = min(bottom, math.floor(0.9 * epsilon / step))
    return [tilt, top, 1 << math.ceil(math.log2(max(top - bottom, 2)))]


def _step(releases: Sequence[Charge], number: int, adjacency: Adjacency) -> float:
    """Spacing, a power of two: some 0.01 % of ε, and no finer, for the sake of the file's size."""
    variance = sum(c.count * loss_variance(c.mechanism, adjacency) for c in releases)
    spans = [loss_span(c.mechanism, adjacency) for c in releases]
    spread = math.sqrt(variance) if 0 < variance < math.inf else 1.0
    wanted = max(spread * min(0.03 / math.sqrt(number), 2.0**-9), min(max(spans), 1e4) * 2.0**-17)
    step = 2.0 ** math.floor(math.log2(wanted))
    if (widest := max((span for span in spans if span < math.inf), default=0.0)) / step > pld.MAX_POINTS:
        raise ValueError(
            f"a release with a loss of up to {widest:.3g} gives no protection, and no certificate is that wide"
        )
    return step


def _rounded(pair: PrivacyLossDistribution, step: float) -> tuple[int, list[int], PrivacyLossDistribution]:
    """First index, masses and distribution of a pair, rounded in the safe direction.

    A mass is that of the upper distribution at losses from 0 on, and that of the lower one below.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    remove = pair._pmf_remove.to_dense_pmf()
    masses, first = np.maximum(remove._probs, 0.0), int(remove._lower_loss)
    before, behind = max(first, 0), max(-(first + len(masses) - 1), 0)
    masses, first = np.pad(masses, (before, behind)), first - before
    index = first + np.arange(len(masses))
    ratio = np.exp(-step * np.abs(index))
    telling = float(remove._infinity_mass) + float(np.sum(np.where(index > 0, masses * (1 - ratio), 0.0)))
    with np.errstate(divide="ignore"):
        larger = np.where(index >= 0, masses, np.exp(np.log(masses) - step * index))
    units = np.floor(larger * (1 - _SLACK / max(1e-3, 1 - telling)) * 2.0**UNIT).astype(np.int64)
    used = np.flatnonzero((units > 0) | (index == 0))
    index, units, ratio = (array[used[0] : used[-1] + 1] for array in (index, units, ratio))
    upper = units / 2.0**UNIT * np.where(index >= 0, 1.0, ratio)
    lower = units / 2.0**UNIT * np.where(index >= 0, ratio, 1.0)
    ways = (upper, int(index[0])), (lower[::-1], -int(index[-1]))
    pmfs = [
        pld_pmf.DensePLDPmf(step, start, masses, max(0.0, 1 - math.fsum(masses)), True)
        for masses, start in ways
    ]
    return int(index[0]), units.tolist(), privacy_loss_distribution.PrivacyLossDistribution(*pmfs)


def _blocks(
    charge: Charge, delta: float, adjacency: Adjacency
) -> tuple[dict[str, Any], list[tuple[int, int]]] | None:
    """Value functions at some steps of one induction, and ``(size, times)`` of the blocks that they bound."""
    pairs = charge.mechanism.dominating_pairs(adjacency)
    assert pairs is not None
    telling = np.any(pairs[0] != pairs[1], axis=1)
    if not telling.any():
        return None
    p, q = exact.undominated(pairs[0][telling], pairs[1][telling])
    size = math.ceil(charge.count / math.ceil(charge.count / _BLOCK))
    sizes = [(n, times) for n, times in ((charge.count % size, 1), (size, charge.count // size)) if n]
    spacing = exact.spread(p, q) / _DIVISIONS
    tail = 1e-6 * delta / (charge.count // size + 1)
    up, down = (float(far[-1]) for far in exact.reach(p, q, size, spacing=spacing, tail=tail))
    if not up + down <= exact.FARTHEST:
        return None
    left, right = math.ceil(up / spacing) + 1, math.ceil(down / spacing) + 1
    stops = np.unique([*np.linspace(1, size, _STOPS).round().astype(np.int64), *(n for n, _ in sizes)])
    kept = np.ones(p.shape, dtype=bool)
    grid = exact.InterpolationGrid.build(p, q, kept, spacing, left, right)
    every = np.ones(size, dtype=np.int64)
    found = grid.run(np.zeros(left + right + 1), left * every, right * every, stops, spacing)
    # Linear growth of what is added, so that the induction from one stop stays below the next.
    place = np.arange(1, len(stops) + 1)[:, None]
    least = _LEAST * np.exp(np.minimum(spacing * np.arange(-left, right + 1), 0.0))
    raised = found * (1 + _RISE * place) + least * place
    steps = {str(n): [float(f"{x:.13g}") for x in row] for n, row in zip(stops, raised.tolist(), strict=True)}
    values: dict[str, Any] = {"spacing": spacing, "first": -left, "steps": steps}
    if isinstance(charge.mechanism, ExponentialArgmax):
        values["cells"] = cells().tolist()
    return values, sizes
