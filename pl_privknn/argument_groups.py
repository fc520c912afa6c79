"""Arguments of constructors in groups: small frozen dataclasses, or mappings in their place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from pl_privknn._checks import shown


@dataclasses.dataclass(frozen=True)
class ArgumentGroup:
    """Arguments that belong together; a subclass names them, and checks them when it is made.

    A constructor has an argument for the group, with the group of its defaults as the default, and reads what it was
    given with :func:`as_group`.
    """


_Group = TypeVar("_Group", bound=ArgumentGroup)


def as_group(name: str, given: Any, default: _Group) -> _Group:
    """A group of arguments as its dataclass.

    Args:
        name: of the argument, for messages.
        given: the dataclass, or a mapping that changes some of the defaults, or None.
        default: the group of the defaults.

    Raises:
        ValueError: for a group that is neither, or has an argument that is not among its own.
    """
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


def plain_groups(**groups: ArgumentGroup) -> dict[str, Any]:
    """Groups as plain mappings, for hyper-parameters that a checkpoint holds."""
    return {name: dataclasses.asdict(group) for name, group in groups.items()}


@functools.cache
def argument_names(owner: type) -> list[str]:
    """What a constructor takes by name; arguments in groups as ``group.name``."""
    named: dict[str, None] = {}
    for parent in owner.__mro__:
        if "__init__" not in vars(parent):
            continue
        parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            named[parameter.name] = None
            if isinstance(parameter.default, ArgumentGroup):
                fields = dataclasses.fields(parameter.default)
                named |= {f"{parameter.name}.{field.name}": None for field in fields}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break  # hands nothing on to its base
    return list(named)
