"""Run one configuration over several seeds, or a comparison of methods, and store the results.

A file with ``methods`` is a comparison: further words are handed to ``privknn compare``, and its folder is
``runs/compare/NAME`` or ``--output``; runs that are done there, by the same code, are not repeated. Any other file is
one configuration, stored under ``--name``: further words are handed to ``privknn fit``, and seeds that are stored are
not run again. Seeded noise makes its runs repeatable; a run over real private data keeps the operating system's
generator, as ``--noise system`` does here.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import Measured, commit, entries
from pl_privknn.cli import main as privknn
from pl_privknn.comparison import read_comparison, read_results
from pl_privknn.config import read_document

#: Words that are not its own belong to ``privknn``.
TAKES_WORDS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("config", help="YAML of a run, or of a comparison")
    parser.add_argument("--name", help="file under benchmarks/results/, of one configuration")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise", choices=["seeded", "system"], default="seeded")
    parser.add_argument("--output", type=Path, help="a comparison's folder")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each run."""
    if "methods" in read_document(Path(options.config)):
        yield from _comparison(options)
        return
    if options.name is None:
        raise SystemExit("--name is missing: the file under benchmarks/results/ of these runs")
    settings = {"config": Path(options.config).name, "overrides": options.words}
    for seed in options.seeds:
        part = f"seed {seed}"
        if part not in entries(options.name):
            found = _run(options.config, seed, options.words, seeded=options.noise == "seeded")
            yield Measured(found, [seed], part, settings, options.name)


def _run(config: str, seed: int, words: list[str], seeded: bool) -> dict[str, Any]:
    """Execute one run in a separate folder; returns its summary."""
    noise = "--labeling.labeler.init_args.noise_source"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", config, "--run_dir", folder, "--seed_everything", str(seed)]
        arguments += ["--labeling.options.seed", str(seed), "--trainer.enable_progress_bar", "false"]
        if seeded and read_document(config)["labeling"].get("labeler") is not None:
            arguments += [noise, "SeededNoise", f"{noise}.seed", str(seed)]
        if privknn(["fit", *arguments, *words]):
            raise SystemExit(f"{config}, seed {seed}: the run failed")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    del summary["versions"]  # the entry has them
    return summary


def _comparison(options: argparse.Namespace) -> Iterator[Measured]:
    """Entries of a comparison; unchanged ones keep their commit."""
    comparison = read_comparison(options.config)
    name, methods = comparison.name, list(comparison.methods)
    folder = options.output or Path("runs") / "compare" / name
    begin(folder)
    failed = privknn(["compare", options.config, "--output", str(folder), *options.words])
    if failed == 2:  # a mistake in the words, and told
        raise SystemExit(2)
    stored = entries(name)
    for result in read_results(folder):
        of = {"comparison": name, "method": result.method, "title": result.title}
        target = "inf" if result.target == math.inf else result.target
        values = {**of, "place": methods.index(result.method), "target_epsilon": target, **result.values}
        del values["versions"]  # those of this entry
        settings = {"config": Path(options.config).name, "overrides": options.words}
        part = f"{result.method}, ε {target}, seed {result.seed}"
        if stored.get(part, {}).get("results") != values:
            yield Measured(values, [result.seed], part, settings, name)
    if failed:
        raise SystemExit(f"{options.config}: a run failed; what is done is stored")


def begin(folder: Path) -> None:
    """Reject a folder started by other code, whose runs would be stored under this commit."""
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
