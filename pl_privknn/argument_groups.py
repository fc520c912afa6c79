"""Arguments of constructors in groups: small frozen dataclasses, or mappings in their place.

An argument that stood by itself before it joined a group is read from there for one release more, in Python, in YAML
and on the command line, with one warning that names its group: :func:`in_groups` moves it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from pl_privknn._checks import shown


@dataclasses.dataclass(frozen=True)
class ArgumentGroup:
    """Arguments that belong together; a subclass names them, and checks them when it is made.

    A constructor has an argument for the group, with the group of its defaults as the default, and ``**flat`` for the
    arguments that stood by themselves before; it reads both with :func:`read_groups`.
    """


@functools.cache
def group_defaults(owner: type) -> dict[str, ArgumentGroup]:
    """The groups that a class takes, by the names of their arguments: those of its defaults."""
    return {
        name: parameter.default
        for name, parameter in _parameters(owner).items()
        if isinstance(parameter.default, ArgumentGroup)
    }


@functools.cache
def place_of(owner: type, name: str) -> tuple[str, ...] | None:
    """Where a class takes the argument ``name``: by itself, in a group (whose name is first), or nowhere."""
    if name in _parameters(owner):
        return (name,)
    for group, default in group_defaults(owner).items():
        if any(field.name == name for field in dataclasses.fields(default)):
            return (group, name)
    return None


def in_groups(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` of a class, those in groups that stand by themselves moved there, with a warning.

    Moved arguments win over what a group in ``arguments`` says of them. What is no argument is left where it is.
    """
    result = dict(arguments)
    moved = []
    for name in arguments:
        place = place_of(owner, name)
        if place is not None and len(place) == 2:
            given = result.get(place[0])
            result[place[0]] = {**_plain(given), name: result.pop(name)}
            moved.append(".".join(place))
    if moved:
        warnings.warn(
            f"{owner.__name__}: arguments stand in groups now, and are read without them for one release more; give "
            f"{', '.join(moved)}",
            FutureWarning,
            stacklevel=2,
        )
    return result


def read_groups(owner: type, flat: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """The groups that a constructor was given, each as its dataclass: those in ``given`` first, in its order.

    Args:
        owner: the class whose constructor it is.
        flat: what the constructor was given beyond its arguments: those in groups, and groups of a subclass.
        **given: each group as a dataclass, or a mapping that changes some of the defaults.

    Raises:
        TypeError: for an argument in ``flat`` that is in no group.
        ValueError: for a group that is neither, or has an argument that is not among its own.
    """
    defaults = group_defaults(owner)
    found = in_groups(owner, {**given, **flat})
    # Only what was given: a group that the owner's own constructor keeps to itself is not read here.
    if unknown := found.keys() - ({*given, *flat} & defaults.keys()):
        raise TypeError(f"{owner.__name__} has no argument {min(unknown)!r}")
    return {name: _made(name, found[name], defaults[name]) for name in found}


def plain_groups(groups: Mapping[str, ArgumentGroup]) -> dict[str, Any]:
    """Groups as plain mappings, for hyper-parameters that a checkpoint holds."""
    return {name: dataclasses.asdict(group) for name, group in groups.items()}


def flat_names(owner: type) -> list[str]:
    """Arguments that a class takes in groups alone."""
    fields = [field.name for group in group_defaults(owner).values() for field in dataclasses.fields(group)]
    return [name for name in fields if place_of(owner, name) != (name,)]


def argument_names(owner: type) -> list[str]:
    """What a constructor takes by name; arguments in groups as ``group.name``."""
    kinds = inspect.Parameter
    named = [
        name
        for name, parameter in _parameters(owner).items()
        if name != "self" and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    return named + [".".join(place_of(owner, name) or (name,)) for name in flat_names(owner)]


def _made(name: str, given: Any, default: ArgumentGroup) -> ArgumentGroup:
    if isinstance(given, type(default)):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"{name}={shown(given)} must be a group of arguments: {type(default).__name__}(...), or a mapping"
        )
    fields = [field.name for field in dataclasses.fields(default)]
    if unknown := [key for key in given or {} if key not in fields]:
        raise ValueError(f"{name}: {shown(unknown[0])} is none of its arguments: {', '.join(fields)}")
    return dataclasses.replace(default, **(given or {}))


def _plain(group: Any) -> dict[str, Any]:
    """A group in any of its forms as a mapping; jsonargparse has objects of its own for those."""
    if isinstance(group, Mapping):
        return dict(group)
    return {} if group is None else dict(vars(group))


@functools.cache
def _parameters(owner: type) -> dict[str, inspect.Parameter]:
    """What constructors take by name, up to the first that hands nothing on to its base."""
    found: dict[str, inspect.Parameter] = {}
    for parent in owner.__mro__:
        if "__init__" not in vars(parent):
            continue
        parameters = inspect.signature(vars(parent)["__init__"]).parameters
        for name, parameter in parameters.items():
            found.setdefault(name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found
