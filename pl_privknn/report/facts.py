"""Facts of a page, read from the files of a run, a comparison or a ledger."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pl_privknn._checks import at_most
from pl_privknn.callbacks.label_store import LABELS, StoredLabels
from pl_privknn.callbacks.labeling_round import HEAD
from pl_privknn.callbacks.loggers import PublicPictures, pictured_queries
from pl_privknn.callbacks.run_files import CHECKPOINT
from pl_privknn.comparison.results import RESULTS, Result, read_results, without_places
from pl_privknn.comparison.table import cell, cells_of, head, joint_cost, mark_footnotes, titles_of
from pl_privknn.config import known_classes, write_yaml
from pl_privknn.privacy.accounting.accountant import RATES, account
from pl_privknn.privacy.audit import (
    CONFIG,
    NotARun,
    audit_run,
    ledger_of,
    mapping_of,
    named_values,
    reading,
)
from pl_privknn.privacy.files import file_digest
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import Charge, merged
from pl_privknn.privacy.verification import parameters_text
from pl_privknn.training import NoisySGD, PrivateTraining

_UNITS = {"add_remove": "one {} more or less", "replace_one": "one {} replaced by another"}
_BUT = {"record": "one", "person": "one person's"}
_NAMES = {"record": "private record", "person": "person with all of their private records"}
#: At how many rows ε is computed for the curve, and how many rows are listed.
MOST_POINTS, MOST_ROWS = 12, 400
# False-positive rates of the chart.
_CURVE = np.linspace(0, 1, 201)
_FIGURES = ("epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact")
#: Of metrics.csv, which may have columns of the user's own.
_CURVES = (
    ("Accuracy", True, {"val/accuracy": "on public examples"}),
    ("Training loss on released labels", False, {"train/loss": "loss"}),
)
_MODELS = {"student": "the student", "head": "the teacher's own model", "mean": "the mean of both"}


# ---------------------------------------------------------------------------- the promise


def protected(adjacency: str, unit: str) -> str:
    """Unit of privacy in words."""
    return _UNITS[adjacency].format(_NAMES[unit])


def in_words(known: dict[str, Any], adjacency: str, unit: str) -> list[str]:
    """Explain the guarantee in a few sentences, for readers outside the field.

    Args:
        known: what an attacker reaches, ``attacker`` of :func:`ledger_facts`.
        adjacency: neighbouring relation.
        unit: a record or a person.
    """
    at_one = next(r for r in known["rates"] if r["false_positive_rate"] == 0.01)["true_positive_rate"]
    question, chance = (
        (f"whether that {unit} was in the private data", "membership")
        if adjacency == "add_remove"
        else (f"which of two candidates that {unit} was", "the choice")
    )
    return [
        f"Suppose an attacker knows all private records but {_BUT[unit]}, all settings and the code, sees everything "
        f"that was released, has unlimited computing power, and tries to find out {question}.",
        f"If {chance} were a coin flip, the attacker would guess right in at most {percent(known['right_guesses'])} "
        "of cases; without any release, in 50 %.",
        f"With false alarms for 1 in 100 {unit}s outside the private data, the attacker detects the {unit} at most "
        f"{percent(at_one)} of the time; blind guessing detects it 1 % of the time.",
        f"This holds for every {unit}, whatever its content, and for anything computed from the releases later.",
    ]


def percent(value: float) -> str:
    """Format a share as a percentage, never rounded down, nor up to certainty."""
    for digits in (1, 3, 6):
        scale = 10 ** (digits + 2)
        up = math.ceil(value * scale - 1e-9) / scale
        if up < 1.0 or value >= 1.0:
            return f"{100 * up:.{digits}f} %"
    return "100 %"


# ---------------------------------------------------------------------------- a ledger


def ledger_facts(path: Path, audit: dict[str, Any], exact: bool = True) -> dict[str, Any]:
    """Facts of a ledger, recomputed from its rows alone.

    Args:
        path: the ledger.
        audit: what an audit of it found.
        exact: also compute the exact worst case (seconds).
    """
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        trade_off = ledger.report(exact=exact).trade_off()
    charges = audit["charges"]
    attacker = {
        "right_guesses": (1 + trade_off.advantage) / 2,
        "rates": [
            {"false_positive_rate": rate, "true_positive_rate": float(found)}
            for rate, found in zip(RATES, trade_off.true_positive_rate(RATES), strict=True)
        ],
        "curve": np.stack([_CURVE, trade_off.true_positive_rate(_CURVE)], axis=1).tolist(),
    }
    stated = ("epsilon", "delta", "adjacency", "unit", "guarantee", "reason")
    return {
        "promise": {
            **{name: audit[name] for name in stated},
            "protected": protected(audit["adjacency"], audit["unit"]),
            "bounds": {name: audit[name] for name in _FIGURES if audit.get(name) is not None},
            "words": in_words(attacker, audit["adjacency"], audit["unit"]),
            "attacker": attacker,
        },
        "planned": [described(record) for run in audit["runs"].values() for record in run["guaranteed"]],
        "spent": {
            "epsilon": audit["epsilon_spent"],
            "releases": [described(record) for run in audit["runs"].values() for record in run["charged"]],
            "rows": [_row(row) for row in charges[:MOST_ROWS]],
            "more_rows": max(0, len(charges) - MOST_ROWS),
            "growth": growth(charges, audit["delta"], audit["adjacency"], audit["epsilon_spent"]),
        },
        "kept": {
            **{name: audit[name] for name in ("ledger_head", "rows", "max_epsilon", "within_budget")},
            "runs": len(audit["runs"]),
            "rule": audit["filter"]["rule"],
        },
    }


def described(record: dict[str, Any]) -> dict[str, Any]:
    """Describe a release: kind, number, and parameters."""
    return {
        "mechanism": str(record["mechanism"]).replace("_", " "),
        "count": record["count"],
        "parameters": parameters_text(record),
        "guarantee": record.get("guarantee", "unconditional"),
    }


def growth(
    rows: Sequence[dict[str, Any]], delta: float, adjacency: Any, final: float
) -> list[tuple[int, float]]:
    """(releases so far, ε spent) at some rows.

    An earlier state is a part of a later one, so that the later bound holds for it too: each point takes the smaller.

    Args:
        rows: charges of an audit.
        delta: δ.
        adjacency: neighbouring relation.
        final: ε of all of them, computed exactly.
    """
    if not rows:
        return []
    places = sorted({round(i * len(rows) / MOST_POINTS) for i in range(1, MOST_POINTS)} - {0, len(rows)})
    charges = [Charge.from_record(row["release"]) for row in rows]
    counts = [0, *itertools.accumulate(charge.count for charge in charges)]
    parts = [list(merged(charges[:place]).values()) for place in places]
    epsilons = [account(part, delta=delta, adjacency=adjacency, exact=False).epsilon for part in parts]
    least = np.minimum.accumulate([final, *reversed(epsilons), 0.0])[::-1].tolist()
    return [(counts[place], bound) for place, bound in zip([0, *places, len(rows)], least, strict=True)]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"position": row["row"], "noise": row["noise"] or "not stated", **described(row["release"])}


# ---------------------------------------------------------------------------- a comparison


def comparison_facts(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """Facts of a comparison, and the results of its plot.

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
            "notes": mark_footnotes(cells),
            "together": joint_cost(results),
            **{name: first[name] for name in ("delta", "adjacency")},
            "protected": protected(first["adjacency"], first.get("unit", "record")),
            "seeds": seeds,
            "runs": [
                {
                    **{name: getattr(result, name) for name in ("title", "seed", "accuracy")},
                    "epsilon": result.values["epsilon"],
                    "guarantee": result.guarantee.level,
                    "releases": sum(record.get("count", 1) for record in result.values["records"]),
                }
                for result in results
            ],
        },
        "settings": write_yaml(first.get("config", {}), width=100),
        "versions": first.get("versions", {}),
    }, results


