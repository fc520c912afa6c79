"""``privknn init``: a configuration for one's own data."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any


def add_init(commands: Any) -> None:
    """Register ``privknn init`` with argparse's subparsers."""
    parser = commands.add_parser("init", help="recommend a teacher for your data and write a configuration")
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="folder of images or arrays, or an .npz file"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="target ε")
    parser.add_argument(
        "--private-records", type=int, required=True, metavar="N", help="about how many, as anybody may know"
    )
    parser.add_argument(
        "--delta", type=float, default=None, help="δ (a tenth of one over the records, or less)"
    )
    parser.add_argument("--num-classes", type=int, default=None, help="where no test set tells them")
    parser.add_argument("--teacher", choices=("reverse-knn", "private-knn"), default=None, help="this one")
    parser.add_argument(
        "--output", default="private_run.yaml", metavar="FILE", help="private_run.yaml by default"
    )
    parser.set_defaults(run=run_init)


def run_init(parsed: argparse.Namespace) -> int:
    """Look at the public side, recommend, and write the configuration."""
    from pl_privknn._checks import check_int, check_positive
    from pl_privknn.recommend import public_side, recommend

    records = check_int("--private-records", parsed.private_records, minimum=10)
    epsilon = check_positive("--epsilon", parsed.epsilon)
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    delta = usual_delta(records) if parsed.delta is None else parsed.delta
    output = Path(parsed.output)
    if output.exists():
        raise FileExistsError(f"--output {output} is there already; name another file")
    side = public_side(parsed.data, parsed.num_classes)
    found = recommend(side, epsilon=epsilon, delta=delta, records=records, teacher=parsed.teacher)
    output.write_text(found.config, encoding="utf-8")
    for line in found.reasons:
        print(line)
    print(f"Next: privknn fit --config {output}")
    return 0


def usual_delta(records: int) -> float:
    """The power of ten that is at most a tenth of one over the number of records."""
    return 10.0 ** math.floor(-math.log10(10 * records))
