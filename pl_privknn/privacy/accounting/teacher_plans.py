"""Plans of the project's teachers and of plain releases: leave one parameter out, and it is found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pl_privknn._checks import check_choice, check_int, check_positive, check_rate
from pl_privknn.privacy.accounting.plan import (
    ADDITIVE_NOISES,
    NOISES,
    UNIT_SCALES,
    Plan,
    make_noise,
    noise_config,
    noise_start,
    solve,
)
from pl_privknn.privacy.mechanisms import (
    Adjacency,
    Charge,
    Gaussian,
    Mechanism,
    NoisyScreening,
    check_adjacency,
)


def plan_private_knn(
    *,
    delta: float,
    k: int = 300,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    queries: int | None = None,
    sampling_rate: float | None = None,
    max_answers: int | None = None,
    answer_share: float | None = None,
    num_classes: int = 10,
    noise: str = "gaussian",
    screening: bool = True,
    threshold: float | None = None,
    sigma_ratio: float = 3.0,
    rounds: int = 1,
    exact: bool = True,
    exact_search: bool = False,
) -> Plan:
    """Plan Private-kNN: leave out one of ``noise_scale``, ``queries`` and ``sampling_rate``; it is found.

    Args:
        delta: target δ.
        k: neighbours that vote.
        epsilon: target ε; left out, all parameters must be given and the plan states what they cost.
        noise_scale: σ of Gaussian noise, b of the other kinds, in votes.
        queries: of all rounds together.
        sampling_rate: γ.
        max_answers: the most answers of all rounds together. This or ``answer_share``; both left out, every
            query may be answered.
        answer_share: answers as a share of the queries, in (0, 1], for plans whose queries are found.
        num_classes: public number of classes.
        noise: one of :data:`NOISES`.
        screening: whether queries are screened.
        threshold: T in votes; 0.6 k by default.
        sigma_ratio: screening noise over the standard deviation of the aggregation noise; 3 as in the paper.
        rounds: of queries, for the configuration.
        exact: give the exact worst case too.
        exact_search: also search on it.

    Raises:
        ValueError: naming the argument; :class:`~pl_privknn.privacy.accounting.calibration.CalibrationError`
            where the target can't be met.
    """
    k, num_classes = check_int("k", k), check_int("num_classes", num_classes, minimum=2)
    rounds, ratio = check_int("rounds", rounds), check_positive("sigma_ratio", sigma_ratio)
    check_choice("noise", noise, NOISES)
    if queries is not None and check_int("queries", queries) < rounds:
        raise ValueError(f"rounds={rounds!r} must be at most the number of queries, {queries}")
    if max_answers is not None and answer_share is not None:
        raise ValueError(
            f"max_answers={max_answers!r}, answer_share={answer_share!r}: give one of them, or neither"
        )
    cap = None if max_answers is None else check_int("max_answers", max_answers)
    share = 1.0 if answer_share is None else check_rate("answer_share", answer_share)
    voted = float(f"{0.6 * k:.6g}") if threshold is None else threshold

    def answers(values: Mapping[str, Any]) -> int:
        asked = int(values["queries"])
        return min(asked, cap) if cap is not None else math.ceil(share * asked - 1e-9)

    def mechanisms(values: Mapping[str, Any]) -> tuple[NoisyScreening | None, Mechanism]:
        rate, scale = values["sampling_rate"], values["noise_scale"]
        aggregation = make_noise(noise, scale, math.sqrt(2.0), 2, rate)
        if not screening:
            return None, aggregation
        sigma = float(f"{ratio * scale / UNIT_SCALES[noise]:.6g}")
        return NoisyScreening(k, voted, sigma, num_classes, rate), aggregation

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        screen, aggregation = mechanisms(values)
        first = [] if screen is None else [Charge(screen, values["queries"])]
        return [*first, Charge(aggregation, answers(values))]

    given = {"noise_scale": noise_scale, "queries": queries, "sampling_rate": sampling_rate}
    start = noise_start(epsilon, delta, math.sqrt(2.0) * (sampling_rate or 1.0), (queries or 1) * share)
    values, found, report = solve(
        charges_at,
        given,
        {"noise_scale": start * UNIT_SCALES[noise], "queries": 1000, "sampling_rate": 0.1},
        epsilon,
        delta,
        "add_remove",
        exact,
        exact_search,
    )
    screen, aggregation = mechanisms(values)
    each, more = divmod(int(values["queries"]), rounds)
    if each == 0:
        raise ValueError(f"rounds={rounds!r} must be at most the number of queries, {values['queries']}")
    arguments: dict[str, Any] = {"k": k, "sampling_rate": values["sampling_rate"]}
    if screen is not None:
        arguments["screening"] = {"threshold": screen.threshold, "sigma": screen.sigma}
    arguments["noise"] = noise_config(aggregation)
    fragment = {
        "labeling": {
            "labeler": {"class_path": "PrivateKNN", "init_args": arguments},
            "rounds": rounds,
            "queries_per_round": each if not more else [each + (i < more) for i in range(rounds)],
            "max_answers": answers(values),
            "delta": delta,
            **({} if epsilon is None else {"max_epsilon": epsilon}),
        }
    }
    parameters = {
        "k": k,
        **values,
        "max_answers": answers(values),
        "noise": noise,
        "num_classes": num_classes,
    }
    if screen is not None:
        parameters |= {"threshold": screen.threshold, "screening_sigma": screen.sigma}
    charges = tuple(charges_at(values))
    return Plan("PrivateKNN", found, epsilon, parameters, charges, report, "queries", fragment, charges_at)


def plan_reverse_knn(
    *,
    delta: float,
    k: int = 1,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    rounds: int | None = None,
    noise: str = "laplace",
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> Plan:
    """Plan reverse kNN: leave out ``noise_scale`` or ``rounds``; it is found.

    Args:
        delta: target δ.
        k: queries that a record votes for.
        epsilon: target ε of all rounds; as in :func:`plan_private_knn`.
        noise_scale: b or σ, in counts.
        rounds: releases of the whole table of counts.
        noise: one of :data:`ADDITIVE_NOISES`.
        adjacency: a replaced record moves twice as much as an added one.
        exact: as in :func:`plan_private_knn`.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    check_choice("noise", noise, ADDITIVE_NOISES)
    moved = check_int("k", k) * (2 if check_adjacency(adjacency) == "replace_one" else 1)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        mechanism = make_noise(noise, values["noise_scale"], math.sqrt(moved), moved, 1.0)
        return [Charge(mechanism, values["rounds"])]

    values, found, report = solve(
        charges_at,
        {"noise_scale": noise_scale, "rounds": rounds},
        {"noise_scale": noise_start(epsilon, delta, moved, rounds or 1), "rounds": 1},
        epsilon,
        delta,
        adjacency,
        exact,
    )
    charges = tuple(charges_at(values))
    arguments: dict[str, Any] = {"k": k, "noise": noise_config(charges[0].mechanism)}
    if adjacency != "add_remove":
        arguments["adjacency"] = adjacency
    fragment = {
        "labeling": {
            "labeler": {
                "class_path": "pl_privknn.labelers.ReverseKNN",
                "init_args": arguments,
            },
            "rounds": values["rounds"],
            "delta": delta,
            "adjacency": adjacency,
            **({} if epsilon is None else {"max_epsilon": epsilon}),
        }
    }
    parameters = {"k": k, **values, "noise": noise}
    return Plan("ReverseKNN", found, epsilon, parameters, charges, report, "rounds", fragment, charges_at)


