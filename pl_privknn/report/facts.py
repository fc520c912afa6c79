"""Facts of the page of a run or a ledger, read from its files alone."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pl_privknn.config import write_yaml
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.card import card_facts, described, interval_of
from pl_privknn.privacy.files import MOST_ERROR
from pl_privknn.privacy.mechanisms.base import Charge, merged
from pl_privknn.privacy.verify import COLUMNS, CONFIG, RELEASES, mapping_of

if TYPE_CHECKING:
    from pl_privknn.callbacks.loggers import PublicPictures

#: At how many rows ε is computed for the curve, and how many rows are listed.
MOST_POINTS, MOST_ROWS = 12, 400
# Votes whose margin is below so many standard deviations of its noise are close.
_CLOSE = 2.0
_MODELS = {"student": "the student", "head": "the teacher's own model", "ensemble": "the ensemble of both"}


def facts_of(path: str | Path, exact: bool = True) -> dict[str, Any]:
    """Facts of a page as plain JSON types.

    The template sees nothing else.

    Args:
        path: the folder of a run, or a ledger.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: as :func:`~pl_privknn.privacy.card.card_facts`.
    """
    facts, audit = card_facts(path, exact)
    if audit is not None:
        facts["spent"] = _spent(audit)
    if facts["kind"] == "run":
        from pl_privknn.callbacks.loggers import PublicPictures

        folder = Path(path)
        summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / CONFIG)
        pictures = PublicPictures.read(folder)
        facts |= {
            "checks": [] if audit is None else audit["checks"],
            "columns": _columns(folder),
            "answers": None if pictures is not None and not pictures.public else _answers(folder, pictures),
            "student": _student(summary, pictures),
            "without_privacy": _without_privacy(folder),
            "settings": write_yaml(_shown(settings), width=100) if settings else "",
        }
    plain: dict[str, Any] = json.loads(json.dumps(facts))  # tuples as lists
    return plain


# ---------------------------------------------------------------------------- a ledger


def _spent(audit: dict[str, Any]) -> dict[str, Any]:
    """Charges of an audited ledger, and their growth."""
    charges = audit["charges"]
    return {
        "epsilon": audit["epsilon_spent"],
        "releases": [described(record) for run in audit["runs"].values() for record in run["charged"]],
        "rows": [
            {"position": row["row"], "noise": row["noise"] or "not stated", **described(row["release"])}
            for row in charges[:MOST_ROWS]
        ],
        "more_rows": max(0, len(charges) - MOST_ROWS),
        "growth": growth(charges, audit["delta"], audit["adjacency"], audit["epsilon_spent"]),
    }


def growth(
    rows: Sequence[dict[str, Any]], delta: float, adjacency: Any, final: float
) -> list[tuple[int, float]]:
    """Pairs (releases so far, ε spent) at some rows of the ledger.

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


# ---------------------------------------------------------------------------- a run


def _answers(folder: Path, pictures: PublicPictures | None) -> dict[str, Any] | None:
    """Queries with their pictures, and accuracy of the labels where the public truth is known."""
    from pl_privknn.callbacks.label_run import stored_answers
    from pl_privknn.callbacks.loggers import pictured_queries

    found = stored_answers(folder)
    if found is None:
        return None
    gallery = [
        {**query, "picture": _png(image), "close": _is_close(query["margin"])}
        for query, image in pictured_queries(folder)
    ]
    margins = [query.margin for query in found.queries if query.margin is not None]
    return {
        "counts": {**found.counts, "labelled": len(found.examples)},
        "close": sum(map(_is_close, margins)) if margins else None,
        "rounds": dict(Counter(query.round + 1 for query in found.queries if query.state != "not asked")),
        "gallery": gallery,
        "not_pictured": found.counts["queried"] - len(gallery),
        **_label_accuracy(found.examples.numpy(), found.labels.numpy(), pictures),
    }


def _is_close(margin: float | None) -> bool:
    return margin is not None and margin < _CLOSE


def _label_accuracy(
    examples: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], pictures: PublicPictures | None
) -> dict[str, Any]:
    """Released labels by class, against the public truth where it is known; or by attribute."""
    if pictures is None or not len(examples):
        return _confused(None, ())
    names = pictures.class_names
    if not len(pictures.truth):
        counts = (
            np.bincount(labels, minlength=len(names)).tolist() if labels.ndim == 1 else labels.sum(axis=0)
        )
        return {"by_class": list(map(_share, names, counts)), "confusion": None}
    wanted = pictures.truth[examples]
    known = wanted >= 0
    if labels.ndim == 2:
        right = ((wanted == labels) & known).sum(dim=0).tolist()
        return {"by_class": list(map(_share, names, known.sum(dim=0).tolist(), right)), "confusion": None}
    cells = wanted[known] * len(names) + labels[known]
    confusion = np.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names))
    return _confused(confusion, names)


