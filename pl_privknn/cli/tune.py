"""``privknn tune``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_tune(commands: Any) -> None:
    """Register ``privknn tune`` with argparse's subparsers."""
    parser = commands.add_parser(
        "tune",
        help="find settings of a private training on the private records, with the whole search paid for (resumable)",
    )
    parser.add_argument("config", help="YAML of a training by NoisySGD or PrivateTraining")
    parser.add_argument("--epsilon", type=float, required=True, help="ε of the whole search")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH=V1,V2",
        help="values to draw from, as in model.init_args.optimization.lr=0.5,1,2; all combinations are possible",
    )
    parser.add_argument(
        "--mean",
        type=float,
        default=None,
        help="expected number of candidates (as many as there are settings)",
    )
    parser.add_argument(
        "--score-noise", type=float, default=50.0, help="σ of the noise on a count of right predictions (50)"
    )
    parser.add_argument("--output", default=None, help="its folder (runs/tune/NAME)")
    parser.add_argument("--ledger", default=None, help="a ledger that several runs share (the folder's own)")
    parser.add_argument("--max-epsilon", type=float, default=None, help="budget of the ledger")
    parser.set_defaults(run=run_tune)


def run_tune(parsed: argparse.Namespace) -> int:
    """Search, and print the best setting and what the search cost."""
    from pl_privknn.comparison.tuning import tuning_of
    from pl_privknn.comparison.tuning_run import TuningRun
    from pl_privknn.config import read_document

    path = Path(parsed.config)
    values = dict(_values_of(text) for text in parsed.set)
    tuning = tuning_of(read_document(path), values, parsed.epsilon, parsed.mean, parsed.score_noise)
    output = Path(parsed.output or Path("runs") / "tune" / path.stem)
    ledger = None if parsed.ledger is None else Path(parsed.ledger)
    print(json.dumps(TuningRun(tuning, output, ledger, parsed.max_epsilon).run(), ensure_ascii=False))
    print(output)
    return 0


def _values_of(text: str) -> tuple[str, list[Any]]:
    """The path and the values of ``--set PATH=V1,V2``.

    Raises:
        ValueError: for a text of another form.
    """
    path, equals, values = text.partition("=")
    from pl_privknn.config import read_yaml

    found = read_yaml(f"[{values}]") if equals and path and values else None
    if not isinstance(found, list):
        raise ValueError(f"--set {text!r} must be PATH=V1,V2, as in model.init_args.optimization.lr=0.5,1")
    return path, found