def plan_release(
    *,
    delta: float,
    noise: str = "gaussian",
    sensitivity: float = 1.0,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    count: int | None = None,
    sampling_rate: float | None = 1.0,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> Plan:
    """Plan plain noisy releases: leave out one of ``noise_scale``, ``count`` and ``sampling_rate``.

    Args:
        delta: target δ.
        noise: one of :data:`ADDITIVE_NOISES`.
        sensitivity: L2 for Gaussian kinds, L1 for Laplace kinds, under ``adjacency``.
        epsilon: as in :func:`plan_private_knn`.
        noise_scale: σ or b.
        count: number of releases.
        sampling_rate: Poisson rate; None to find it.
        adjacency: neighbouring relation.
        exact: as in :func:`plan_private_knn`.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    check_choice("noise", noise, ADDITIVE_NOISES)
    length = check_positive("sensitivity", sensitivity)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        mechanism = make_noise(noise, values["noise_scale"], length, length, values["sampling_rate"])
        return [Charge(mechanism, values["count"])]

    start = noise_start(epsilon, delta, length * (sampling_rate or 1.0), count or 1)
    values, found, report = solve(
        charges_at,
        {"noise_scale": noise_scale, "count": count, "sampling_rate": sampling_rate},
        {"noise_scale": start, "count": 100, "sampling_rate": 0.1},
        epsilon,
        delta,
        adjacency,
        exact,
    )
    charges = tuple(charges_at(values))
    parameters = {"noise": noise, "sensitivity": length, **values}
    fragment = {
        "releases": [charge.to_record() for charge in charges],
        "delta": delta,
        "adjacency": adjacency,
    }
    return Plan(
        f"{noise} release", found, epsilon, parameters, charges, report, "count", fragment, charges_at
    )


def plan_noisy_sgd(
    *,
    delta: float,
    records: int,
    batch_size: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: int | None = None,
) -> Plan:
    """Plan NoisySGD with Poisson batches: leave out ``noise_multiplier`` or ``epochs``.

    The rate is ``batch_size / records`` and there are ⌈epochs / rate⌉ steps; the trainer must use both.

    Args:
        delta: target δ.
        records: private records; a public number here.
        batch_size: expected size of a Poisson batch.
        epsilon: as in :func:`plan_private_knn`.
        noise_multiplier: noise on the sum of clipped gradients over the clipping norm.
        epochs: passes over the records.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    records, batch_size = check_int("records", records), check_int("batch_size", batch_size)
    if batch_size > records:
        raise ValueError(f"batch_size={batch_size} must be at most records={records}")
    rate = batch_size / records

    def steps(values: Mapping[str, Any]) -> int:
        return -(-int(values["epochs"]) * records // batch_size)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        return [Charge(Gaussian(values["noise_multiplier"], 1.0, rate), steps(values))]

    start = max(0.5, noise_start(epsilon, delta, rate, (epochs or 1) / rate))
    values, found, report = solve(
        charges_at,
        {"noise_multiplier": noise_multiplier, "epochs": epochs},
        {"noise_multiplier": start, "epochs": 10},
        epsilon,
        delta,
        "add_remove",
        exact=False,
    )
    charges = tuple(charges_at(values))
    parameters = {
        "records": records,
        "batch_size": batch_size,
        **values,
        "sampling_rate": rate,
        "steps": steps(values),
    }
    fragment = {
        "releases": [charge.to_record() for charge in charges],
        "delta": delta,
        "adjacency": "add_remove",
    }
    return Plan("NoisySGD", found, epsilon, parameters, charges, report, "epochs", fragment, charges_at)
