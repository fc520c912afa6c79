"""Audits of mechanisms: draws on worst-case neighbouring inputs, tested against the charged mechanism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, VERDICT, Audit, Floats, Scores, audit_scores
from pl_privknn.privacy.accounting.accountant import account, merge_charges
from pl_privknn.privacy.accounting.rdp import sampled_loss
from pl_privknn.privacy.mechanisms import (
    Adjacency,
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.privacy.mechanisms.base import check_adjacency
from pl_privknn.privacy.noise import NoiseSource, default_noise

#: (with the record, releases, noise) -> one score per release, shape ``(releases,)``; larger indicates the record.
Experiment = Callable[[bool, int, NoiseSource], ArrayLike]
#: Releases drawn by one call, and by one audit with and without the record, each.
_AT_A_TIME, MAX_DRAWS = 1 << 20, 5_000_000


def audit(
    charges: Sequence[Charge],
    experiment: Experiment,
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    confidence: float = CONFIDENCE,
    verdict: float = VERDICT,
    adjacency: Adjacency = "add_remove",
    noise: NoiseSource | None = None,
    subject: str = "releases",
) -> Audit:
    """Test a stated guarantee against releases with and without a record.

    Args:
        charges: the claim.
        experiment: runs the release with or without the record and returns one score per run. Any score is
            valid; the log-likelihood ratio is the most sensitive.
        delta: δ.
        trials: runs with and without the record, each; part of them selects the test, the others perform it.
        confidence: of the lower bound, in (0, 1).
        verdict: a true claim is called violated with probability at most 1 − this.
        adjacency: neighbouring relation of the claim.
        noise: source of protective randomness; the operating system's generator by default.
        subject: name in the result.

    Raises:
        ValueError: for arguments out of range, or scores that are NaN or of another shape.
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    trials, confidence = check_int("trials", trials, minimum=200), check_open_unit("confidence", confidence)
    source = noise if noise is not None else default_noise()
    sides = []
    for present in (True, False):
        scores = experiment(present, trials, source.stream("audit", int(present)))
        sides.append(np.asarray(scores, dtype=np.float64))
        if sides[-1].shape != (trials,):
            raise ValueError(
                f"experiment: returned shape {sides[-1].shape}; expected one score for each of {trials} runs"
            )
    seen = Scores("outcomes", np.arange(2 * trials) < trials, np.concatenate(sides), independent=True)
    return audit_scores(
        subject, seen, charges, delta=delta, adjacency=adjacency, confidence=confidence, verdict=verdict,
        runs=2 * trials,
    )  # fmt: skip


