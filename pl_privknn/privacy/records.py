"""Inspection of data sets of private records: rows, memory and reading code.

A record is one index of the data set. What reading it returns is the record, so reading one must not use another:
that can be seen of tables of tensors and of this package's data sets, and is an assumption for all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pl_privknn._checks import InputError
from pl_privknn.privacy.noise import NoiseSource

_PACKAGE = __name__.split(".")[0]
# Attributes by which data sets of this package hold others.
_HELD = ("store", "stores", "_items")


def is_ours(thing: Any) -> bool:
    """Whether an object's class is defined in this package."""
    return type(thing).__module__.split(".")[0] == _PACKAGE


def leaves_of(dataset: Any, rows: Tensor | None = None) -> Iterator[tuple[Any, Tensor]]:
    """Underlying data sets of a data set, and the rows that it reads.

    Args:
        dataset: map-style; ``Subset``, ``ConcatDataset`` and views of ``datasets.Dataset`` are looked into.
        rows: of ``dataset``, int64 ``(n,)``; all if None.

    Yields:
        Each data set, and its rows in the order of reading.
    """
    rows = torch.arange(len(dataset)) if rows is None else rows
    if isinstance(dataset, Subset):
        yield from leaves_of(dataset.dataset, torch.as_tensor(list(dataset.indices), dtype=torch.int64)[rows])
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            yield from leaves_of(part, rows[(rows >= start) & (rows < end)] - start)
            start = end
    elif _is_arrow(dataset):
        yield from _arrow_rows(dataset, rows)
    else:
        yield dataset, rows


def _is_arrow(dataset: Any) -> bool:
    """Whether this is a ``datasets.Dataset``: a table of Arrow with indices, or None, of the rows that are read."""
    return hasattr(dataset, "_indices") and hasattr(dataset, "data")


