"""Privacy card of a run or a ledger: its guarantee in the terms of NIST SP 800-226, read from its files alone."""

from __future__ import annotations

import contextlib
import datetime
import functools
import html
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pl_privknn import __version__
from pl_privknn._checks import at_most, printable
from pl_privknn.privacy.accounting.tradeoff import RATES
from pl_privknn.privacy.earlier_runs import together_in_words
from pl_privknn.privacy.files import MOST_ERROR, file_digest, write_durably, write_json
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.run import RUN_FILE, is_labelling
from pl_privknn.privacy.verify import (
    CHECKPOINT,
    CONFIG,
    HEAD,
    NotARun,
    audit_ledger,
    audit_run,
    ledger_of,
    mapping_of,
    named_values,
    parameters_text,
    reading,
)

_CARD = "privacy_card"
#: Classes whose recall is listed.
_MOST_CLASSES = 20
#: Files of which a run's folder has at least one.
_FILES = ("summary.json", RUN_FILE)
# False-positive rates of the chart.
_CURVE = np.linspace(0, 1, 201)
_FIGURES = ("epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact")
_UNITS = {"add_remove": "one {} more or less", "replace_one": "one {} replaced by another"}
_BUT = {"record": "one", "person": "one person's"}
_NAMES = {"record": "private record", "person": "person with all of their private records"}
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


# ---------------------------------------------------------------------------- facts


def ledger_facts(path: Path, audit: dict[str, Any], exact: bool = True) -> dict[str, Any]:
    """Facts of a ledger, recomputed from its rows alone.

    Args:
        path: the ledger.
        audit: what an audit of it found.
        exact: also compute the exact worst case (seconds).
    """
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        trade_off = ledger.report(exact=exact).trade_off()
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
        "planned": [described(record) for run in audit["runs"].values() for record in run["guaranteed"]],
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


def audited(folder: Path, exact: bool = False) -> dict[str, Any] | None:
    """Audit of a run that is shown or exported; None for one that used no private record.

    Args:
        folder: of the run.
        exact: see :func:`~pl_privknn.privacy.verify.audit_run`.

    Raises:
        NotARun: where the audit finds something; and as :func:`audit_run`.
    """
    with reading(folder):
        summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / CONFIG)
        private = (
            summary.get("epsilon") is not None or has_teacher(folder, settings) or _trains_privately(settings)
        )
        if not private and ledger_of(folder) is None:
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
    return named or is_labelling(folder)


