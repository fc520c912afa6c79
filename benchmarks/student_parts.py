"""What each part of the student of configs/fashion_mnist_statistics.yaml gains: all of it, and one thing changed.

One part a variant and an ε. Each seed has answers of its own, those of ``python -m benchmarks statistics`` with the
same ``--cache``, with the operating system's noise; all variants learn from the same ones. Nothing was chosen by
these figures: by default the split is one on which nothing was tuned.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.record import Measured, entries
from benchmarks.statistics import (
    CONFIG,
    SETTINGS,
    accuracy,
    answers_of,
    features_file,
    features_of,
    part_of,
    sections_at,
    student_of,
)
from pl_privknn.comparison.marks import guarantee_of, stated
from pl_privknn.nested_settings import get, put
from pl_privknn.privacy.mechanisms.base import weakest

_MODEL = "model.init_args"
#: A student of pixels whose views are mirrored and cut out.
_ON_PIXELS = {
    "extractor": None,
    "network": "small_cnn",
    "ema_decay": 0.998,
    "augment": "weak",
    "augmentation": {"flip": True, "cutout": 0.286, "cutout_fill": 0.286},
    "optimization.lr": 0.004,
}
WHOLE = "the student"
#: What is changed, and how: settings of the model, and what becomes of soft labels, float32 ``(n, 10)``.
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    WHOLE: ({}, torch.clone),
    "hard labels": ({}, lambda soft: functional.one_hot(soft.argmax(dim=1), soft.shape[1]).float()),
    "no hidden layer": ({"network": "linear_probe"}, torch.clone),
    "a constant learning rate": ({"optimization.scheduler": "none"}, torch.clone),
    "no weight decay": ({"optimization.weight_decay": 0.0}, torch.clone),
    "`small_cnn` on pixels": (_ON_PIXELS, torch.clone),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/statistics"), help="for features and answers"
    )
    parser.add_argument("--split", type=int, default=1)
    parser.add_argument("--epsilons", type=float, nargs="+", choices=list(SETTINGS), default=[0.1, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Every variant at every ε, but those that are stored."""
    torch.set_num_threads(options.threads)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    options.cache.mkdir(parents=True, exist_ok=True)
    given = options.split, options.root, False
    tables = features_of(
        sections_at(max(SETTINGS), *given), options.cache / features_file(options.split, False)
    )
    stored = entries("student_parts")
    for epsilon in options.epsilons:
        answers = {
            seed: answers_of(
                sections_at(epsilon, *given),
                tables,
                options.cache / f"{part_of(options.split, epsilon, seed, False)}.pt",
            )
            for seed in options.seeds
        }
        weak = weakest(guarantee_of(one["guarantee"]) for one in answers.values())
        for name, (settings, becomes) in VARIANTS.items():
            if f"{name}, ε {epsilon:g}" in stored:
                continue
            found: dict[str, list[float]] = {"student": [], "mean": []}
            for seed, one in answers.items():
                sections = sections_at(epsilon, *given)
                for key, value in settings.items():
                    put(sections, f"{_MODEL}.{key}", value)
                says = student_of(sections, {**one, "soft": becomes(one["soft"])}, seed)
                found["student"].append(accuracy(says, tables["test_labels"]))
                found["mean"].append(accuracy((says + one["test"]) / 2, tables["test_labels"]))
            results = {
                "epsilon": epsilon,
                "delta": get(sections_at(epsilon, *given), "labeling.labeler.init_args.delta"),
                "adjacency": "add_remove",
                **stated(weak),
                **found,
                "head": [accuracy(one["test"], tables["test_labels"]) for one in answers.values()],
            }
            yield Measured(
                results,
                options.seeds,
                f"{name}, ε {epsilon:g}",
                {"config": Path(CONFIG).name, "split_seed": options.split, "changed": settings},
            )
