"""``privknn search``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_privknn.comparison.worker import Command


def add_search(commands: Any, command: Command) -> None:
    """Register ``privknn search`` with argparse's subparsers; its runs are what ``command`` does."""
    parser = commands.add_parser(
        "search",
        help="try settings on public images with known truth, as if those were private (free, resumable)",
    )
    parser.add_argument("config", help="YAML of a training run with a labeling section")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH=V1,V2",
        help="values to try, as in labeling.labeler.init_args.ridge=0.2,0.4; all combinations are run",
    )
    parser.add_argument(
        "--records",
        type=int,
        default=None,
        help="about how many private records there will be; never counted here",
    )
    parser.add_argument(
        "--seeds", nargs="+", action="extend", type=int, default=[], metavar="N", help="0 1 2 by default"
    )
    parser.add_argument("--output", default=None, help="its folder (runs/search/NAME)")
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at a time, each in a process (1); 0: all in this process"
    )
    parser.set_defaults(run=run_search, command=command)


def run_search(parsed: argparse.Namespace) -> int:
    """Run what is missing of a search, and print its table; 1 where a run failed."""
    from pl_privknn.cli.compare import Progress, interruptible
    from pl_privknn.cli.training_words import importable
    from pl_privknn.comparison.results import read_results
    from pl_privknn.comparison.runner import run_comparison
    from pl_privknn.comparison.search import search_of, search_table
    from pl_privknn.documents import read_configuration

    path = Path(parsed.config)
    values = dict(values_of(text) for text in parsed.set)
    search = search_of(read_configuration(path), path.stem, values, parsed.records, parsed.seeds or [0, 1, 2])
    output = Path(parsed.output or Path("runs") / "search" / path.stem)
    shown = Progress(search.name, len(search.methods) * len(search.seeds))
    with interruptible(), shown, importable([parsed.config]):
        outcome = run_comparison(
            search,
            output,
            command=parsed.command,
            worker=("pl_privknn.cli.worker", str(path.resolve().parent)),
            workers=parsed.workers,
            report=shown.report,
        )
    if outcome.total > len(outcome.failed):
        table = search_table(read_results(output))
        (output / "table.md").write_text(table + "\n", encoding="utf-8")
        print(table)
    for label, error in outcome.failed.items():
        print(f"failed: {label}: {error}")
    print(output)
    return int(bool(outcome.failed))


def values_of(text: str) -> tuple[str, list[Any]]:
    """The path and the values of ``--set PATH=V1,V2``.

    Raises:
        ValueError: for a text of another form.
    """
    path, equals, values = text.partition("=")
    from pl_privknn.documents import read_yaml

    found = read_yaml(f"[{values}]") if equals and path and values else None
    if not isinstance(found, list):
        raise ValueError(f"--set {text!r} must be PATH=V1,V2, as in trainer.max_epochs=20,30")
    return path, found
