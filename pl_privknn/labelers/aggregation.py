"""What labelers that release an arg-max of votes have in common."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from pl_privknn.labelers.base import Release
from pl_privknn.privacy.mechanisms import (
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    Mechanism,
)
from pl_privknn.privacy.noise import NoiseSource

#: What a user leaves at its default, because the labeler knows it better.
_UNSET = {"sampling_rate": 1.0, "l2_sensitivity": 1.0, "l1_sensitivity": 1.0, "votes": "swap"}


def complete_noise(noise: Mechanism, **known: Any) -> Mechanism:
    """Fill in the sensitivities and the sampling rate that the labeler knows.

    Args:
        noise: a mechanism with its noise scale.
        **known: values for the fields of :data:`_UNSET`; those that the mechanism lacks are skipped.

    Returns:
        The frozen mechanism that both draws and accounts.

    Raises:
        ValueError: if the mechanism can't noise votes, or states another value than the labeler's.
    """
    if not (hasattr(noise, "argmax") or hasattr(noise, "add_noise")):
        raise ValueError(
            f"noise={noise!r} can't be added to votes; use for instance Gaussian, DiscreteGaussian, Laplace "
            "or ExponentialArgmax"
        )
    names = {field.name for field in dataclasses.fields(noise)}  # type: ignore[arg-type]
    wanted = {name: value for name, value in known.items() if name in names}
    for name, value in wanted.items():
        stated = getattr(noise, name)
        if stated not in (_UNSET[name], value):
            raise ValueError(f"noise.{name}={stated!r} differs from the labeler's {value!r}; leave it out")
    completed: Mechanism = dataclasses.replace(noise, **wanted)  # type: ignore[type-var]
    return completed


def secure_noise(noise: Mechanism) -> Mechanism:
    """The mechanism of the same scale that draws exactly, in integers: closed to floating-point attacks.

    Gaussian and Laplace noise become discrete noise of the same parameter, an arg-max by Gumbel noise an exact
    choice (Mironov 2012 for the attack; Canonne, Kamath, Steinke 2020 for the samplers). Costs differ from those
    of the continuous kinds by little, and are accounted for what is drawn.

    Args:
        noise: a mechanism for whole-number votes.

    Raises:
        ValueError: for a mechanism that has no exact form.
    """
    if isinstance(noise, DiscreteGaussian | DiscreteLaplace):
        return noise
    if isinstance(noise, Gaussian):
        return DiscreteGaussian(noise.sigma, noise.l2_sensitivity, noise.sampling_rate)
    if isinstance(noise, Laplace):
        return DiscreteLaplace(noise.scale, int(noise.l1_sensitivity), noise.sampling_rate)
    if isinstance(noise, ExponentialArgmax):
        return dataclasses.replace(noise, secure=True)
    raise ValueError(
        f"noise={noise!r} has no exact form; with secure=True use Gaussian, Laplace, their discrete kinds or "
        "ExponentialArgmax"
    )


def noisy_argmax(mechanism: Mechanism, votes: Tensor, noise: NoiseSource) -> Tensor:
    """The class with the most noisy votes.

    Args:
        mechanism: from :func:`complete_noise`; already charged.
        votes: int64 counts, shape ``(m, c)``.
        noise: protective randomness.

    Returns:
        int64, shape ``(m,)``.
    """
    if hasattr(mechanism, "argmax"):
        released: Tensor = mechanism.argmax(votes, noise)
        return released
    noisy: Tensor = mechanism.add_noise(votes, noise)  # type: ignore[attr-defined]
    return noisy.argmax(dim=1)


def check_releases_counts(noise: Mechanism) -> None:
    """Raise ``ValueError`` unless all noisy counts may be let out at the price of their arg-max.

    They may where noise is added to every count and paid for as such, which is how Gaussian and Laplace noise
    are charged here. A mechanism that only ever shows the winner has a price for just that.
    """
    if not hasattr(noise, "add_noise"):
        raise ValueError(
            f"release_counts=True: noise={noise!r} is paid for the winner alone; use Gaussian, Laplace or their "
            "discrete kinds, or release_counts=False"
        )


def answer_votes(
    mechanism: Mechanism, votes: Tensor, answered: Tensor, noise: NoiseSource, release_counts: bool
) -> Release:
    """Noisy winners of the answered queries, with all of their noisy counts where those are released.

    Args:
        mechanism: from :func:`complete_noise`; already charged for the answered queries.
        votes: int64 counts of the answered queries, shape ``(a, c)``.
        answered: bool, shape ``(m,)``; ``a`` of them are true.
        noise: protective randomness.
        release_counts: give the counts too; rows of NaN for refused queries.
    """
    labels = torch.full((len(answered),), -1, dtype=torch.int64)
    if not release_counts:
        labels[answered] = noisy_argmax(mechanism, votes, noise)
        return Release(labels)
    noisy: Tensor = mechanism.add_noise(votes, noise).double()  # type: ignore[attr-defined]
    labels[answered] = noisy.argmax(dim=1)
    scores = torch.full((len(answered), votes.shape[1]), torch.nan, dtype=torch.float64)
    scores[answered] = noisy
    return Release(labels, scores=scores, score_deviation=noise_deviation(mechanism))


def noise_deviation(mechanism: Mechanism) -> float:
    """Standard deviation of a mechanism's additive noise.

    Raises:
        ValueError: for a mechanism that has neither ``scale`` nor ``sigma``.
    """
    names = {field.name for field in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    if "sigma" in names:
        return float(mechanism.sigma)  # type: ignore[attr-defined]
    if "scale" in names:
        return math.sqrt(2.0) * float(mechanism.scale)  # type: ignore[attr-defined]
    raise ValueError(f"noise={mechanism!r} has neither a scale nor a sigma; use for instance Laplace")
