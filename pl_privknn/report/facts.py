"""Facts of a run or a ledger, read from its files alone, and the privacy card made of them."""

from __future__ import annotations

import base64
import contextlib
import datetime
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
from pl_privknn.config import known_classes, write_yaml
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.tradeoff import RATES
from pl_privknn.privacy.audit import CONFIG, NotARun, audit_run, ledger_of, mapping_of, named_values, reading
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
_MODELS = {"student": "the student", "head": "the teacher's own model", "mean": "the mean of both"}
#: Released objects in words, by kind.
RELEASED = {
    "labels": "labels of public examples and everything that is computed from them, such as the trained model (the "
    "student)",
    "statistics": "noisy statistics of the private records, the teacher's own model computed from them, labels of "
    "public examples and everything that is computed from these, such as the trained model (the student)",
    "weights": "weights of a network that was trained on the private records by noisy steps, all of its checkpoints, "
    "and everything that is computed from them",
    "": "whatever the ledger's releases were used for",
}
_TIMES = "running time and memory of the labelling: outsiders must not be able to measure them"
_PUBLIC = "the choice of the public examples, assumed to be independent of the private records"
_FLOATS = "rounding of computer arithmetic in weighted votes and gradients (counted votes get exact noise)"
#: Exclusions of the guarantee by kind of release; docs/methods/privacy.md has more on each.
_OWN_EXCLUSIONS = {
    "labels": (_TIMES, _PUBLIC, _FLOATS),
    "statistics": (
        _TIMES,
        _PUBLIC,
        "features that were learned on other data than the public examples of this run",
    ),
    "weights": (
        "running time, memory and profiles of the training: outsiders must not be able to measure them",
        _FLOATS,
        "initial weights of the training, assumed to be independent of the private records",
        "side effects of reading a record: a record is one index of the data set, assumed to be read independently",
    ),
    "": (_PUBLIC, _FLOATS),
}
_SEVERAL = "several records of one person together, see the unit above (unit: person protects them all)"
#: Exclusions of every guarantee.
EXCLUSIONS = (
    "people in the public, validation and test parts: ε protects the private records alone",
    "settings that were chosen by looking at results on the same private records outside this ledger "
    "(the file that records every release)",
    "an attacker who can rewrite the ledger with all its hashes, unless its last hash was noted elsewhere",
)
#: Trust model by mechanism; the first that a ledger has.
_TRUST = {
    "shuffle amplification": "shuffle model: record owners trust a shuffler to mix their messages",
    "negative binomial": "shuffle model: record owners trust a shuffler to mix their messages",
    "randomized response": "local model: every record owner adds the noise, and needs to trust no one else",
}
_CENTRAL = "central model: a trusted data owner holds the records and adds the noise"


# ---------------------------------------------------------------------------- the promise


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
            "protected": _UNITS[audit["adjacency"]].format(_NAMES[audit["unit"]]),
            "bounds": {name: audit[name] for name in _FIGURES if audit.get(name) is not None},
            "words": in_words(attacker, audit["adjacency"], audit["unit"]),
            "attacker": attacker,
        },
        "planned": [_described(record) for run in audit["runs"].values() for record in run["guaranteed"]],
        "spent": {
            "epsilon": audit["epsilon_spent"],
            "releases": [_described(record) for run in audit["runs"].values() for record in run["charged"]],
            "rows": [
                {"position": row["row"], "noise": row["noise"] or "not stated", **_described(row["release"])}
                for row in charges[:MOST_ROWS]
            ],
            "more_rows": max(0, len(charges) - MOST_ROWS),
            "growth": growth(charges, audit["delta"], audit["adjacency"], audit["epsilon_spent"]),
        },
        "kept": {
            **{name: audit[name] for name in ("ledger_head", "rows", "max_epsilon", "within_budget")},
            "runs": len(audit["runs"]),
            "rule": audit["filter"]["rule"],
        },
    }


