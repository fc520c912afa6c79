"""``privknn demo``: two private teachers on scikit-learn's digits, side by side, with what their ε means."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Configurations of the runs, the best teacher for small data first.
_RUNS = {"Reverse kNN": "digits_reverse_knn", "Private-kNN": "digits_private_knn"}

Command = Callable[[Sequence[str]], int]


def add_demo(commands: Any, command: Command) -> None:
    """Register ``privknn demo`` with argparse's subparsers; its runs are what ``command`` does."""
    parser = commands.add_parser(
        "demo", help="two private teachers on bundled digits: ε and accuracy of both"
    )
    parser.add_argument("--output", default="runs/demo", help="where the runs go (runs/demo)")
    parser.add_argument("--epochs", type=int, default=24, help="of each student (24)")
    parser.set_defaults(run=lambda parsed: _demo(parsed, command))


def _demo(parsed: argparse.Namespace, command: Command) -> int:
    from pl_privknn._checks import check_int
    from pl_privknn.cli.run_folder import new_number

    epochs = check_int("epochs", parsed.epochs, minimum=1)
    folder = new_number(Path(parsed.output))
    for place, (title, config) in enumerate(_RUNS.items(), 1):
        print(f"\n{place} of {len(_RUNS)}: {title}, configs/{config}.yaml", flush=True)
        run = folder / config
        own = Path(__file__).parents[1] / "configs" / f"{config}.yaml"
        words = ["fit", "--config", str(own), "--run_dir", str(run), "--trainer.max_epochs", str(epochs)]
        if status := command(
            [*words, "--trainer.enable_progress_bar", "false", "--labeling.progress", "false"]
        ):
            return status
    summaries = {title: read_summary(folder / config) for title, config in _RUNS.items()}
    _print_table(summaries)
    for title, summary in summaries.items():
        print(f"{title}: {meaning(summary)}")
    for title, config in _RUNS.items():
        print(f"A page to look at, of {title}:")
        command(["report", str(folder / config)])
    print(folder)
    return 0


def meaning(summary: Mapping[str, Any]) -> str:
    """What the ε of a run means for one person, in a sentence; see :func:`~pl_privknn.privacy.trade_off`."""
    found = 100 * summary["tpr_at_fpr_0.01"]
    return (
        f"ε = {summary['epsilon']:.3g}: whoever takes 1 in 100 outsiders for one of the people in the private data "
        f"finds at most {found:.2g} in 100 of those who are, whatever else is known; by guessing, 1"
    )


def read_summary(folder: Path) -> dict[str, Any]:
    """The ``summary.json`` of a run's folder."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _print_table(summaries: dict[str, dict[str, Any]]) -> None:
    columns = "{:12} {:>6} {:>8} {:14} {:>9} {:>7} {:>7}"
    print("\n" + columns.format("teacher", "ε", "δ", "guarantee", "answered", "labels", "test"))
    for title, summary in summaries.items():
        numbers = (f"{summary['epsilon']:.3g}", f"{summary['delta']:g}", summary["guarantee"])
        answered = f"{summary['answered']}/{summary['queried']}"
        accuracies = (f"{summary[name]:.3f}" for name in ("label_accuracy", "test_accuracy"))
        print(columns.format(title, *numbers, answered, *accuracies))
    print("labels, test: shares of released labels, and of test images by the student, that are right\n")
