"""One planner for every teacher, for noisy SGD and for plain releases: leave one parameter out, and it is found.

What a labeler costs is what its own :meth:`~pl_privknn.labelers.base.Labeler.plan` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pl_privknn._checks import check_choice, check_int, check_open_unit, check_positive, check_rate
from pl_privknn.labelers import Labeler, Screening
from pl_privknn.planning.makers import noise
from pl_privknn.planning.options import Made, Row
from pl_privknn.planning.plan import Plan, solve
from pl_privknn.planning.teachers import TEACHERS
from pl_privknn.planning.utility import Utility, utility_of_attributes, utility_of_votes
from pl_privknn.privacy.mechanisms import Charge, Gaussian, check_adjacency

#: The option that says how many votes a query gets; of reverse kNN none does, since records choose their queries.
_VOTES = {"private-knn": "k", "private-radius": "max_votes", "pate": "num_teachers", "reverse-knn": ""}
_ATTRIBUTE_VOTES = {
    "multilabel-knn": "k",
    "multilabel-pate": "num_teachers",
    "multilabel-reverse-knn": "",
}


def plan(
    teacher: str,
    *,
    delta: float,
    epsilon: float | None = None,
    exact: bool = True,
    exact_search: bool = False,
    **options: Any,
) -> Plan:
    """Plan a teacher: leave out one of the parameters that may be looked for, and it is found.

    Args:
        teacher: a row of :data:`TEACHERS`.
        delta: target δ.
        epsilon: target ε; left out, all parameters must be given and the plan states what they cost.
        exact: give the exact worst case too.
        exact_search: also search on it.
        **options: of the row.

    Raises:
        ValueError: naming the argument; :class:`~pl_privknn.privacy.accounting.calibration.CalibrationError`
            where the target can't be met.
    """
    row = TEACHERS[check_choice("teacher", teacher, tuple(TEACHERS))]
    names = [option.name for option in row.options]
    if unknown := [name for name in options if name not in names]:
        raise ValueError(f"{unknown[0]}={options[unknown[0]]!r}: options of {teacher} are {', '.join(names)}")
    stated = {name: value for name, value in options.items() if value is not None}
    missing = [name for name in row.free if name not in stated]
    if epsilon is not None and len(missing) == 1:  # it is looked for, though it may have a default
        stated[missing[0]] = None
    settings = {option.name: stated.get(option.name, option.default) for option in row.options}
    if lacking := [
        option.name for option in row.options if option.required and settings[option.name] is None
    ]:
        raise ValueError(f"{lacking[0]}=None must be given")
    settings = {"rounds": 1, "num_classes": 2, "adjacency": "add_remove", **settings}
    adjacency = check_adjacency(settings["adjacency"])

    def at(values: Mapping[str, Any]) -> SimpleNamespace:
        return _resolved({**settings, **{name: values[name] for name in row.free}})

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        return _charges(row, at(values))

    if settings.get("queries") is not None:
        _each_round(settings["queries"], settings["rounds"])
    start = _noise_start(epsilon, delta, *row.start(SimpleNamespace(**settings)))
    values, found, report = solve(
        charges_at,
        {name: settings[name] for name in row.free},
        {name: start if place is None else place for name, place in row.free.items()},
        epsilon,
        delta,
        adjacency,
        exact and row.exact,
        exact_search,
    )
    final, charges = at(values), tuple(charges_at(values))
    made = row.make(final)
    fragment = (
        {"labeling": _labeling(row, final, made, delta, epsilon)}
        if isinstance(made, Made)
        else {"releases": [charge.to_record() for charge in charges], "delta": delta, "adjacency": adjacency}
    )
    shown = [part for name in row.shown for part in (row.free if name == "*" else (name,))]
    parameters = {name: getattr(final, name) for name in shown if getattr(final, name, None) is not None}
    title = row.title.format(**settings)
    return Plan(
        title,
        found,
        epsilon,
        parameters,
        charges,
        report,
        row.counted,
        fragment,
        charges_at,
        _utility(teacher, final, made),
    )


def _resolved(settings: dict[str, Any]) -> SimpleNamespace:
    """All options, with what follows from several of them."""
    o = SimpleNamespace(**{"max_answers": None, "answer_share": None, **settings})
    if "queries" in settings:
        o.queries = int(o.queries)
        if o.answer_share is not None:
            if o.max_answers is not None:
                raise ValueError(
                    f"max_answers={o.max_answers!r}, answer_share={o.answer_share!r}: give one of them, or neither"
                )
            o.max_answers = math.ceil(check_rate("answer_share", o.answer_share) * o.queries - 1e-9)
        o.max_answers = min(
            o.queries, check_int("max_answers", o.queries if o.max_answers is None else o.max_answers)
        )
    return o


def _charges(row: Row, o: SimpleNamespace) -> list[Charge]:
    made = row.make(o)
    if not isinstance(made, Made):
        return made
    labeler: Labeler = made.make()
    queries = getattr(o, "queries", 1)
    return labeler.plan(queries, o.max_answers or queries, o.num_classes, rounds=o.rounds)


def _utility(teacher: str, o: SimpleNamespace, made: Any) -> tuple[Utility, ...]:
    """What the planned noise leaves of the votes; nothing for teachers that count none."""
    if teacher == "ind-knn":  # its noise grows with the root of the number of neighbours
        alike = check_int("neighbors", o.neighbors, 2)
        return utility_of_votes(Gaussian(o.sigma2 * math.sqrt(alike)), max(o.num_classes, 2), alike)
    if teacher in _ATTRIBUTE_VOTES:
        labeler, votes = made.make(), getattr(o, _ATTRIBUTE_VOTES[teacher], None)
        noisy, attributes = labeler.plan(1, 1, o.num_classes)[0].mechanism, labeler.attributes
        positives = getattr(attributes.decision, "expected_positives", None)
        abstain = getattr(labeler, "abstain", 0.0)
        return utility_of_attributes(noisy, votes, attributes.tau, positives, abstain)
    if teacher not in _VOTES:
        return ()
    votes = getattr(o, _VOTES[teacher], None)
    sigma = getattr(o, "screening_sigma", None)
    screening = None if sigma is None or o.threshold is None else Screening(o.threshold, sigma)
    return utility_of_votes(noise(o).make(), max(o.num_classes, 2), votes, screening)


def _labeling(
    row: Row, o: SimpleNamespace, made: Made, delta: float, epsilon: float | None
) -> dict[str, Any]:
    """The section of a training configuration."""
    asked: dict[str, Any] = {}
    if hasattr(o, "queries"):
        each, more = _each_round(o.queries, o.rounds)
        asked["queries_per_round"] = each if not more else [each + (i < more) for i in range(o.rounds)]
        asked["max_answers"] = o.max_answers
    stated = any(option.name == "adjacency" for option in row.options)
    return {
        "labeler": made.config(),
        "rounds": o.rounds,
        **asked,
        "budget": {
            "delta": delta,
            **({"adjacency": o.adjacency} if stated else {}),
            **({} if epsilon is None else {"max_epsilon": epsilon}),
        },
    }


def _each_round(queries: int, rounds: int) -> tuple[int, int]:
    """Queries of each round, and how many rounds ask one more."""
    if check_int("queries", queries) < check_int("rounds", rounds):
        raise ValueError(f"rounds={rounds!r} must be at most the number of queries, {queries}")
    return divmod(queries, rounds)


def _noise_start(epsilon: float | None, delta: float, length: float, releases: float) -> float:
    """The textbook's Gaussian noise for as many releases: only where the search starts."""
    size = math.sqrt(2 * math.log(1.25 / check_open_unit("delta", delta)) * releases)
    return length * size / (1.0 if epsilon is None else check_positive("epsilon", epsilon))


plan_private_knn = functools.partial(plan, "private-knn")
plan_reverse_knn = functools.partial(plan, "reverse-knn")
plan_release = functools.partial(plan, "release")
plan_noisy_sgd = functools.partial(plan, "noisy-sgd")
