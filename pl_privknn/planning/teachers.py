"""The teachers that can be planned, and which options there are; how these become labelers, see :mod:`.makers`."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from pl_privknn import labelers
from pl_privknn._checks import check_int
from pl_privknn.labelers.attributes import swapped_vote_norms
from pl_privknn.labelers.pate import PATE_VOTES_L2
from pl_privknn.labelers.private_knn import KNN_VOTES_L2
from pl_privknn.planning import makers
from pl_privknn.planning.makers import ADDITIVE_NOISES, NOISES, SUM_NOISES
from pl_privknn.planning.options import Option, Row
from pl_privknn.privacy.mechanisms import (
    ADJACENCIES,
)

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
_POSITIVES = Option(
    "expected_positives", float, "attributes that a record has, a public guess; above τ they are cut (τ)"
)
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
    return length * rate / makers.unit(o), (o.queries or 1) * share


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
        makers.private_knn,
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
        makers.private_radius,
        functools.partial(_asked, 1.0),
    ),
    "pate": Row(
        "PATE",
        {"noise_scale": None, "queries": 1000},
        "queries",
        ("num_teachers", *_SHOWN),
        (_SCALE, _PARTS, *_QUERIES, _CLASSES, _kinds(NOISES), *_screened(0.7, 2.125, "teachers"), _ADJACENCY),
        makers.pate,
        functools.partial(_asked, PATE_VOTES_L2),
    ),
    "multilabel-knn": Row(
        "PrivateKNN",
        {"noise_scale": None, "queries": 1000, "sampling_rate": 0.1},
        "queries",
        ("k", "tau", *_SHOWN),
        (_SCALE, _RATE, _K, _TAU, _POSITIVES, *_QUERIES, _ATTRIBUTES, _kinds(SUM_NOISES)),
        makers.multilabel_knn,
        _asked_attributes,
    ),
    "multilabel-pate": Row(
        "PATE",
        {"noise_scale": None, "queries": 1000},
        "queries",
        ("num_teachers", "tau", *_SHOWN),
        (
            *(_SCALE, _PARTS, _TAU, _POSITIVES, *_QUERIES, _ATTRIBUTES, _kinds(SUM_NOISES)),
            _ADJACENCY,
        ),
        makers.multilabel_pate,
        _asked_attributes,
    ),
    "reverse-knn": Row(
        "ReverseKNN",
        {"noise_scale": None, "rounds": 1},
        "rounds",
        ("k", "*", "noise"),
        (_SCALE, _TABLES, _VOTED, _kinds(ADDITIVE_NOISES, "laplace"), _ADJACENCY),
        functools.partial(makers.reverse, labelers.ReverseKNN),
        _whole_table,
    ),
    "multilabel-reverse-knn": Row(
        "ReverseKNN",
        {"noise_scale": None, "rounds": 1},
        "rounds",
        ("k", "tau", "*", "noise", "num_classes"),
        (
            *(_SCALE, _TABLES, _VOTED, _TAU, _POSITIVES, _ATTRIBUTES),
            *(_kinds(SUM_NOISES, "laplace"), _ADJACENCY),
        ),
        makers.multilabel_reverse,
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
            Option("neighbors", int, "records similar to a query, for the estimate of usefulness (100)", 100),
        ),
        makers.ind_knn,
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
        makers.noisy_sgd_teacher,
        lambda o: (o.sampling_rate or 1.0, (o.steps or 1) * o.rounds),
    ),
    **{
        name: Row(
            cls.__name__,
            {"noise_multiplier": None, **free},
            counted,
            ("*", "expected_records"),
            (*_STATISTICS, option),
            functools.partial(makers.statistics, cls),
            lambda o: (1.0, getattr(o, "releases", None) or 1),
        )
        for name, cls, free, counted, option in (
            ("class-sums", labelers.ClassSums, {}, "rounds", _ROUNDS),
            ("public-curvature", labelers.PublicCurvature, {"releases": 6}, "releases", _RELEASES),
        )
    },
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
        makers.noisy_sgd,
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
        makers.release,
        lambda o: (o.sensitivity * (o.sampling_rate or 1.0), o.count or 1),
    ),
}
