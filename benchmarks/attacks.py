"""What an attacker really gets from every method, at several values of ε, and whether half the noise is noticed.

Each part is one method at one ε on the bundled digits, or on Fashion-MNIST: an honest run, and the same with noise of
the half scale under the same charges. A part that is stored already is not measured again, so the command may be
stopped and started.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.record import ROOT, Measured, entries
from pl_privknn.attacks.attack import attack_labeler
from pl_privknn.attacks.configuration import target_of_config
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.documents import read_document
from pl_privknn.planning.configuration_plan import plan_with_setting
from pl_privknn.planning.setting_search import Calibrate
from pl_privknn.privacy.noise import NoiseSource, SeededNoise

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
    "reverse kNN, Fashion-MNIST": ("fashion_mnist_reverse_knn_eps1", "epsilon", {}),
}
#: Their noise is not continuous, so :class:`HalfNoise` leaves it as it is.
WHOLE_NUMBERS = ("reverse kNN, local", "reverse kNN, shuffle")
#: Runs on either side where each takes long; fewer than the option says.
FEWER = {"Ind-KNN": 400}


class HalfNoise(NoiseSource):
    """Continuous noise of the half scale, under the same charges: a fault."""

    cryptographic = False

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def random_words(self, count: int) -> Any:
        """Those of the source."""
        return self.source.random_words(count)

    def stream(self, *key: Any) -> HalfNoise:
        """A stream of the source, with the same fault."""
        return HalfNoise(self.source.stream(*key))

    def normal(self, shape: Any, scale: Any) -> Any:
        """Of half the deviation."""
        return super().normal(shape, scale / 2)

    def laplace(self, shape: Any, scale: Any) -> Any:
        """Of half the scale."""
        return super().laplace(shape, scale / 2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 8.0])
    parser.add_argument("--canaries", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--root", default=None, help="folder of Fashion-MNIST")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part for each method and ε."""
    stored = {} if options.again else entries("attacks")
    for epsilon in options.epsilons:
        for method in options.methods:
            part = f"{method}, ε {epsilon:g}"
            if part in stored:
                continue
            target = target_of_config(configuration(method, epsilon, options.root), method)
            runs = min(options.runs, FEWER.get(method, options.runs))
            settings = {"canaries": options.canaries, "runs": runs}
            torch.set_num_threads(1)
            honest = attack_labeler(target, noise=SeededNoise(0), **settings).to_dict()
            fault = attack_labeler(target, noise=HalfNoise(SeededNoise(1)), **settings).to_dict()
            figures = {
                "method": method,
                "wanted": epsilon,
                **stated(SEEDED),
                "honest": honest,
                "half_noise": fault,
            }
            yield Measured(figures, seeds=[0, 1], part=part, settings=settings)


def configuration(method: str, epsilon: float, root: str | None = None) -> dict[str, Any]:
    """The configuration of a method, with its noise for an ε."""
    name, setting, changes = METHODS[method]
    document = copy.deepcopy(read_document(ROOT / "pl_privknn" / "configs" / f"{name}.yaml"))
    if root is not None and "root" in document["data"].get("init_args", {}):
        document["data"]["init_args"]["root"] = root
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
