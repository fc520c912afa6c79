"""What an attacker really gets from every method, at several values of ε, and whether half the noise is noticed.

Each part is one method at one ε on the bundled digits, or on Fashion-MNIST: an honest run, and the same with noise of
the half scale under the same charges. A part that is stored already is not measured again, so the command may be
stopped and started.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.faulty import LessNoise
from benchmarks.record import ROOT, Measured, entries
from pl_privknn.attacks.attack import attack_labeler, attack_training
from pl_privknn.attacks.configuration import target_of_config
from pl_privknn.attacks.training_configuration import training_of_config
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.comparison.trainings import is_training
from pl_privknn.documents import read_configuration
from pl_privknn.planning.configuration_plan import plan_with_setting
from pl_privknn.planning.setting_search import Calibrate
from pl_privknn.privacy.noise import SeededNoise

_QUERIES = 100
_LABELER = "labeling.labeler.init_args"
_SIGMA = {"class_path": "Gaussian", "init_args": {"sigma": 10.0}}
#: Configuration, what is set to ε or found for it, and what else is changed.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reverse kNN": ("digits_reverse_knn", "epsilon", {}),
    "reverse kNN, local": ("digits_reverse_knn_local", "epsilon", {}),
    "reverse kNN, shuffle": ("digits_reverse_knn_shuffle", "epsilon", {}),
    "statistics": ("digits_statistics", "epsilon", {}),
    "noisy SGD teacher": ("digits_noisy_sgd_teacher", "epsilon", {}),
    "Private-kNN": ("digits_private_knn", "noise.init_args.sigma", {"screening": None, "noise": _SIGMA}),
    "PATE": (
        "digits_pate",
        "aggregator.init_args.sigma",
        {"aggregator": {"class_path": "GNMAX", "init_args": {"sigma": 10.0}}},
    ),
    "Ind-KNN": ("digits_ind_knn", "epsilon", {}),
    "NoisySGD": ("digits_noisy_sgd", "epsilon", {}),
    "PrivateTraining": ("digits_noisy_sgd", "epsilon", {}),
    "reverse kNN, Fashion-MNIST": ("fashion_mnist_reverse_knn_eps1", "epsilon", {}),
    "reverse kNN, local, Fashion-MNIST": ("fashion_mnist_reverse_knn_local_eps1", "epsilon", {}),
    "reverse kNN, shuffle, Fashion-MNIST": (
        "fashion_mnist_reverse_knn_shuffle",
        "epsilon",
        {"num_clients": 3000},
    ),
    "statistics, Fashion-MNIST": (
        "fashion_mnist_statistics",
        "epsilon",
        {"expected_records": 3000, "components": 200},
    ),
    "noisy SGD teacher, Fashion-MNIST": ("fashion_mnist_noisy_sgd_teacher", "epsilon", {"batch_size": 300}),
    "Ind-KNN, Fashion-MNIST": ("fashion_mnist_ind_knn", "epsilon", {}),
}
#: A guarantee holds for every table; of these methods a part of the private and the public images is enough.
FEWER_IMAGES = {"num_private": 3000, "num_public": 1000}
_WHOLE = "reverse kNN, Fashion-MNIST"
#: Their noise is not continuous, so :class:`~benchmarks.faulty.LessNoise` leaves it as it is.
WHOLE_NUMBERS = tuple(name for name in METHODS if "local" in name or "shuffle" in name)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 8.0])
    parser.add_argument("--canaries", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--root", default=None, help="folder of Fashion-MNIST")
    parser.add_argument("--workers", type=int, default=2, help="attacks at a time, of one thread each")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part for each method and ε, as each is done."""
    stored = {} if options.again else entries("attacks")
    wanted = [
        (method, epsilon)
        for epsilon in options.epsilons
        for method in options.methods
        if _part(method, epsilon) not in stored
    ]
    # Processes of their own: their threads would share one interpreter, and seconds are told of each attack.
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as workers:
        asked = [
            workers.submit(_attacked, *one, options.canaries, options.runs, options.root) for one in wanted
        ]
        for done in as_completed(asked):
            yield done.result()


def _part(method: str, epsilon: float) -> str:
    return f"{method}, ε {epsilon:g}"


def _attacked(method: str, epsilon: float, canaries: int, runs: int, root: str | None) -> Measured:
    """An honest run, and one with noise of half the scale."""
    torch.set_num_threads(1)
    document = configuration(method, epsilon, root)
    settings = {"canaries": canaries, "runs": runs}
    if is_training(document):
        training = training_of_config(document, method)
        attack = functools.partial(attack_training, training, canaries=canaries)
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


def _training(document: dict[str, Any], epsilon: float, plain: bool) -> dict[str, Any]:
    """A private training for an ε: of the baseline, or of a plain module by the callback."""
    arguments = document["model"]["init_args"]
    if not plain:
        arguments["budget"]["epsilon"] = epsilon
        return document
    callback = {
        "class_path": "pl_privknn.PrivateTraining",
        "init_args": {
            "epsilon": epsilon,
            "delta": arguments["budget"]["delta"],
            "expected_batch_size": arguments["batches"]["batch_size"],
            "expected_records": arguments["batches"]["expected_records"],
        },
    }
    document["model"] = {"class_path": "benchmarks.small_training.PlainClassifier"}
    document["trainer"]["callbacks"] = [callback]
    return document


def configuration(method: str, epsilon: float, root: str | None = None) -> dict[str, Any]:
    """The configuration of a method, with its noise for an ε."""
    name, setting, changes = METHODS[method]
    document = copy.deepcopy(read_configuration(ROOT / "pl_privknn" / "configs" / f"{name}.yaml"))
    if root is not None and "root" in document["data"].get("init_args", {}):
        document["data"]["init_args"]["root"] = root
    if document["data"]["class_path"] == "FashionMNISTDataModule" and method != _WHOLE:
        document["data"]["init_args"].update(FEWER_IMAGES)
        document["labeling"]["features"] = "HOG"
        if document["labeling"].get("queries_per_round", 0) > _QUERIES:
            document["labeling"]["queries_per_round"] = _QUERIES
    if "labeling" not in document:
        return _training(document, epsilon, method == "PrivateTraining")
    arguments = document["labeling"]["labeler"]["init_args"]
    arguments.update(copy.deepcopy(changes))
    if "." not in setting:
        arguments[setting] = epsilon
        return document
    wanted = Calibrate(f"{_LABELER}.{setting}", 0.1, 1e4, False, False, False)
    arguments["noise" if method == "Private-kNN" else "aggregator"]["init_args"]["sigma"] = round(
        plan_with_setting(document, name, wanted, epsilon).parameters[wanted.parameter], 4
    )
    return document
