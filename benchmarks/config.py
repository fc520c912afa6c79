"""Run one configuration over several seeds and keep each run's summary.

Further words are handed to ``privknn fit``. Seeds that are stored already are not run again. Seeded noise makes the
runs repeatable; it is for benchmarks, a run over real private data keeps the operating system's generator, as
``--noise system`` does here.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import Measured, entries
from pl_privknn.cli.main import main as privknn
from pl_privknn.documents import read_configuration

#: Words that are not its own belong to ``privknn fit``.
TAKES_WORDS = True


def first_round(metrics: Path) -> dict[str, float]:
    """What the first epoch was trained on: label accuracy and answers of the first round."""
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("labels/answered"):
                names = ("labels/accuracy", "labels/answered", "labels/queried")
                return {name: float(row[name]) for name in names if row.get(name)}
    return {}


def attribute_accuracies(metrics: Path) -> dict[str, float]:
    """Test accuracy of each attribute, of runs on attributes."""
    prefix = "test/accuracy_"
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name.removeprefix(prefix): round(float(row[name]), 6)
        for row in rows
        for name in row
        if name.startswith(prefix) and row[name]
    }


def run(config: str, seed: int, words: list[str], seeded: bool = True) -> dict[str, Any]:
    """One run in a folder of its own; returns its summary."""
    noise = "--labeling.labeler.init_args.noise_source"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", config, "--run_dir", folder, "--seed_everything", str(seed)]
        arguments += ["--labeling.seed", str(seed), "--trainer.enable_progress_bar", "false"]
        if seeded and read_configuration(config)["labeling"].get("labeler") is not None:
            arguments += [noise, "SeededNoise", f"{noise}.seed", str(seed)]
        arguments += words
        if privknn(["fit", *arguments]):
            raise SystemExit(f"{config}, seed {seed}: the run failed")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        metrics = Path(folder) / "metrics.csv"
        attributes = attribute_accuracies(metrics)
        return {
            **{name: value for name, value in summary.items() if name != "versions"},  # the entry has them
            "first_round": first_round(metrics),
            **({"attribute_accuracies": attributes} if attributes else {}),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("config")
    parser.add_argument("--name", required=True, help="file under benchmarks/results/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise", choices=["seeded", "system"], default="seeded")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Run all seeds that have no result yet."""
    settings = {"config": Path(options.config).name, "overrides": options.words}
    for seed in options.seeds:
        part = f"seed {seed}"
        if part not in entries(options.name):
            found = run(options.config, seed, options.words, seeded=options.noise == "seeded")
            yield Measured(found, [seed], part, settings, options.name)