# ---------------------------------------------------------------------------- a run


def audited(folder: Path, exact: bool = False) -> dict[str, Any] | None:
    """Audit of a run that is shown or exported; None for one that used no private record.

    Args:
        folder: of the run.
        exact: see :func:`~pl_privknn.privacy.audit.audit_run`.

    Raises:
        NotARun: where the audit finds something; and as :func:`audit_run`.
    """
    with reading(folder):
        summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / CONFIG)
        private = (
            summary.get("epsilon") is not None or has_teacher(folder, settings) or _trains_privately(settings)
        )
        if not private and ledger_of(folder, settings) is None:
            return None
    found = audit_run(folder, exact=exact, released=False)
    wrong = [check["name"] for check in found["checks"] if check["agrees"] is False]
    if found["violated"]:
        what = f"{', '.join(wrong)} not matching the ledger" if wrong else "the budget is exceeded"
        raise NotARun(f"{folder}: the audit fails: {what}; `privknn audit` of the folder shows the details")
    return found


def has_teacher(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a run releases labels."""
    section = settings.get("labeling")
    # Python alone may know the teacher; a command writes null where there is none.
    named = isinstance(section, Mapping) and section.get("labeler", "known to Python") is not None
    return named or (folder / LABELS).is_file()


def _trains_privately(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on private records."""
    found = (known_classes().get(name) for name in named_values(settings, "class_path"))
    return any(issubclass(kind, PrivateTraining | NoisySGD) for kind in found if kind is not None)


def run_facts(folder: Path, audit: dict[str, Any] | None, exact: bool = True) -> dict[str, Any]:
    """Facts of a run, from the files in its folder alone.

    Args:
        folder: of the run.
        audit: see :func:`audited`.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: if a file in it can't be read as what it is.
    """
    summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / CONFIG)
    pictures = PublicPictures.read(folder)
    return {
        "kind": "run",
        "title": _title(summary) or folder.name,
        "data": _data(summary),
        "files": _files(folder),
        "promise": None,
        **(ledger_facts(Path(audit["ledger"]), audit, exact) if audit is not None else {}),
        "checks": [] if audit is None else audit["checks"],
        "released": released_kind(folder, audit, settings),
        "answers": _answers(folder, pictures),
        "student": _student(summary, pictures),
        "curves": _curves(folder),
        "without_privacy": _without_privacy(folder, summary),
        "settings": write_yaml(without_places(_set(settings)), width=100) if settings else "",
        "versions": summary.get("versions", {}),
    }


