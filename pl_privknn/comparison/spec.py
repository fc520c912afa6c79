"""Parsing and validation of comparisons in YAML, with the rules for a fair comparison."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
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

_BASE = ("data", "student", "trainer", "labeling")
_KINDS = {"labeling": "labeler", "model": "baseline", "true_labels": "true_labels"}
_METHOD = ("name", "title", *_KINDS, "trainer", "find", "settings", "epsilons")
_WANDB = ("project", "entity", "mode", "attach_ledger", "tags")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: Settings shared by all methods, which no method may set.
_SHARED = (
    "delta", "adjacency", "unit", "seed", "noise_source", "run_dir", "ledger_path", "state_dir",
)  # fmt: skip
_Value = TypeVar("_Value", float, int)


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of a comparison; see docs/guides/comparison.md for each key.

    Attributes:
        name: name of its folder.
        title: name in tables and plots.
        kind: ``"labeler"`` (a teacher and the shared student), ``"baseline"`` (a separate model)
            or ``"true_labels"`` (the shared student on the true labels of public examples).
        sections: its own sections of a configuration: ``labeling``, or ``model`` and ``trainer``.
        find: dotted path of the setting that is calibrated for each ε, as by ``privknn plan --find``.
        settings: overrides by ε, dotted paths to values; those of inf remove the noise.
        epsilons: its target values of ε, possibly inf.
    """

    name: str
    title: str
    kind: str
    sections: dict[str, Any]
    find: str | None
    settings: Mapping[float, Mapping[str, Any]]
    epsilons: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison, as stated in its YAML.

    Attributes:
        name: names the folder ``runs/compare/NAME``.
        base: ``data``, ``student``, ``trainer`` and shared ``labeling`` settings.
        delta: δ of every run.
        adjacency: neighbouring relation of every run.
        unit: unit of privacy of every run.
        noise_seeded: draw protective noise from seeds, for benchmarks; gives no protection.
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
    """ε as text in folder names and tables: ``0.5``, ``inf``."""
    return f"{epsilon:g}"


