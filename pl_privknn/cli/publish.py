"""``privknn init``, ``report``, ``export`` and ``demo``: what comes before a first run, and after one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn.cli.common import CommandParser, suggest, without_suggestions

#: Configurations of the demo: what init recommends for these data first.
_DEMO = {"Recommended": "digits_recommended", "Private-kNN": "digits_private_knn"}
#: Options that say what stands in tables: arguments of TextDataModule.
_COLUMNS = ("text", "label", "person", "classes")


def add_init(commands: Any) -> None:
    """Register ``privknn init`` with argparse's subparsers."""
    parser = commands.add_parser(
        "init", help="recommend the best run for your data and write its configuration"
    )
    _add_recommended(parser)
    parser.add_argument("--output", default="private_run.yaml", metavar="FILE", help="(private_run.yaml)")
    parser.set_defaults(run=_init)


def _add_recommended(parser: argparse.ArgumentParser) -> None:
    """Options of ``init``, and of ``fit`` without a configuration."""
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="folder of images, tables or arrays, or an .npz file"
    )
    parser.add_argument("--name", help="of the data in report and privacy card (the folder's name)")
    for column, what in (
        ("text", "texts, or of vectors (text)"),
        ("label", "labels (label)"),
        ("person", "owners"),
    ):
        parser.add_argument(f"--{column}", metavar="COLUMN", help=f"of tables: the column of {what}")
    parser.add_argument(
        "--classes", nargs="+", metavar="NAME", help="of tables whose test part does not tell them"
    )
    parser.add_argument(
        "--unit", choices=("record", "person"), help="of privacy; a person where --person names the owners"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="target ε")
    parser.add_argument(
        "--private-records",
        type=int,
        required=True,
        metavar="N",
        help="about how many, as anybody may know; or persons, where these are the unit",
    )
    parser.add_argument("--delta", type=float, help="δ (a tenth of one over the records, or less)")
    parser.add_argument("--num-classes", type=int, help="where no test set tells them")
    parser.add_argument("--teacher", choices=("ReverseKNN", "PreconditionedGradients"), help="this one")


def _init(parsed: argparse.Namespace) -> int:
    output = Path(parsed.output)
    if output.exists():
        raise FileExistsError(f"--output {output} is there already; name another file")
    _check_writable("--output", output)
    output.write_text(_recommended(parsed), encoding="utf-8")
    suggest(f"fit --config {output}")
    return 0


def _recommended(parsed: argparse.Namespace) -> str:
    """The configuration as YAML; its reasons are printed."""
    from pl_privknn._checks import check_int, check_positive
    from pl_privknn.recommendation import recommend

    check_int("--private-records", parsed.private_records, 10, 10**9)
    check_positive("--epsilon", parsed.epsilon)
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    name = _name(parsed.data) if parsed.name is None else parsed.name
    if not name.strip():
        raise ValueError(f"--name {name!r}: want a text, or leave it out for the folder's name")
    found = recommend(
        parsed.data,
        epsilon=parsed.epsilon,
        expected_records=parsed.private_records,
        delta=parsed.delta,
        teacher=parsed.teacher,
        num_classes=parsed.num_classes,
        columns={name: value for name in _COLUMNS if (value := getattr(parsed, name)) is not None},
        progress=sys.stderr.isatty(),
    )
    found.config["data"]["init_args"]["name"] = name
    if (parsed.unit or ("person" if parsed.person else "record")) == "person":
        found.config["labeling"]["budget"]["unit"] = "person"
    print(*found.reasons, sep="\n", flush=True)
    return found.to_yaml()