def _title(summary: dict[str, Any]) -> str:
    """Title of data, method, ε and accuracy, as far as the summary has them."""
    method = " · ".join(str(summary[name]) for name in ("labeler", "student") if summary.get(name))
    parts = [" by ".join(filter(None, [_data(summary), method]))]
    if isinstance(summary.get("epsilon"), float):
        parts.append(f"ε = {at_most(summary['epsilon'])}")
    if isinstance(summary.get("test_accuracy"), float):
        parts.append(f"test accuracy {summary['test_accuracy']:.3f}")
    return ", ".join(filter(None, parts))


def _data(summary: dict[str, Any]) -> str:
    """Name of the data set."""
    return str(summary.get("data", "")).removesuffix("DataModule")


def _files(folder: Path) -> list[dict[str, str]]:
    """The run's model files with their digests."""
    paths = [path for path in (folder / CHECKPOINT, folder / HEAD) if path.is_file()]
    return [{"name": path.name, "sha256": file_digest(path)} for path in paths]


def released_kind(folder: Path, audit: dict[str, Any] | None, settings: dict[str, Any]) -> str:
    """Kind of release: ``"labels"``, ``"statistics"`` or ``"weights"``; empty where nothing private was used."""
    if audit is None:
        return ""
    if (folder / HEAD).is_file():
        return "statistics"
    return "labels" if has_teacher(folder, settings) else "weights"


def _answers(folder: Path, pictures: PublicPictures | None) -> dict[str, Any] | None:
    """Queries with their pictures, and accuracy of the labels where the public truth is known."""
    path = folder / LABELS
    if not path.is_file():
        return None
    with contextlib.closing(StoredLabels(path)) as store:
        queries, counts = store.queries(), store.counts()
        examples, labels, _ = store.answers(store.rounds())
    names = pictures.class_names if pictures is not None else ()
    truth = None if pictures is None or not len(pictures.truth) else torch.from_numpy(pictures.truth)
    gallery = [
        {**one.plain(), "picture": None if one.image is None else _png(one.image)}
        for one in pictured_queries(folder)
    ]
    asked = Counter(query.round + 1 for query in queries if query.state != "not asked")
    return {
        "counts": {**counts, "labelled": len(examples)},
        "rounds": dict(asked),
        "gallery": gallery,
        "not_pictured": counts["queried"] - len(gallery),
        **_label_accuracy(examples, labels, truth, names),
    }


