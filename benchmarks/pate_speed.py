"""How fast many teachers of PATE train at once, on Fashion-MNIST.

The same kinds of teachers train at once (stacked parameters) and one after another in plain PyTorch, in one process,
each with one thread and with all of them, several times; the best time of each counts. ``--in-turn`` trains only so
many of them one after another and scales the time up. Processor seconds are shown too: they suffer less than the
clock from other work on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from benchmarks.pate_figures import load
from benchmarks.record import Measured
from pl_privknn.labelers.pate_training import CNNTeachers, LinearTeachers, StackedTeachers, rows_of_parts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument("--teachers", type=int, default=100, help="number of teachers")
    parser.add_argument("--in-turn", type=int, default=100, help="teachers trained one after another")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of each teacher")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="beside one thread")
    parser.add_argument("--repeat", type=int, default=3, help="best of so many repetitions")
    parser.add_argument("--cnn", action="store_true", help="also convolutional teachers (minutes)")


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


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Time both ways for several kinds of teachers."""
    data = load(options.root)
    generator = torch.Generator().manual_seed(0)
    projected = data["pixels"] @ (torch.randn(784, 128, generator=generator) / 28)
    steps, count = options.steps, options.teachers
    cases: dict[str, tuple[StackedTeachers, Tensor]] = {
        "linear, HOG (1296)": (LinearTeachers(steps), data["hog"]),
        "linear, random projection (128)": (LinearTeachers(steps), projected),
    }
    if options.cnn:
        cases["CNN 16-32, pixels (28×28)"] = (CNNTeachers(steps=steps), data["pixels"])
    parts = torch.randint(count, data["labels"].shape, generator=generator)
    rows_of = rows_of_parts(parts, count)[: options.in_turn]
    scale = count / len(rows_of)
    results = {}
    threads = sorted({1, options.threads})
    for name, (maker, features) in track(cases.items(), "training", console=Console(stderr=True)):

        def at_once(maker: StackedTeachers = maker, features: Tensor = features) -> None:
            maker.train(features, data["labels"], parts, 10, count, lambda fraction: None)

        def in_turn(maker: StackedTeachers = maker, features: Tensor = features) -> None:
            one_after_another(maker, features, data["labels"], rows_of)

        stacked, stacked_cpu = _best(at_once, threads, options.repeat)
        plain, plain_cpu = (scale * seconds for seconds in _best(in_turn, threads, options.repeat))
        results[name] = {
            "at_once_s": stacked,
            "one_after_another_s": plain,
            "ratio": plain / stacked,
            "processor_ratio": plain_cpu / stacked_cpu,
        }
    settings = {
        "teachers": count,
        "measured_in_turn": len(rows_of),
        "repeat": options.repeat,
        "steps": steps,
        "batch_size": 32,
        "threads": threads,
    }
    yield Measured({"cases": results}, seeds=[0], settings=settings)


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
