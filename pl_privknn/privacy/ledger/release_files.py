"""Lists of releases and plans as files, JSON or YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit, shown
from pl_privknn.documents import read_document
from pl_privknn.privacy.accounting.accountant import read_records
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency


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


def read_releases(path: str | Path) -> Releases:
    """Read a list of records, or a mapping that holds one.

    A mapping has the records under ``releases`` (what ``privknn plan`` and ``privknn audit --export`` write) or
    ``records`` (``privknn plan --json``), and may state ``delta`` and ``adjacency``.

    Raises:
        ValueError: naming what is wrong with the file, or with which record.
    """
    return releases_in(read_document(path), path)


def releases_in(document: Any, path: str | Path) -> Releases:
    """The releases in a document that :func:`~pl_privknn.documents.read_document` read from ``path``."""
    if not isinstance(document, dict):
        return Releases(tuple(read_records(document)))
    names = [name for name in ("releases", "records") if name in document]
    if not names:
        held = ", ".join(shown(name).strip("'") for name in list(document)[:8])
        raise ValueError(
            f"{path} holds {held or 'nothing'}; want a ledger, a JSON list or YAML plan of "
            "records, or a mapping with the records under 'releases'"
        )
    if len(names) > 1:
        raise ValueError(f"{path} has its records under both {' and '.join(names)}; leave one of them out")
    delta, adjacency = document.get("delta"), document.get("adjacency")
    return Releases(
        tuple(read_records(document[names[0]])),
        None if delta is None else check_open_unit("delta", delta),
        None if adjacency is None else check_adjacency(adjacency),
    )