@contextlib.contextmanager
def fit_words(words: list[str]) -> Iterator[list[str]]:
    """Words of ``fit``, where ``--data PATH --epsilon E --private-records N`` become the recommended configuration.

    It is written into the run's folder, and taken back where no run follows.
    """
    if words[0] != "fit" or not any(word.partition("=")[0] == "--private-records" for word in words):
        yield words
        return
    parser = CommandParser(prog="privknn fit", add_help=False, allow_abbrev=False)
    _add_recommended(parser)
    parser.add_argument("--run_dir")
    parsed, others = parser.parse_known_args(words[1:])
    if any(word.partition("=")[0] in ("--config", "-c", "--resume") for word in others):
        raise ValueError("--private-records recommends a configuration; leave --config and --resume out")
    from pl_privknn.privacy.store import LOCK, new_number

    runs = Path("runs") / _name(parsed.data)
    wanted = Path(parsed.run_dir) if parsed.run_dir else runs
    _check_writable("--run_dir", wanted)
    text = _recommended(parsed)
    missing = [place for place in (wanted, *wanted.parents) if not place.exists()]
    folder = wanted if parsed.run_dir else new_number(runs)
    folder.mkdir(parents=True, exist_ok=True)
    there = set(folder.iterdir())
    config = folder / "recommended.yaml"
    config.write_text(text, encoding="utf-8")
    try:
        yield ["fit", "--config", str(config), "--run_dir", str(folder), *others]
    finally:
        new = set(folder.iterdir()) - there
        if config in new and {file.name for file in new} <= {config.name, LOCK}:
            for file in new:
                file.unlink()
            with contextlib.suppress(OSError):  # others may have come by
                for place in missing if parsed.run_dir else [folder, *missing]:
                    place.rmdir()


def _name(path: str) -> str:
    """Name of a folder or file of data."""
    return Path(path).resolve().stem or "data"


def _check_writable(option: str, path: Path) -> None:
    """Refuse a place that can't be written to, before anything is computed."""
    place = next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())
    if place.is_file() or not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} {path}: {place} is no folder that can be written to")


def add_report(commands: Any) -> None:
    """Register ``privknn report`` with argparse's subparsers."""
    parser = commands.add_parser(
        "report", help="one HTML page of a run, a comparison or a ledger; privacy card"
    )
    parser.add_argument("path", help="folder of a run or of a comparison, or a ledger")
    parser.add_argument("--output", metavar="FILE", help="the HTML file (report.html in the folder)")
    parser.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> int:
    from pl_privknn.report import write_report

    print(write_report(parsed.path, parsed.output, exact=not parsed.fast))
    if (Path(parsed.path) / "checkpoints").is_dir():
        suggest(f"export {parsed.path}")
    return 0


def add_export(commands: Any) -> None:
    """Register ``privknn export`` with argparse's subparsers."""
    parser = commands.add_parser(
        "export", help="the model that a run released as one file, with its privacy card"
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format", choices=("torch", "onnx"), default="torch", help="torch.export's .pt2, or ONNX"
    )
    parser.add_argument("--output", metavar="DIR", help="folder for the files (RUN/export)")
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> int:
    from pl_privknn.export import export_run

    run = Path(parsed.run_dir)
    print(export_run(run, Path(parsed.output or run / "export"), parsed.format))
    suggest(f"audit {run}")
    return 0


def add_demo(commands: Any, command: Callable[[Sequence[str]], int]) -> None:
    """Register ``privknn demo`` with argparse's subparsers; its runs are what ``command`` does."""
    parser = commands.add_parser(
        "demo", help="the recommended run and Private-kNN on bundled digits: ε and accuracy of both"
    )
    parser.add_argument("--output", default="runs/demo", help="where the runs go (runs/demo)")
    parser.add_argument("--epochs", type=int, default=24, help="of each student (24)")
    parser.set_defaults(run=lambda parsed: _demo(parsed, command))


def _demo(parsed: argparse.Namespace, command: Callable[[Sequence[str]], int]) -> int:
    from pl_privknn._checks import at_most, check_int
    from pl_privknn.privacy.store import new_number

    epochs, folder = check_int("epochs", parsed.epochs, minimum=1), new_number(Path(parsed.output))
    quiet = ["--trainer.enable_progress_bar", "false", "--labeling.progress", "false"]
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
    print("labels, test: shares of released labels, and of test images by the student, that are right\n")
    print(*sentences, sep="\n")
    for title, config in _DEMO.items():
        print(f"A page to look at, of {title}:", flush=True)
        with without_suggestions():
            command(["report", str(folder / config)])
    suggest("init --data PATH --epsilon 1 --private-records N")
    print(folder)
    return 0


def _meaning(summary: Mapping[str, Any]) -> str:
    """Meaning of a run's ε for one person, in a sentence; see :func:`~pl_privknn.privacy.trade_off`."""
    from pl_privknn._checks import at_most

    found = at_most(100 * summary["tpr_at_fpr_0.01"], 2)
    return (
        f"ε = {at_most(summary['epsilon'])} (smaller is stronger): an attacker who wrongly accuses 1 in 100 people "
        f"outside the private data detects at most {found} in 100 people inside it; guessing detects 1"
    )