def _trains_privately(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration names a class of this package that trains on private records."""
    paths = [path.rpartition(".") for path in named_values(settings, "class_path")]
    own = [name for room, _, name in paths if not room or room.split(".")[0] == "pl_privknn"]
    return bool({"NoisySGD", "PrivateTraining"}.intersection(own))


def card_facts(path: str | Path, exact: bool = True) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Facts of a run or a ledger that its card states, and its audit.

    Args:
        path: the folder of a run, or a ledger.
        exact: also compute the exact worst case (seconds).

    Returns:
        The facts, with ``promise`` None for a run that used no private record, and the audit, then None.

    Raises:
        FileNotFoundError: where there is nothing at ``path``.
        ValueError: where it is neither, or a file in it can't be read as what it is.
    """
    path = Path(path)
    if path.is_file():
        audit = audit_ledger(path, exact=exact)
        return {"kind": "ledger", "title": path.name, **ledger_facts(path, audit, exact)}, audit
    if not path.is_dir():
        raise FileNotFoundError(f"there is nothing at {path}; name a run's folder or a ledger")
    if not any((path / name).is_file() for name in _FILES):
        raise ValueError(
            f"{path} is no run's folder (summary.json, {RUN_FILE}); name a run's folder or a ledger"
        )
    found = audited(path, exact)
    summary, settings = mapping_of(path / "summary.json"), mapping_of(path / CONFIG)
    kind = "labels" if has_teacher(path, settings) else "weights"
    models = [file for file in (path / CHECKPOINT, path / HEAD) if file.is_file()]
    return {
        "kind": "run",
        "title": _title(summary) or path.name,
        "data": _data(summary),
        "files": [{"name": file.name, "sha256": file_digest(file)} for file in models],
        "promise": None,
        **({} if found is None else ledger_facts(Path(found["ledger"]), found, exact)),
        "released": "" if found is None else "statistics" if (path / HEAD).is_file() else kind,
        "evaluation": _evaluation(summary),
        "remark": summary.get("remark") or "",
        "together": together_in_words(summary),
        "versions": summary.get("versions", {}),
    }, found


def accuracy_text(summary: Mapping[str, Any], name: str = "test_accuracy") -> str:
    """Text of an accuracy beside the accuracy of always predicting the largest class."""
    baseline = summary.get("label_baseline" if name == "label_accuracy" else "test_baseline")
    beside = f" (largest class {baseline:.3f})" if isinstance(baseline, float) else ""
    return f"{summary[name]:.3f}{beside}"


def interval_of(accuracy: float, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy over a number of examples (Agresti and Coull 1998)."""
    share = (accuracy * count + 2) / (count + 4)
    reach = 1.96 * math.sqrt(share * (1 - share) / (count + 4))
    return max(share - reach, 0.0), min(share + reach, 1.0)


def recall_text(recalls: Mapping[str, float | None], errors: Mapping[str, float] | None = None) -> str:
    """Recall by class: of all classes, or of the lowest among many; with standard errors of noisy ones."""
    known = {name: recall for name, recall in recalls.items() if recall is not None}
    if errors is not None:
        known = {name: recall for name, recall in known.items() if errors[name] <= MOST_ERROR}
    lowest = (
        sorted(known, key=lambda name: known[name])[:_MOST_CLASSES] if len(known) > _MOST_CLASSES else known
    )
    texts = [
        f"{name} {known[name]:.3f}{'' if errors is None else f' ± {errors[name]:.3f}'}" for name in lowest
    ]
    if rest := len(known) - len(texts):
        texts.append(f"{rest} others are higher")
    if few := len(recalls) - len(known):
        texts.append(f"too few records of {few} to say")
    return ", ".join(texts)


def _evaluation(summary: Mapping[str, Any]) -> str:
    """Figures of hold-out and test set, each with its figures by class."""
    texts = []
    if summary.get("holdout_accuracy") is not None:
        cost = at_most(summary["holdout_epsilon"])
        texts.append(
            f"hold-out accuracy {holdout_text(summary)}, released at ε {cost} (parallel composition)"
        )
        if "holdout_recall" in summary:
            texts.append(
                f"hold-out recall: {recall_text(summary['holdout_recall'], summary['holdout_recall_deviation'])}"
            )
    if summary.get("test_accuracy") is not None:
        texts.append(f"test accuracy {accuracy_text(summary)}")
        if "test_recall" in summary:
            texts[-1] += f", balanced {summary['test_balanced_accuracy']:.3f}"
            texts.append(f"recall: {recall_text(summary['test_recall'])}")
    return "; ".join(texts)


def holdout_text(summary: Mapping[str, Any]) -> str:
    """Accuracy on held-out private records with its standard error, and the other figures of classes."""
    if summary.get("holdout_needed") is not None:
        return f"too few held-out records to say: about {summary['holdout_needed']} give ± 0.1"
    parts = [f"{summary['holdout_accuracy']:.3f} ± {summary['holdout_deviation']:.3f}"]
    if summary.get("holdout_baseline") is not None:
        parts.append(f"largest class {summary['holdout_baseline']:.3f}")
        balanced, error = summary["holdout_balanced_accuracy"], summary["holdout_balanced_deviation"]
        parts.append(
            "balanced: " + (f"{balanced:.3f} ± {error:.3f}" if error <= MOST_ERROR else "too few records")
        )
    return f"{parts[0]} ({', '.join(parts[1:])})" if parts[1:] else parts[0]


def _title(summary: dict[str, Any]) -> str:
    """Title of data, method, ε and accuracy, as far as the summary has them."""
    method = " · ".join(str(summary[name]) for name in ("labeler", "student") if summary.get(name))
    parts = [" by ".join(filter(None, [_data(summary), method]))]
    if isinstance(summary.get("epsilon"), float):
        parts.append(f"ε = {at_most(summary['epsilon'])}")
    if isinstance(summary.get("test_accuracy"), float):
        parts.append(f"test accuracy {accuracy_text(summary)}")
    return ", ".join(filter(None, parts))


def _data(summary: dict[str, Any]) -> str:
    """Name of the data set."""
    return str(summary.get("data", "")).removesuffix("DataModule")


# ---------------------------------------------------------------------------- the privacy card


def card_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Build a privacy card, a run's guarantee in the terms of NIST SP 800-226, for a model card.

    Args:
        facts: of the run or the ledger.

    Raises:
        ValueError: without a promise, for a run without private records.
    """
    promise, kept = facts.get("promise"), facts.get("kept", {})
    if promise is None:
        raise ValueError(
            f"{facts['title']}: no private records were used, so there is no privacy card; name a private run"
        )
    kind, unit = facts.get("released", ""), promise["unit"]
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
        "evaluation": facts.get("evaluation", ""),
        "remark": facts.get("remark", ""),
        "together": facts.get("together", ""),
        "ledger_head": kept["ledger_head"],
        "versions": facts.get("versions", {}),
    }


def write_card(card: dict[str, Any], output: Path) -> None:
    """Write a privacy card into a folder, for programs and for people.

    Args:
        card: see :func:`privacy_card`.
        output: the folder.
    """
    write_json(output / f"{_CARD}.json", card)
    write_durably(output / f"{_CARD}.md", card_markdown(card))


def privacy_card(run: str | Path, exact: bool = True) -> dict[str, Any]:
    """The privacy card of a run's folder, or of a ledger, as plain JSON types.

    An infinite ε is a float here, and the string ``"inf"`` in ``privacy_card.json``: JSON has no infinite numbers.

    Args:
        run: the folder, or the ledger's file.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: for a run that used no private record; and as :func:`write_report`.
    """
    with reading(run):
        return card_of(card_facts(run, exact)[0])


def card_markdown(card: dict[str, Any]) -> str:
    """Privacy card in Markdown: a page in plain words, then the technical details."""
    template = templates("pl_privknn", "privacy").get_template("privacy_card.md.j2")
    return str(template.render(card=card, version=__version__))


@functools.cache
def templates(package: str, folder: str) -> Any:
    """Jinja environment of the templates in a folder, with the filters of facts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, folder),
        autoescape=lambda name: name is not None and ".html" in name,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "md": _markdown}
    environment.filters["share"] = lambda value: "–" if value is None else f"{100 * value:.1f} %"
    environment.filters["figure"] = lambda value: "∞" if value is None else at_most(value)
    return environment


def _markdown(text: Any) -> str:
    """Escape text of an untrusted file: no line, column, link, emphasis or HTML comes from it."""
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", html.escape(printable(str(text)), quote=False))
