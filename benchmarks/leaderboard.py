"""Fashion-MNIST under differential privacy: rows of ours and published ones in one table.

Our rows come from what ``compare_fashion_mnist`` and ``private_training`` stored, and name the command that measures
them again. Published rows are what their papers print; none was run here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.record import Measured, entries, explained, markdown, spread
from pl_privknn.comparison.results import guarantee_of, mark
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL, Guarantee, weakest

#: ε of our rows that are shown.
EPSILONS = (0.5, 1.0, 2.0)
_IMAGENET = "5,000 images of the same kind, ImageNet weights"
_IMAGES = "5,000 images of the same kind"
#: (method, source, ε, δ, test accuracy): trained on 60,000 records, one added or removed, without public data.
PUBLISHED = (
    ("DP-SGD, tempered sigmoids", "Papernot et al. 2021 (arXiv:2007.14191)", 2.7, 1e-5, 0.861),
    ("DP-SGD, linear on scattering", "Tramèr, Boneh 2021 (arXiv:2011.11660)", 2.7, 1e-5, 0.895),
    ("DP-SGD on scattering", "Tramèr, Boneh 2021 (arXiv:2011.11660)", 3.0, 1e-5, 0.897),
)


class Row(NamedTuple):
    """One line of the table."""

    accuracy: float
    cells: tuple[object, ...]
    named: tuple[str, Guarantee]


def add_options(parser: argparse.ArgumentParser) -> None:
    """None: everything is stored."""


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Print the table, and store nothing."""
    print(table())
    yield from ()


def table() -> str:
    """All rows, the most accurate first."""
    rows = sorted([*_compared(), *_trained(), *_published()], key=lambda row: -row.accuracy)
    header = ["method", "test accuracy", "ε", "δ", "adjacency", "public data", "seeds", "source"]
    return explained(markdown(header, (row.cells for row in rows)), (row.named for row in rows))


def _row(
    method: str, found: list[dict[str, Any]], epsilon: float, name: str, public: str, command: str
) -> Row:
    weak = weakest(guarantee_of(one) for one in found)
    accuracies = [one[name] for one in found]
    one = found[0]
    cells = (
        method, spread(accuracies), f"{epsilon:g}{mark(weak)}", f"{one['delta']:g}", one["adjacency"], public,
        len(found), f"`{command}`",
    )  # fmt: skip
    return Row(sum(accuracies) / len(accuracies), cells, (f"{method}, ε = {epsilon:g}", weak))


def _compared() -> Iterator[Row]:
    grouped: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for entry in entries("compare_fashion_mnist").values():
        found = entry["results"]
        if found["target_epsilon"] in EPSILONS:
            grouped.setdefault((found["title"], found["method"], found["target_epsilon"]), []).append(found)
    for (title, method, epsilon), found in grouped.items():
        command = f"privknn compare configs/compare_fashion_mnist.yaml --only {method}"
        public = _IMAGES if method == "noisy_sgd" else _IMAGENET
        yield _row(title, found, epsilon, "test_accuracy", public, command)


def _trained() -> Iterator[Row]:
    grouped: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for part, entry in entries("private_training").items():
        if part.startswith(("head, ε", "head on scattering, ε", "pixels, ε")):
            setting, _, asked = part.rpartition(", seed")[0].rpartition(", ε ")
            grouped.setdefault((setting, float(asked)), []).append(entry["results"])
    for (setting, epsilon), found in grouped.items():
        public = _IMAGENET if setting == "head" else _IMAGES
        command = f'python -m benchmarks private_training --only "{setting}"'
        yield _row(f"PrivateTraining, {setting}", found, epsilon, "test_accuracy", public, command)


def _published() -> Iterator[Row]:
    for method, source, epsilon, delta, accuracy in PUBLISHED:
        cells = (method, f"{accuracy:.3f}", f"{epsilon:g}", f"{delta:g}", "add_remove", "none", "–", source)
        yield Row(accuracy, cells, (method, UNCONDITIONAL))
