"""The teachers that can be planned: how options become each of them, and which options there are."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

from pl_privknn import labelers
from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.labelers.multilabel.votes import swapped_vote_norms
from pl_privknn.labelers.pate.aggregators import PATE_VOTES_L2, Aggregator
from pl_privknn.labelers.private_knn import KNN_VOTES_L2
from pl_privknn.labelers.statistics.prototypes import REACH
from pl_privknn.planning.options import Made, Option, Row
from pl_privknn.privacy.mechanisms import (
    ADJACENCIES,
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


# ------------------------------------------------------------------ how options become labelers


def noise(o: SimpleNamespace, scale: float | None = None) -> Made:
    """The noise that is named, with its scale: σ of Gaussian kinds, b of the others."""
    found = NOISES[check_choice("noise", o.noise, tuple(NOISES))]
    parameter = dataclasses.fields(found)[0].name  # type: ignore[arg-type]
    return Made(found, {parameter: o.noise_scale if scale is None else scale})


def _unit(o: SimpleNamespace) -> float:
    """Standard deviation of noise of scale 1."""
    return float(noise(o, 1.0).make().deviation)


def _screening(o: SimpleNamespace, usual: float) -> dict[str, Any]:
    """The screening, by default at the usual threshold, as an argument; none where it was declined."""
    if not o.screening:
        o.threshold = None
        return {}
    ratio = check_positive("sigma_ratio", o.sigma_ratio)
    o.screening_sigma = float(f"{ratio * o.noise_scale * _unit(o):.6g}")
    o.threshold = float(f"{usual:.6g}") if o.threshold is None else o.threshold
    return {"screening": Made(labelers.Screening, {"threshold": o.threshold, "sigma": o.screening_sigma})}


def _private_knn(o: SimpleNamespace) -> Made:
    k = check_int("k", o.k)
    arguments = {"k": k, "sampling_rate": o.sampling_rate, **_screening(o, 0.6 * k), "noise": noise(o)}
    return Made(labelers.PrivateKNN, arguments)


def _private_radius(o: SimpleNamespace) -> Made:
    cut: dict[str, Any] = {}
    if o.max_votes is not None:
        cut = {"max_votes": o.max_votes, **_screening(o, 0.6 * check_int("max_votes", o.max_votes))}
    elif o.threshold is not None:
        raise ValueError(
            f"threshold={o.threshold!r} of a screening needs max_votes, the largest count it covers"
        )
    return Made(labelers.PrivateRadius, {"sampling_rate": o.sampling_rate, **cut, "noise": noise(o)})


def _pate(o: SimpleNamespace) -> Made:
    teachers = check_int("num_teachers", o.num_teachers, 2)
    aggregator = Made(Aggregator, {"noise": noise(o), **_screening(o, 0.7 * teachers)})
    return Made(labelers.PATE, {"num_teachers": teachers, "aggregator": aggregator})


def _multilabel_knn(o: SimpleNamespace) -> Made:
    arguments = {"k": o.k, "sampling_rate": o.sampling_rate, "tau": o.tau, "noise": noise(o)}
    return Made(labelers.MultiLabelKNN, arguments)


def _multilabel_pate(o: SimpleNamespace) -> Made:
    arguments = {"num_teachers": o.num_teachers, "tau": o.tau, "noise": noise(o)}
    return Made(labelers.MultiLabelPATE, arguments)


def _adjacency(o: SimpleNamespace) -> dict[str, str]:
    """The argument of labelers that hold under either adjacency; none where it is their default."""
    return {} if o.adjacency == "add_remove" else {"adjacency": o.adjacency}


def _reverse(cls: type, o: SimpleNamespace, **more: Any) -> Made:
    return Made(cls, {"k": o.k, **more, "noise": noise(o), **_adjacency(o)})


def _multilabel_reverse(o: SimpleNamespace) -> Made:
    return _reverse(labelers.MultiLabelReverseKNN, o, tau=o.tau)


def _ind_knn(o: SimpleNamespace) -> Made:
    budgets = {"budget": o.budget}
    arguments = {"threshold": o.threshold, "sigma2": o.sigma2, "num_queries": o.queries, "budgets": budgets}
    return Made(labelers.IndKNN, arguments)


def _noisy_sgd_teacher(o: SimpleNamespace) -> Made:
    names = ("sampling_rate", "batch_size", "steps", "noise_multiplier", "rounds")
    return Made(labelers.NoisySGDTeacher, {name: getattr(o, name) for name in names})


def _statistics(cls: type, o: SimpleNamespace) -> Made:
    names = [name for name in ("noise_multiplier", "expected_records", "releases") if hasattr(o, name)]
    return Made(cls, {**{name: getattr(o, name) for name in names}, **_adjacency(o)})


def _prototypes(o: SimpleNamespace) -> Made:
    epsilon = REACH[o.adjacency] / check_positive("noise_scale", o.noise_scale)
    return Made(labelers.PublicPrototypes, {"epsilon": epsilon, **_adjacency(o)})


def _noisy_sgd(o: SimpleNamespace) -> list[Charge]:
    """Poisson batches at the rate batch_size / records, in ⌈epochs / rate⌉ steps."""
    records, batch = check_int("records", o.records), check_int("batch_size", o.batch_size)
    if batch > records:
        raise ValueError(f"batch_size={batch} must be at most records={records}")
    o.sampling_rate, o.steps = batch / records, -(-int(o.epochs) * records // batch)
    return [Charge(step_mechanism(o.noise_multiplier, 1.0, o.sampling_rate), o.steps)]


def _release(o: SimpleNamespace) -> list[Charge]:
    check_choice("noise", o.noise, ADDITIVE_NOISES)
    length = o.sensitivity = check_positive("sensitivity", o.sensitivity)
    return [Charge(noise(o).make().for_votes(length, length, o.sampling_rate), o.count)]


# ------------------------------------------------------------------ what may be said of each teacher

_SCALE = Option("noise_scale", float, "σ of Gaussian noise, b of the other kinds")
_MULTIPLIER = Option(
    "noise_multiplier", float, "noise on the sum of clipped gradients over the clipping norm"
)
_RATE = Option("sampling_rate", float, "γ in (0, 1]")
_ROUNDS = Option("rounds", int, "rounds of queries (1)", 1)
_TABLES = Option("rounds", int, "releases of the whole table of counts")
_VOTED = Option("k", int, "queries that a record votes for (1)", 1)
_ADJACENCY = Option("adjacency", ADJACENCIES, "neighbouring relation (add_remove)", "add_remove")
_CLASSES = Option("num_classes", int, "number of classes (10)", 10)
_ATTRIBUTES = Option("num_classes", int, "number of attributes", None, "num-attributes", True)
_STATISTICS = (
    Option("noise_multiplier", float, "noise on each sum over its sensitivity"),
    Option("expected_records", int, "a public constant, about the number of records (60000)", 60_000),
    _ADJACENCY,
)
_RELEASES = Option("releases", int, "sums of gradients of all rounds together")
_TAU = Option("tau", float, "the most that a vote adds to all attributes together (3)", 3.0)
_QUERIES = (
    Option("queries", int, "queries of all rounds together"),
    Option(
        "max_answers", int, "the most answers of all rounds together; by default all queries", flag="answers"
    ),
    Option("answer_share", float, "answers as a share of the queries, instead of --answers"),
    _ROUNDS,
)


def _kinds(names: Any, default: str = "gaussian") -> Option:
    return Option("noise", tuple(names), f"kind of noise ({default})", default)


def _screened(share: float, ratio: float, votes: str) -> tuple[Option, ...]:
    return (
        Option("threshold", float, f"of the screening, in votes ({share} {votes})"),
        Option("sigma_ratio", float, f"screening noise over the deviation of the votes' ({ratio:g})", ratio),
        Option("screening", bool, "answer every query", True, "no-screening"),
    )


def _asked(length: float, o: SimpleNamespace) -> tuple[float, float]:
    """Start of the noise where queries are answered one by one."""
    rate, share = getattr(o, "sampling_rate", None) or 1.0, 1.0 if o.answer_share is None else o.answer_share
    return length * rate / _unit(o), (o.queries or 1) * share


def _asked_attributes(o: SimpleNamespace) -> tuple[float, float]:
    return _asked(swapped_vote_norms(o.tau, check_int("num_classes", o.num_classes, 2))[1], o)


def _whole_table(o: SimpleNamespace) -> tuple[float, float]:
    """Start of the noise where a round releases one table of counts."""
    return o.k * (2 if o.adjacency == "replace_one" else 1), o.rounds or 1


def _epochs(o: SimpleNamespace) -> tuple[float, float]:
    rate = o.batch_size / o.records
    return rate, (o.epochs or 1) / rate


_SHOWN = ("*", "max_answers", "noise", "num_classes", "threshold", "screening_sigma")
_K = Option("k", int, "neighbours that vote (300)", 300)
_PARTS = Option("num_teachers", int, "teachers that vote (250)", 250, "teachers")
TEACHERS: dict[str, Row] = {
    "private-knn": Row(
        "PrivateKNN",
        {"noise_scale": None, "queries": 1000, "sampling_rate": 0.1},
        "queries",
        ("k", *_SHOWN),
        (_SCALE, _RATE, _K, *_QUERIES, _CLASSES, _kinds(NOISES), *_screened(0.6, 3.0, "k")),
        _private_knn,
        functools.partial(_asked, KNN_VOTES_L2),
    ),
    "private-radius": Row(
        "PrivateRadius",
        {"noise_scale": None, "queries": 1000, "sampling_rate": 0.1},
        "queries",
        ("max_votes", *_SHOWN),
        (
            *(_SCALE, _RATE, *_QUERIES, _CLASSES, _kinds(NOISES, "exponential_argmax")),
            Option("max_votes", int, "a count above this is cut to it; with it queries are screened"),
            *_screened(0.6, 3.0, "max_votes"),
        ),
        _private_radius,
        functools.partial(_asked, 1.0),
    ),
    "pate": Row(
        "PATE",
        {"noise_scale": None, "queries": 1000},
        "queries",
        ("num_teachers", *_SHOWN),
        (_SCALE, _PARTS, *_QUERIES, _CLASSES, _kinds(NOISES), *_screened(0.7, 2.125, "teachers"), _ADJACENCY),
        _pate,
        functools.partial(_asked, PATE_VOTES_L2),
    ),
    "multilabel-knn": Row(
        "MultiLabelKNN",
        {"noise_scale": None, "queries": 1000, "sampling_rate": 0.1},
        "queries",
        ("k", "tau", *_SHOWN),
        (_SCALE, _RATE, _K, _TAU, *_QUERIES, _ATTRIBUTES, _kinds(SUM_NOISES)),
        _multilabel_knn,
        _asked_attributes,
    ),
    "multilabel-pate": Row(
        "MultiLabelPATE",
        {"noise_scale": None, "queries": 1000},
        "queries",
        ("num_teachers", "tau", *_SHOWN),
        (_SCALE, _PARTS, _TAU, *_QUERIES, _ATTRIBUTES, _kinds(SUM_NOISES), _ADJACENCY),
        _multilabel_pate,
        _asked_attributes,
    ),
    "reverse-knn": Row(
        "ReverseKNN",
        {"noise_scale": None, "rounds": 1},
        "rounds",
        ("k", "*", "noise"),
        (_SCALE, _TABLES, _VOTED, _kinds(ADDITIVE_NOISES, "laplace"), _ADJACENCY),
        functools.partial(_reverse, labelers.ReverseKNN),
        _whole_table,
    ),
    "multilabel-reverse-knn": Row(
        "MultiLabelReverseKNN",
        {"noise_scale": None, "rounds": 1},
        "rounds",
        ("k", "tau", "*", "noise", "num_classes"),
        (_SCALE, _TABLES, _VOTED, _TAU, _ATTRIBUTES, _kinds(SUM_NOISES, "laplace"), _ADJACENCY),
        _multilabel_reverse,
        _whole_table,
    ),
    "ind-knn": Row(
        "IndKNN",
        {"budget": 0.01},
        "queries",
        ("*", "queries", "threshold", "sigma2"),
        (
            Option("budget", float, "B of every record; ε follows from it alone"),
            Option("queries", int, "queries that the budgets should last for (1000)", 1000),
            Option("threshold", float, "kernel value from which a record is a neighbour (0.5)", 0.5),
            Option("sigma2", float, "noise of the votes (1)", 1.0),
        ),
        _ind_knn,
        lambda o: (1.0, 1.0),
    ),
    "noisy-sgd-teacher": Row(
        "NoisySGDTeacher",
        {"noise_multiplier": None, "steps": 100, "sampling_rate": 0.1},
        "steps",
        ("*", "batch_size", "rounds"),
        (
            _MULTIPLIER,
            Option("steps", int, "noisy steps of one round"),
            _RATE,
            Option("batch_size", int, "what the noisy sum of gradients is divided by (6000)", 6000),
            _ROUNDS,
        ),
        _noisy_sgd_teacher,
        lambda o: (o.sampling_rate or 1.0, (o.steps or 1) * o.rounds),
    ),
    **{
        name: Row(
            cls.__name__,
            {"noise_multiplier": None, **free},
            counted,
            ("*", "expected_records"),
            (*_STATISTICS, option),
            functools.partial(_statistics, cls),
            lambda o: (1.0, getattr(o, "releases", None) or 1),
        )
        for name, cls, free, counted, option in (
            ("class-sums", labelers.ClassSums, {}, "rounds", _ROUNDS),
            ("soft-votes", labelers.SoftVotes, {}, "rounds", _ROUNDS),
            ("public-curvature", labelers.PublicCurvature, {"releases": 6}, "releases", _RELEASES),
        )
    },
    "public-prototypes": Row(
        "PublicPrototypes",
        {"noise_scale": None},
        "rounds",
        ("*",),
        (_SCALE, _ADJACENCY, _ROUNDS),
        _prototypes,
        lambda o: (REACH[o.adjacency], 1.0),
    ),
    "noisy-sgd": Row(
        "NoisySGD",
        {"noise_multiplier": None, "epochs": 10},
        "epochs",
        ("records", "batch_size", "*", "sampling_rate", "steps"),
        (
            _MULTIPLIER,
            Option("epochs", int, "passes over the records"),
            Option("records", int, "number of private records", required=True),
            Option("batch_size", int, "expected size of a Poisson batch", required=True),
        ),
        _noisy_sgd,
        _epochs,
        exact=False,
    ),
    "release": Row(
        "{noise} release",
        {"noise_scale": None, "count": 100, "sampling_rate": 0.1},
        "count",
        ("noise", "sensitivity", "*"),
        (
            _SCALE,
            Option("count", int, "number of releases"),
            Option("sampling_rate", float, "Poisson rate in (0, 1]", 1.0),
            _kinds(ADDITIVE_NOISES),
            Option("sensitivity", float, "L2 for Gaussian kinds, L1 for Laplace kinds (1)", 1.0),
            _ADJACENCY,
        ),
        _release,
        lambda o: (o.sensitivity * (o.sampling_rate or 1.0), o.count or 1),
    ),
}
