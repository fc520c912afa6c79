"""Run one config over several seeds and keep each run's summary: run_config.py CONFIG --name NAME [--seeds 0 1 2].

Further words are handed to ``privknn fit``. Seeded noise makes the runs repeatable; it is for benchmarks, a run
over real private data keeps the operating system's generator.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pl_privknn.cli.main import main as privknn

RESULTS = Path(__file__).parent / "results"


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


def run(config: str, seed: int, words: list[str]) -> dict[str, Any]:
    """One run in a folder of its own; returns its summary."""
    noise = "--labeling.labeler.init_args.noise_source"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", config, "--run_dir", folder, "--seed_everything", str(seed)]
        arguments += ["--labeling.seed", str(seed), "--trainer.enable_progress_bar", "false"]
        if yaml.safe_load(Path(config).read_text())["labeling"].get("labeler") is not None:
            arguments += [noise, "SeededNoise", f"{noise}.seed", str(seed)]
        arguments += words
        if privknn(["fit", *arguments]):
            raise SystemExit(f"{config}, seed {seed}: the run failed")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        metrics = Path(folder) / "metrics.csv"
        attributes = attribute_accuracies(metrics)
        return {
            **summary,
            "seed": seed,
            "config": Path(config).name,
            "first_round": first_round(metrics),
            **({"attribute_accuracies": attributes} if attributes else {}),
        }


def main() -> None:
    """Parse the command line and run all seeds that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--name", required=True, help="folder under benchmarks/results/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parsed, words = parser.parse_known_args()
    for seed in parsed.seeds:
        target = RESULTS / parsed.name / f"seed{seed}.json"
        if target.exists():
            continue
        summary = run(parsed.config, seed, words)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**summary, "overrides": words}, indent=2, ensure_ascii=False) + "\n")
        epsilon = "none" if summary["epsilon"] is None else f"{summary['epsilon']:.4g}"
        guarantee = f"guarantee: {summary['guarantee']} ({summary['reason']})"
        line = (
            f"{parsed.name} seed {seed}: test accuracy {summary['test_accuracy']}, ε {epsilon}, {guarantee}"
        )
        Console().print(line, markup=False)


if __name__ == "__main__":
    main()
