"""Run a benchmark and store its measurements, or render the stored results: ``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.record import commit, store

#: Modules with ``add_options(parser)`` and ``measure(options)``, which yields :class:`~benchmarks.record.Measured`.
BENCHMARKS = {
    "accountants": "ε of random plans by dp-accounting, prv-accountant and this package",
    "attacks": "attacks on methods: measured lower bounds on ε, and whether half of the noise is found",
    "foreign_modules": "PrivateTraining of modules of other packages, unchanged; its speed compared with Opacus",
    "membership": "membership inference on students and on a network trained on private records",
    "private_training": "a network from pixels by PrivateTraining on Fashion-MNIST",
    "recipes": "recommended runs compared with manually tuned teachers, over data sets, sizes and ε",
    "runs": "one training configuration over several seeds, or a comparison of methods",
    "scale": "memory of a labelling round with a large table",
    "speed": "labelling, features, an epoch, the exact ε and the import, as ratios of processor seconds",
    "tables": "recommended runs on tables compared with private models of other packages",
}
#: Options that say where things lie or which are measured, and change no figure.
PLACES = ("prv", "dry_run", "folder", "name", "only", "peers", "root", "words")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name_of_benchmark", metavar="NAME", required=True)
    render = {"render": "write tables and plots of what is stored; --check compares"}
    for name, what in {**BENCHMARKS, **render}.items():
        commands.add_parser(name, help=what, add_help=False)
    name = parser.parse_known_args(words[:1])[0].name_of_benchmark
    module = importlib.import_module(f"benchmarks.{name}")
    own = argparse.ArgumentParser(
        prog=f"{parser.prog} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(own)
    if name == "render":
        return int(module.render(own.parse_args(words[1:])))
    own.add_argument("--dry-run", action="store_true", help="print the figures and store nothing")
    options, rest = own.parse_known_args(words[1:])
    if rest and not hasattr(module, "TAKES_WORDS"):
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    options.words = rest
    settings = {key: value for key, value in vars(options).items() if key not in PLACES}
    begun = commit()
    for measured in module.measure(options):
        text = json.dumps({measured.part: measured.results}, indent=1, ensure_ascii=False, default=str)
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        if not options.dry_run:
            store(measured.benchmark or name, measured, settings, begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
