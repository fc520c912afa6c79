"""Which group a record is in stays: a training that goes on is held to the members with which it began."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.record_budgets import RecordKey, as_bytes
from pl_privknn.privacy.store import private_folder

_KEY_BYTES = 32


def check_members(
    run_dir: Path, run_id: str, records: Iterable[tuple[Tensor, Tensor]], members: Tensor, begun: bool
) -> None:
    """Note the members of a training before its first step; refuse others afterwards.

    A record that changed its group would take part in some steps at one rate and in others at another, which no
    group's ε covers. One keyed digest of all records with their groups, whatever their order, lies in the run's
    private folder, for the owner alone.

    Args:
        run_dir: the run's folder.
        run_id: the run.
        records: images and labels of all private records, in blocks.
        members: group of each, int64 ``(n,)``.
        begun: whether a step has been paid for.

    Raises:
        ValueError: if records or groups are not those with which the training began.
        FileNotFoundError: if nothing says any more which they were.
    """
    file = private_folder(run_dir) / run_id / "members"
    if not begun:
        key = secrets.token_bytes(_KEY_BYTES)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(file, key + _digest(key, records, members), 0o600)
        return
    if not file.is_file():
        raise FileNotFoundError(
            f"groups: {file} is missing, which says whether members are those of the first steps; restore it, or "
            "start a new training in another folder, which costs anew"
        )
    noted = file.read_bytes()
    key = noted[:_KEY_BYTES]
    if not secrets.compare_digest(noted[_KEY_BYTES:], _digest(key, records, members)):
        raise ValueError(
            "groups: private records or their members are not those with which this training began, and a record "
            "that changes its group has no ε; go back to them, or start a new training in another folder, which "
            "costs anew"
        )


def _digest(key: bytes, records: Iterable[tuple[Tensor, Tensor]], members: Tensor) -> bytes:
    """Of the sorted digests of single records, each with its labels and its group."""
    each: list[bytes] = []
    for images, labels in records:
        groups = members[len(each) : len(each) + len(images), None]
        numbers = torch.cat([labels.reshape(len(labels), -1).long(), groups], dim=1)
        each += as_bytes(RecordKey(key).digests(images, numbers))
    return hashlib.blake2b(b"".join(sorted(each)), key=key, digest_size=32).digest()
