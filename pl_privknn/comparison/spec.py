"""Comparisons and their YAML, read and checked: the rules that keep them fair."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pl_privknn._checks import (
    check_choice,
    check_installed,
    check_int,
    check_open_unit,
    check_positive,
    check_switch,
)
from pl_privknn.config import ConfigurationError, put, read_document
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.privacy.mechanisms.base import Unit, check_adjacency, check_unit

_TOP = ("name", "base", "delta", "adjacency", "unit", "noise_seeded", "seeds", "epsilons", "methods", "wandb")
_BASE = ("data", "student", "trainer", "labeling")
_METHOD = (
    "name", "title", "labeling", "model", "trainer", "student", "true_labels", "epsilon_to", "find", "settings",
    "epsilons",
)  # fmt: skip
_KINDS = {"labeling": "labeler", "model": "baseline", "true_labels": "true_labels"}
_Value = TypeVar("_Value", float, int)
_WANDB = ("project", "entity", "mode", "attach_ledger", "tags")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: What is the same for all methods and so belongs to no method.
_SHARED = (
    "delta",
    "adjacency",
    "unit",
    "seed",
    "noise_source",
    "max_epsilon",
    "run_dir",
    "ledger_path",
    "state_dir",
)


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of a comparison; see docs/guides/comparison.md for each key.

    Attributes:
        name: names its folder.
        title: names it in tables and plots.
        kind: ``"labeler"`` (a teacher and the shared student), ``"baseline"`` (a model of its own)
            or ``"true_labels"`` (the shared student on the true labels of public images).
        labeling: section of a labeler.
        model: section of a baseline.
        trainer: a baseline's own trainer settings.
        epsilon_to: dotted paths that receive ε itself.
        find: dotted path of the setting that is found for each ε, as by ``privknn plan --find``.
        settings: overrides by ε, dotted paths to values; those of inf take the noise out.
        epsilons: the values of ε that this method runs at, inf among them.
    """

    name: str
    title: str
    kind: str
    labeling: dict[str, Any] | None
    model: dict[str, Any] | None
    trainer: dict[str, Any]
    epsilon_to: tuple[str, ...]
    find: str | None
    settings: Mapping[float, Mapping[str, Any]]
    epsilons: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison as its YAML states it.

    Attributes:
        name: names the folder ``runs/compare/NAME``.
        base: ``data``, ``student``, ``trainer`` and shared ``labeling`` settings.
        delta: δ of every run.
        adjacency: neighbouring relation of every run.
        unit: unit of privacy of every run.
        noise_seeded: draw protective noise from seeds, for benchmarks; it protects nothing.
        seeds: one run each.
        epsilons: targets, ascending, ``math.inf`` last.
        methods: in the order of the YAML.
        wandb: settings of the W&B group, or None.
    """

    name: str
    base: dict[str, Any]
    delta: float
    adjacency: Adjacency
    unit: Unit
    noise_seeded: bool
    seeds: tuple[int, ...]
    epsilons: tuple[float, ...]
    methods: tuple[Method, ...]
    wandb: dict[str, Any] | None


def epsilon_text(epsilon: float) -> str:
    """ε as it stands in names of folders and in tables: ``0.5``, ``inf``."""
    return f"{epsilon:g}"


def read_epsilon(where: str, value: Any) -> float:
    """ε above 0, or the word ``inf``.

    Raises:
        ConfigurationError: otherwise.
    """
    if str(value).strip().lower().lstrip(".") == "inf":
        return math.inf
    try:
        return check_positive("ε", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ConfigurationError(
            f"{where}: ε={value!r} must be a number above 0, or inf (no privacy)"
        ) from None


def read_comparison(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Comparison:
    """Read and check the YAML of a comparison.

    Args:
        path: the file.
        overrides: dotted paths to values that replace those of the file; a method is found by its name, as in
            ``methods.pate.labeling.queries_per_round``. Those of ``definitions`` come first.

    Raises:
        ConfigurationError: for a key that is missing, unknown or has a bad value.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    given = overrides or {}
    start = "definitions."
    document = read_document(
        path, {where.removeprefix(start): value for where, value in given.items() if where.startswith(start)}
    )
    try:
        for where, value in given.items():
            if not where.startswith(start):
                put(document, where, value)
        return comparison_of(document)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def comparison_of(document: Any) -> Comparison:
    """The comparison that plain types (a parsed YAML) state; see :func:`read_comparison`."""
    top = _section("the comparison", document, _TOP, ("name", "base", "delta", "epsilons", "methods"))
    base = _section("base", top["base"], _BASE, ("data", "student"))
    _class_section("base.data", base["data"])
    if base["student"] is not None:
        _class_section("base.student", base["student"])
        _refuse_shared("base.student", base["student"].get("init_args"))
    for name in ("trainer", "labeling"):
        base[name] = _section(f"base.{name}", base.get(name) or {})
    _refuse_shared("base.labeling", base["labeling"])
    if base["labeling"].get("labeler"):
        raise ConfigurationError("base.labeling.labeler: a teacher belongs to a method; move it there")
    epsilons = _distinct("epsilons", top["epsilons"], read_epsilon)
    read = [
        _method(f"methods[{place}]", method, base, epsilons)
        for place, method in enumerate(_list("methods", top["methods"]))
    ]
    names = [method.name for method in read]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"methods: {twice[0]!r} is there twice; give each its own name")
    return Comparison(
        name=_name("name", top["name"]),
        base=base,
        delta=check_open_unit("delta", top["delta"]),
        adjacency=check_adjacency(top.get("adjacency", "add_remove")),
        unit=check_unit(top.get("unit", "record")),
        noise_seeded=check_switch("noise_seeded", top.get("noise_seeded", False)),
        seeds=_distinct("seeds", top.get("seeds", [0, 1, 2]), lambda name, seed: check_int(name, seed, 0)),
        epsilons=tuple(sorted(epsilons)),
        methods=tuple(read),
        wandb=_wandb(top.get("wandb")),
    )


