"""Arguments of constructors in groups: small frozen dataclasses, or mappings in their place.

An argument that stood by itself before it joined a group is read from there for one release more, in Python, in YAML
and on the command line, with one warning that names its group: :func:`in_groups` moves it. So is one that had another
name: :func:`renamed` says which.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pl_privknn._checks import shown


@dataclasses.dataclass(frozen=True)
class ArgumentGroup:
    """Arguments that belong together; a subclass names them, and checks them when it is made.

    A constructor has an argument for the group, with the group of its defaults as the default, and ``**flat`` for the
    arguments that stood by themselves before; it reads both with :func:`read_groups`.
    """


_Class = TypeVar("_Class", bound=type)


def renamed(**names: str) -> Callable[[_Class], _Class]:
    """Decorate a class whose arguments had other names, under which they are read for one release more.

    Args:
        **names: the name of today, by the earlier one.
    """

    def decorate(owner: _Class) -> _Class:
        made = owner.__init__  # type: ignore[misc]

        @functools.wraps(made)
        def read_both(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **_with_new_names(owner, kwargs))

        owner.__init__ = read_both  # type: ignore[misc]
        owner._renamed = names  # type: ignore[attr-defined]
        return owner

    return decorate


def earlier_names(owner: type) -> dict[str, str]:
    """The names of today of a class's arguments, by their earlier ones."""
    found: dict[str, str] = getattr(owner, "_renamed", {})
    return found


def _with_new_names(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(arguments)
    for old, new in earlier_names(owner).items():
        if old in result:
            if result.get(new) is not None:
                raise TypeError(f"{owner.__name__}: {old} is the earlier name of {new}; give {new} alone")
            result[new] = result.pop(old)
            _warn(owner, [new])
    return result


def _warn(owner: type, moved: list[str]) -> None:
    warnings.warn(
        f"{owner.__name__}: arguments stand in groups now or have other names, and are read as before for one "
        f"release more; give {', '.join(moved)}",
        FutureWarning,
        stacklevel=3,
    )


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
    """Where a class takes the argument ``name``: by itself, in a group (whose name is first), or nowhere.

    Args:
        owner: the class.
        name: of today or an earlier one, by itself or after its group and a dot.
    """
    if name in _parameters(owner):
        return (name,)
    if (new := earlier_names(owner).get(name)) is not None:
        return (new,)
    group, dot, own = name.partition(".")
    for place, default in group_defaults(owner).items():
        inner = own if dot and group == place else name
        inner = earlier_names(type(default)).get(inner, inner)
        if any(field.name == inner for field in dataclasses.fields(default)):
            return (place, inner)
    return None


def in_groups(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` of a class, those in groups that stand by themselves moved there, with a warning.

    Moved arguments win over what a group in ``arguments`` says of them. So do those of earlier names, which get the
    names of today. What is no argument is left where it is.
    """
    result = dict(arguments)
    moved = []
    for group, default in group_defaults(owner).items():
        if isinstance(given := result.get(group), Mapping | argparse.Namespace):
            for old in [old for old in earlier_names(type(default)) if old in _plain(given)]:
                new = earlier_names(type(default))[old]
                inner = _plain(result[group])
                value = inner.pop(old)
                result[group] = {**inner, new: value}
                moved.append(f"{group}.{new}")
    for name in arguments:
        place = place_of(owner, name)
        if place is None or place == (name,):
            continue
        value = result.pop(name)
        result[place[0]] = {**_plain(result.get(place[0])), place[1]: value} if len(place) == 2 else value
        moved.append(".".join(place))
    if moved:
        _warn(owner, moved)
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
    earlier = [old for group in group_defaults(owner).values() for old in earlier_names(type(group))]
    return [name for name in (*fields, *earlier) if place_of(owner, name) != (name,)]


def argument_names(owner: type) -> list[str]:
    """What a constructor takes by name; arguments in groups as ``group.name``."""
    kinds = inspect.Parameter
    named = [
        name
        for name, parameter in _parameters(owner).items()
        if name != "self" and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    grouped = [".".join(place_of(owner, name) or (name,)) for name in flat_names(owner)]
    return list(dict.fromkeys(named + grouped))


def _made(name: str, given: Any, default: ArgumentGroup) -> ArgumentGroup:
    if isinstance(given, type(default)):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"{name}={shown(given)} must be a group of arguments: {type(default).__name__}(...), or a mapping"
        )
    given = _with_new_names(type(default), given or {})
    fields = [field.name for field in dataclasses.fields(default)]
    if unknown := [key for key in given if key not in fields]:
        raise ValueError(f"{name}: {shown(unknown[0])} is none of its arguments: {', '.join(fields)}")
    return dataclasses.replace(default, **given)


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
