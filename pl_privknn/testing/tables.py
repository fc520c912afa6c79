"""Private tables for checks of a labeler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms import Adjacency


@dataclasses.dataclass(frozen=True)
class Table:
    """A private table, the queries that are asked about it, and the records in which neighbours differ.

    Attributes:
        name: what is special about it.
        features: float32 ``(n, d)``.
        labels: int64 ``(n,)``; of multi-label data ``(n, num_classes)``.
        queries: float32 ``(m, d)``; public.
        records: positions of the records that a neighbour lacks, or has another record in place of.
    """

    name: str
    features: Tensor
    labels: Tensor
    queries: Tensor
    records: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def without(self, record: int) -> Table:
        """The neighbour that lacks a record."""
        kept = torch.arange(len(self)) != record
        return dataclasses.replace(self, features=self.features[kept], labels=self.labels[kept])

    def with_other(self, record: int, features: Tensor, label: Tensor) -> Table:
        """The neighbour that has another record in place of one."""
        changed, labels = self.features.clone(), self.labels.clone()
        changed[record], labels[record] = features, label
        return dataclasses.replace(self, features=changed, labels=labels)


def neighbors_of(table: Table, adjacency: Adjacency) -> Iterator[tuple[str, Table, int | None]]:
    """Neighbours of a table in each of its ``records``.

    Yields:
        How it differs, the neighbour, and the position of the record that it lacks; None where one was exchanged.
    """
    for record in table.records:
        if adjacency == "add_remove":
            yield f"with and without record {record}", table.without(record), record
            continue
        features, label = table.features[record], table.labels[record]
        other = 1 - label if label.ndim else (label + 1) % (int(table.labels.max()) + 1)
        yield f"with another label of record {record}", table.with_other(record, features, other), None
        yield f"with other features of record {record}", table.with_other(record, -3 * features, label), None


# More records than a branch for small tables is likely to look for.
_MANY = 1500
# Records of rare classes, on both sides of ten; and how many records their table has beyond the others'.
_RARE, _MORE = (10, 9, 11, 1), 36


@dataclasses.dataclass(frozen=True)
class Examples:
    """Tables for one task.

    Args:
        task: ``"multiclass"`` or ``"multilabel"``.
        n: records of the larger tables.
        m: queries about each.
        c: classes or attributes.
        d: dimension of the features.
        generator: of what is drawn at random.
    """

    task: str
    n: int
    m: int
    c: int
    d: int
    generator: torch.Generator

    def clusters(self, name: str, classes: Tensor, records: Sequence[int]) -> Table:
        """Records around one centre for each class, and queries around the same centres."""
        asked = torch.arange(self.m) % self.c
        features = self._centres[classes] + self._normal(len(classes), self.d)
        queries = self._centres[asked] + self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(dict.fromkeys(records)))

    def tied(self) -> Table:
        """Records all at one place, where the queries are too."""
        labels = self._labels(self._shuffled(self.n))
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        places = (0, self.n // 2, self.n - 1)
        return Table("tied distances", torch.full((self.n, self.d), 5.0), labels, queries, places)

    def all(self) -> list[Table]:
        """Every table, a random one first."""
        random = self.clusters("random", torch.arange(self.n) % self.c, ())
        nearest = int(torch.cdist(random.queries[:1], random.features).argmin())
        first = tuple(dict.fromkeys((*range(min(self.c, self.n)), nearest, self.n - 1)))
        random = dataclasses.replace(random, records=first)
        scattered = self._scattered("no pattern", self.n, range(min(self.n, 4)))
        asked = scattered.features[: self.m]
        labels = self._labels((torch.arange(self.n) == 3).long())
        return [
            random,
            scattered,
            *self._decisive(),
            self.tied(),
            self._duplicates(),
            dataclasses.replace(
                random, name="one query many times", queries=random.queries[:1].repeat(self.m, 1)
            ),
            dataclasses.replace(scattered, name="queries that are records", queries=asked),
            dataclasses.replace(random, name="a class with one record", labels=labels, records=(3,)),
            *(self._scaled(f"a record of norm {factor:g}", factor) for factor in (1e4, 1e9)),
            self._scaled("a record that is not finite", torch.nan),
            *(self._scattered(f"{n} records", n, range(min(n, 4))) for n in (2, 3, self.c)),
            *self._rare(self.n + _MORE),
            dataclasses.replace(large := next(self._rare(_MANY)), records=large.records[:2]),
            self.clusters("many records", torch.arange(_MANY) % self.c, (0,)),
        ]

    def public(self) -> Tensor:
        """Features of public examples."""
        return self._centres.repeat(8, 1) + self._normal(8 * self.c, self.d)

    @functools.cached_property
    def _centres(self) -> Tensor:
        return 2 * self._normal(self.c, self.d)

    def _scattered(self, name: str, n: int, records: Sequence[int]) -> Table:
        """Records of all classes in no order, without clusters."""
        classes = self._shuffled(n)
        features, queries = 2 * self._normal(n, self.d), 2 * self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(records))

    def _shuffled(self, n: int) -> Tensor:
        return (torch.arange(n) % self.c)[torch.randperm(n, generator=self.generator)]

    def _scaled(self, name: str, factor: float) -> Table:
        """Table without a pattern, one of whose records is multiplied by a factor."""
        table = self._scattered(name, self.n, (1,))
        table.features[1] *= factor
        return table

    def _duplicates(self) -> Table:
        twice = self.clusters("duplicates", torch.arange(self.n // 2) % self.c, (0, 1, 2))
        labels = torch.stack([twice.labels, twice.labels.roll(1, 0)], 1).flatten(0, 1)
        return dataclasses.replace(twice, features=twice.features.repeat_interleave(2, dim=0), labels=labels)

    def _decisive(self) -> Iterator[Table]:
        """Tables in order of distance whose first record decides: the others have another class, or attributes."""
        line = torch.nn.functional.normalize(torch.ones(self.d), dim=0)
        features = 5 + torch.arange(1, self.n + 1)[:, None] * line
        for mine, theirs in self._kinds():
            queries = 5 + 1e-3 * self._normal(self.m, self.d)
            yield Table(
                "one record decides", features, torch.stack([mine] + [theirs] * (self.n - 1)), queries, (0,)
            )

    def _rare(self, n: int) -> Iterator[Table]:
        """Clusters in no order, some small; the first record and one of each small cluster are removed in turn."""
        for start in range(0, len(_RARE), self.c - 1):
            sizes = torch.tensor(_RARE[start : start + self.c - 1])
            rare = torch.arange(len(sizes)).repeat_interleave(sizes)
            rest = len(sizes) + torch.arange(n - len(rare)) % (self.c - len(sizes))
            classes = torch.cat([rare, rest])[torch.randperm(n, generator=self.generator)]
            one_each = torch.nn.functional.one_hot(classes, self.c)
            name = f"classes of {', '.join(map(str, sizes.tolist()))} records"
            table = self.clusters(name, classes, (0, *one_each.argmax(dim=0)[: len(sizes)].tolist()))
            yield table if self.task == "multiclass" else dataclasses.replace(table, labels=one_each)

    def _kinds(self) -> list[tuple[Tensor, Tensor]]:
        """Label of the deciding record, and label of all others."""
        if self.task == "multiclass":
            return [(torch.tensor(0), torch.tensor(self.c - 1)), (torch.tensor(self.c - 1), torch.tensor(0))]
        kinds = {(self.c, 0), *((s, t) for s in range(1, self.c + 1) for t in (s, self.c - s))}
        first = (torch.arange(self.c) < torch.arange(self.c + 1)[:, None]).long()
        return [(first[mine], first[theirs].flip(0)) for mine, theirs in sorted(kinds)]

    def _labels(self, classes: Tensor) -> Tensor:
        if self.task == "multiclass":
            return classes
        bits = torch.rand(len(classes), self.c, generator=self.generator) < 0.5
        return torch.where(classes[:, None] == 0, 1, bits.long())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)