def read_epsilon(where: str, value: Any) -> float:
    """Parse an ε above 0, or the word ``inf``.

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
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    given = dict(overrides or {})
    start = "definitions."
    defined = {
        where.removeprefix(start): given.pop(where) for where in list(given) if where.startswith(start)
    }
    document = read_document(path, defined)
    try:
        for where, value in given.items():
            put(document, where, value)
        return comparison_of(document)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def comparison_of(document: Any) -> Comparison:
    """Comparison from plain types (a parsed YAML); see :func:`read_comparison`."""
    known = [field.name for field in dataclasses.fields(Comparison)]
    top = _section("the comparison", document, known, ("name", "base", "delta", "epsilons", "methods"))
    base = _section("base", top["base"], _BASE, ("data", "student"))
    _section("base.data", base["data"], needed=("class_path",))
    for name in ("trainer", "labeling"):
        base[name] = _section(f"base.{name}", base.get(name) or {})
    _refuse_shared("base.student", base["student"])
    _refuse_shared("base.labeling", base["labeling"])
    if base["labeling"].get("labeler"):
        raise ConfigurationError("base.labeling.labeler: a teacher belongs to a method; move it there")
    epsilons = _distinct("epsilons", top["epsilons"], read_epsilon)
    given = _list("methods", top["methods"])
    methods = [_method(f"methods[{i}]", method, base, epsilons) for i, method in enumerate(given)]
    names = [method.name for method in methods]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"methods: {twice[0]!r} occurs twice; give each method a different name")
    return Comparison(
        name=_name("name", top["name"]),
        base=base,
        delta=check_open_unit("delta", top["delta"]),
        adjacency=check_adjacency(top.get("adjacency", "add_remove")),
        unit=check_unit(top.get("unit", "record")),
        noise_seeded=check_switch("noise_seeded", top.get("noise_seeded", False)),
        seeds=_distinct("seeds", top.get("seeds", [0, 1, 2]), lambda name, seed: check_int(name, seed, 0)),
        epsilons=tuple(sorted(epsilons)),
        methods=tuple(methods),
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
            f"base.student: {name} needs a student; only baselines with a separate model do not"
        )
    for key, allowed, why in (
        ("trainer", kind == "baseline", "methods that train base.student share base.trainer; leave it out"),
        ("find", kind == "labeler", "only the noise of a labeler's plan can be calibrated; leave it out"),
        ("settings", kind != "true_labels", "true_labels uses no teacher and has no ε; leave it out"),
    ):
        if section.get(key) and not allowed:
            raise ConfigurationError(f"{where}.{key}: {why}")
    keys = {"labeler": ("labeling",), "baseline": ("model", "trainer")}.get(kind, ())
    needed = {"labeling": ("labeler",), "model": ("class_path",)}
    sections = {
        key: _section(f"{where}.{key}", section.get(key) or {}, needed=needed.get(key, ())) for key in keys
    }
    for key in sections:
        _refuse_shared(f"{where}.{key}", sections[key])
    if kind == "labeler":
        labeler = f"{where}.labeling.labeler"
        _refuse_shared(labeler, _section(labeler, sections["labeling"]["labeler"], needed=("class_path",)))
    settings = {}
    for key, overrides in _section(f"{where}.settings", section.get("settings") or {}).items():
        at = f"{where}.settings.{key}"
        settings[read_epsilon(at, key)] = _section(at, overrides or {})
        _check_paths(at, overrides or {}, keys)
    if find := section.get("find"):
        _check_paths(f"{where}.find", [find], keys)
    wanted = epsilons
    if section.get("epsilons") is not None:
        wanted = _distinct(f"{where}.epsilons", section["epsilons"], read_epsilon)
        if kind != "true_labels" and math.inf in wanted and math.inf not in settings:
            raise ConfigurationError(f"{where}.epsilons: inf needs settings of inf, which remove the noise")
    elif math.inf not in settings:
        wanted = tuple(epsilon for epsilon in wanted if epsilon < math.inf)
    return Method(
        name,
        str(section.get("title", name)),
        kind,
        sections,
        find,
        settings,
        (math.inf,) if kind == "true_labels" else tuple(sorted(wanted)),
    )


def _refuse_shared(where: str, section: Any) -> None:
    """Reject settings of the comparison among the arguments of a class or group."""
    arguments = section.get("init_args", section) if isinstance(section, Mapping) else None
    for key, value in arguments.items() if isinstance(arguments, Mapping) else ():
        if key in _SHARED:
            raise ConfigurationError(
                f"{where}: {key} is the same for all methods and set by the comparison; leave it out"
            )
        if isinstance(value, Mapping) and "class_path" not in value:
            _refuse_shared(f"{where}.{key}", value)


def _check_paths(where: str, paths: Collection[Any], roots: tuple[str, ...]) -> None:
    for path in paths:
        if not isinstance(path, str) or path.split(".")[0] not in roots or "." not in path:
            raise ConfigurationError(
                f"{where}: {path!r} must be within {' or '.join(roots)}; data, student and trainer are shared"
            )
        if path.rsplit(".", 1)[-1] in _SHARED:
            raise ConfigurationError(
                f"{where}: {path} is set by the comparison, alike for all methods; leave it out"
            )


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
        raise ConfigurationError(f"{where}={given!r}: a value occurs twice; remove one")
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


def _section(
    where: str, given: Any, known: Collection[str] | None = None, needed: Collection[str] = ()
) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: {given!r} must be a section with keys")
    if unknown := [str(key) for key in given if known is not None and key not in known]:
        raise ConfigurationError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known or ())}")
    if missing := [key for key in needed if key not in given]:
        raise ConfigurationError(f"{where} has no {missing[0]!r}; add it")
    return dict(given)