def audit_records(
    charges: Sequence[Charge],
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    adjacency: Adjacency = "add_remove",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Audit each mechanism of a list on its worst-case inputs, and all of them together if there are several.

    Args:
        charges: releases. Of equal ones at most as many are run as ``MAX_DRAWS`` allows, and tested against the
            guarantee of that number.
        delta: δ.
        trials: as in :func:`audit`, for each row.
        adjacency: neighbouring relation, as in :func:`audit`.
        **settings: further arguments of :func:`audit`.

    Returns:
        One row a mechanism: ``releases`` (that were run), ``recorded`` (in the list) and the fields of
        :class:`~pl_privknn.auditing.bounds.Audit`; ``verdict="NOT DRAWN"`` with a ``reason`` for entries without a
        draw, such as totals. A last row, ``all of them``, if there are several.
    """
    most = max(1, MAX_DRAWS // check_int("trials", trials, minimum=200))
    options: dict[str, Any] = {"delta": delta, "adjacency": adjacency}

    def row(name: str, part: list[Charge], recorded: int) -> dict[str, Any]:
        found = audit(part, experiment_of(part), trials=trials, subject=name, **options, **settings)
        return {"releases": sum(charge.count for charge in part), "recorded": recorded, **found.to_dict()}

    rows, drawn = [], []
    for charge in merge_charges(charges):
        mechanism = charge.mechanism
        if _draw.dispatch(type(mechanism.bare)) is _draw.dispatch(object):
            reason = f"{mechanism.kind} is a total or a bound and draws nothing"
            stated = {"subject": mechanism.label, "releases": 0, "recorded": charge.count, "delta": delta}
            epsilon = account([charge], exact=False, **options).epsilon
            rows.append({**stated, "epsilon": epsilon, "verdict": "NOT DRAWN", "reason": reason})
            continue
        drawn.append(Charge(mechanism, min(charge.count, most)))
        rows.append(row(mechanism.label, drawn[-1:], charge.count))
    if len(drawn) > 1:
        rows.append(row("all of them", drawn, sum(charge.count for charge in charges)))
    return rows


def experiment_of(
    charges: Sequence[Charge], coin_rate: float | None = None, digits: int | None = 9
) -> Experiment:
    """Experiment that runs all releases of ``charges`` on worst-case pairs; scores are log-likelihood ratios.

    Args:
        charges: releases; the coins of sampled ones come from the noise source, fresh for each release.
        coin_rate: actual sampling rate, if it differs from the mechanisms' own: a fault to be detected.
        digits: decimals of the scores; None keeps all bits.
    """
    merged = merge_charges(charges)

    def experiment(present: bool, runs: int, noise: NoiseSource) -> Floats:
        scores = np.zeros(runs)
        for number, charge in enumerate(merged):
            source, mechanism = noise.stream(number), charge.mechanism.bare
            rate = float(getattr(charge.mechanism, "sampling_rate", 1.0))
            step = max(1, _AT_A_TIME // charge.count)
            for start in range(0, runs, step):
                shape = (min(step, runs - start), charge.count)
                coins = source.bernoulli(shape, rate if coin_rate is None else coin_rate)
                here = coins if present else torch.zeros_like(coins)
                ratio = sampled_loss(_draw(mechanism, here, source), rate)
                scores[start : start + step] += ratio.sum(axis=1)
        # The low bits of data plus floating-point noise reveal more than ideal noise would (Mironov 2012).
        # The claim is about ideal noise, so scores are rounded; see docs/methods/accounting.md.
        return scores if digits is None else scores.round(digits)

    return experiment


@functools.singledispatch
def _draw(mechanism: Any, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Log-likelihood ratios, before sampling, of single releases on a worst-case pair of inputs.

    ``taking_part`` states in which releases the record is sampled; the result has its shape.
    """
    raise ValueError(f"{mechanism.kind}: a total or a bound has nothing to draw")


@_draw.register
def _gaussian(mechanism: Gaussian, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Releases at 0 or at the sensitivity."""
    length = mechanism.l2_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    return (released - length / 2) * length / mechanism.sigma**2


@_draw.register
def _laplace(mechanism: Laplace, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Releases at 0 or at the sensitivity, in one coordinate."""
    length = mechanism.l1_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    ratio: Floats = (np.abs(released) - np.abs(released - length)) / mechanism.scale
    return ratio


@_draw.register
def _screening(mechanism: NoisyScreening, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Releases at the possible count where one more vote is most informative, found by comparing all."""
    counts = np.arange(mechanism.lowest, mechanism.k + 1)
    passing, failing = mechanism.log_outcomes(counts).T
    if len(counts) == 1:
        return np.zeros(taking_part.shape)
    for_pass, for_fail = np.diff(passing), np.diff(failing)
    place = int(np.argmax(np.exp(passing[1:]) * for_pass + np.exp(failing[1:]) * for_fail))
    passed = mechanism.passes(taking_part.long() + int(counts[place]), noise).numpy()
    return np.where(passed, for_pass[place], for_fail[place])


@_draw.register
def _argmax(mechanism: ExponentialArgmax, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Releases of two classes; the record adds a vote to the second, or also removes one from the first."""
    here, swaps = taking_part.long(), mechanism.votes == "swap"
    votes = torch.stack([1 - here if swaps else torch.zeros_like(here), here], dim=-1)
    chosen = mechanism.argmax(votes, noise).numpy()

    def log_share(gap: float) -> float:
        """Logarithm of the probability of a class that leads by ``gap`` votes."""
        return -math.log1p(math.exp(-gap / mechanism.scale))

    away = -1.0 if swaps else 0.0
    return np.where(chosen == 1, log_share(1.0) - log_share(away), log_share(-1.0) - log_share(-away))


@_draw.register
def _randomized(mechanism: RandomizedResponse, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Messages of zeros or ones, in as many places as two messages may differ."""
    values = taking_part[..., None].expand(*taking_part.shape, mechanism.differing).long()
    message = mechanism.randomize(values, noise).numpy()
    ratio: Floats = mechanism.loss * ((message == 1).sum(axis=-1) - (message == 0).sum(axis=-1)).astype(float)
    return ratio
