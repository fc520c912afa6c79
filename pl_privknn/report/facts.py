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
from pl_privknn.privacy.card import card_facts, described, holdout_text, recall_text
from pl_privknn.privacy.mechanisms.base import Charge, merged
from pl_privknn.privacy.verify import CONFIG, mapping_of

if TYPE_CHECKING:
    from pl_privknn.callbacks.loggers import PublicPictures

#: At how many rows ε is computed for the curve, and how many rows are listed.
MOST_POINTS, MOST_ROWS = 12, 400
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
            "answers": _answers(folder, pictures),
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


# ---------------------------------------------------------------------------- a run


def _answers(folder: Path, pictures: PublicPictures | None) -> dict[str, Any] | None:
    """Queries with their pictures, and accuracy of the labels where the public truth is known."""
    from pl_privknn.callbacks.label_run import stored_answers
    from pl_privknn.callbacks.loggers import pictured_queries

    found = stored_answers(folder)
    if found is None:
        return None
    gallery = [
        {**query, "picture": None if image is None else _png(image)}
        for query, image in pictured_queries(folder)
    ]
    return {
        "counts": {**found.counts, "labelled": len(found.examples)},
        "rounds": dict(Counter(query.round + 1 for query in found.queries if query.state != "not asked")),
        "gallery": gallery,
        "not_pictured": found.counts["queried"] - len(gallery),
        **_label_accuracy(found.examples.numpy(), found.labels.numpy(), pictures),
    }


def _label_accuracy(
    examples: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], pictures: PublicPictures | None
) -> dict[str, Any]:
    """Released labels against the public truth: by class with a confusion matrix, or by attribute."""
    if pictures is None or not len(pictures.truth) or not len(examples):
        return _confused(None, ())
    wanted, names = pictures.truth[examples], pictures.class_names
    known = wanted >= 0
    if labels.ndim == 2:
        right = ((wanted == labels) & known).sum(dim=0).tolist()
        return {"by_class": list(map(_share, names, right, known.sum(dim=0).tolist())), "confusion": None}
    cells = wanted[known] * len(names) + labels[known]
    confusion = np.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names))
    return _confused(confusion, names)


def _student(summary: dict[str, Any], pictures: PublicPictures | None) -> dict[str, Any]:
    """Accuracy of the released model on public examples and the public test set."""
    confusion = None if pictures is None or not pictures.confusion.size else pictures.confusion
    shown = (
        *("test_accuracy", "test_baseline", "test_balanced_accuracy", "val_accuracy"),
        *("holdout_epsilon", "label_accuracy", "label_baseline", "epochs", "remark"),
    )
    tested = {text: summary.get(f"{name}_test_accuracy") for name, text in _MODELS.items()}
    return {
        **{name: summary.get(name) for name in shown},
        "holdout": None if summary.get("holdout_accuracy") is None else holdout_text(summary),
        "holdout_recall": recall_text(summary["holdout_recall"], summary["holdout_recall_deviation"])
        if "holdout_recall" in summary
        else "",
        "released": _MODELS.get(summary.get("released", ""), ""),
        "models": {text: accuracy for text, accuracy in tested.items() if accuracy is not None},
        **_confused(confusion, () if pictures is None else pictures.class_names),
    }


def _without_privacy(folder: Path) -> list[dict[str, Any]]:
    """Accuracy of the same comparison's runs without privacy, with the same seed; none outside a comparison.

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


def _share(name: str, right: int, count: int) -> dict[str, Any]:
    return {"name": name, "right": right, "count": count, "accuracy": right / count if count else None}


def _confused(confusion: np.ndarray[Any, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy by class, and the confusion matrix with its rows as shares; nothing where there is none."""
    if confusion is None:
        return {"by_class": [], "confusion": None}
    counts = confusion.sum(axis=1)
    shares = confusion / np.maximum(counts, 1)[:, None]
    return {
        "by_class": list(map(_share, names, confusion.diagonal().tolist(), counts.tolist())),
        "confusion": {"names": list(names), "rows": confusion.tolist(), "shares": shares.tolist()},
    }


def _png(image: np.ndarray[Any, Any]) -> str:
    """A picture as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
