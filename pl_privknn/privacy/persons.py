"""Persons and their records, where a person is the unit of privacy."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import InputError
from pl_privknn.privacy.noise import NoiseSource


def check_owners(owners: Tensor | None, num_records: int) -> Tensor:
    """Return the owner of each record, or raise ``ValueError`` where one has none.

    Args:
        owners: person of each record, int64 ``(n,)``, numbers from 0. **Private**.
        num_records: n.
    """
    if owners is None:
        raise InputError(
            "unit='person': the private records have no owners; give the data module private_groups, or use "
            "unit='record'"
        )
    if owners.dtype != torch.int64 or tuple(owners.shape) != (num_records,):
        raise InputError("private_groups: must be int64 of shape (n,), the person of each private record")
    if bool((owners < 0).any()):
        raise InputError(
            "private_groups: some records have no owner (a negative number); name one, or leave these records out"
        )
    return owners


def persons_of(owners: Tensor) -> tuple[Tensor, Tensor]:
    """Number persons from 0.

    Args:
        owners: person of each record, int64 ``(n,)``. **Private**.

    Returns:
        The number of each record's person, int64 ``(n,)``, and the owners in the order of these numbers.
    """
    persons, numbers = owners.unique(return_inverse=True)
    return numbers, persons


def records_drawn(owners: Tensor, most: int, noise: NoiseSource) -> Tensor:
    """Rows of at most ``most`` records of each person, drawn without replacement by private coins.

    Each record gets a random key, and a person's records with the smallest keys are drawn, so who else is
    in the table changes nothing.

    Args:
        owners: person of each record, int64 ``(n,)``. **Private**.
        most: m, a public constant.
        noise: source of the coins.

    Returns:
        Rows in the order of the table, int64. **Private**.
    """
    numbers, persons = persons_of(owners)
    keys = noise.integers((len(owners),), 1 << 62)
    order = keys.argsort(stable=True)
    order = order[numbers[order].argsort(stable=True)]  # person by person, keys ascending
    first = torch.searchsorted(numbers[order].contiguous(), torch.arange(len(persons)))
    place = torch.arange(len(order)) - first[numbers[order]]
    return order[place < most].sort().values