def _method(where: str, given: Any, base: Mapping[str, Any], epsilons: tuple[float, ...]) -> Method:
    section = _section(where, given, _METHOD, ("name",))
    name = _name(f"{where}.name", section["name"])
    where = f"methods.{name}"
    kinds = [key for key in _KINDS if section.get(key)]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"{where}: {' and '.join(kinds) or 'none'} of labeling, model and true_labels; a method has exactly one: "
            "a teacher in labeling, a baseline's own model, or true_labels: true"
        )
    kind = _KINDS[kinds[0]]
    if kind != "baseline" and base["student"] is None:
        raise ConfigurationError(
            f"base.student: {name} needs a student; only baselines with a model of their own do without"
        )
    baseline = kind == "baseline"
    no_teacher = ("settings", "find", "epsilon_to") if kind == "true_labels" else ()
    for key, refused, why in (
        ("student", True, "all teachers share base.student; a baseline has a model of its own"),
        ("trainer", not baseline, "methods that train base.student share base.trainer; leave it out"),
        ("find", baseline, "only a labeler states a plan that noise can be found for; use epsilon_to"),
        *((key, True, "true_labels asks no teacher and has no ε; leave it out") for key in no_teacher),
    ):
        if refused and section.get(key):
            raise ConfigurationError(f"{where}.{key}: {why}")
    labeling = _labeling(f"{where}.labeling", section["labeling"]) if kind == "labeler" else None
    model = _class_section(f"{where}.model", section["model"]) if kind == "baseline" else None
    if model is not None:
        _refuse_shared(f"{where}.model", model.get("init_args"))
    roots = ("labeling.",) if kind == "labeler" else ("model.", "trainer.")
    own = section.get("epsilons")
    wanted = epsilons if own is None else _distinct(f"{where}.epsilons", own, read_epsilon)
    method = Method(
        name=name,
        title=str(section.get("title", name)),
        kind=kind,
        labeling=labeling,
        model=model,
        trainer=_section(f"{where}.trainer", section.get("trainer") or {}),
        epsilon_to=_paths(f"{where}.epsilon_to", section.get("epsilon_to"), roots),
        find=next(iter(_paths(f"{where}.find", section.get("find"), ("labeling.",))), None),
        settings=_settings(f"{where}.settings", section.get("settings"), roots),
        epsilons=(),
    )
    return dataclasses.replace(
        method, epsilons=_defined(where, method, tuple(sorted(wanted)), own is not None)
    )


