"""Facts for a page from a run's folder: queries and answers, accuracy, settings."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pl_privknn._checks import at_most
from pl_privknn.callbacks.label_store import LABELS, StoredLabels
from pl_privknn.callbacks.labeling_round import HEAD
from pl_privknn.callbacks.loggers import PublicPictures, pictured_queries
from pl_privknn.callbacks.run_summary import CHECKPOINT, file_digest
from pl_privknn.comparison.results import RESULTS, read_results, without_places
from pl_privknn.config import write_yaml
from pl_privknn.report.audit import has_teacher, mapping_of
from pl_privknn.report.ledger_facts import ledger_facts

#: Of metrics.csv, which may have columns of the user's own.
_CURVES = (
    ("Accuracy", True, {"val/accuracy": "on public images"}),
    ("Training loss on released labels", False, {"train/loss": "loss"}),
)
_MODELS = {"student": "the student", "head": "the teacher's own model", "mean": "the mean of both"}


def run_facts(folder: Path, audit: dict[str, Any] | None, exact: bool = True) -> dict[str, Any]:
    """Facts of a run, from the files in its folder alone.

    Args:
        folder: of the run.
        audit: see :func:`~pl_privknn.report.audit.audited`.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: if a file in it can't be read as what it is.
    """
    summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / "config.yaml")
    pictures = PublicPictures.read(folder)
    return {
        "kind": "run",
        "title": _title(summary) or folder.name,
        "data": _data(summary),
        "files": _files(folder),
        "promise": None,
        **(ledger_facts(Path(audit["ledger"]), exact) if audit is not None else {}),
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
    """Data, method, ε and accuracy, as far as the summary has them."""
    method = " · ".join(str(summary[name]) for name in ("labeler", "student") if summary.get(name))
    figures = [
        f"ε = {at_most(summary['epsilon'])}" if isinstance(summary.get("epsilon"), float) else "",
        f"test accuracy {summary['test_accuracy']:.3f}"
        if isinstance(summary.get("test_accuracy"), float)
        else "",
    ]
    return ", ".join(filter(None, [" by ".join(filter(None, [_data(summary), method])), *figures]))


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
    """Queries with their pictures, and how right the labels are where the public truth is known."""
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
        **_judged(examples, labels, truth, names),
    }


def _judged(
    examples: torch.Tensor, labels: torch.Tensor, truth: torch.Tensor | None, names: tuple[str, ...]
) -> dict[str, Any]:
    """Released labels against the public truth: by class with a confusion matrix, or by attribute."""
    if truth is None or not len(examples):
        return {"by_class": [], "confusion": None}
    right, wanted = labels, truth[examples]
    if labels.ndim == 2:
        by_class = [
            _share(name, int((truths == told)[truths >= 0].sum()), int((truths >= 0).sum()))
            for name, truths, told in zip(names, wanted.T, right.T, strict=True)
        ]
        return {"by_class": by_class, "confusion": None}
    known = wanted >= 0
    cells = wanted[known] * len(names) + right[known]
    confusion = torch.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names)).numpy()
    return {"by_class": _by_class(confusion, names), "confusion": _matrix(confusion, names)}


def _student(summary: dict[str, Any], pictures: PublicPictures | None) -> dict[str, Any]:
    """Accuracy of the released model on public examples and the public test set."""
    confusion = None if pictures is None or not pictures.confusion.size else pictures.confusion
    names = pictures.class_names if pictures is not None else ()
    return {
        "test_accuracy": summary.get("test_accuracy"),
        "val_accuracy": summary.get("val_accuracy"),
        "holdout": None
        if summary.get("holdout_accuracy") is None
        else f"{summary['holdout_accuracy']:.3f} ± {summary['holdout_deviation']:.3f}",
        "holdout_epsilon": summary.get("holdout_epsilon"),
        "label_accuracy": summary.get("label_accuracy"),
        "epochs": summary.get("epochs"),
        "released": _MODELS.get(summary.get("released", ""), ""),
        "models": {
            text: summary[f"{name}_test_accuracy"]
            for name, text in _MODELS.items()
            if summary.get(f"{name}_test_accuracy") is not None
        },
        "by_class": [] if confusion is None else _by_class(confusion, names),
        "confusion": None if confusion is None else _matrix(confusion, names),
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
            "the same student on the true labels of public images"
            if bound
            else "the same method without noise"
        )
        found.append({"what": what, "title": result.title, "accuracy": result.accuracy})
    return found


def _set(value: Any) -> Any:
    """Settings without those that stand at nothing."""
    if isinstance(value, dict):
        return {name: _set(item) for name, item in value.items() if item is not None}
    return [_set(item) for item in value] if isinstance(value, list) else value


def _by_class(confusion: np.ndarray[Any, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [_share(name, int(confusion[i, i]), int(confusion[i].sum())) for i, name in enumerate(names)]


def _share(name: str, right: int, count: int) -> dict[str, Any]:
    return {"name": name, "right": right, "count": count, "accuracy": right / count if count else None}


def _matrix(confusion: np.ndarray[Any, Any], names: tuple[str, ...]) -> dict[str, Any]:
    rows = confusion.tolist()
    shares = [[cell / sum(row) if sum(row) else 0.0 for cell in row] for row in rows]
    return {"names": list(names), "rows": rows, "shares": shares}


def _png(image: np.ndarray[Any, Any]) -> str:
    """A picture as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any((folder / name).is_file() for name in ("summary.json", LABELS, "ledger.sqlite"))


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts as they read in JSON."""
    loaded: dict[str, Any] = json.loads(json.dumps(facts))
    return loaded
