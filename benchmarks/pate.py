"""PATE on Fashion-MNIST: how fast many teachers train at once, and the figures of the PATE papers.

    python benchmarks/pate.py speed [--teachers 100] [--steps 300] [--in-turn 100] [--output FILE]
    python benchmarks/pate.py figures [--seeds 3] [--output FILE]

``speed`` trains the same kinds of teachers at once (stacked parameters) and one after another in plain PyTorch,
in one process, each with one thread and with all of them, several times; the best time of each counts.
``--in-turn`` trains only so many of them one after another and scales the time up. Processor seconds are shown
too: they suffer less than the clock from other work on the machine.

``figures`` prints, for the three partitions, the consensus of the teachers, the accuracy of the released
labels, ε (the valid one, and the data-dependent one for comparison with the papers) and the accuracy and
variance of students: logistic regressions on the released labels and HOG features.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from pl_privknn.comparison.marks import footnotes, guarantee_of, mark, stated
from pl_privknn.datamodules.mnist import FashionMNISTDataModule
from pl_privknn.features.hog import HOG
from pl_privknn.labelers.pate.aggregators import LNMAX, Aggregator, ConfidentGNMAX
from pl_privknn.labelers.pate.guided import GuidedPartition
from pl_privknn.labelers.pate.networks import CNNTeachers, LinearTeachers, MLPTeachers
from pl_privknn.labelers.pate.partition import ClassBalancedPartition, RandomPartition
from pl_privknn.labelers.pate.pate import PATE
from pl_privknn.labelers.pate.report import consensus, consensus_histogram, prediction_variance
from pl_privknn.labelers.pate.stacked import StackedTeachers
from pl_privknn.labelers.pate.teachers import rows_of_parts
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.guarantee import Guarantee, weakest
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

DELTA = 1e-5


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


def one_after_another(
    maker: StackedTeachers, features: Tensor, labels: Tensor, rows_of: list[Tensor]
) -> None:
    """The plain loop: for each teacher a module, an optimiser and its own batches."""
    for teacher, rows in enumerate(rows_of):
        module = maker.initial(teacher, features.shape[1], 10)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=maker.learning_rate, weight_decay=0.0, fused=True
        )
        generator = maker.batch_generator(teacher)
        own, own_labels = features[rows], labels[rows]
        for step in range(maker.steps):
            batch = torch.randint(len(rows), (maker.batch_size,), generator=generator)
            optimizer.param_groups[0]["lr"] = maker.rate(step)
            loss = nn.functional.cross_entropy(module(own[batch]), own_labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def speed(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time both ways for several kinds of teachers."""
    data = load(arguments.root)
    generator = torch.Generator().manual_seed(0)
    projected = data["pixels"] @ (torch.randn(784, 128, generator=generator) / 28)
    steps, count = arguments.steps, arguments.teachers
    cases: dict[str, tuple[StackedTeachers, Tensor]] = {
        "linear, HOG (1296)": (LinearTeachers(steps), data["hog"]),
        "linear, random projection (128)": (LinearTeachers(steps), projected),
        "MLP 64, random projection (128)": (MLPTeachers(64, steps), projected),
        "MLP 64, HOG (1296)": (MLPTeachers(64, steps), data["hog"]),
    }
    if arguments.cnn:
        cases["CNN 16-32, pixels (28×28)"] = (CNNTeachers(steps=steps), data["pixels"])
    parts = torch.randint(count, data["labels"].shape, generator=generator)
    rows_of = rows_of_parts(parts, count)[: arguments.in_turn]
    scale = count / len(rows_of)
    table = Table("teachers", "at once, s", "one after another, s", "ratio", "ratio of processor seconds")
    results = {}
    threads = sorted({1, arguments.threads})
    for name, (maker, features) in track(cases.items(), "training", console=console):

        def at_once(maker: StackedTeachers = maker, features: Tensor = features) -> None:
            maker.train(features, data["labels"], parts, 10, count, lambda fraction: None)

        def in_turn(maker: StackedTeachers = maker, features: Tensor = features) -> None:
            one_after_another(maker, features, data["labels"], rows_of)

        stacked, stacked_cpu = _best(at_once, threads, arguments.repeat)
        plain, plain_cpu = (scale * seconds for seconds in _best(in_turn, threads, arguments.repeat))
        results[name] = {
            "at_once_s": stacked,
            "one_after_another_s": plain,
            "ratio": plain / stacked,
            "processor_ratio": plain_cpu / stacked_cpu,
        }
        table.add_row(
            name, f"{stacked:.2f}", f"{plain:.2f}", f"{plain / stacked:.1f}", f"{plain_cpu / stacked_cpu:.1f}"
        )
    console.print(table)
    return {
        "teachers": count,
        "measured_in_turn": len(rows_of),
        "repeat": arguments.repeat,
        "steps": steps,
        "batch_size": 32,
        "threads": threads,
        "cases": results,
    }


