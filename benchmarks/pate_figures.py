"""Figures of the PATE papers on Fashion-MNIST: three partitions, the consensus of teachers, labels and students.

For each partition the consensus of the teachers, the accuracy of the released labels, ε (the valid one, and the
data-dependent one for comparison with the papers: private, and no guarantee) and the accuracy and variance of
students: logistic regressions on the released labels and HOG features.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.record import Measured
from pl_privknn.comparison.marks import stated
from pl_privknn.datamodules.mnist import FashionMNISTDataModule
from pl_privknn.features.hog import HOG
from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.pate import (
    LNMAX,
    PATE,
    Aggregator,
    ConfidentGNMAX,
)
from pl_privknn.labelers.pate_training import (
    ClassBalancedPartition,
    GuidedPartition,
    LinearTeachers,
    RandomPartition,
)
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms.base import weakest
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

DELTA = 1e-5
LOG = Console(stderr=True)


def load(root: str) -> dict[str, Tensor]:
    """Pixels, HOG features and labels of the private, public and test images."""
    data = FashionMNISTDataModule(root=root)
    data.setup("fit")
    images, labels = (torch.cat(part) for part in zip(*data.private_batches(4096), strict=True))
    public = data.public.images(torch.arange(len(data.public)))
    assert data.public.truth is not None
    test = torch.stack([data.test[i][0] for i in range(len(data.test))])
    hog = HOG()

    def features(batch: Tensor) -> Tensor:
        return torch.cat([hog(part) for part in batch.split(4096)])

    return {
        "pixels": images.flatten(1),
        "hog": features(images),
        "labels": labels,
        "public": features(public),
        "truth": data.public.truth,
        "test": features(test),
        "test_labels": torch.tensor([int(data.test[i][1]) for i in range(len(data.test))]),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """The papers' comparisons: Guided PATE's Table 1, and confident GNMAX with 250 teachers."""
    data = load(options.root)
    settings: dict[str, tuple[int, Aggregator, list[tuple[int, int]]]] = {
        "100 teachers, LNMAX 1/γ = 10": (100, LNMAX(10.0), [(100, 100), (250, 250)]),
        "250 teachers, confident GNMAX": (250, ConfidentGNMAX(200, 100, 40), [(1000, 580)]),
    }
    partitions = [RandomPartition(), ClassBalancedPartition(), GuidedPartition()]
    results: dict[str, Any] = {}
    for name, (count, aggregator, sizes) in settings.items():
        for partition in partitions:
            runs: dict[int, list[dict[str, Any]]] = {queries: [] for queries, _ in sizes}
            for seed in track(range(options.seeds), f"{name}: {type(partition).__name__}", console=LOG):
                pate = PATE(
                    count,
                    LinearTeachers(seed=seed),
                    partition,
                    aggregator,
                    progress=False,
                    noise_source=SeededNoise(seed),
                )
                pate.fit(data["hog"], data["labels"], 10)
                for queries, cap in sizes:
                    runs[queries].append(_ask(pate, data, queries, cap, seed))
                    pate.forget_queries()
            for queries, of_seeds in runs.items():
                found = results.setdefault(name, {}).setdefault(type(partition).__name__, {})
                found[str(queries)] = _summarise(of_seeds)
    yield Measured({"settings": results}, list(range(options.seeds)), settings={"delta": DELTA})


def _ask(pate: PATE, data: dict[str, Tensor], queries: int, cap: int, seed: int) -> dict[str, Any]:
    order = torch.randperm(len(data["public"]), generator=torch.Generator().manual_seed(seed))[:queries]
    labels = pate.label(data["public"][order], FreeLedger(), max_answers=cap).labels
    answered = labels >= 0
    votes, _ = pate.asked_votes()
    report = pate.data_dependent_report(DELTA)
    plan = stated_plan(pate, queries, cap, 10)
    probabilities = _student(data["public"][order][answered], labels[answered], data["test"], seed)
    return {
        "consensus": float(consensus(votes, pate.num_teachers).mean()),
        "histogram": consensus_histogram(votes, pate.num_teachers)[0].tolist(),
        "answered": float(answered.float().mean()),
        "label_accuracy": float((labels == data["truth"][order])[answered].float().mean()),
        "epsilon": account(plan, delta=DELTA, adjacency="replace_one").epsilon,
        "guarantee": weakest(charge.guarantee for charge in plan),
        "epsilon_data_dependent": report.epsilon,
        "epsilon_data_dependent_published": report.epsilon_one_direction_classic,
        "student_accuracy": float((probabilities.argmax(1) == data["test_labels"]).float().mean()),
        "probabilities": probabilities,
    }


def _student(features: Tensor, labels: Tensor, test: Tensor, seed: int) -> Tensor:
    maker = LinearTeachers(steps=1000, batch_size=64, weight_decay=0.1, seed=seed)
    trained = maker.train(features, labels, torch.zeros_like(labels), 10, 1, lambda fraction: None)
    state = trained.state()
    assert state is not None
    return torch.softmax(test @ state["params/weight"][0].T + state["params/bias"][0], dim=1)


def _summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, float):
            values = [run[key] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            summary[key] = {"mean": statistics.fmean(values), "std": spread}
    summary |= stated(weakest(run["guarantee"] for run in runs))
    summary["histogram"] = torch.tensor([run["histogram"] for run in runs]).double().mean(dim=0).tolist()
    students = torch.stack([run["probabilities"] for run in runs])
    summary["student_variance"] = prediction_variance(students) if len(runs) > 1 else 0.0
    return summary


def consensus(votes: Tensor, num_teachers: int) -> Tensor:
    """**Private.** Share of the teachers behind the winner of each query, float64 ``(m,)``.

    Args:
        votes: int64 ``(m, c)``, from :meth:`~pl_privknn.labelers.pate.PATE.votes`.
        num_teachers: all of them, those that abstain included.
    """
    return votes.max(dim=1).values.double() / num_teachers


def consensus_histogram(votes: Tensor, num_teachers: int, bins: int = 10) -> tuple[Tensor, Tensor]:
    """**Private.** How many queries have which consensus.

    Returns:
        ``(counts, edges)``: int64 ``(bins,)`` and float64 ``(bins + 1,)`` from 0 to 1; full consensus is in
        the last bin.
    """
    shares = consensus(votes, num_teachers)
    place = (shares * bins).long().clamp_(max=bins - 1)
    return torch.bincount(place, minlength=bins), torch.linspace(0, 1, bins + 1, dtype=torch.float64)


def prediction_variance(predictions: Tensor) -> float:
    """Mean over examples and classes of the variance, across students, of their class probabilities.

    The students differ in their seeds and in the answers that they were trained on. (The Guided PATE paper
    prints "variance in the predictions of student model" without a definition; its scale can't be matched.)

    Args:
        predictions: class probabilities of r ≥ 2 students on the same examples, shape ``(r, m, c)``.

    Raises:
        ValueError: for another shape.
    """
    if predictions.ndim != 3 or len(predictions) < 2:
        raise ValueError(
            f"predictions: shape {tuple(predictions.shape)}; want (students, examples, classes), "
            "at least two students"
        )
    return float(predictions.double().var(dim=0, unbiased=True).mean())
