"""Nested sections of configuration: merging, dotted paths, differences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def merged(base: Mapping[str, Any] | None, over: Mapping[str, Any] | None) -> dict[str, Any]:
    """``base`` with the values of ``over``, section by section.

    A section that names another ``class_path`` replaces the earlier one as a whole: arguments of one class mean
    nothing to another.
    """
    result = copy.deepcopy(dict(base or {}))
    for name, value in (over or {}).items():
        earlier = result.get(name)
        if isinstance(earlier, dict) and isinstance(value, Mapping):
            other_class = "class_path" in value and value["class_path"] != earlier.get("class_path")
            result[name] = copy.deepcopy(dict(value)) if other_class else merged(earlier, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def put(document: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path in place, making sections on the way.

    An item of a list is named by its number or by its ``name``.

    Raises:
        ValueError: for a path through something that is neither a section nor a list.
    """
    first, *rest = path.split(".")
    here = document
    names = [first, *rest]
    for depth, name in enumerate(names[:-1]):
        found = _item(here, name, path)
        if found is None:
            found = {}
            here[_key(here, name, path)] = found
        elif not isinstance(found, dict | list):
            raise ValueError(f"{path}: {'.'.join(names[: depth + 1])} is {found!r}, not a section")
        here = found
    here[_key(here, names[-1], path)] = copy.deepcopy(value)


def get(document: Any, path: str) -> Any:
    """The value at a dotted path, or None where there is none."""
    here = document
    for name in path.split("."):
        if not isinstance(here, dict | list):
            return None
        here = _item(here, name, path)
    return here


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted path; empty sections count as values."""
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield path, value
        return
    for name, item in items:
        yield from leaves(item, f"{path}.{name}" if path else str(name))


def differences(then: Any, now: Any) -> list[str]:
    """What differs, one text for each dotted path: ``path: … then, … now``."""
    before, after = dict(leaves(then)), dict(leaves(now))
    return [
        f"{path}: {_shown(before, path)} then, {_shown(after, path)} now"
        for path in {**before, **after}
        if (path in before) != (path in after) or before.get(path) != after.get(path)
    ]


def _shown(values: dict[str, Any], path: str) -> str:
    return repr(values[path]) if path in values else "nothing"


def _item(here: Any, name: str, path: str) -> Any:
    if isinstance(here, list):
        place = _place(here, name)
        return None if place is None else here[place]
    return here.get(name)


def _key(here: Any, name: str, path: str) -> Any:
    if not isinstance(here, list):
        return name
    place = _place(here, name)
    if place is None:
        raise ValueError(f"{path}: the list has no item {name!r}")
    return place


def _place(items: list[Any], name: str) -> int | None:
    if name.isdigit() and int(name) < len(items):
        return int(name)
    named = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    return named.index(name) if name in named else None