def _arrow_rows(dataset: Any, rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Buffers of Arrow that a view of a ``datasets.Dataset`` reads, and their rows; slices share a buffer."""
    table = getattr(dataset.data, "table", dataset.data)
    if dataset._indices is not None:
        chosen = getattr(dataset._indices, "table", dataset._indices).column(0).to_numpy()
        rows = torch.from_numpy(np.array(chosen, dtype=np.int64))[rows]
    if not table.num_columns:
        yield dataset, rows
        return
    start = 0
    for chunk in table.column(0).chunks:
        address = next((buffer.address for buffer in reversed(chunk.buffers()) if buffer is not None), 0)
        own = rows[(rows >= start) & (rows < start + len(chunk))]
        yield _BUFFERS.setdefault(address, _Buffer(address)), own - start + chunk.offset
        start += len(chunk)


class _Buffer(NamedTuple):
    """Memory block that rows are read from."""

    address: int


#: One object for each buffer, since data sets are compared by identity.
_BUFFERS: dict[int, _Buffer] = {}


def _objects_of(dataset: Any) -> list[int]:
    """Identities of the entries of lists in a data set, in the order of reading, but for plain numbers and words."""
    return [
        id(leaf[row])
        for leaf, rows in leaves_of(dataset)
        if type(leaf) in (list, tuple)
        for row in rows.tolist()
        if not isinstance(leaf[row], int | float | str | bytes | None)
    ]


def has_repeated_rows(dataset: Any) -> bool:
    """Whether a data set reads a row of another one, or an object of a list, twice, as in oversampling.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> table = TensorDataset(torch.rand(5, 2))
        >>> has_repeated_rows(Subset(table, [0, 1, 1])), has_repeated_rows(Subset(table, [0, 1]))
        (True, False)
        >>> rare, other = (torch.rand(2), 0), (torch.rand(2), 1)
        >>> has_repeated_rows([*[rare] * 20, other]), has_repeated_rows([rare, other])
        (True, False)
    """
    if not isinstance(dataset, Subset | ConcatDataset | list | tuple) and not _is_arrow(dataset):
        return False
    objects = _objects_of(dataset)
    if len(set(objects)) < len(objects):
        return True
    rows: dict[int, list[Tensor]] = {}
    for leaf, part in leaves_of(dataset):
        rows.setdefault(id(leaf), []).append(part)
    return any(len(joined.unique()) < len(joined) for joined in map(torch.cat, rows.values()))


def foreign_reader(dataset: Any) -> str | None:
    """Name of the class outside this package that reads records; None for own classes and tables of tensors.

    Args:
        dataset: map-style, or a store of images.
    """
    if type(dataset) in (list, tuple, TensorDataset):
        return None
    if type(dataset) in (Subset, ConcatDataset):
        parts = dataset.datasets if type(dataset) is ConcatDataset else [dataset.dataset]
    elif is_ours(dataset):
        held = [(name, vars(dataset)[name]) for name in _HELD if name in vars(dataset)]
        parts = [part for name, one in held for part in (one if name == "stores" else [one])]
        parts = [part for part in parts if hasattr(part, "__len__")]
    else:
        return type(dataset).__name__
    return next((name for part in parts if (name := foreign_reader(part))), None)


def has_one_structure(dataset: Any) -> bool:
    """Whether all records have equal shapes by construction: rows of tensors, or data sets of this package.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> has_one_structure(Subset(TensorDataset(torch.rand(5, 2)), [0, 1])), has_one_structure([(1, 2), (1, 2)])
        (True, False)
    """
    found: set[Any] = set()
    for leaf, _ in leaves_of(dataset):
        if type(leaf) is TensorDataset:
            found.add(tuple((part.shape[1:], part.dtype) for part in leaf.tensors))
        else:
            found.add(id(leaf) if is_ours(leaf) else None)
    return len(found) == 1 and None not in found


def foreign_loader(data: Any) -> str | None:
    """Name of the method outside this package that loads a data module's private records; None where there is none.

    Args:
        data: a data module, or None.
    """
    load = getattr(type(data), "load_private", None)
    if load is None or load.__module__.split(".")[0] == _PACKAGE:
        return None
    return f"{type(data).__name__}.load_private"


def memory_of(value: Any, depth: int = 4) -> Iterator[tuple[int, int]]:
    """Memory ranges (first and last address) of tensors and arrays reachable through an object's attributes.

    Args:
        value: an object, a tensor, or a container of them.
        depth: attributes of attributes that are followed.
    """
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            yield value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()
    elif isinstance(value, np.ndarray):
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
        low = value.__array_interface__["data"][0]
        yield low, low + (reach + value.itemsize if value.size else 0)
    elif depth and not isinstance(value, str | bytes | int | float | None):
        parts: Any = getattr(value, "__dict__", {})
        if isinstance(value, list | tuple):
            parts = dict(enumerate(value[:100]))
        elif isinstance(value, dict):
            parts = value
        for part in list(parts.values()):
            yield from memory_of(part, depth - 1)


def shares_memory(first: Any, second: Any) -> bool:
    """Whether two objects share memory."""
    held = list(memory_of(first))
    return any(low < end and start < high for low, high in memory_of(second) for start, end in held)


def check_evaluated(name: str, loaders: Any, records: Any) -> None:
    """Refuse to evaluate on private records: no charge covers the exact figure.

    Args:
        name: of the loaders, for the message.
        loaders: one, or a container of them.
        records: data set of private records, or None.

    Raises:
        ValueError: where a loader reads from that data set.
    """
    found = [
        getattr(one, "dataset", None) for one in pytree.tree_leaves(getattr(loaders, "iterables", loaders))
    ]
    if records is not None and any(one is not None and shares_records(records, one) for one in found):
        raise ValueError(
            f"{name}: reads the data set of the private records, whose exact accuracy is not covered by ε; "
            "evaluate on public data, or train with evaluate=PaidEvaluation(), which holds records out"
        )


def check_hyperparameters(module: Any, data: Any, records: Any) -> None:
    """Refuse hyper-parameters that hold private records: checkpoints and loggers would write them down.

    Args:
        module: LightningModule of the fit.
        data: its data module, or None; whatever tensors, arrays, frames and data sets are its arguments are data.
        records: data set of private records, or None.

    Raises:
        ValueError: for such a hyper-parameter; the message names it, and shows no value.
    """
    for owner in (module, data):
        for name, value in dict(getattr(owner, "hparams", {})).items():
            if _holds_data(value) and (owner is data or shares_memory(records, value)):
                raise ValueError(
                    f"save_hyperparameters: {name}, a {type(value).__name__} of {type(owner).__name__}, may hold "
                    f"private records, which checkpoints and loggers would write down; add ignore=[{name!r}]"
                )


def _holds_data(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor, an array, a frame or a data set, or a container of them."""
    if isinstance(value, list | tuple | set):
        return bool(depth) and any(_holds_data(part, depth - 1) for part in value)
    if isinstance(value, Mapping):
        return bool(depth) and any(_holds_data(part, depth - 1) for part in value.values())
    return (hasattr(value, "__array__") and getattr(value, "ndim", 1) > 0) or isinstance(value, Dataset)


def shares_records(private: Any, other: Any) -> bool:
    """Whether a data set reads from a data set of private records, or shares memory with it."""
    own = {id(leaf) for leaf, _ in leaves_of(private)}
    if not {*_objects_of(private)}.isdisjoint(_objects_of(other)):
        return True
    return any(id(leaf) in own or shares_memory(private, leaf) for leaf, _ in leaves_of(other))


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
