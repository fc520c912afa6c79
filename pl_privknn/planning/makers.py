"""How options become labelers, or the releases of what is none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from pl_privknn import labelers
from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.labelers.pate import Aggregator
from pl_privknn.planning.options import Made
from pl_privknn.privacy.mechanisms import (
    Charge,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    VoteNoise,
)
from pl_privknn.privacy.noisy_steps import step_mechanism

#: Noise by name.
NOISES: dict[str, type[VoteNoise]] = {
    found.kind: found for found in (Gaussian, DiscreteGaussian, Laplace, DiscreteLaplace, ExponentialArgmax)
}
ADDITIVE_NOISES = tuple(NOISES)[:-1]
SUM_NOISES = (Gaussian.kind, Laplace.kind)


def noise(o: SimpleNamespace, scale: float | None = None) -> Made:
    """The noise that is named, with its scale: σ of Gaussian kinds, b of the others."""
    found = NOISES[check_choice("noise", o.noise, tuple(NOISES))]
    parameter = dataclasses.fields(found)[0].name  # type: ignore[arg-type]
    return Made(found, {parameter: o.noise_scale if scale is None else scale})


def unit(o: SimpleNamespace) -> float:
    """Standard deviation of noise of scale 1."""
    return float(noise(o, 1.0).make().deviation)


def screening(o: SimpleNamespace, usual: float) -> dict[str, Any]:
    """The screening, by default at the usual threshold, as an argument; none where it was declined."""
    if not o.screening:
        o.threshold = None
        return {}
    ratio = check_positive("sigma_ratio", o.sigma_ratio)
    o.screening_sigma = float(f"{ratio * o.noise_scale * unit(o):.6g}")
    o.threshold = float(f"{usual:.6g}") if o.threshold is None else o.threshold
    return {"screening": Made(labelers.Screening, {"threshold": o.threshold, "sigma": o.screening_sigma})}


def private_knn(o: SimpleNamespace) -> Made:
    """Of ``PrivateKNN``."""
    k = check_int("k", o.k)
    arguments = {"k": k, "sampling_rate": o.sampling_rate, **screening(o, 0.6 * k), "noise": noise(o)}
    return Made(labelers.PrivateKNN, arguments)


def private_radius(o: SimpleNamespace) -> Made:
    """Of ``PrivateRadius``."""
    cut: dict[str, Any] = {}
    if o.max_votes is not None:
        cut = {"max_votes": o.max_votes, **screening(o, 0.6 * check_int("max_votes", o.max_votes))}
    elif o.threshold is not None:
        raise ValueError(
            f"threshold={o.threshold!r} of a screening needs max_votes, the largest count it covers"
        )
    return Made(labelers.PrivateRadius, {"sampling_rate": o.sampling_rate, **cut, "noise": noise(o)})


def pate(o: SimpleNamespace) -> Made:
    """Of ``PATE``."""
    teachers = check_int("num_teachers", o.num_teachers, 2)
    aggregator = Made(Aggregator, {"noise": noise(o), **screening(o, 0.7 * teachers)})
    return Made(labelers.PATE, {"num_teachers": teachers, "aggregator": aggregator})


def attributes(o: SimpleNamespace, cls: type = labelers.LearnedThresholds, **more: Any) -> dict[str, Any]:
    """How votes are clipped and sums become attributes, as an argument."""
    if o.expected_positives is None:
        return {"attributes": Made(labelers.Attributes, {"tau": o.tau})}
    rule = Made(cls, {"expected_positives": o.expected_positives, **more})
    return {"attributes": Made(labelers.Attributes, {"tau": o.tau, "rule": rule})}


def multilabel_knn(o: SimpleNamespace) -> Made:
    """Of ``PrivateKNN`` with attributes."""
    arguments = {"k": o.k, "sampling_rate": o.sampling_rate, **attributes(o), "noise": noise(o)}
    return Made(labelers.PrivateKNN, arguments)


def multilabel_pate(o: SimpleNamespace) -> Made:
    """Of ``PATE`` with attributes."""
    aggregator = Made(Aggregator, {"noise": noise(o)})
    arguments = {"num_teachers": o.num_teachers, **attributes(o), "aggregator": aggregator}
    return Made(labelers.PATE, arguments)


def adjacency(o: SimpleNamespace) -> dict[str, str]:
    """The argument of labelers that hold under either adjacency; none where it is their default."""
    return {} if o.adjacency == "add_remove" else {"adjacency": o.adjacency}


def reverse(cls: type, o: SimpleNamespace, **more: Any) -> Made:
    """Of reverse kNN of any kind."""
    return Made(cls, {"k": o.k, **more, "noise": noise(o), **adjacency(o)})


def multilabel_reverse(o: SimpleNamespace) -> Made:
    """Of ``ReverseKNN`` with attributes."""
    return reverse(labelers.ReverseKNN, o, **attributes(o, labelers.FixedThresholds, denoise=True))


def ind_knn(o: SimpleNamespace) -> Made:
    """Of ``IndKNN``."""
    budgets = {"budget": o.budget}
    arguments = {"threshold": o.threshold, "sigma2": o.sigma2, "num_queries": o.queries, "budgets": budgets}
    return Made(labelers.IndKNN, arguments)


def noisy_sgd_teacher(o: SimpleNamespace) -> Made:
    """Of ``NoisySGDTeacher``."""
    names = ("sampling_rate", "batch_size", "steps", "noise_multiplier", "rounds")
    return Made(labelers.NoisySGDTeacher, {name: getattr(o, name) for name in names})


def statistics(cls: type, o: SimpleNamespace) -> Made:
    """Of teachers that release sums."""
    names = [name for name in ("noise_multiplier", "expected_records", "releases") if hasattr(o, name)]
    return Made(cls, {**{name: getattr(o, name) for name in names}, **adjacency(o)})


def noisy_sgd(o: SimpleNamespace) -> list[Charge]:
    """Poisson batches at the rate batch_size / records, in ⌈epochs / rate⌉ steps."""
    records, batch = check_int("records", o.records), check_int("batch_size", o.batch_size)
    if batch > records:
        raise ValueError(f"batch_size={batch} must be at most records={records}")
    o.sampling_rate, o.steps = batch / records, -(-int(o.epochs) * records // batch)
    return [Charge(step_mechanism(o.noise_multiplier, 1.0, o.sampling_rate), o.steps)]


def release(o: SimpleNamespace) -> list[Charge]:
    """Plain noise on a vector."""
    check_choice("noise", o.noise, ADDITIVE_NOISES)
    length = o.sensitivity = check_positive("sensitivity", o.sensitivity)
    return [Charge(noise(o).make().for_votes(length, length, o.sampling_rate), o.count)]
