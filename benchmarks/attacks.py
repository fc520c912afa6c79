"""Attacks on methods at several values of ε, and whether they detect half of the noise.

Each method at each ε on the bundled digits, or on Fashion-MNIST: an honest run, and the same with half the noise
under the same charges. A part that is stored already is not measured again, so the command may be stopped.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.faulty import LessNoise
from benchmarks.record import ROOT, Measured, entries, markdown
from pl_privknn.auditing.attack import attack_labeler, attack_training, target_of_config, training_of_config
from pl_privknn.comparison.table import SEEDED, stated
from pl_privknn.config import read_document
from pl_privknn.planning import is_training, solve
from pl_privknn.privacy.noise import SeededNoise

_QUERIES = 100
_SIGMA = {"class_path": "Gaussian", "init_args": {"sigma": 10.0}}
#: Configuration, and what is changed in its teacher; its ε is set, or the noise of its votes found for it.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "reverse kNN": ("digits_reverse_knn", {}),
    "reverse kNN, shuffle": ("digits_reverse_knn_shuffle", {}),
    "Private-kNN": ("digits_private_knn", {"screening": None, "noise": _SIGMA}),
    "PATE": ("digits_pate", {"screening": None, "noise": _SIGMA}),
    "NoisySGD": ("digits_noisy_sgd", {}),
    "PrivateTraining": ("digits_noisy_sgd", {}),
    "reverse kNN, Fashion-MNIST": ("fashion_mnist_reverse_knn_eps1", {}),
    "reverse kNN, shuffle, Fashion-MNIST": ("fashion_mnist_reverse_knn_shuffle", {"num_clients": 3000}),
}
#: A guarantee holds for every table; of these methods a part of the private and the public images is enough.
FEWER_IMAGES = {"private_records": 3000, "public_examples": 1000}
_WHOLE = "reverse kNN, Fashion-MNIST"
#: Their noise is not continuous, so :class:`~benchmarks.faulty.LessNoise` leaves it as it is.
WHOLE_NUMBERS = tuple(name for name in METHODS if "shuffle" in name)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--canaries", type=int, default=3000)
    parser.add_argument("--root", help="folder of Fashion-MNIST")
    parser.add_argument("--workers", type=int, default=2, help="attacks at a time, of one thread each")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements that are not stored yet, one by one."""
    wanted = [(method, epsilon) for epsilon in (1.0, 2.0, 8.0) for method in METHODS]
    stored = entries("attacks")
    jobs = [(_attacked, *one, options.canaries, options.root) for one in wanted if _part(*one) not in stored]
    # Separate processes: threads would share one interpreter, and the seconds of each attack are reported.
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as workers:
        for done in as_completed([workers.submit(*job) for job in jobs]):
            yield done.result()


def _part(method: str, epsilon: float) -> str:
    return f"{method}, ε {epsilon:g}"


def _attacked(method: str, epsilon: float, canaries: int, root: str | None) -> Measured:
    """Attack results of an honest run and of one with half the noise scale."""
    torch.set_num_threads(1)
    document = configuration(method, epsilon, root)
    settings: dict[str, Any] = {"canaries": canaries}
    if is_training(document):
        attack = functools.partial(attack_training, training_of_config(document, method), **settings)
    else:
        attack = functools.partial(attack_labeler, target_of_config(document, method), **settings)
    figures = {
        "method": method,
        "wanted": epsilon,
        **stated(SEEDED),
        "honest": attack(noise=SeededNoise(0)).to_dict(),
        "half_noise": attack(noise=LessNoise(2.0, SeededNoise(1))).to_dict(),
    }
    return Measured(figures, seeds=[0, 1], part=_part(method, epsilon), settings=settings)


def configuration(method: str, epsilon: float, root: str | None = None) -> dict[str, Any]:
    """Configuration of a method, with its noise calibrated to an ε."""
    name, changes = METHODS[method]
    document = copy.deepcopy(read_document(ROOT / "pl_privknn" / "configs" / f"{name}.yaml"))
    if root is not None and "root" in document["data"].get("init_args", {}):
        document["data"]["init_args"]["root"] = root
    if document["data"]["class_path"] == "FashionMNISTDataModule" and method != _WHOLE:
        document["data"]["init_args"].update(FEWER_IMAGES)
        document["labeling"]["features"] = "HOG"
        if document["labeling"].get("queries_per_round", 0) > _QUERIES:
            document["labeling"]["queries_per_round"] = _QUERIES
    if "labeling" not in document:
        arguments = document["model"]["init_args"]
        arguments["budget"] = {**arguments.get("budget", {}), "epsilon": epsilon}
        if method == "PrivateTraining":
            names = ("budget", "expected_batch_size", "private_records")
            kept = {name: arguments[name] for name in names}
            document["model"] = {"class_path": "benchmarks.faulty.PlainClassifier"}
            document["trainer"]["callbacks"] = [
                {"class_path": "pl_privknn.PrivateTraining", "init_args": kept}
            ]
        return document
    arguments = document["labeling"]["labeler"]["init_args"]
    arguments.update(copy.deepcopy(changes))
    if "noise" not in changes:
        document["labeling"]["budget"]["epsilon"] = epsilon
        return document
    plan = solve(document, None, epsilon, source=name, exact=False)
    arguments["noise"]["init_args"]["sigma"] = round(plan.values[plan.found], 4)
    return document


def table() -> str:
    """Table with one row per method: stated ε and lower bounds at each."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in entries("attacks").values():
        rows.setdefault(one["results"]["method"], []).append(one["results"])
    lines = []
    for method, found in sorted(rows.items()):
        found.sort(key=lambda each: each["wanted"])
        lines.append([
            method,
            found[0]["honest"]["released"],
            ", ".join(f"{one['honest']['epsilon']:.2f}" for one in found),
            # A lower bound, rounded down.
            ", ".join(f"{math.floor(100 * one['honest']['epsilon_lower_bound']) / 100:.2f}" for one in found),
            "–" if method in WHOLE_NUMBERS else ", ".join(
                "yes" if one["half_noise"]["violated"] else "no" for one in found
            ),
        ])  # fmt: skip
    header = ["method", "seen", "ε", "lower bound", "half the noise found"]
    return markdown(header, lines)
