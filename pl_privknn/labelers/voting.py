"""What labelers that release an arg-max of votes have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

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
