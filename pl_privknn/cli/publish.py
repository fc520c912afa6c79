"""``privknn report``, ``export``, ``predict`` and ``demo``: commands after a run, and two example runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn.cli.common import suggest, without_suggestions

#: Configurations of the demo; the first is the recommendation of init for these data.
_DEMO = {"Recommended": "digits_recommended", "Private-kNN": "digits_private_knn"}


def add_report(commands: Any) -> None:
    """Register ``privknn report`` with argparse's subparsers."""
    parser = commands.add_parser(
        "report", help="write an HTML page of a run or a ledger, and its privacy card"
    )
    parser.add_argument("path", help="folder of a run, or a ledger")
    parser.add_argument("--output", metavar="FILE", help="the HTML file (report.html in the folder)")
    parser.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> int:
    if not Path(parsed.path).exists():
        raise FileNotFoundError(f"there is nothing at {parsed.path}; name a run's folder or a ledger")
    from pl_privknn.report.page import write_report

    print(write_report(parsed.path, parsed.output, exact=not parsed.fast))
    if (Path(parsed.path) / "checkpoints").is_dir():
        suggest(f"export {parsed.path}")
    return 0


def add_export(commands: Any) -> None:
    """Register ``privknn export`` with argparse's subparsers."""
    parser = commands.add_parser(
        "export", help="write the released model of a run as one file, with its privacy card"
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format", choices=("torch", "onnx"), default="torch", help="torch.export's .pt2, or ONNX"
    )
    parser.add_argument("--output", metavar="DIR", help="folder for the files (RUN/export)")
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> int:
    run = Path(parsed.run_dir)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: there is no such folder; give the folder of a finished run")
    from pl_privknn.export.released_model import export_run

    path = export_run(run, Path(parsed.output or run / "export"), parsed.format)
    print(path)
    if path.suffix != ".pt":  # weights without a model can't predict
        suggest(f"predict {path} FILES")
    return 0


def add_predict(commands: Any) -> None:
    """Register ``privknn predict`` with argparse's subparsers."""
    parser = commands.add_parser(
        "predict", help="predict classes of images, texts or vectors; writes a CSV file"
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a run, or its exported file")
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="images or folders of images, one table or one .npy array (the run's own predict or test part)",
    )
    parser.add_argument("--column", help="column of a table (as in the run)")
    parser.add_argument("--output", metavar="FILE", help="CSV file (predictions.csv, predictions-2.csv, …)")
    parser.add_argument("--force", action="store_true", help="replace an existing --output")
    parser.set_defaults(run=_predict)


def _predict(parsed: argparse.Namespace) -> int:
    names = ("predictions.csv", *(f"predictions-{number}.csv" for number in range(2, 1_000_000)))
    output = Path(parsed.output or next(name for name in names if not Path(name).exists()))
    if output.is_dir() or (output.exists() and not parsed.force):
        raise FileExistsError(
            f"--output {output} already exists; name another file, or replace it by --force"
        )
    if not output.resolve().parent.is_dir():
        raise FileNotFoundError(f"--output {output}: there is no folder {output.parent}; create it first")
    for path in (parsed.model, *parsed.inputs):
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file or folder; check the path")
    from pl_privknn._checks import counted
    from pl_privknn.export.prediction import predict

    found = predict(parsed.model, parsed.inputs or None, column=parsed.column)
    found.write(output)
    print(counted(len(found.names), "prediction"))
    print(output)
    return 0


def add_demo(commands: Any, command: Callable[[Sequence[str]], int]) -> None:
    """Register ``privknn demo`` with argparse's subparsers; ``command`` executes its runs."""
    parser = commands.add_parser(
        "demo", help="train the recommended run and Private-kNN on bundled digits; compare ε and accuracy"
    )
    parser.add_argument("--output", default="runs/demo", help="where the runs go (runs/demo)")
    parser.add_argument("--epochs", type=int, default=24, help="epochs of each student (24)")
    parser.set_defaults(run=lambda parsed: _demo(parsed, command))


def _demo(parsed: argparse.Namespace, command: Callable[[Sequence[str]], int]) -> int:
    from pl_privknn._checks import at_most, check_int
    from pl_privknn.privacy.files import new_number

    epochs, folder = check_int("epochs", parsed.epochs, minimum=1), new_number(Path(parsed.output))
    quiet = ["--trainer.enable_progress_bar", "false", "--labeling.options.progress", "false"]
    for place, (title, config) in enumerate(_DEMO.items(), 1):
        print(f"\n{place} of {len(_DEMO)}: {title}, configs/{config}.yaml", flush=True)
        own = Path(__file__).parents[1] / "configs" / f"{config}.yaml"
        words = ["fit", "--config", str(own), "--run_dir", str(folder / config)]
        with without_suggestions():
            if status := command([*words, "--trainer.max_epochs", str(epochs), *quiet]):
                return status
    columns = "{:12} {:>6} {:>8} {:14} {:>9} {:>7} {:>7}"
    print("\n" + columns.format("teacher", "ε", "δ", "guarantee", "answered", "labels", "test"))
    sentences = []
    for title, config in _DEMO.items():
        summary = json.loads((folder / config / "summary.json").read_text(encoding="utf-8"))
        answered = f"{summary['answered']}/{summary['queried']}"
        accuracies = (f"{summary[name]:.3f}" for name in ("label_accuracy", "test_accuracy"))
        figures = (at_most(summary["epsilon"]), f"{summary['delta']:g}", summary["guarantee"])
        print(columns.format(title, *figures, answered, *accuracies))
        sentences.append(f"{title}: {_meaning(summary)}")
    print("labels: accuracy of the released labels; test: accuracy of the student on test images\n")
    print(*sentences, sep="\n")
    for title, config in _DEMO.items():
        print(f"Report of {title}:", flush=True)
        with without_suggestions():
            command(["report", str(folder / config)])
    suggest("init --data PATH --epsilon 1 --private-records N")
    print(folder)
    return 0


def _meaning(summary: Mapping[str, Any]) -> str:
    """Sentence on the meaning of a run's ε for one person; see :func:`~pl_privknn.privacy.trade_off`."""
    from pl_privknn._checks import at_most

    found = at_most(100 * summary["tpr_at_fpr_0.01"], 2)
    return (
        f"ε = {at_most(summary['epsilon'])} (smaller is stronger): an attacker who wrongly accuses 1 in 100 people "
        f"outside the private data detects at most {found} in 100 people inside it; guessing detects 1"
    )
