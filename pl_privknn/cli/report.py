"""``privknn report``."""

from __future__ import annotations

import argparse
from typing import Any


def add_report(commands: Any) -> None:
    """Register ``privknn report`` with argparse's subparsers."""
    parser = commands.add_parser(
        "report", help="one HTML page of a run, a comparison or a ledger; privacy card"
    )
    parser.add_argument("path", help="folder of a run or of a comparison, or a ledger")
    parser.add_argument(
        "--output", default=None, metavar="FILE", help="the HTML file (report.html in the folder)"
    )
    parser.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    parser.set_defaults(run=run_report)


def run_report(parsed: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from pl_privknn.report import write_report

    print(write_report(parsed.path, parsed.output, exact=not parsed.fast))
    return 0
