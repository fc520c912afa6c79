"""Fashion-MNIST under differential privacy: rows of ours and published ones in one table.

Our rows come from what ``compare_fashion_mnist`` and ``private_training`` stored, and name the command that measures
them again. Published rows are what their papers print; none was run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.record import entries, explained, markdown, spread
from pl_privknn.comparison.results import guarantee_of, mark
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL, Guarantee, weakest

#: ε of our rows that are shown.
EPSILONS = (0.5, 1.0, 2.0)
_IMAGENET = "images, ImageNet"
_IMAGES = "images"
#: (method, source, ε, test accuracy): trained on 60,000 records without public data, at δ and adjacency of our rows.
PUBLISHED = (
    ("DP-SGD, tempered sigmoids", "Papernot et al. 2021 (arXiv:2007.14191)", 2.7, 0.861),
    ("DP-SGD, linear on scattering", "Tramèr, Boneh 2021 (arXiv:2011.11660)", 2.7, 0.895),
    ("DP-SGD on scattering", "Tramèr, Boneh 2021 (arXiv:2011.11660)", 3.0, 0.897),
)


class Row(NamedTuple):
    """One line of the table: a method and its accuracy at each ε."""

    accuracies: dict[float, tuple[float, str]]
    cells: tuple[object, ...]
    named: list[tuple[str, Guarantee]]


def table() -> str:
    """All methods, the one with the most accurate row first."""
    rows = sorted(
        [*_compared(), *_trained(), *_published()], key=lambda row: -max(row.accuracies.values())[0]
    )
    shown = sorted({epsilon for row in rows for epsilon in row.accuracies})
    columns = ["public data", "seeds", "source"]
    header = ["method", *(f"ε = {epsilon:g}" for epsilon in shown), *columns]
    lines = [
        [row.cells[0], *(row.accuracies.get(epsilon, (0.0, "–"))[1] for epsilon in shown), *row.cells[1:]]
        for row in rows
    ]
    return explained(markdown(header, lines), (one for row in rows for one in row.named))


def _row(method: str, found: dict[float, list[dict[str, Any]]], public: str, command: str) -> Row:
    weak = {epsilon: weakest(guarantee_of(one) for one in here) for epsilon, here in found.items()}
    accuracies = {
        epsilon: (mean(runs), spread(runs) + mark(weak[epsilon]))
        for epsilon, here in found.items()
        for runs in [[one["test_accuracy"] for one in here]]
    }
    # The page states both once.
    assert {(one["delta"], one["adjacency"]) for here in found.values() for one in here} == {
        (1e-5, "add_remove")
    }
    seeds = min(len(here) for here in found.values())
    cells = (method, public, seeds, f"`{command}`")
    return Row(accuracies, cells, [(method, one) for one in weak.values()])


def _compared() -> Iterator[Row]:
    grouped: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = {}
    for entry in entries("compare_fashion_mnist").values():
        found = entry["results"]
        if found["target_epsilon"] in EPSILONS:
            here = grouped.setdefault((found["title"], found["method"]), {})
            here.setdefault(found["target_epsilon"], []).append(found)
    for (title, method), by_epsilon in grouped.items():
        public = _IMAGES if method == "noisy_sgd" else _IMAGENET
        yield _row(title, by_epsilon, public, f"compare: {method}")


def _trained() -> Iterator[Row]:
    grouped: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for part, entry in entries("private_training").items():
        if part.startswith(("head, ε", "head on scattering, ε", "pixels, ε", "no public images, ε")):
            setting, _, asked = part.rpartition(", seed")[0].rpartition(", ε ")
            grouped.setdefault(setting, {}).setdefault(float(asked), []).append(entry["results"])
    for setting, found in grouped.items():
        kept = {epsilon: here for epsilon, here in found.items() if epsilon in EPSILONS}
        public = {"head": _IMAGENET, "no public images": "none"}.get(setting, _IMAGES)
        method = (
            f"PrivateTraining, {setting}" if public != "none" else "NoisySGD, linear on scattering and HOG"
        )
        yield _row(method, kept, public, f"train: {setting}")


def _published() -> Iterator[Row]:
    for method, source, epsilon, accuracy in PUBLISHED:
        cells = (method, "none", "–", source)
        yield Row({epsilon: (accuracy, f"{accuracy:.3f}")}, cells, [(method, UNCONDITIONAL)])
