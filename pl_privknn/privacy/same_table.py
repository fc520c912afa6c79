"""Recognition of a table: the one that a run began with, and the one that all processes of a training hold."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.sqlite_file import SQLiteFile

_KEY_BYTES = 32


def table_digest(blocks: Iterable[Tensor], key: bytes = b"") -> str:
    """Digest of the values of a table in their order, however they are cut into blocks.

    Args:
        blocks: tensors of any shape and dtype.
        key: a secret without which the digest reveals nothing of the table, not even to somebody who guesses it;
            up to 64 bytes. Left out for public tables.
    """
    found = hashlib.blake2b(key=key, digest_size=32)
    for block in blocks:
        found.update(block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def same_table(store: SQLiteFile, name: str, blocks: Iterable[Tensor], begun: bool) -> bool:
    """Note a table until something was paid for it, and recognise it afterwards.

    Args:
        store: private state of the run, which keeps a digest under a random key.
        name: of the table among the facts of the store.
        blocks: the table; see :func:`table_digest`. **Private**.
        begun: whether something was paid for the noted table, so that it can't change any more.

    Returns:
        False where the run began with another table, or with none.
    """
    noted = store.fact(name)
    if begun:
        return noted is not None and secrets.compare_digest(
            noted["digest"], table_digest(blocks, bytes.fromhex(noted["key"]))
        )
    key = secrets.token_bytes(_KEY_BYTES)
    store.note(name, {"key": key.hex(), "digest": table_digest(blocks, key)})
    return True


def check_same_in_processes(agree: Callable[[bytes], bool], blocks: Iterable[Tensor]) -> None:
    """Refuse processes of one training that hold different tables, where each is to read a share of one.

    Args:
        agree: whether all processes give the same bytes; here a digest, as private as the table.
        blocks: the table, or what identifies it.

    Raises:
        ValueError: where they differ, in every process.
    """
    if not agree(bytes.fromhex(redacted(table_digest, blocks))):
        raise ValueError(
            "private set: the processes of this training hold different records, or in another order, so that some "
            "would be read by several; seed what splits or shuffles them, or give each process its own file"
        )
