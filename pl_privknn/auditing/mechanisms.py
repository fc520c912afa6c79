"""Audits of mechanisms: their draws on worst pairs of inputs, held against what they are charged as."""

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
from pl_privknn.auditing.bounds import CONFIDENCE, VERDICT, Audit, Floats, Scores, judge
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

#: (with the record, releases, noise) -> one score a release, shape ``(releases,)``: larger speaks for the record.
Experiment = Callable[[bool, int, NoiseSource], ArrayLike]
#: Single releases of mechanisms that one call draws at a time, and that one audit draws on either side.
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
    """Hold a claim against releases of what it is about, with and without a record.

    Args:
        charges: the claim.
        experiment: runs the release with or without the record and returns one score a run. Any score is
            valid; the log-likelihood ratio sees most.
        delta: δ.
        trials: runs on either side; half of them choose, half test.
        confidence: of the lower bound, in (0, 1).
        verdict: a true claim is called violated with probability at most 1 − this.
        adjacency: neighbouring relation of the claim.
        noise: where protective randomness comes from; the operating system's generator by default.
        subject: what is audited, for the result.

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
    return judge(
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
    """Audit each mechanism of a list on its worst inputs, and all of them together where there are several.

    Args:
        charges: releases. Of many equal ones as many are run as ``MAX_DRAWS`` allows, against the claim for
            that many.
        delta: δ.
        trials: as in :func:`audit`, for each row.
        adjacency: likewise.
        **settings: further arguments of :func:`audit`.

    Returns:
        One row a mechanism: ``releases`` (that were run), ``recorded`` (in the list) and the fields of
        :class:`~pl_privknn.auditing.bounds.Audit`; ``verdict="NOT DRAWN"`` with a ``reason`` for mechanisms that draw
        nothing. A last row, ``all of them``, if there are several.
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
            reason = f"{mechanism.kind} stands for a total or a bound and draws nothing"
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
            source, mechanism = noise.stream(number), charge.mechanism.bare
            rate = float(getattr(charge.mechanism, "sampling_rate", 1.0))
            step = max(1, _AT_A_TIME // charge.count)
            for start in range(0, runs, step):
                shape = (min(step, runs - start), charge.count)
                coins = source.bernoulli(shape, rate if coin_rate is None else coin_rate)
                here = coins if present else torch.zeros_like(coins)
                ratio = sampled_loss(_draw(mechanism, here, source), rate)
                scores[start : start + step] += ratio.sum(axis=1)
        # The low bits of data plus floating-point noise tell more than ideal noise would (Mironov 2012).
        # The claim is about ideal noise, so the score leaves them out; docs/methods/accounting.md says what it means.
        return scores if digits is None else scores.round(digits)

    return experiment


@functools.singledispatch
def _draw(mechanism: Any, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Run single releases on a worst pair of inputs; the log-likelihood ratio of each before sampling.

    ``taking_part`` says in which releases the record is in the sample; the result has its shape.
    """
    raise ValueError(f"{mechanism.kind}: stands for a total or a bound; there is nothing to draw")


@_draw.register
def _gaussian(mechanism: Gaussian, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity."""
    length = mechanism.l2_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    return (released - length / 2) * length / mechanism.sigma**2


@_draw.register
def _laplace(mechanism: Laplace, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity, in one coordinate."""
    length = mechanism.l1_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    ratio: Floats = (np.abs(released) - np.abs(released - length)) / mechanism.scale
    return ratio


@_draw.register
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


@_draw.register
def _argmax(mechanism: ExponentialArgmax, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Two classes; the record adds a vote to the second, or takes it from the first as well."""
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
    """A message of zeros or of ones, in as many places as two messages may differ."""
    values = taking_part[..., None].expand(*taking_part.shape, mechanism.differing).long()
    message = mechanism.randomize(values, noise).numpy()
    ratio: Floats = mechanism.loss * ((message == 1).sum(axis=-1) - (message == 0).sum(axis=-1)).astype(float)
    return ratio