def figures(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The papers' comparisons: Guided PATE's Table 1, and confident GNMAX with 250 teachers."""
    data = load(arguments.root)
    settings: dict[str, tuple[int, Aggregator, list[tuple[int, int]]]] = {
        "100 teachers, LNMAX 1/γ = 10": (100, LNMAX(10.0), [(100, 100), (250, 250)]),
        "250 teachers, confident GNMAX": (250, ConfidentGNMAX(200, 100, 40), [(1000, 580)]),
    }
    partitions = [RandomPartition(), ClassBalancedPartition(), GuidedPartition()]
    columns = (
        "partition",
        "queries",
        "consensus",
        "answered",
        "labels",
        "ε",
        "data-dep. ε",
        "student",
        "variance",
    )
    results: dict[str, Any] = {}
    named: list[tuple[str, Guarantee]] = []
    for name, (count, aggregator, sizes) in settings.items():
        table = Table(*columns, title=name)
        for partition in partitions:
            runs: dict[int, list[dict[str, Any]]] = {queries: [] for queries, _ in sizes}
            for seed in track(range(arguments.seeds), f"{name}: {type(partition).__name__}", console=console):
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
                summary = _summarise(of_seeds)
                named.append((type(partition).__name__, guarantee_of(summary)))
                results.setdefault(name, {}).setdefault(type(partition).__name__, {})[queries] = summary
                table.add_row(
                    type(partition).__name__.removesuffix("Partition"),
                    str(queries),
                    *(f"{summary[key]['mean']:.3f}" for key in ("consensus", "answered", "label_accuracy")),
                    f"{summary['epsilon']['mean']:.3f}{mark(guarantee_of(summary))}",
                    *(
                        f"{summary[key]['mean']:.3f}"
                        for key in ("epsilon_data_dependent", "student_accuracy")
                    ),
                    f"{summary['student_variance']:.4f}",
                )
        console.print(table)
    console.print(*footnotes(named), "Data-dependent ε: private, for comparison only.", sep="\n")
    return {"seeds": arguments.seeds, "delta": DELTA, "settings": results}


def _ask(pate: PATE, data: dict[str, Tensor], queries: int, cap: int, seed: int) -> dict[str, Any]:
    order = torch.randperm(len(data["public"]), generator=torch.Generator().manual_seed(seed))[:queries]
    labels = pate.label(data["public"][order], FreeLedger(), max_answers=cap).labels
    answered = labels >= 0
    votes, _ = pate.asked_votes()
    report = pate.data_dependent_report(DELTA)
    plan = pate.stated_plan(queries, cap, 10)
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


def _best(task: Callable[[], None], threads: list[int], repeat: int) -> tuple[float, float]:
    """Least wall-clock and least processor seconds over the numbers of threads and the repetitions."""
    clock, processor = [], []
    for count in threads * repeat:
        torch.set_num_threads(count)
        started = time.perf_counter(), time.process_time()
        task()
        clock.append(time.perf_counter() - started[0])
        processor.append(time.process_time() - started[1])
    return min(clock), min(processor)


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "figures"), nargs="?", default="speed")
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument("--teachers", type=int, default=100, help="speed: number of teachers")
    parser.add_argument("--in-turn", type=int, default=100, help="speed: teachers trained one after another")
    parser.add_argument("--steps", type=int, default=300, help="speed: optimiser steps of each teacher")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="speed: beside one thread"
    )
    parser.add_argument("--repeat", type=int, default=3, help="speed: best of so many repetitions")
    parser.add_argument("--cnn", action="store_true", help="speed: also convolutional teachers (minutes)")
    parser.add_argument("--seeds", type=int, default=3, help="figures: repetitions")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, 150))
    measured = speed(arguments, console) if arguments.what == "speed" else figures(arguments, console)
    measured["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
