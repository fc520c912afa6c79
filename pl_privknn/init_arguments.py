"""What an object was made with, as a configuration would say it: for the ``config.yaml`` of a run from Python."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pl_privknn.argument_groups import ArgumentGroup

#: Longest list that is written: longer ones are data.
LONGEST = 100


class HasInitArguments:
    """Remembers the arguments that it was made with, as far as a configuration can say them.

    Of arrays, modules and other objects it keeps the argument's name alone, so that no data is held, and none is
    written. What may be data too is not kept: lists of a user's own class, all arguments of a user's own data module,
    and what one named ``private…`` holds besides a path.
    """

    #: Whether arguments that this package does not know may be, or choose, private data.
    holds_data: ClassVar[bool] = False
    _made_with: tuple[dict[str, Any], list[str]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Note the arguments, which ``__init__`` takes next."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        object.__setattr__(made, "_made_with", _noted(cls, args, kwargs))
        return made


def as_section(made: HasInitArguments) -> tuple[dict[str, Any], list[str]]:
    """An object as the section of a configuration.

    Returns:
        ``class_path`` and ``init_args`` of what was given, and the names of the arguments that they leave out.
    """
    cls = type(made)
    arguments, left_out = made._made_with
    section: dict[str, Any] = {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
    return section | ({"init_args": arguments} if arguments else {}), left_out


class _NotPlain(Exception):
    """A value that a configuration can't say."""


def _noted(
    cls: type[HasInitArguments], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(vars(cls).get("__init__", cls.__init__)).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in by_place][1:]
    arguments: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        try:
            ours = _is_ours(cls, name)
            if (name.startswith("private") and not isinstance(value, str | Path)) or (
                cls.holds_data and not ours
            ):
                raise _NotPlain
            arguments[name] = _plain(value, name, left_out, ours)
        except _NotPlain:
            left_out.append(name)
    return arguments, left_out


def _plain(value: Any, path: str, left_out: list[str], lists: bool) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, HasInitArguments):
        if "<" in type(value).__qualname__:
            raise _NotPlain
        section, missing = as_section(value)
        left_out.extend(f"{path}.{name}" for name in missing)
        return section
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        unstated: frozenset[str] = getattr(value, "_unstated", frozenset())  # of noise: the labeler's to say
        fields = {
            field.name: _plain(getattr(value, field.name), f"{path}.{field.name}", left_out, lists)
            for field in dataclasses.fields(value)
            if field.init and field.name not in unstated and not _is_default(value, field)
        }
        if isinstance(value, ArgumentGroup):
            return fields
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": fields}
    if lists and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{path}.{key}", left_out, lists) for key, item in value.items()}
    if lists and isinstance(value, list | tuple) and len(value) <= LONGEST:
        return [_plain(item, f"{path}[{place}]", left_out, lists) for place, item in enumerate(value)]
    raise _NotPlain


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether a field has its default; raises :class:`_NotPlain` for data, which a field without ``repr`` holds."""
    given = getattr(value, field.name)
    if not (field.repr or given is None or isinstance(given, str | Path)):
        raise _NotPlain
    return bool(field.default is not dataclasses.MISSING and given == field.default)


def _is_ours(cls: type, name: str) -> bool:
    """Whether an argument is one of this package's classes, whose lists are settings."""
    return any(
        parent.__module__.startswith("pl_privknn.")
        and "__init__" in vars(parent)
        and name in inspect.signature(vars(parent)["__init__"]).parameters
        for parent in cls.__mro__
    )