def _label_accuracy(
    examples: torch.Tensor, labels: torch.Tensor, truth: torch.Tensor | None, names: tuple[str, ...]
) -> dict[str, Any]:
    """Released labels against the public truth: by class with a confusion matrix, or by attribute."""
    if truth is None or not len(examples):
        return _confused(None, names)
    wanted = truth[examples]
    known = wanted >= 0
    if labels.ndim == 2:
        right = ((wanted == labels) & known).sum(dim=0).tolist()
        return {"by_class": list(map(_share, names, right, known.sum(dim=0).tolist())), "confusion": None}
    cells = wanted[known] * len(names) + labels[known]
    confusion = torch.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names))
    return _confused(confusion.numpy(), names)


def _student(summary: dict[str, Any], pictures: PublicPictures | None) -> dict[str, Any]:
    """Accuracy of the released model on public examples and the public test set."""
    confusion = None if pictures is None or not pictures.confusion.size else pictures.confusion
    shown = ("test_accuracy", "val_accuracy", "holdout_epsilon", "label_accuracy", "epochs", "remark")
    return {
        **{name: summary.get(name) for name in shown},
        "holdout": None
        if summary.get("holdout_accuracy") is None
        else f"{summary['holdout_accuracy']:.3f} ± {summary['holdout_deviation']:.3f}",
        "released": _MODELS.get(summary.get("released", ""), ""),
        "models": {
            text: summary[f"{name}_test_accuracy"]
            for name, text in _MODELS.items()
            if summary.get(f"{name}_test_accuracy") is not None
        },
        **_confused(confusion, () if pictures is None else pictures.class_names),
    }


def _curves(folder: Path) -> list[dict[str, Any]]:
    """The student's curves over epochs, from all parts of a run that was interrupted."""
    values: dict[str, dict[int, float]] = {}
    # The epoch at which so many queries were first counted: the student restarts there.
    asked: dict[float, int] = {}
    earlier = sorted(folder.glob("metrics.*.csv"), key=lambda path: int(path.name.split(".")[1]))
    for path in [*earlier, *[p for p in [folder / "metrics.csv"] if p.is_file()]]:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name in (name for _, _, columns in _CURVES for name in columns):
                    if row.get(name) and row.get("epoch"):
                        values.setdefault(name, {})[int(row["epoch"]) + 1] = float(row[name])
                if row.get("labels/queried") and row.get("epoch"):
                    asked.setdefault(float(row["labels/queried"]), int(row["epoch"]) + 1)
    return [
        {
            "title": title,
            "share": share,
            "rounds": sorted(asked.values())[1:],
            "series": {
                text: sorted(values[name].items()) for name, text in columns.items() if name in values
            },
        }
        for title, share, columns in _CURVES
        if any(len(values.get(name, ())) > 1 for name in columns)
    ]


def _without_privacy(folder: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracy of the same comparison's runs without privacy, with the same seed; none outside a comparison."""
    places = folder.resolve().parents
    if len(places) < 3 or not (places[2] / RESULTS).is_dir() or not folder.resolve().name.startswith("seed_"):
        return []
    method, seed = places[1].name, folder.resolve().name.removeprefix("seed_")
    found = []
    for result in read_results(places[2]):
        bound = result.values["kind"] == "true_labels"
        if result.target != np.inf or str(result.seed) != seed or not (bound or result.method == method):
            continue
        what = (
            f"the same {'student on the true labels of public examples' if bound else 'method without noise'}"
        )
        found.append({"what": what, "title": result.title, "accuracy": result.accuracy})
    return found


def _set(value: Any) -> Any:
    """Settings that are not null."""
    if isinstance(value, dict):
        return {name: _set(item) for name, item in value.items() if item is not None}
    return [_set(item) for item in value] if isinstance(value, list) else value


def _share(name: str, right: int, count: int) -> dict[str, Any]:
    return {"name": name, "right": right, "count": count, "accuracy": right / count if count else None}


def _confused(confusion: np.ndarray[Any, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy by class, and the confusion matrix with its rows as shares; nothing where there is none."""
    if confusion is None:
        return {"by_class": [], "confusion": None}
    rows = confusion.tolist()
    counts = list(map(sum, rows))
    shares = [
        [cell / count if count else 0.0 for cell in row] for row, count in zip(rows, counts, strict=True)
    ]
    return {
        "by_class": list(map(_share, names, confusion.diagonal().tolist(), counts)),
        "confusion": {"names": list(names), "rows": rows, "shares": shares},
    }


def _png(image: np.ndarray[Any, Any]) -> str:
    """A picture as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any((folder / name).is_file() for name in ("summary.json", LABELS, "ledger.sqlite"))
