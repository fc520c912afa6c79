"""The declared list: what a run that sees private records may log, and what each figure is made of.

A figure that was computed from private records and not paid for is a breach, however harmless it looks: a training
loss, the size of a batch, the number of records. So nothing is logged or summed up beside the private side unless its
name is here. What a student logs is its own affair: it sees released labels and public images alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Where = Literal["metrics", "summary", "report"]

_PUBLIC = "public constants"
_PLAN = "the plan and public constants"
_CHARGES = "charges; how many there are follows from released answers"
_ANSWERS = "released answers"
_RELEASED = "noisy counts that were paid for"
_JUDGED = "released answers or weights, on public examples with their truth"

_LISTS: dict[Where, dict[str, str]] = {
    # What PrivateLabeler and NoisySGD log.
    "metrics": {
        **dict.fromkeys(("privacy/delta", "labels/queried"), _PUBLIC),
        **dict.fromkeys(("privacy/epsilon", "privacy/guarantee"), _PLAN),
        "privacy/epsilon_spent": _CHARGES,
        **dict.fromkeys(("privacy/max_grad_norm", "private/accuracy"), _RELEASED),
        **dict.fromkeys(("labels/answered", "labels/labelled"), _ANSWERS),
        **dict.fromkeys(("labels/accuracy", "labels/accuracy_last_round"), _JUDGED),
        **dict.fromkeys(("val/accuracy", "val/loss", "test/accuracy", "test/loss"), _JUDGED),
        "tradeoff/epsilon": _PLAN,
        "tradeoff/epsilon_spent": _CHARGES,
        **dict.fromkeys(("tradeoff/val_accuracy", "tradeoff/test_accuracy"), _JUDGED),
    },
    # Keys of summary.json.
    "summary": {
        **dict.fromkeys(("delta", "adjacency", "max_epsilon", "queried", "labeler"), _PUBLIC),
        **dict.fromkeys(("epochs", "student", "data", "versions", "seconds"), _PUBLIC),
        **dict.fromkeys(("sampling_rate", "batch_size", "clip_norm", "bands"), _PUBLIC),
        **dict.fromkeys(("epsilon", "epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld"), _PLAN),
        **dict.fromkeys(("epsilon_exact", "guarantee", "reason", "conditional"), _PLAN),
        **dict.fromkeys(("tpr_at_fpr_0.001", "tpr_at_fpr_0.01", "tpr_at_fpr_0.1"), _PLAN),
        **dict.fromkeys(("advantage", "gaussian_dp_mu"), _PLAN),
        **dict.fromkeys(("noise_multiplier", "steps_planned", "epsilon_of_groups", "rate_of_groups"), _PLAN),
        **dict.fromkeys(("epsilon_spent", "steps", "ledger_head"), _CHARGES),
        **dict.fromkeys(("answered", "refused", "lost"), _ANSWERS),
        **dict.fromkeys(("label_accuracy", "label_accuracy_last_round"), _JUDGED),
        **dict.fromkeys(("val_accuracy", "test_accuracy"), _JUDGED),
        **dict.fromkeys((f"{name}_test_accuracy" for name in ("student", "head", "mean")), _JUDGED),
        **dict.fromkeys(("released", "run"), _PUBLIC),
    },
    # Parts of a report, of which the page and the privacy card are made.
    "report": {
        **dict.fromkeys(("kind", "title", "settings", "versions"), _PUBLIC),
        **dict.fromkeys(("promise", "planned"), _PLAN),
        **dict.fromkeys(("spent", "kept"), _CHARGES),
        "checks": "the summary's and the ledger's figures",
        "answers": "released answers, with pictures and truth of public examples",
        **dict.fromkeys(("student", "curves"), _JUDGED),
        "without_privacy": "accuracy of runs without a promise, which other files of the comparison hold",
        "comparison": "results of runs, each from its summary and its ledger",
    },
}


class UndeclaredError(ValueError):
    """Something was to be logged beside the private side that nobody has declared."""


def check_declared(names: Iterable[str], where: Where = "metrics") -> None:
    """Refuse to log what is not on the list.

    Args:
        names: of metrics, keys of ``summary.json``, or parts of a report.
        where: which of these.

    Raises:
        UndeclaredError: for a name that is not there; nothing of ``names`` has been logged.
    """
    if unknown := sorted(set(names) - _LISTS[where].keys()):
        raise UndeclaredError(
            f"{where}: {unknown[0]!r} is not declared, and may be made of private records. If it is made of released "
            "answers, public data or public constants alone, say so first: "
            f"pl_privknn.privacy.logged.declare({unknown[0]!r}, 'what it is made of', {where!r})"
        )


def declare(name: str, made_of: str, where: Where = "metrics") -> None:
    """Put a figure of one's own on the list.

    Args:
        name: of the metric, or the key of ``summary.json``.
        made_of: what it is computed from, in words: released answers, public data, public constants.
        where: which of these lists.

    Raises:
        ValueError: where nothing is said of what it is made of.
    """
    if not made_of.strip():
        raise ValueError(f"made_of={made_of!r} must say what {name!r} is computed from")
    _LISTS[where].setdefault(name, made_of)