def _described(record: dict[str, Any]) -> dict[str, Any]:
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
    kind = "labels" if has_teacher(folder, settings) else "weights"
    models = [path for path in (folder / CHECKPOINT, folder / HEAD) if path.is_file()]
    return {
        "kind": "run",
        "title": _title(summary) or folder.name,
        "data": _data(summary),
        "files": [{"name": path.name, "sha256": file_digest(path)} for path in models],
        "promise": None,
        **(ledger_facts(Path(audit["ledger"]), audit, exact) if audit is not None else {}),
        "checks": [] if audit is None else audit["checks"],
        "released": "" if audit is None else "statistics" if (folder / HEAD).is_file() else kind,
        "answers": _answers(folder, pictures),
        "student": _student(summary, pictures),
        "without_privacy": _without_privacy(folder),
        "settings": write_yaml(_shown(settings), width=100) if settings else "",
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


def _answers(folder: Path, pictures: PublicPictures | None) -> dict[str, Any] | None:
    """Queries with their pictures, and accuracy of the labels where the public truth is known."""
    path = folder / LABELS
    if not path.is_file():
        return None
    with contextlib.closing(StoredLabels(path)) as store:
        queries, counts = store.queries(), store.counts()
        examples, labels, _ = store.answers(store.rounds())
    gallery = [
        {**query, "picture": None if image is None else _png(image)}
        for query, image in pictured_queries(folder)
    ]
    return {
        "counts": {**counts, "labelled": len(examples)},
        "rounds": dict(Counter(query.round + 1 for query in queries if query.state != "not asked")),
        "gallery": gallery,
        "not_pictured": counts["queried"] - len(gallery),
        **_label_accuracy(examples, labels, pictures),
    }


def _label_accuracy(
    examples: torch.Tensor, labels: torch.Tensor, pictures: PublicPictures | None
) -> dict[str, Any]:
    """Released labels against the public truth: by class with a confusion matrix, or by attribute."""
    if pictures is None or not len(pictures.truth) or not len(examples):
        return _confused(None, ())
    wanted, names = torch.from_numpy(pictures.truth)[examples], pictures.class_names
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
    holdout = summary.get("holdout_accuracy")
    tested = {text: summary.get(f"{name}_test_accuracy") for name, text in _MODELS.items()}
    return {
        **{name: summary.get(name) for name in shown},
        "holdout": None if holdout is None else f"{holdout:.3f} ± {summary['holdout_deviation']:.3f}",
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


# ---------------------------------------------------------------------------- the privacy card


def card_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Build a privacy card, a run's guarantee in the terms of NIST SP 800-226, for a model card.

    Args:
        facts: of the run or the ledger.

    Raises:
        ValueError: without a promise, for a run without private records.
    """
    promise, kept, student = facts.get("promise"), facts.get("kept", {}), facts.get("student") or {}
    if promise is None:
        raise ValueError(
            f"{facts['title']}: no private records were used, so there is no privacy card; name a private run"
        )
    kind, unit, evaluation = facts.get("released", ""), promise["unit"], ""
    if student.get("holdout"):
        cost = at_most(student["holdout_epsilon"])
        evaluation = f"hold-out accuracy {student['holdout']}, released at ε {cost} (parallel composition)"
    kinds = {release["mechanism"] for release in facts["planned"]}
    return {
        "standard": "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "subject": facts["title"],
        "organisation": "",
        "contact": "",
        "date": datetime.date.today().isoformat(),
        "data_set": facts.get("data", ""),
        "files": facts.get("files", []),
        "privacy_definition": "(ε, δ)-differential privacy",
        **{name: promise[name] for name in ("epsilon", "delta", "unit", "adjacency", "guarantee", "reason")},
        "unit_of_privacy": f"one {unit} of the private set ({promise['protected']})",
        "mechanisms": facts["planned"],
        "composition": {
            "how": "worst case over adaptive releases: the smallest of Rényi DP, privacy loss distributions and, "
            "where it applies, exact induction",
            "bounds": promise["bounds"],
            **{name: kept[name] for name in ("rule", "runs", "max_epsilon")},
        },
        "trust_model": next((text for name, text in _TRUST.items() if name in kinds), _CENTRAL),
        "what_is_released": RELEASED[kind],
        "attacker": {name: promise["attacker"][name] for name in ("right_guesses", "rates")},
        "tuning": "What is charged in this ledger is covered. Settings are public constants; this ledger can't show "
        "whether they were chosen on the same private records elsewhere, and add such runs to it.",
        "known_exclusions": [
            *_OWN_EXCLUSIONS[kind],
            *([_SEVERAL] if unit == "record" else []),
            *EXCLUSIONS,
        ],
        "in_words": promise["words"],
        "evaluation": evaluation,
        "remark": student.get("remark") or "",
        "ledger_head": kept["ledger_head"],
        "versions": facts.get("versions", {}),
    }