def _student(summary: dict[str, Any], pictures: PublicPictures | None) -> dict[str, Any]:
    """Accuracy of the released model on public examples, the public test set and held-out records."""
    confusion = None if pictures is None or not pictures.confusion.size else pictures.confusion
    shown = (
        *("test_accuracy", "test_baseline", "test_balanced_accuracy", "val_accuracy"),
        *(
            "label_accuracy",
            "label_baseline",
            "epochs",
            "remark",
            "test_calibration_error",
            "test_reliability",
        ),
    )
    tested = {text: summary.get(f"{name}_test_accuracy") for name, text in _MODELS.items()}
    accuracy, count = summary.get("test_accuracy"), 0 if confusion is None else int(confusion.sum())
    return {
        **{name: summary.get(name) for name in shown},
        "test_interval": interval_of(accuracy, count) if accuracy is not None and count else None,
        "holdout": _holdout(summary),
        "released": _MODELS.get(summary.get("released", ""), ""),
        "models": {text: accuracy for text, accuracy in tested.items() if accuracy is not None},
        "mistakes": _mistakes(pictures),
        **_confused(confusion, () if pictures is None else pictures.class_names),
    }


def _holdout(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Figures on held-out records: accuracy with its 95 % interval, and recalls with standard errors."""
    if summary.get("holdout_accuracy") is None:
        return None
    stated = ("needed", "epsilon", "baseline", "balanced_accuracy", "balanced_deviation")
    found = {name: summary.get(f"holdout_{name}") for name in ("accuracy", *stated)}
    reach, errors = 1.96 * summary["holdout_deviation"], summary.get("holdout_recall_deviation", {})
    if summary.get("holdout_balanced_deviation", 0.0) > MOST_ERROR:
        found["balanced_accuracy"] = None
    recalls = summary.get("holdout_recall", {}).items()
    return found | {
        "interval": [max(found["accuracy"] - reach, 0.0), min(found["accuracy"] + reach, 1.0)],
        "recalls": [
            {"name": name, "accuracy": recall, "error": errors[name], "known": errors[name] <= MOST_ERROR}
            for name, recall in recalls
        ],
    }


def _mistakes(pictures: PublicPictures | None) -> list[dict[str, Any]]:
    """Pictured test examples that the model gets wrong, the worst first."""
    if pictures is None:
        return []
    from pl_privknn.callbacks.loggers import name_of, picture_of

    return [
        {
            "state": "answered",
            "right": False,
            "margin": None,
            "close": False,
            "truth": name_of(truth, pictures.class_names),
            "label": name_of(said, pictures.class_names),
            "text": pictures.tested_texts[place] if pictures.tested_texts else "",
            "picture": _png(picture_of(pictures.tested_images, place)),
        }
        for place, (_, truth, said) in enumerate(pictures.tested.tolist())
        if truth != said
    ]


def _columns(folder: Path) -> list[dict[str, Any]]:
    """Released histograms of a private table, where the run paid for some."""
    if not (folder / RELEASES).is_file() or not (folder / COLUMNS).is_file():
        return []
    import torch

    from pl_privknn.datamodules.schema import Schema

    columns = Schema.of(json.loads((folder / COLUMNS).read_text(encoding="utf-8"))).columns
    cells = torch.load(folder / RELEASES, weights_only=True)["histograms"].numpy().clip(0)
    found, start = [], 0
    numbers = sum(not column.size for column in columns)
    width = (len(cells) - sum(column.size for column in columns)) // max(numbers, 1)  # the last one: missing
    for column in columns:
        counts = cells[start : start + (column.size or width)]
        start += len(counts)
        if column.part is not None:  # a coordinate of a text says nothing to people
            continue
        shares = (counts / max(counts.sum(), 1.0)).tolist()
        names = [column.shown(place) or "missing or another" for place in range(column.size)]
        low, high = (column.shown(bound) for bound in column.bounds or (0.0, 1.0))
        found.append({"name": column.name, "shares": shares, "names": names, "low": low, "high": high})
    return found


def _without_privacy(folder: Path) -> list[dict[str, Any]]:
    """Accuracy of the runs without privacy in the run's comparison, at its seed; None outside a comparison.

    Runs of a comparison lie in ``METHOD/eps_TARGET/seed_NUMBER``.
    """
    seed, method = folder.resolve().name, folder.resolve().parent.parent
    found = []
    for path in sorted(method.parent.glob(f"*/eps_inf/{seed}/summary.json")):
        summary, own = mapping_of(path), path.parents[2] == method
        bound = summary.get("epsilon") is None
        if (own or bound) and summary.get("test_accuracy") is not None:
            what = "student on the true labels of public examples" if bound else "method without noise"
            found.append({"what": f"the same {what}", "accuracy": summary["test_accuracy"]})
    return found


def _shown(value: Any) -> Any:
    """Settings that are not null, with absolute paths shortened to their last component."""
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items() if item is not None}
    if isinstance(value, str) and len(value) > 1 and Path(value).is_absolute():
        return f"…/{Path(value).name}"
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _share(name: str, count: int, right: int | None = None) -> dict[str, Any]:
    accuracy = None if right is None or not count else right / count
    return {"name": name, "right": right, "count": count, "accuracy": accuracy}


def _confused(confusion: np.ndarray[Any, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy by class, and the confusion matrix with its rows as shares; nothing where there is none."""
    if confusion is None:
        return {"by_class": [], "confusion": None}
    counts = confusion.sum(axis=1)
    shares = confusion / np.maximum(counts, 1)[:, None]
    return {
        "by_class": list(map(_share, names, counts.tolist(), confusion.diagonal().tolist())),
        "confusion": {"names": list(names), "rows": confusion.tolist(), "shares": shares.tolist()},
    }


def _png(image: np.ndarray[Any, Any] | None) -> str | None:
    """A picture as a data URI; None where there is none."""
    if image is None:
        return None
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