def _defined(where: str, method: Method, wanted: tuple[float, ...], own: bool) -> tuple[float, ...]:
    """The values of ε at which the method is defined."""
    if method.kind == "true_labels":
        return (math.inf,)
    finite = [epsilon for epsilon in wanted if epsilon < math.inf]
    missing = [epsilon for epsilon in finite if epsilon not in method.settings]
    if missing and not (method.epsilon_to or method.find):
        raise ConfigurationError(
            f"{where}: nothing says how it reaches ε={epsilon_text(missing[0])}; add epsilon_to, find, or "
            f"settings for it, or list the method's own epsilons"
        )
    if math.inf in wanted and math.inf not in method.settings:
        if own:
            raise ConfigurationError(f"{where}.epsilons: inf needs settings of inf, which take the noise out")
        return tuple(finite)
    return wanted


def _labeling(where: str, given: Any) -> dict[str, Any]:
    section = _section(where, given)
    if not section.get("labeler"):
        raise ConfigurationError(f"{where}.labeler is missing; name the teacher's class_path and init_args")
    _refuse_shared(where, section)
    _refuse_shared(
        f"{where}.labeler", _class_section(f"{where}.labeler", section["labeler"]).get("init_args")
    )
    return section


def _refuse_shared(where: str, section: Any) -> None:
    for key, value in (section or {}).items():
        if key in _SHARED:
            raise ConfigurationError(
                f"{where}: {key} is the same for all methods and set by the comparison; leave it out"
            )
        if isinstance(value, Mapping) and "class_path" not in value:  # a group of arguments
            _refuse_shared(f"{where}.{key}", value)


def _settings(where: str, given: Any, roots: tuple[str, ...]) -> dict[float, dict[str, Any]]:
    found = {}
    for key, overrides in _section(where, given or {}).items():
        epsilon = read_epsilon(where, key)
        found[epsilon] = _section(f"{where}.{key}", overrides or {})
        _paths(f"{where}.{key}", list(found[epsilon]), roots)
    return found


def _paths(where: str, given: Any, roots: tuple[str, ...]) -> tuple[str, ...]:
    paths = [given] if isinstance(given, str) else list(given or [])
    for path in paths:
        if not isinstance(path, str) or not path.startswith(roots):
            raise ConfigurationError(
                f"{where}: {path!r} must start with {' or '.join(roots)}; data, student and trainer are shared"
            )
        if path.rsplit(".", 1)[-1] in _SHARED:
            raise ConfigurationError(
                f"{where}: {path} is set by the comparison, alike for all methods; leave it out"
            )
    return tuple(paths)


def _wandb(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    section = _section("wandb", given, _WANDB, ("project",))
    modes = ("online", "offline", "disabled")
    section["mode"] = check_choice("wandb.mode", section.get("mode", "online"), modes)
    if section["mode"] != "disabled":
        check_installed("the section wandb", "wandb", "wandb")
    section["attach_ledger"] = check_switch("wandb.attach_ledger", section.get("attach_ledger", False))
    return section


def _distinct(where: str, given: Any, read: Callable[[str, Any], _Value]) -> tuple[_Value, ...]:
    values = tuple(read(where, value) for value in _list(where, given))
    if len(set(values)) < len(values):
        raise ConfigurationError(f"{where}={given!r}: a value is there twice")
    return values


def _list(where: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise ConfigurationError(f"{where}={given!r} must be a list of at least one value")
    return given


def _name(where: str, given: Any) -> str:
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise ConfigurationError(
            f"{where}={given!r} must be a name of letters, digits, '.', '_' and '-'; it names a folder"
        )
    return given


def _class_section(where: str, given: Any) -> dict[str, Any]:
    return _section(where, given, ("class_path", "init_args"), ("class_path",))


def _section(
    where: str, given: Any, known: Sequence[str] | None = None, needed: Sequence[str] = ()
) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: {given!r} must be a section with keys")
    if unknown := [str(key) for key in given if known is not None and key not in known]:
        raise ConfigurationError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known or ())}")
    if missing := [key for key in needed if key not in given]:
        raise ConfigurationError(f"{where} has no {missing[0]!r}; it needs one")
    return dict(given)
