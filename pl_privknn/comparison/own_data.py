"""Comparison on a user's own data: the recommended run and the main teachers on the recommended features."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pl_privknn._checks import at_most, check_epsilon, check_int
from pl_privknn.comparison.run import Run
from pl_privknn.comparison.spec import Comparison, comparison_of
from pl_privknn.recommendation import Recommendation, recommend
from pl_privknn.rules import TEACHERS, config_of

_TITLES = {
    "ReverseKNN": "Reverse kNN",
    "PreconditionedGradients": "Released gradients",
    "SufficientStatistics": "Class sums",
}


def own_comparison(
    path: str | Path,
    epsilons: Sequence[float],
    records: int,
    seeds: Sequence[int] = (0,),
    **arguments: Any,
) -> tuple[Comparison, Recommendation]:
    """Comparison of the recommended run, the other recommended teacher, Private-kNN and NoisySGD on own data.

    Student, data and training are those of the recommendation at the middle ε, whose features all methods share. Only
    public data are read. Without public examples the recommended class sums and NoisySGD are compared.

    Args:
        path: the data, as in :func:`~pl_privknn.recommend`.
        epsilons: targets of every method.
        records: approximate number of private records; becomes public.
        seeds: seeds of the runs of each method and ε.
        **arguments: further arguments of :func:`~pl_privknn.recommend`.

    Raises:
        ValueError: for attributes, data without test examples, or arguments out of range.
    """
    epsilons = sorted({check_epsilon("--epsilon", epsilon) for epsilon in epsilons})
    check_int("--private-records", records, 10, 10**9)
    middle = epsilons[len(epsilons) // 2]
    found = recommend(path, epsilon=middle, private_records=records, **arguments)
    if found.data.task == "multilabel":
        raise ValueError(
            f"--data {path}: its labels are attributes, --data compares methods for classes; give a comparison like "
            "configs/compare_fashion_mnist_attributes.yaml, or run privknn fit --data"
        )
    if not len(found.data.test):
        raise ValueError(
            f"--data {path}: there are no test examples to compare methods on; give --test PATH, or run privknn fit "
            "--data, which releases the accuracy on a hold-out"
        )
    sizes, public, methods = found.sizes, found.data.has_public, []
    for teacher in TEACHERS if public else [found.setting.teacher]:
        recommended = teacher == found.setting.teacher
        setting = found.setting if recommended else sizes.rule(teacher)
        labeling = copy.deepcopy((config_of(setting, sizes) if public else found.config)["labeling"])
        del labeling["budget"]
        for shared in ("epsilon", "delta"):
            labeling["labeler"]["init_args"].pop(shared, None)
        title = _TITLES[teacher]
        method: dict[str, Any] = {"name": _name(title), "title": title, "labeling": labeling}
        if recommended:
            method["title"] += " (recommended)"
        if "queries_per_round" in labeling:
            method["settings"] = {
                epsilon: {"labeling.queries_per_round": replace(sizes, epsilon=epsilon).clusters}
                for epsilon in epsilons
            }
        methods.append(method)
    features = found.config["labeling"]["features"]
    if public:
        features = config_of(sizes.rule("PreconditionedGradients"), sizes)["labeling"]["features"]
        votes = config_of(sizes.rule("ReverseKNN"), sizes)["labeling"]["features"]
        # Half of the records of a class vote, on few queries, so that the noise is small relative to the votes.
        near = max(5, records // (2 * sizes.num_classes))
        neighbors = {"k": near, "sampling_rate": 0.8, "noise": {"class_path": "Gaussian"}}
        methods.append({
            "name": "private_knn",
            "title": "Private-kNN",
            "labeling": {
                "labeler": {"class_path": "PrivateKNN", "init_args": neighbors},
                "queries_per_round": min(40, sizes.clusters),
                "selection": "ClusterSelection",
                "rounds": 1,
                "features": votes,
            },
            "find": "labeling.labeler.init_args.noise.init_args.sigma",
        })  # fmt: skip
    steps = {"expected_batch_size": max(1, records // 10), "max_grad_norm": 0.25}
    baseline = {
        "extractor": features[0],
        "feature_head": {"head": "linear", "bias": False},
        "private_records": records,
        "options": {"physical_batch_size": 4096},
        "optimization": {"lr": 8.0},
    }
    methods.append({
        "name": "noisy_sgd",
        "title": "NoisySGD, linear",
        "model": {"class_path": "NoisySGD", "init_args": {**baseline, **steps}},
        "trainer": {"max_epochs": 10, "log_every_n_steps": 1},
    })  # fmt: skip
    document = {
        "name": _name(Path(path).resolve().stem or "data"),
        "base": {
            "data": found.config["data"],
            "student": found.config["model"],
            "trainer": found.config["trainer"],
        },
        "delta": sizes.delta,
        "seeds": list(seeds) or [0],
        "epsilons": epsilons,
        "methods": methods,
    }
    return comparison_of(document), found


def total_of(runs: Sequence[Run]) -> str:
    """Sentence with the sums of ε and δ over private runs: an upper bound on their joint cost."""
    private = [run for run in runs if run.private]
    epsilon, delta = sum(run.epsilon for run in private), sum(run.comparison.delta for run in private)
    return (
        f"All {len(private)} private runs together: ε at most {at_most(epsilon)} at δ {delta:g} (their sum), "
        "whichever model is released. The choice among them by public validation or test examples costs nothing more."
    )


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.-").lower() or "data"
