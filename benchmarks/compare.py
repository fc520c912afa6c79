"""Run a comparison of methods, or go on with it, and store the result of every run.

Further words are handed to ``privknn compare``. The comparison's folder is its own, ``runs/compare/NAME`` or
``--output``; runs that are done there, by the same code, are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.record import Measured, commit, entries
from pl_privknn.cli.main import main as privknn
from pl_privknn.comparison import read_comparison, read_results

#: Words that are not its own belong to ``privknn compare``.
TAKES_WORDS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("config", help="YAML of the comparison")
    parser.add_argument("--output", type=Path, default=None, help="the comparison's folder")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One entry a run; entries that say the same already stay as they are, with their commit."""
    name = read_comparison(Path(options.config)).name
    folder = options.output or Path("runs") / "compare" / name
    _begin(folder)
    failed = privknn(["compare", options.config, "--output", str(folder), *options.words])
    if failed == 2:  # a mistake in the words, and told
        raise SystemExit(2)
    stored = entries(name)
    for result in read_results(folder):
        values = dict(result.values)
        settings = {"config": values.pop("config")}
        seed = values.pop("seed")
        values.pop("versions")  # those of this entry
        part = f"{values['method']}, ε {values['target_epsilon']}, seed {seed}"
        if stored.get(part, {}).get("results") != values:
            yield Measured(values, [seed], part, settings, name)
    if failed:
        raise SystemExit(f"{options.config}: a run failed; what is done is stored")


def _begin(folder: Path) -> None:
    """Let nobody go on with a folder that other code began: its runs would be stored under this commit."""
    begun, now = folder / "measured_by.json", commit()
    if begun.exists():
        if json.loads(begun.read_text(encoding="utf-8")) != now:
            raise SystemExit(
                f"--output {folder} was begun by other code; check that out, or take another folder"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"--output {folder} holds runs of unknown code; take another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        begun.write_text(json.dumps(now), encoding="utf-8")
