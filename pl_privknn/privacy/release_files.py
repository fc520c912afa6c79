"""Lists of releases and plans as files, JSON or YAML."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accountant import read_records
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency

# YAML 1.1 reads 1e-5 as text: it wants a dot. People don't write one.
_SHORT_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclasses.dataclass(frozen=True)
class Releases:
    """What a file says of releases.

    Attributes:
        charges: the most that may be released.
        delta: δ, where the file states one.
        adjacency: neighbouring relation, where the file states one.
    """

    charges: tuple[Charge, ...]
    delta: float | None = None
    adjacency: Adjacency | None = None


def read_document(path: str | Path) -> Any:
    """The file's content as plain Python types.

    Raises:
        ValueError: if it is neither JSON nor YAML.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{path} is neither a ledger nor a JSON list or YAML plan: {error}") from error
    try:
        return json.loads(text)
    except ValueError as not_json:
        yaml = importlib.import_module("yaml")
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is neither a ledger nor a JSON list or YAML plan: {error}") from error
        if not isinstance(document, list | dict):
            raise ValueError(
                f"{path} is neither a ledger nor a JSON list or YAML plan: {not_json}"
            ) from not_json
        return _numbers(document)


def read_releases(path: str | Path) -> Releases:
    """Read a list of records, or a mapping that holds one.

    A mapping has the records under ``releases`` (what ``privknn plan`` and ``privknn audit --export`` write) or
    ``records`` (``privknn plan --json``), and may state ``delta`` and ``adjacency``.

    Raises:
        ValueError: naming what is wrong with the file, or with which record.
    """
    return releases_in(read_document(path), path)


def releases_in(document: Any, path: str | Path) -> Releases:
    """The releases in a document that :func:`read_document` read from ``path``."""
    if not isinstance(document, dict):
        return Releases(tuple(read_records(document)))
    name = next((name for name in ("releases", "records") if name in document), None)
    if name is None:
        raise ValueError(
            f"{path} holds {', '.join(map(str, document)) or 'nothing'}; want a ledger, a JSON list or YAML plan of "
            "records, or a mapping with the records under 'releases'"
        )
    delta, adjacency = document.get("delta"), document.get("adjacency")
    return Releases(
        tuple(read_records(document[name])),
        None if delta is None else check_open_unit("delta", delta),
        None if adjacency is None else check_adjacency(adjacency),
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and _SHORT_FLOAT.fullmatch(value):
        return float(value)
    return value
