"""What a comparison's stored results say, as facts for a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pl_privknn.comparison.results import Result, mark, read_results
from pl_privknn.comparison.spec import epsilon_text
from pl_privknn.comparison.table import (
    cells_of,
    guarantees,
    marks_explained,
    mean_and_spread,
    titles_of,
    together,
)
from pl_privknn.config import write_yaml
from pl_privknn.privacy.mechanisms.base import UNCONDITIONAL
from pl_privknn.report.promise import attacker, protected


def comparison_facts(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """Facts of a comparison, and the results that its plot is drawn of.

    Raises:
        ValueError: if the folder holds no results, or one of them is none.
    """
    results = read_results(folder)
    cells = cells_of(results)
    known = guarantees(cells)
    first = results[0].values
    targets = sorted({result.target for result in results})
    rows = []
    for method, title in titles_of(cells).items():
        cell_texts = []
        for target in targets:
            here = cells.get((method, target), [])
            if not here:
                cell_texts.append("–")
                continue
            mean, spread = mean_and_spread(here)
            text = f"{mean:.3f}" + (f" ± {spread:.3f}" if len(here) > 1 else "")
            cell_texts.append(text + mark(known.get((method, target), UNCONDITIONAL)))
        rows.append({"title": title, "cells": cell_texts})
    return {
        "kind": "comparison",
        "title": first["comparison"],
        "promise": None,
        "comparison": {
            "heads": [f"ε ≤ {epsilon_text(t)}" if t < math.inf else "without privacy" for t in targets],
            "rows": rows,
            "notes": marks_explained(cells),
            "together": together(results),
            "delta": first["delta"],
            "adjacency": first["adjacency"],
            "protected": protected(first["adjacency"], first.get("unit", "record")),
            "seeds": sorted({result.seed for result in results}),
            "attackers": [
                {"epsilon": target, **attacker(target, first["delta"])}
                for target in targets
                if target < math.inf
            ],
            "runs": [
                {
                    "title": result.title,
                    "seed": result.seed,
                    "epsilon": result.values["epsilon"],
                    "guarantee": result.guarantee.level,
                    "accuracy": result.accuracy,
                    "releases": sum(record.get("count", 1) for record in result.values["records"]),
                }
                for result in results
            ],
        },
        "settings": write_yaml(first.get("config", {}), width=100),
        "versions": first.get("versions", {}),
    }, results
