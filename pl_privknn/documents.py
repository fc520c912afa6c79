"""JSON and YAML as plain data, read strictly: what a file says once is what is read, and nothing else happens."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from pl_privknn._checks import shown

#: Largest file that is read: lists of records and exported ledgers are far smaller.
MAX_JSON_BYTES = 1 << 24
#: YAML is written by people, and read a hundred times more slowly.
MAX_YAML_BYTES = 1 << 18
#: Most lists and mappings within each other; configurations have about ten.
MAX_DEPTH = 64
#: Most places of a configuration that name a definition.
MAX_USES = 64

# What PyYAML raises; ValueError comes from numbers of thousands of digits.
_UNREADABLE = (yaml.YAMLError, ValueError)
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class DocumentError(ValueError):
    """A text that is not read: it says something twice, refers to itself, nests too deep, or is neither format."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain types, with 1e-5 a number (YAML 1.1 wants a dot, people don't write one) and dates as text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (_FLOAT, _TIMESTAMP)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)  # fmt: skip


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_document(path: str | Path) -> Any:
    """The content of a JSON or YAML file as plain Python types.

    Raises:
        DocumentError: if it is neither, or larger, deeper or less plain than what :func:`read_yaml` reads.
        OSError: if it can't be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise DocumentError(f"{path} has more than {MAX_JSON_BYTES >> 20} MiB; split it into several files")
    try:
        text = data.decode("utf-8-sig")
        return _read_json(text)
    except json.JSONDecodeError as error:
        not_json = error
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from None
    except RecursionError:
        raise DocumentError(f"{path}: {_too_deep()}") from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise DocumentError(f"{path} is neither JSON nor YAML: {error}") from None
    if len(data) > MAX_YAML_BYTES:
        raise DocumentError(
            f"{path} is no JSON ({not_json}), and with more than {MAX_YAML_BYTES >> 10} KiB too large for YAML"
        )
    try:
        document = _read_yaml(text)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from None
    except _UNREADABLE as error:
        raise DocumentError(f"{path} is neither JSON ({not_json}) nor YAML ({_line(error)})") from None
    if not isinstance(document, list | dict):
        raise DocumentError(f"{path} is neither JSON ({not_json}) nor a YAML list or mapping")
    return document


def read_configuration(path: str | Path) -> Any:
    """:func:`read_document` of a configuration, its definitions written out; see :func:`written_out`.

    Raises:
        DocumentError: as there.
        OSError: if it can't be read.
    """
    document = read_document(path)
    try:
        return written_out(document)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from None


def written_out(document: Any) -> Any:
    """A configuration with each ``{definition: NAME}`` replaced by what its ``definitions`` section has of that name.

    Definitions don't use one another, so that a short file stays a short configuration.

    Raises:
        DocumentError: for a name that is not defined, or more than :data:`MAX_USES` uses.

    Example:
        >>> from pl_privknn.documents import written_out
        >>> written_out({"definitions": {"x": {"k": 4}}, "a": {"definition": "x"}, "b": [{"definition": "x"}]})
        {'a': {'k': 4}, 'b': [{'k': 4}]}
    """
    if not isinstance(document, dict):
        return document
    defined = document.get("definitions", {})
    if not isinstance(defined, dict):
        raise DocumentError(f"definitions={shown(defined)} must be a section with a name for each definition")
    uses = 0

    def replaced(part: Any) -> Any:
        nonlocal uses
        if isinstance(part, list):
            return [replaced(item) for item in part]
        if not isinstance(part, dict):
            return part
        if set(part) != {"definition"}:
            return {name: replaced(item) for name, item in part.items()}
        name, uses = part["definition"], uses + 1
        if not isinstance(name, str) or name not in defined:
            raise DocumentError(
                f"definition={shown(name)} is not in the section definitions; it has "
                f"{', '.join(map(str, defined)) or 'none, or is missing'}"
            )
        if uses > MAX_USES:
            raise DocumentError(f"definitions are used more than {MAX_USES} times; split the file")
        return copy.deepcopy(defined[name])

    return {name: replaced(part) for name, part in document.items() if name != "definitions"}


def read_yaml(text: str) -> Any:
    """One YAML document as plain Python types.

    Raises:
        DocumentError: for anything but one document, or one with an anchor, an alias, a merge key, a tag, a key
            that stands twice in a mapping, or more than :data:`MAX_DEPTH` levels.
    """
    try:
        return _read_yaml(text)
    except DocumentError:
        raise
    except _UNREADABLE as error:
        raise DocumentError(f"not readable as YAML: {_line(error)}") from None


def write_yaml(data: Any, flow_style: bool | None = False, width: int = 80) -> str:
    """Plain types as YAML that :func:`read_yaml` reads: in their order, and written out where a part comes twice."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow_style, width=width
    )
    return text


def check_yaml(text: str) -> None:
    """Refuse what :func:`read_yaml` does not read, before anything is made of it.

    Raises:
        DocumentError: as there.
        yaml.YAMLError: for what is no YAML.
    """
    # Of each open list None; of each open mapping the keys so far, and whether a key comes next.
    open_parts: list[tuple[set[str], list[bool]] | None] = []
    for event in _events(text):
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise DocumentError(f"{where} has an anchor or alias (& or *); write its value out")
        if isinstance(event, yaml.CollectionEndEvent):
            open_parts.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if event.tag is not None:
            raise DocumentError(f"{where} has the tag {shown(event.tag)}; leave tags out")
        if open_parts and (mapping := open_parts[-1]) is not None:
            keys, is_key = mapping
            if is_key[0]:
                _check_key(event, keys, where)
            is_key[0] = not is_key[0]
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_parts) == MAX_DEPTH:
                raise DocumentError(f"{where}: {_too_deep()}")
            open_parts.append((set(), [True]) if isinstance(event, yaml.MappingStartEvent) else None)


def _read_yaml(text: str) -> Any:
    check_yaml(text)
    return yaml.load(text, Loader=_Loader)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _events(text: str) -> Iterator[Any]:
    return yaml.parse(text, Loader=_Loader)


def _check_key(event: Any, keys: set[str], where: str) -> None:
    if not isinstance(event, yaml.ScalarEvent):
        raise DocumentError(f"{where} has a list or a mapping as key; use a word")
    if event.value == "<<" and not event.style:
        raise DocumentError(f"{where} has a merge key (<<); write its values out")
    if event.value in keys:
        raise DocumentError(
            f"{where}: {shown(event.value)} stands twice in one mapping; leave one of them out"
        )
    keys.add(event.value)


def _read_json(text: str) -> Any:
    document = json.loads(text, object_pairs_hook=_object)
    level = [[document]]
    for _ in range(MAX_DEPTH + 1):
        parts = [item for part in level for item in part if isinstance(item, list | dict)]
        level = [list(part.values()) if isinstance(part, dict) else part for part in parts]
    if level:
        raise DocumentError(_too_deep())
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DocumentError(f"{shown(name)} stands twice in one object; leave one of them out")
        found[name] = value
    return found


def _too_deep() -> str:
    return f"more than {MAX_DEPTH} lists and mappings within each other; write it flatter"
