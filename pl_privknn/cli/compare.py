"""``privknn compare``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn.cli.privacy import add_set, values_set

if TYPE_CHECKING:
    from pl_privknn.comparison.run import Run
    from pl_privknn.comparison.spec import Comparison
    from pl_privknn.comparison.worker import Command
    from pl_privknn.privacy.mechanisms.base import Guarantee


def add_compare(commands: Any, command: Command) -> None:
    """Register ``privknn compare`` with argparse's subparsers; its runs are what ``command`` does."""
    parser = commands.add_parser(
        "compare", help="run methods on one split over ε and seeds; table, CSV and plot of all (resumable)"
    )
    parser.add_argument(
        "config", nargs="?", help="YAML of the comparison, such as configs/compare_digits.yaml"
    )
    parser.add_argument("--output", default=None, help="its folder (runs/compare/NAME)")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="METHOD", help="these methods alone"
    )
    parser.add_argument(
        "--seeds", nargs="+", action="extend", type=int, default=[], metavar="N", help="these seeds alone"
    )
    parser.add_argument(
        "--epsilons", nargs="+", action="extend", default=[], metavar="ε", help="these values of ε alone"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at a time, each in a process (1); 0: all in this process"
    )
    add_set(parser, "replace values of the YAML, as in base.trainer.max_epochs=2")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what is done and what is missing; run nothing"
    )
    parser.add_argument(
        "--render", metavar="DIR", default=None, help="table, CSV and plot of stored results alone"
    )
    parser.set_defaults(run=run_compare, command=command)


def run_compare(parsed: argparse.Namespace) -> int:
    """Run or render a comparison; 1 where a run failed."""
    if parsed.render is not None:
        if parsed.config is not None:
            raise ValueError("--render takes stored results; leave the configuration out")
        render(Path(parsed.render), Path(parsed.output or parsed.render))
        return 0
    if parsed.config is None:
        raise ValueError("name the YAML of a comparison, or --render DIR")
    from pl_privknn.cli.training_words import importable

    with importable([parsed.config]):
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    from pl_privknn.comparison.runner import choose, run_comparison
    from pl_privknn.comparison.spec import read_comparison

    comparison = read_comparison(parsed.config, values_set("--set", parsed.set))
    output = Path(parsed.output or Path("runs") / "compare" / comparison.name)
    if parsed.dry_run:
        return _dry_run(comparison, output, parsed)
    shown = Progress(comparison.name, len(choose(comparison, parsed.only, parsed.seeds, parsed.epsilons)))
    with interruptible(), shown:
        outcome = run_comparison(
            comparison,
            output,
            command=parsed.command,
            worker=("pl_privknn.cli.worker", str(Path(parsed.config).resolve().parent)),
            only=parsed.only,
            seeds=parsed.seeds,
            epsilons=parsed.epsilons,
            workers=parsed.workers,
            report=shown.report,
        )
    if any((output / "results").glob("*.json")):
        render(output, output)
    for label, error in outcome.failed.items():
        print(f"failed: {label}: {error}")
    done = outcome.total - outcome.before - len(outcome.failed)
    print(f"{outcome.total} runs: {outcome.before} done before, {done} now, {len(outcome.failed)} failed")
    print(output)
    return int(bool(outcome.failed))


def render(folder: Path, output: Path) -> None:
    """Write ``results.csv``, ``table.md`` and ``comparison.{svg,png}`` of the results in ``folder``."""
    from pl_privknn.comparison.plot import draw
    from pl_privknn.comparison.results import read_results, write_csv
    from pl_privknn.comparison.table import markdown_table, together

    results = read_results(folder)
    output.mkdir(parents=True, exist_ok=True)
    table = markdown_table(results)
    write_csv(results, output / "results.csv")
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    draw(results, output / "comparison")
    print(table)
    print(together(results))


def _dry_run(comparison: Comparison, output: Path, parsed: argparse.Namespace) -> int:
    from pl_privknn.comparison.marks import footnotes
    from pl_privknn.comparison.run import Planner
    from pl_privknn.comparison.runner import choose, has_result, is_begun

    planner = Planner(comparison.base["data"])
    planned: dict[tuple[str, float], str] = {}
    reasons: list[tuple[str, Guarantee]] = []
    for run in choose(comparison, parsed.only, parsed.seeds, parsed.epsilons):
        state = "done" if has_result(run, output) else "begun" if is_begun(run, output) else "missing"
        if (key := (run.method.name, run.epsilon)) not in planned:
            planner.check(run)
            plan = planner.plan(run)
            found = [f"{path.rsplit('.', 1)[-1]}={value:g}" for path, value in plan.calibrated.items()]
            if plan.epsilon is not None and plan.guarantee is not None:
                found.append(f"plan ε={plan.epsilon:.4g}, guarantee: {plan.guarantee.level}")
                reasons.append((run.method.title, plan.guarantee))
            planned[key] = ", ".join(found)
        print(f"{state:8} {run.label:40} {planned[key]}".rstrip())
    for note in footnotes(reasons):
        print(note)
    return 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a termination end the runs at work in good order, as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGTERM, stop) if mine else None
    try:
        yield
    except KeyboardInterrupt:
        raise RuntimeError("interrupted; the same command continues where it stopped") from None
    finally:
        if mine:
            signal.signal(signal.SIGTERM, earlier)


class Progress:
    """A bar of all runs, the runs at work, and a line for each that ends."""

    def __init__(self, name: str, runs: int) -> None:
        from rich import progress
        from rich.console import Console

        # Runs in this process send their own output to their logs; this stays where it is now.
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=Console(file=sys.stdout),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._all = self._bars.add_task(name, total=runs)
        self._at_work: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def report(self, what: str, run: Run, text: str) -> None:
        """Show what happens to a run."""
        if what == "before":
            self._bars.advance(self._all)
            return
        if what == "start":
            self._at_work[run.label] = self._bars.add_task(f"  {run.label}", total=None)
            return
        self._bars.remove_task(self._at_work.pop(run.label))
        self._bars.advance(self._all)
        style = "red" if what == "failed" else "green"
        self._bars.console.print(f"[{style}]{what}[/{style}] {run.label}: {_plain(text)}", highlight=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
