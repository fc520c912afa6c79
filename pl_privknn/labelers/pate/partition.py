"""How private records are dealt out to teachers, and for which neighbours each way keeps PATE's argument."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_int, shape_text
from pl_privknn.privacy.mechanisms import Conditional
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism
from pl_privknn.privacy.noise import NoiseSource


class Partitioner(abc.ABC):
    """Deals records out to parts, one part a record.

    PATE's argument: if two neighbouring tables can be partitioned so that they differ in **one** part, one
    teacher's vote changes and no other. Where the partition is drawn at random it is enough that the two
    random partitions can be *coupled* so: given such a coupling every draw has the guarantee, and a mixture
    of pairs that have it has it too, because Rényi and hockey-stick divergences are jointly (quasi-)convex.
    Each partitioner states for which neighbours that holds.

    The result is one part number for each record, so parts are disjoint whatever a subclass does; range,
    shape and dtype are checked.

    Attributes:
        adjacencies: neighbouring relations for which the statement is made.
        condition: what else has to hold, in words; empty where the argument holds outright. It goes into
            every record of the ledger.
        takes_groups: whether whole groups of records (all of one person) can be dealt out together.
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "replace_one")
    condition: ClassVar[str] = ""
    takes_groups: ClassVar[bool] = False

    def billed(self, mechanism: Mechanism) -> Mechanism:
        """What the ledger is charged for a release of ``mechanism``: with the condition, where there is one."""
        return Conditional(mechanism, self.condition) if self.condition else mechanism

    def assign(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        num_parts: int,
        noise: NoiseSource,
        groups: Tensor | None = None,
    ) -> Tensor:
        """The part of each record.

        Args:
            features: float, shape ``(n, d)``.
            labels: int64, shape ``(n,)``.
            num_classes: number of classes.
            num_parts: number of teachers.
            noise: protective randomness; the random choices of the partition belong to the guarantee.
            groups: int64, shape ``(n,)``; records with the same number go to the same part. None: each
                record is a group of its own.

        Returns:
            int64, shape ``(n,)``, values in ``[0, num_parts)``. Parts may be empty.

        Raises:
            ValueError: if there are fewer records (or groups) than parts, ``groups`` does not fit, or the
                partitioner can't deal out groups.
        """
        num_parts = check_int("num_parts", num_parts)
        unit = "records" if groups is None else "groups"
        if groups is not None:
            if not self.takes_groups:
                raise ValueError(
                    f"groups: {type(self).__name__} deals out single records; use RandomPartition"
                )
            groups = compact_groups(groups, len(labels))
        units = len(labels) if groups is None else int(groups.max()) + 1
        if units < num_parts:
            raise ValueError(
                f"the private table holds fewer {unit} than {num_parts} teachers; lower num_teachers to a "
                f"small fraction of the number of {unit}"
            )
        if groups is None:
            parts = self._deal(features, labels, num_classes, num_parts, noise)
        else:
            parts = self._deal_units(units, num_parts, noise)[groups]
        if parts.dtype != torch.int64 or parts.shape != labels.shape:
            raise ValueError(
                f"{type(self).__name__}: parts of shape {shape_text(parts.shape)}, {parts.dtype}; want int64 of "
                "shape (n,), one part for each record"
            )
        if bool(((parts < 0) | (parts >= num_parts)).any()):
            raise ValueError(f"{type(self).__name__}: some parts lie outside [0, num_parts={num_parts})")
        return parts

    def __repr__(self) -> str:
        """The settings; part of the key of a private cache."""
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({shown})"

    def _deal_units(self, units: int, num_parts: int, noise: NoiseSource) -> Tensor:
        """Parts of ``units`` groups that are known by their number alone; for ``takes_groups``."""
        raise NotImplementedError(f"{type(self).__name__} can't deal out groups")

    @abc.abstractmethod
    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        """Parts of single records, int64 ``(n,)``."""


class _UnitPartition(Partitioner):
    """Partitions that know records by their number alone, so that groups are dealt out as records are."""

    takes_groups: ClassVar[bool] = True

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return self._deal_units(len(labels), num_parts, noise)


class RandomPartition(_UnitPartition):
    """Each record's part is drawn independently of all other records: PATE's argument holds outright.

    Coupling: draw the same part for every record that both tables have. Under ``add_remove`` the part of the
    additional record differs by that record; under ``replace_one`` the new record takes the old one's draw.
    So one part differs, for every draw. The draws come from the labeler's noise source (a published seed
    would tie draws to row numbers, which shift when a record is removed). Sizes are multinomial: parts of
    240 records on average have a standard deviation of 15.

    With groups, one draw a group: the same holds for all records of one person together.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import RandomPartition
        >>> from pl_privknn.privacy import SeededNoise
        >>> features, labels = torch.rand(60, 4), torch.arange(60) % 3
        >>> settings = {"num_classes": 3, "num_parts": 5, "noise": SeededNoise(0)}
        >>> parts = RandomPartition().assign(features, labels, **settings)
        >>> parts.shape, sorted(set(parts.tolist()))
        (torch.Size([60]), [0, 1, 2, 3, 4])
    """

    def _deal_units(self, units: int, num_parts: int, noise: NoiseSource) -> Tensor:
        return noise.integers(units, num_parts)


class ClassBalancedPartition(Partitioner):
    """The records of each class are shuffled and dealt out in equal shares; conditional.

    The dealing of each class starts at a teacher drawn at random, so that classes do not depend on each
    other and small classes do not all land on the first teachers. If a record is replaced by one of its own
    class, it takes the old one's place and one part differs. Otherwise the size of a class changes, and up to
    two parts for each class concerned.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import ClassBalancedPartition
        >>> from pl_privknn.privacy import SeededNoise
        >>> features, labels = torch.rand(60, 4), torch.arange(60) % 3
        >>> settings = {"num_classes": 3, "num_parts": 5, "noise": SeededNoise(0)}
        >>> parts = ClassBalancedPartition().assign(features, labels, **settings)
        >>> parts.shape, sorted(set(parts.tolist()))
        (torch.Size([60]), [0, 1, 2, 3, 4])
    """

    condition: ClassVar[str] = (
        "the class-balanced partition covers the replacement of a record by one of the same class; adding, "
        "removing or relabelling a record can change two teachers for each class concerned, and the cost is "
        "that of one"
    )

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        starts = noise.integers(num_classes, num_parts)
        parts = torch.empty(len(labels), dtype=torch.int64)
        for label in range(num_classes):
            members = torch.nonzero(labels == label).flatten()
            members = members[random_permutation(len(members), noise)]
            parts[members] = (torch.arange(len(members)) + starts[label]) % num_parts
        return parts


def random_permutation(count: int, noise: NoiseSource) -> Tensor:
    """A random order of ``count`` places, int64 ``(count,)``.

    Sorts 62-bit keys: equal keys (for a million places, one chance in ten million) make the order a little
    less than uniform, which costs no privacy, because the order never depends on data.
    """
    return noise.integers(count, 1 << 62).argsort(stable=True)


def compact_groups(groups: Tensor, records: int) -> Tensor:
    """Group numbers ``0 … g-1``, int64 ``(n,)``, from any whole-number ids.

    Raises:
        ValueError: unless there is one whole number for each of ``records`` records.
    """
    if groups.shape != (records,) or groups.is_floating_point() or groups.is_complex():
        raise ValueError(
            f"groups: shape {shape_text(groups.shape)}, {groups.dtype}; want whole numbers of shape (n,), "
            "one id for each private record in the data module's order"
        )
    if records == 0:
        return groups.to(torch.int64)
    return torch.unique(groups, return_inverse=True)[1]
