"""Facts for a page from a comparison's stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pl_privknn.comparison.results import Result, read_results
from pl_privknn.comparison.table import cell, cells_of, head, marks_explained, titles_of, together
from pl_privknn.config import write_yaml
from pl_privknn.report.promise import protected


def comparison_facts(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """Facts of a comparison, and the results that its plot is drawn of.

    Raises:
        ValueError: if the folder holds no results, or one of them is none.
    """
    results = read_results(folder)
    cells = cells_of(results)
    first = results[0].values
    targets = sorted({result.target for result in results})
    seeds = sorted({result.seed for result in results})
    rows = [
        {"title": title, "cells": [cell(cells, (method, target), len(seeds)) for target in targets]}
        for method, title in titles_of(cells).items()
    ]
    return {
        "kind": "comparison",
        "title": first["comparison"],
        "promise": None,
        "comparison": {
            "heads": list(map(head, targets)),
            "rows": rows,
            "notes": marks_explained(cells),
            "together": together(results),
            "delta": first["delta"],
            "adjacency": first["adjacency"],
            "protected": protected(first["adjacency"], first.get("unit", "record")),
            "seeds": seeds,
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
