"""Private tables for checks of a labeler."""

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
        others: under ``replace_one``, a record ``(features, label)`` to put there, besides those made up.
        owners: person of each record, where persons are the unit; the first record of person ``i`` lies at ``i``.
    """

    name: str
    features: Tensor
    labels: Tensor
    queries: Tensor
    records: tuple[int, ...] = ()
    others: tuple[tuple[Tensor, Tensor], ...] = ()
    owners: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def units(self) -> int:
        """Number of records, or of persons."""
        return len(self if self.owners is None else self.owners.unique())

    def of_persons(self, each: int) -> Table:
        """As many persons as there were records, each with so many records at one place."""
        return dataclasses.replace(
            self,
            name=f"{self.name}, {each} records a person",
            features=self.features.repeat(each, 1),
            labels=self.labels.repeat(each, *[1] * (self.labels.ndim - 1)),
            owners=torch.arange(len(self)).repeat(each),
        )

    def _rows(self, record: int) -> Tensor:
        owners = torch.arange(len(self)) if self.owners is None else self.owners
        return owners == owners[record]

    def without(self, record: int) -> Table:
        """The neighbour that lacks a record, or its person."""
        kept = ~self._rows(record)
        owners = None if self.owners is None else self.owners[kept]
        return dataclasses.replace(
            self, features=self.features[kept], labels=self.labels[kept], owners=owners
        )

    def with_other(self, record: int, features: Tensor, label: Tensor) -> Table:
        """The neighbour that has another record in place of one, or of each one of a person."""
        changed, labels, rows = self.features.clone(), self.labels.clone(), self._rows(record)
        changed[rows], labels[rows] = features, label
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


# More records than a branch for small tables is likely to look for.
_MANY = 1500
# Records of rare classes, on both sides of ten; and how many records their table has beyond the others'.
_RARE, _MORE = (10, 9, 11, 1), 36


class Makers:
    """Tables for one task.

    Args:
        task: ``"multiclass"`` or ``"multilabel"``.
        private_records: of the larger tables.
        num_queries: asked about each.
        num_classes: classes or attributes.
        dimension: of the features.
        seed: of what is drawn at random.
    """

    def __init__(
        self, task: str, private_records: int, num_queries: int, num_classes: int, dimension: int, seed: int
    ) -> None:
        self.task, self.n, self.m, self.c, self.d = task, private_records, num_queries, num_classes, dimension
        self._generator = torch.Generator().manual_seed(seed)
        self._centres = 2 * self._normal(self.c, self.d)
        #: A direction along which records lie in order of distance.
        self.line = torch.nn.functional.normalize(torch.ones(self.d), dim=0)

    def random(self, name: str = "random", n: int | None = None) -> Table:
        """Clusters, one per class; one record of each class, and the one nearest to a query, are removed in turn."""
        n = self.n if n is None else n
        classes = torch.arange(n) % self.c
        features = self._centres[classes] + self._normal(n, self.d)
        asked = torch.arange(self.m) % self.c
        queries = self._centres[asked] + self._normal(self.m, self.d)
        nearest = int(torch.cdist(queries[:1], features).argmin())
        records = (*range(min(self.c, n)), nearest, n - 1)
        return Table(name, features, self._labels(classes), queries, tuple(dict.fromkeys(records)))

    def scattered(self, name: str = "no pattern", n: int | None = None) -> Table:
        """Records of all classes at one place, in no order; some of them are removed in turn."""
        n = self.n if n is None else n
        classes = (torch.arange(n) % self.c)[torch.randperm(n, generator=self._generator)]
        features, queries = 2 * self._normal(n, self.d), 2 * self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(range(min(n, 4))))

    def in_order(self, name: str, labels: Tensor, n: int, records: Sequence[int]) -> Table:
        """Records on a line, nearest first for every query."""
        features = 5 + torch.arange(1, n + 1)[:, None] * self.line
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        return Table(name, features.float(), labels, queries.float(), tuple(records))

    def together(self) -> Table:
        """Records all at one place, where the queries are too."""
        n, features = self.n, torch.full((self.n, self.d), 5.0)
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        return Table(
            "tied distances", features, self._labels(torch.arange(n) % self.c), queries, (0, n // 2, n - 1)
        )

    def decisive(self) -> Iterator[Table]:
        """Tables with one decisive record: it is of one class (or set of attributes), all others of another."""
        for mine, theirs in self._kinds():
            labels = torch.stack([mine] + [theirs] * (self.n - 1))
            yield self.in_order("one record decides", labels, self.n, (0,))

    def rare(self, n: int) -> Iterator[Table]:
        """Clusters in no order, some small; the first record and one of each small cluster are removed in turn."""
        for start in range(0, len(_RARE), self.c - 1):
            sizes = torch.tensor(_RARE[start : start + self.c - 1])
            rare = torch.arange(len(sizes)).repeat_interleave(sizes)
            rest = len(sizes) + torch.arange(n - len(rare)) % (self.c - len(sizes))
            classes = torch.cat([rare, rest])[torch.randperm(n, generator=self._generator)]
            features = self._centres[classes] + self._normal(n, self.d)
            queries = self._centres[torch.arange(self.m) % self.c] + self._normal(self.m, self.d)
            one_each = torch.nn.functional.one_hot(classes, self.c)
            labels = classes if self.task == "multiclass" else one_each
            records = (0, *one_each.argmax(dim=0)[: len(sizes)].tolist())
            name = f"classes of {', '.join(map(str, sizes.tolist()))} records"
            yield Table(name, features, labels, queries, tuple(dict.fromkeys(records)))

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
        huge = self.scattered("a record of huge norm")
        huge.features[1] *= 1e9
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
            dataclasses.replace(
                random, name="one query many times", queries=random.queries[:1].repeat(self.m, 1)
            ),
            dataclasses.replace(random, name="a class with one record", labels=alone, records=(3,)),
            dataclasses.replace(far, records=(0, 1)),
            dataclasses.replace(huge, records=(1,)),
            dataclasses.replace(wide, records=(0,)),
            dataclasses.replace(broken, records=(2,)),
            *(self.scattered(f"{n} records", n) for n in (2, 3, self.c)),
            *self.rare(self.n + _MORE),
            *(dataclasses.replace(table, records=table.records[:2]) for table in [next(self.rare(_MANY))]),
        ]

    def asked_about_records(self) -> tuple[Table, list[Table]]:
        """A table whose first records are the queries themselves, and one of other labels at the same places."""
        table = self.random("queries that are records")
        queries = table.features[: self.m].clone()
        asked = dataclasses.replace(table, queries=queries)
        return asked, [dataclasses.replace(asked, labels=asked.labels.roll(1, 0))]

    def many(self, more: int) -> tuple[Table, list[Table]]:
        """Two tables of many records that have nothing in common."""
        table = self.scattered("many records", _MANY)
        other = self.scattered("as many others", _MANY + more)
        alike = self._labels(torch.full((_MANY + more,), self.c - 1))
        return table, [dataclasses.replace(other, queries=table.queries, labels=alike)]

    def strangers(self, more: int) -> list[Table]:
        """Tables that have nothing in common with one another, nor with the random one; the last has more records."""
        random, alike = self.random("other labels"), self.random("labels all alike", self.n + more)
        same = torch.full((self.n + more,), self.c - 1)
        distant = self.random("no record near")
        return [
            dataclasses.replace(random, labels=random.labels.roll(1, 0)),
            self.scattered(),
            dataclasses.replace(distant, features=distant.features - 1000 * self.line),
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
