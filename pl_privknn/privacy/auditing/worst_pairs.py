"""Worst neighbouring inputs of each mechanism, run through the very methods that draw in real releases."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.privacy.accounting.accountant import account, merge_charges
from pl_privknn.privacy.accounting.rdp import sampled_loss
from pl_privknn.privacy.auditing.lower_bound import AuditResult, Experiment, audit
from pl_privknn.privacy.mechanisms import (
    Adjacency,
    Charge,
    Conditional,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    Mechanism,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

#: Single releases that one call draws at a time, and that one audit draws on either side.
_AT_A_TIME = 1 << 20
MAX_DRAWS = 5_000_000


class NotDrawn(ValueError):
    """A mechanism that stands for a total or a bound and draws nothing of its own."""


def run_releases(mechanism: Mechanism, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Run single releases on a worst pair of inputs, and say how much each speaks for the record.

    Args:
        mechanism: draws its own noise.
        taking_part: bool, any shape: in which releases the record is in the sample.
        noise: where the noise comes from.

    Returns:
        Log-likelihood ratio of each release before sampling, float64, same shape.

    Raises:
        NotDrawn: for mechanisms that draw nothing, such as ``fixed_total``.
    """
    return _run(mechanism, taking_part, noise)


def can_draw(mechanism: Mechanism) -> bool:
    """Whether :func:`run_releases` knows how to run this mechanism."""
    inner = mechanism.inner if isinstance(mechanism, Conditional) else mechanism
    return _run.dispatch(type(inner)) is not _run.dispatch(object)


@functools.singledispatch
def _run(mechanism: Any, taking_part: Tensor, noise: NoiseSource) -> Floats:
    raise NotDrawn(f"{mechanism.kind}: stands for a total or a bound; there is nothing to draw")


