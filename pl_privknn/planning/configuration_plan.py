"""What a training configuration may release at most, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import check_int, shown
from pl_privknn.configuration import ConfigurationError, instantiate, known_classes, project_classes_only
from pl_privknn.labelers.base import stated_plan
from pl_privknn.planning.plan import Plan
from pl_privknn.planning.setting_search import Calibrate
from pl_privknn.privacy.verification import Releases

if TYPE_CHECKING:
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.privacy.mechanisms import Charge

#: What has no part in a plan, and may be large, or read files.
_LEFT_OUT = ("features", "teachers")


def plan_of_config(document: dict[str, Any], path: str | Path, num_classes: int | None = None) -> Releases:
    """The plan that the ``labeling`` section of a configuration states before its first query.

    The sections ``labeling`` and ``data`` may name the project's own classes alone; of ``data`` nothing but the
    number of classes is asked.

    Args:
        document: the configuration: a ``labeling`` section, and a ``data`` section that tells the number of
            classes.
        path: where it came from, for messages.
        num_classes: number of classes, for a fragment without ``data``.

    Raises:
        ValueError: for sections that don't parse, or name other classes; a missing number of classes, or a number of
            queries that only the data tells.
    """
    from pl_privknn.callbacks import PrivateLabeler

    try:
        sections = {
            name: project_classes_only(document[name], name, unmade=_LEFT_OUT)
            for name in ("labeling", "data")
            if name in document
        }
        labeling = instantiate(
            {"labeling": _planned(sections["labeling"])}, {"labeling": PrivateLabeler}
        ).labeling
        if labeling.labeler is None:
            raise ConfigurationError("its labeling section has no labeler, so nothing is released")
        if num_classes is None:
            num_classes = _num_classes(sections.get("data"))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    charges = labeling_plan(labeling, check_int("num_classes", num_classes, minimum=2), str(path))
    return Releases(tuple(charges), labeling.delta, labeling.adjacency)


def plan_with_setting(
    document: dict[str, Any],
    path: str | Path,
    wanted: Calibrate,
    epsilon: float,
    delta: float | None = None,
    num_classes: int | None = None,
) -> Plan:
    """Find one setting of a configuration for an ε, by its dotted path.

    Args:
        document: as for :func:`plan_of_config`.
        path: likewise.
        wanted: the setting, and within which limits.
        epsilon: target ε.
        delta: target δ; the configuration's by default.
        num_classes: as for :func:`plan_of_config`.

    Raises:
        ValueError: as :func:`plan_of_config`; also where the target can't be met.
    """
    stated = plan_of_config(wanted.filled(document, wanted.middle), path, num_classes)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        filled = wanted.filled(document, values[wanted.parameter])
        return list(plan_of_config(filled, path, num_classes).charges)

    delta = stated.delta if delta is None else delta
    assert delta is not None
    assert stated.adjacency is not None
    found = wanted.search(
        document,
        lambda filled: plan_of_config(dict(filled), path, num_classes).charges,
        epsilon=epsilon,
        delta=delta,
        adjacency=stated.adjacency,
    )
    name, filled = wanted.parameter, wanted.filled(document, found.value)
    parameters = wanted.values(found.value)
    return Plan(str(path), name, epsilon, parameters, found.charges, found.report, name, filled, charges_at)


def _planned(labeling: Any) -> Any:
    """The part of a labeling section on which its plan depends."""
    if not isinstance(labeling, Mapping):
        return labeling
    kept = {name: value for name, value in labeling.items() if name not in _LEFT_OUT}
    labeler = kept.get("labeler")
    if isinstance(labeler, Mapping) and isinstance(arguments := labeler.get("init_args"), Mapping):
        plain = {name: value for name, value in arguments.items() if name not in _LEFT_OUT}
        kept["labeler"] = {**labeler, "init_args": plain}
    return kept


def _num_classes(data: Any) -> int:
    from pl_privknn.datamodules.base import PrivatePublicDataModule

    if data is None:
        raise ConfigurationError(
            "num_classes=None: there is no data section that tells it; pass it (--num-classes)"
        )
    section = {"class_path": data} if isinstance(data, str) else data
    if not isinstance(section, Mapping) or set(section) - {"class_path", "init_args"}:
        raise ConfigurationError(f"data={shown(data)} must have a class_path, and its arguments as init_args")
    found = known_classes().get(section.get("class_path", ""))
    if found is None or not issubclass(found, PrivatePublicDataModule):
        raise ConfigurationError(
            f"data.class_path={shown(section.get('class_path'))} must name a data module"
        )
    made = instantiate({"data": section.get("init_args") or {}}, {"data": found}).data
    return int(made.num_classes)


def labeling_plan(
    labeling: PrivateLabeler, num_classes: int, path: str, public_examples: int | None = None
) -> list[Charge]:
    """The most that a labeling section can cost.

    Args:
        labeling: the section's callback.
        num_classes: number of classes.
        path: where it came from, for messages.
        public_examples: size of the public set, for a section that asks about all of it.

    Raises:
        ValueError: for a number of queries that only the data tells.
    """
    assert labeling.labeler is not None
    if labeling.selects_all and public_examples is None:
        raise ValueError(
            f"{path}: selection: all asks as many queries as there are public examples, which the configuration "
            "does not say; audit the ledger of a run instead"
        )
    queries = sum(labeling.queries_per_round)
    if labeling.selects_all and public_examples is not None:
        queries = public_examples * labeling.rounds
    answers = queries if labeling.max_answers is None else min(labeling.max_answers, queries)
    # As the callback states it: a round of no queries smooths earlier counts anew and releases nothing.
    rounds = labeling.rounds if labeling.selects_all else sum(map(bool, labeling.queries_per_round))
    return stated_plan(labeling.labeler, queries, answers, num_classes, rounds=rounds)
