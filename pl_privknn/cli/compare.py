"""``privknn compare``: many runs and their total cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import check_epsilon
from pl_privknn.cli.common import CommandError, add_set, importable, say, suggest, values_set
from pl_privknn.cli.fit import add_places, places_of

if TYPE_CHECKING:
    from pl_privknn.comparison.run import Command


def add_compare(commands: Any, command: Command) -> None:
    """Register ``privknn compare`` with argparse's subparsers; ``command`` executes its runs."""
    parser = commands.add_parser(
        "compare", help="run several methods over values of ε and seeds; write a table and a plot (resumable)"
    )
    parser.add_argument("config", nargs="?", help="YAML of the comparison, as configs/compare_digits.yaml")
    parser.add_argument(
        "--data", metavar="PATH", help="instead of a YAML: compare the main methods on your own data"
    )
    parser.add_argument(
        "--epsilon",
        nargs="+",
        action="extend",
        type=float,
        metavar="ε",
        help="values of ε of --data; of a YAML only these",
    )
    parser.add_argument(
        "--private-records", type=int, metavar="N", help="of --data: approximate number; becomes public"
    )
    parser.add_argument(
        "--delta", type=float, help="of --data: δ (by default the largest power of ten up to 1/(10 N))"
    )
    add_places(parser.add_argument_group("parts and columns of --data"))
    parser.add_argument("--output", help="output folder (runs/compare/NAME)")
    for option, kind, metavar, text in (
        ("--only", str, "METHOD", "only these methods"),
        ("--seeds", int, "N", "only these seeds"),
    ):
        parser.add_argument(
            option, nargs="+", action="extend", type=kind, default=[], metavar=metavar, help=text
        )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of parallel processes (1); 0: run everything in this process",
    )
    add_set(parser, "settings of all runs, as those of privknn fit: trainer.max_epochs=2")
    parser.add_argument(
        "--dry-run", action="store_true", help="list finished and missing runs without running any"
    )
    parser.add_argument(
        "--render", metavar="DIR", help="only write table, CSV and plot of the comparison in DIR"
    )
    parser.set_defaults(run=_compare, command=command)


def _compare(parsed: argparse.Namespace) -> int:
    """Run or render a comparison; 1 where a run failed."""
    if parsed.render is not None:
        if parsed.config is not None:
            raise ValueError("--render takes finished runs; leave out the configuration")
        print(_render(Path(parsed.render), Path(parsed.output or parsed.render)))
        return 0
    own, places = (parsed.data, parsed.epsilon, parsed.private_records), places_of(parsed)
    given = (*own[::2], parsed.delta, places["columns"] or None, parsed.public, parsed.test)
    if any(value is not None for value in given) and (None in own or parsed.config is not None or parsed.set):
        raise ValueError(
            "--data PATH, --epsilon ε and --private-records N are given together, without a YAML and --set; their "
            "other options need all three"
        )
    if parsed.config is None and parsed.data is None:
        raise ValueError("nothing to compare; give the YAML of a comparison, --data PATH or --render DIR")
    for epsilon in parsed.epsilon if parsed.data is not None else ():
        check_epsilon("--epsilon", epsilon)
    if not Path(parsed.config or parsed.data).exists():
        raise FileNotFoundError(f"{parsed.config or parsed.data}: no such file or folder; check the path")
    with importable([parsed.config or parsed.data]):
        return _run(parsed)


def _render(folder: Path, output: Path) -> str:
    """Write table, CSV and plot; returns the table and the cost of all runs."""
    from pl_privknn.comparison.run import joint_cost

    return f"{_files(folder, output)}\n{joint_cost(folder)}"


def _files(folder: Path, output: Path) -> str:
    """Write table, CSV and plot of the runs that are finished; returns the table."""
    from pl_privknn.comparison.plot import render
    from pl_privknn.comparison.run import COMPARISON, read_comparison, read_results

    runs = len(read_comparison(folder / COMPARISON).cells())
    return render(read_results(folder), output, folder.resolve().name, runs)


def _show_so_far(output: Path) -> None:
    """Write table and plot while runs go on; a failure is reported and stops no run."""
    try:
        _files(output, output)
    except Exception as error:
        print(f"{output}: table and plot were not written ({type(error).__name__}: {error})", file=sys.stderr)


def _run(parsed: argparse.Namespace) -> int:
    from pl_privknn._checks import counted
    from pl_privknn.comparison.run import (
        choose,
        comparison_of,
        read_comparison,
        read_epsilon,
        run_comparison,
        states_of,
        total_of,
    )

    place = Path(parsed.config or parsed.data)
    if parsed.data is None:
        comparison = read_comparison(place, values_set("--set", parsed.set))
    else:
        from pl_privknn.recommendation.methods import methods_on

        name, document, found = methods_on(
            parsed.data,
            parsed.epsilon,
            parsed.private_records,
            parsed.seeds,
            delta=parsed.delta,
            **places_of(parsed),
        )
        comparison = comparison_of(document, name)
        say(*found.reasons)
    output = Path(parsed.output or Path("runs") / "compare" / comparison.name)
    epsilons = [read_epsilon("--epsilon", epsilon) for epsilon in parsed.epsilon or []]
    chosen = choose(
        comparison, method=parsed.only, seed=parsed.seeds, epsilon=epsilons if parsed.data is None else []
    )
    if parsed.dry_run or parsed.data is not None:
        print(*states_of(chosen, output), sep="\n", flush=True)
    if parsed.data is not None:
        say(total_of(comparison, chosen), found.size_line())
    if parsed.dry_run:
        return 0
    try:
        before, failed = run_comparison(
            comparison,
            chosen,
            output,
            command=parsed.command,
            folder=place.resolve().parent if parsed.data is None else None,
            workers=parsed.workers,
            finished=lambda: _show_so_far(output),
        )
    except KeyboardInterrupt:
        from pl_privknn.comparison.run import joint_cost

        raise CommandError(
            f"interrupted; the same command continues where it stopped. {joint_cost(output)}"
        ) from None
    if failed < len(chosen):
        print(_render(output, output))
    done = len(chosen) - before - failed
    print(f"{counted(len(chosen), 'run')}: {before} done before, {done} now, {failed} failed")
    suggest(f"report {output}")
    print(output)
    return int(failed > 0)
