"""Private tables to try a labeler on, each with records to take out or to exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

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
        others: under ``replace_one``, a record ``(features, label)`` to put there, beside those made up.
    """

    name: str
    features: Tensor
    labels: Tensor
    queries: Tensor
    records: tuple[int, ...] = ()
    others: tuple[tuple[Tensor, Tensor], ...] = ()

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


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two neighbouring tables.

    Attributes:
        name: for messages.
        first: the larger one, where one is.
        second: its neighbour.
        adjacency: relation in which they are neighbours.
        removed: position in ``first`` of the record that ``second`` lacks; None where a record was exchanged.
    """

    name: str
    first: Table
    second: Table
    adjacency: Adjacency
    removed: int | None


def neighbors_of(table: Table, adjacency: Adjacency) -> Iterator[Pair]:
    """The neighbours of a table in its ``records``."""
    for record in table.records:
        if adjacency == "add_remove":
            name = f"'{table.name}' of {len(table)} records with and without record {record}"
            yield Pair(name, table, table.without(record), adjacency, record)
            continue
        for number, (features, label) in enumerate([*_exchanges(table, record), *table.others]):
            name = f"'{table.name}' of {len(table)} records, record {record} exchanged (way {number})"
            yield Pair(name, table, table.with_other(record, features, label), adjacency, None)


def _exchanges(table: Table, record: int) -> list[tuple[Tensor, Tensor]]:
    features, label = table.features[record], table.labels[record]
    other = 1 - label if label.ndim else (label + 1) % (int(table.labels.max()) + 1)
    return [(features, other), (-3 * features, label)]


class Makers:
    """Tables for one task.

    Args:
        task: ``"multiclass"`` or ``"multilabel"``.
        num_records: of the larger tables.
        num_queries: asked about each.
        num_classes: classes or attributes.
        dimension: of the features.
        seed: of what is drawn at random.
    """

    def __init__(
        self, task: str, num_records: int, num_queries: int, num_classes: int, dimension: int, seed: int
    ) -> None:
        self.task, self.n, self.m, self.c, self.d = task, num_records, num_queries, num_classes, dimension
        self._generator = torch.Generator().manual_seed(seed)
        self._centres = 2 * self._normal(self.c, self.d)
        #: A direction along which records lie in order of distance.
        self.line = torch.nn.functional.normalize(torch.ones(self.d), dim=0)

    def random(self, name: str = "random", n: int | None = None) -> Table:
        """Clusters, one a class; one record of each class, and the one nearest to a query, are to go."""
        n = self.n if n is None else n
        classes = torch.arange(n) % self.c
        features = self._centres[classes] + self._normal(n, self.d)
        asked = torch.arange(self.m) % self.c
        queries = self._centres[asked] + self._normal(self.m, self.d)
        nearest = int(torch.cdist(queries[:1], features).argmin())
        records = (*range(min(self.c, n)), nearest, n - 1)
        return Table(name, features, self._labels(classes), queries, tuple(dict.fromkeys(records)))

    def scattered(self, name: str = "no pattern", n: int | None = None) -> Table:
        """Records of all classes in one place, in no order; some of them are to go."""
        n = self.n if n is None else n
        classes = (torch.arange(n) % self.c)[torch.randperm(n, generator=self._generator)]
        features, queries = 2 * self._normal(n, self.d), 2 * self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(range(min(n, 4))))

    def in_order(self, name: str, labels: Tensor, n: int, records: Sequence[int]) -> Table:
        """Records on a line, nearest first for every query."""
        features = 5 + torch.arange(1, n + 1)[:, None] * self.line
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        return Table(name, features.float(), labels, queries.float(), tuple(records))

    def together(self, name: str = "tied distances", n: int | None = None) -> Table:
        """Records all at one place, where the queries are too."""
        n = self.n if n is None else n
        features = torch.full((n, self.d), 5.0)
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        return Table(name, features, self._labels(torch.arange(n) % self.c), queries, (0, n // 2, n - 1))

    def decisive(self) -> Iterator[Table]:
        """Tables in which one record decides: it is of one class (or set of attributes), all others of another."""
        for mine, theirs in self._kinds():
            labels = torch.stack([mine] + [theirs] * (self.n - 1))
            yield self.in_order("one record decides", labels, self.n, (0,))

    def all(self) -> list[Table]:
        """Every table, the random one first."""
        random = self.random()
        twice = self.random("duplicates", self.n // 2)
        doubled = dataclasses.replace(
            twice,
            features=twice.features.repeat_interleave(2, dim=0),
            labels=torch.stack([twice.labels, twice.labels.roll(1, 0)], 1).flatten(0, 1),
            records=(0, 1, 2),
        )
        alone = self._labels((torch.arange(self.n) == 3).long())
        far = self.scattered("a record of great norm")
        far.features[0] = 0
        far.features[1] *= 1e4
        wide = self.scattered("a record far out in some directions")
        wide.features[0, : self.d // 2] *= 1e4
        broken = self.scattered("a record that is not finite")
        broken.features[2] = torch.nan
        return [
            random,
            self.scattered(),
            *self.decisive(),
            self.together(),
            doubled,
            dataclasses.replace(random, name="a class with one record", labels=alone, records=(3,)),
            dataclasses.replace(far, records=(0, 1)),
            dataclasses.replace(wide, records=(0,)),
            dataclasses.replace(broken, records=(2,)),
            *(self.scattered(f"{n} records", n) for n in (2, 3, self.c)),
        ]

    def strangers(self, more: int) -> list[Table]:
        """Tables that have nothing in common with one another, nor with the random one; the last has more records."""
        random, alike = self.random("other labels"), self.random("labels all alike", self.n + more)
        same = torch.full((self.n + more,), self.c - 1)
        nobody = self.random("nobody near")
        return [
            dataclasses.replace(random, labels=random.labels.roll(1, 0)),
            self.scattered(),
            dataclasses.replace(nobody, features=nobody.features - 1000 * self.line),
            dataclasses.replace(alike, labels=self._labels(same)),
        ]

    def public(self) -> Tensor:
        """Features of public examples."""
        return self._centres.repeat(8, 1) + self._normal(8 * self.c, self.d)

    def _kinds(self) -> list[tuple[Tensor, Tensor]]:
        if self.task == "multiclass":
            return [(torch.tensor(0), torch.tensor(self.c - 1)), (torch.tensor(self.c - 1), torch.tensor(0))]
        first: Callable[[int], Tensor] = lambda ones: (torch.arange(self.c) < ones).long()  # noqa: E731
        kinds = {(self.c, 0), *((s, t) for s in range(1, self.c + 1) for t in (s, self.c - s))}
        return [(first(s), first(t).flip(0)) for s, t in sorted(kinds)]

    def _labels(self, classes: Tensor) -> Tensor:
        if self.task == "multiclass":
            return classes
        bits = torch.rand(len(classes), self.c, generator=self._generator) < 0.5
        return torch.where(classes[:, None] == 0, 1, bits.long())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)
