"""Methods to compare on a user's own data: the recommended run and the main teachers on its features."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_epsilon, check_int
from pl_privknn.recommendation.recommend import Recommendation, recommend
from pl_privknn.recommendation.rules import TEACHERS, parts_of

_EPOCHS = 20  # of the student on true labels
_METHODS = {
    "ReverseKNN": ("reverse_knn", "Reverse kNN"),
    "PreconditionedGradients": ("released_gradients", "Released gradients"),
    "SufficientStatistics": ("class_sums", "Class sums"),
}


def methods_on(
    path: str | Path,
    epsilons: Sequence[float],
    records: int,
    seeds: Sequence[int] = (0,),
    **arguments: Any,
) -> tuple[str, dict[str, Any], Recommendation]:
    """Recommend the methods of a comparison: the recommended run, the other teacher and NoisySGD.

    Student, data and training are those of the recommendation at the middle ε, whose features all methods share. Only
    public data are read. Without public examples the recommended class sums and NoisySGD are compared; where the run
    pays for public rows, released gradients and class sums, whose noise is Gaussian as that of the rows. Where the
    classes of all public examples are known, a student on them shows what is reached without privacy.

    Args:
        path: the data, as in :func:`~pl_privknn.recommend`.
        epsilons: targets of every method.
        records: approximate number of private records; becomes public.
        seeds: seeds of the runs of each method and ε.
        **arguments: further arguments of :func:`~pl_privknn.recommend`.

    Returns:
        Name and plain content of a comparison file, and the recommendation at the middle ε.

    Raises:
        ValueError: for attributes, data without test examples, or arguments out of range.
    """
    epsilons = sorted({check_epsilon("--epsilon", epsilon) for epsilon in epsilons})
    check_int("--private-records", records, 10, 10**9)
    found = recommend(path, epsilon=epsilons[len(epsilons) // 2], private_records=records, **arguments)
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
    sizes, public, methods = found.sizes, found.data.has_public, {}
    paid = found.data.pays_for_public
    teachers = [*TEACHERS] if public else [found.setting.teacher]
    if paid:
        teachers = [found.setting.teacher, "SufficientStatistics"]
    for teacher in teachers:
        name, title = _METHODS[teacher]
        recommended = teacher == found.setting.teacher
        labeling = found.config["labeling"]
        if paid and not recommended:
            labeler = {**labeling["labeler"], "class_path": teacher}
            labeling = {**labeling, "labeler": labeler}
        elif public and not paid:
            setting = found.setting if recommended else sizes.rule(teacher)
            labeling = parts_of(setting, sizes).sections()["labeling"]
        clusters = {
            epsilon: {"labeling.queries_per_round": replace(sizes, epsilon=epsilon).clusters}
            for epsilon in epsilons
        }
        methods[name] = {
            "title": f"{title} (recommended)" if recommended else title,
            "set": {"labeling": labeling},
            "at": clusters if "queries_per_round" in labeling else {},
        }
    features = found.config["labeling"]["features"]
    if public and not paid:
        features = parts_of(sizes.rule("PreconditionedGradients"), sizes).sections()["labeling"]["features"]
    baseline = {
        "extractor": features[0],
        "feature_head": {"head": "linear", "bias": False},
        "private_records": records,
        "options": {"physical_batch_size": 4096},
        "optimization": {"lr": 8.0},
        "expected_batch_size": max(1, records // 10),
        "max_grad_norm": 0.25,
    }
    if not paid:  # it pays for no rows
        methods["noisy_sgd"] = {
            "title": "NoisySGD, linear",
            "set": {
                "model": {"class_path": "NoisySGD", "init_args": baseline},
                "trainer.max_epochs": 10,
                "trainer.log_every_n_steps": 1,
            },
        }
    truth = found.data.public.truth if public else None
    if truth is not None and bool((truth >= 0).all()):
        methods["supervised"] = {
            "title": "student on true public labels",
            "set": {"data.init_args.train_on_truth": True, "trainer.max_epochs": _EPOCHS},
        }
    document = {
        "config": {section: found.config[section] for section in ("data", "model", "trainer")},
        "budget": {"delta": sizes.delta},
        "seeds": list(seeds) or [0],
        "epsilons": epsilons,
        "methods": methods,
    }
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(path).resolve().stem).strip("_.-").lower()
    return name or "data", document, found