@_run.register
def _gaussian(mechanism: Gaussian, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity."""
    length = mechanism.l2_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    return (released - length / 2) * length / mechanism.sigma**2


@_run.register
def _discrete_gaussian(mechanism: DiscreteGaussian, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A vector of zeros or of ones, as long as the squared sensitivity."""
    shape = (*taking_part.shape, mechanism.square)
    values = taking_part[..., None].expand(shape).long()
    released = mechanism.add_noise(values, noise).sum(dim=-1).numpy()
    return (released - mechanism.square / 2) / mechanism.sigma**2


@_run.register
def _laplace(mechanism: Laplace | DiscreteLaplace, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity, in one coordinate."""
    length = mechanism.l1_sensitivity
    whole = isinstance(mechanism, DiscreteLaplace)
    values = (taking_part.long() if whole else taking_part.double()) * length
    released = mechanism.add_noise(values, noise).double().numpy()
    ratio: Floats = (np.abs(released) - np.abs(released - length)) / mechanism.scale
    return ratio


@_run.register
def _screening(mechanism: NoisyScreening, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """The count, of those that can occur, at which one vote more tells most; found by comparing all."""
    counts = np.arange(mechanism.lowest, mechanism.k + 1)
    passing, failing = mechanism.log_outcomes(counts).T
    if len(counts) == 1:
        return np.zeros(taking_part.shape)
    for_pass, for_fail = np.diff(passing), np.diff(failing)
    place = int(np.argmax(np.exp(passing[1:]) * for_pass + np.exp(failing[1:]) * for_fail))
    passed = mechanism.passes(taking_part.long() + int(counts[place]), noise).numpy()
    return np.where(passed, for_pass[place], for_fail[place])


@_run.register
def _argmax(mechanism: ExponentialArgmax, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Two classes; the record adds a vote to the second, or takes it from the first as well."""
    here = taking_part.long()
    votes = torch.stack([1 - here if mechanism.votes == "swap" else torch.zeros_like(here), here], dim=-1)
    chosen = mechanism.argmax(votes, noise).numpy()
    away, near = (-1.0, 1.0) if mechanism.votes == "swap" else (0.0, 1.0)

    def log_share(gap: float) -> float:
        """Logarithm of the probability of a class that leads by ``gap`` votes."""
        return -math.log1p(math.exp(-gap / mechanism.scale))

    return np.where(chosen == 1, log_share(near) - log_share(away), log_share(-near) - log_share(-away))


@_run.register
def _randomized(mechanism: RandomizedResponse, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A message of zeros or of ones, in as many places as two messages may differ."""
    values = taking_part[..., None].expand(*taking_part.shape, mechanism.differing).long()
    message = mechanism.randomize(values, noise).numpy()
    ratio: Floats = mechanism.loss * ((message == 1).sum(axis=-1) - (message == 0).sum(axis=-1)).astype(float)
    return ratio


@_run.register
def _conditional(mechanism: Conditional, taking_part: Tensor, noise: NoiseSource) -> Floats:
    return _run(mechanism.inner, taking_part, noise)


def experiment_of(
    charges: Sequence[Charge], coin_rate: float | None = None, digits: int | None = 9
) -> Experiment:
    """An experiment that runs all releases of ``charges`` on worst pairs; scores are log-likelihood ratios.

    Args:
        charges: releases; the coins of sampled ones come from the noise source, fresh for each release.
        coin_rate: rate at which coins are really tossed, where it is not the mechanisms' own: a fault to be
            looked for.
        digits: decimals that scores are rounded to; None looks at the last bit.
    """
    merged = merge_charges(charges)

    def experiment(present: bool, runs: int, noise: NoiseSource) -> Floats:
        scores = np.zeros(runs)
        for number, charge in enumerate(merged):
            source = noise.stream(number)
            rate = float(getattr(charge.mechanism, "sampling_rate", 1.0))
            step = max(1, _AT_A_TIME // charge.count)
            for start in range(0, runs, step):
                shape = (min(step, runs - start), charge.count)
                coins = source.bernoulli(shape, rate if coin_rate is None else coin_rate)
                here = coins if present else torch.zeros_like(coins)
                ratio = sampled_loss(run_releases(charge.mechanism, here, source), rate)
                scores[start : start + step] += ratio.sum(axis=1)
        # The low bits of data plus floating-point noise tell more than ideal noise would (Mironov 2012).
        # The claim is about ideal noise, so the score leaves them out; docs/methods/accounting.md says what it means.
        return scores if digits is None else scores.round(digits)

    return experiment


def audit_records(
    charges: Sequence[Charge],
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    confidence: float = 0.999,
    adjacency: Adjacency = "add_remove",
    noise: NoiseSource | None = None,
) -> list[dict[str, Any]]:
    """Audit each mechanism of a list, and all of them together where there are several.

    Args:
        charges: releases. Of many equal ones as many are run as ``MAX_DRAWS`` allows, against the claim for
            that many.
        delta: δ.
        trials: as in :func:`~pl_privknn.privacy.auditing.lower_bound.audit`, for each row.
        confidence: likewise.
        adjacency: likewise.
        noise: likewise.

    Returns:
        One row a mechanism: ``mechanism``, ``releases`` (that were run), ``recorded`` (in the list) and the
        fields of :class:`~pl_privknn.privacy.auditing.lower_bound.AuditResult`; ``verdict="NOT DRAWN"`` with a
        ``reason`` for mechanisms that draw nothing. A last row, ``all of them``, if there are several.
    """
    most = max(1, MAX_DRAWS // check_int("trials", trials, minimum=100))

    def row(name: str, part: list[Charge], recorded: int) -> dict[str, Any]:
        result: AuditResult = audit(
            part,
            experiment_of(part),
            delta=delta,
            trials=trials,
            confidence=confidence,
            adjacency=adjacency,
            noise=noise,
        )
        releases = sum(charge.count for charge in part)
        return {"mechanism": name, "releases": releases, "recorded": recorded, **result.to_dict()}

    rows, drawn = [], []
    for charge in merge_charges(charges):
        if not can_draw(charge.mechanism):
            claimed = account([charge], delta=delta, adjacency=adjacency, exact=False).epsilon
            rows.append(
                {
                    "mechanism": charge.mechanism.label,
                    "releases": 0,
                    "recorded": charge.count,
                    "claimed": claimed,
                    "delta": delta,
                    "verdict": "NOT DRAWN",
                    "reason": f"{charge.mechanism.kind} stands for a total or a bound and draws nothing",
                }
            )
            continue
        part = Charge(charge.mechanism, min(charge.count, most))
        drawn.append(part)
        rows.append(row(charge.mechanism.label, [part], charge.count))
    if len(drawn) > 1:
        rows.append(row("all of them", drawn, sum(charge.count for charge in charges)))
    return rows
