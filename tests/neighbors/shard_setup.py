"""Shards of a table, all of them in one process."""

import functools

from pl_privknn._processes import Shard
from pl_privknn.features.private_records import PrivateRecords
from tests.setup.threads import Threads


def by_row(count, size):
    """``(first, stride, rows)`` of shards of every so many-th record."""
    return [(rank, size, list(range(rank, count, size))) for rank in range(size)]


def in_order(*counts):
    """``(first, stride, rows)`` of shards one after another."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [
        (start, 1, list(range(start, start + count))) for start, count in zip(starts, counts, strict=True)
    ]


def parts_of(count):
    """Tables of 60 records and more in shards of many shapes, by name."""
    return {
        **{name: by_row(count, size) for size, name in enumerate(("one", "two", "three", "four"), 1)},
        "unequal": in_order(1, count - 10, 9),
        "empty": in_order(0, count - 20, 0, 20),
    }


def in_shards(shards, work):
    """``work(shard, rows)`` of every shard, each in a thread."""
    threads = Threads(len(shards))
    total = sum(len(rows) for _, _, rows in shards)
    held = [
        functools.partial(work, Shard(group, first, stride, total), rows)
        for group, (first, stride, rows) in zip(threads.groups, shards, strict=True)
    ]
    return threads.run(held)


class Members:
    """Teachers that hold a shard each.

    Attributes:
        members: the teachers; the first one charges and draws.
        shards: theirs.
    """

    def __init__(self, make, shards, features, labels, num_classes, public=None):
        self.threads, self.members = Threads(len(shards)), [make() for _ in shards]
        self.shards, held = [], []
        for number, (group, (first, stride, rows)) in enumerate(
            zip(self.threads.groups, shards, strict=True)
        ):
            shard = Shard(group, first, stride, len(labels))
            self.shards.append(shard)
            records = PrivateRecords.of(
                features[rows],
                labels[rows],
                num_classes,
                shard=shard,
                public=None if public is None else public[number],
            )
            held.append(functools.partial(self.members[number].fit, records))
        self.threads.run(held)

    def each(self, work):
        """``work(member)`` of all, at the same time."""
        return self.threads.run([functools.partial(work, member) for member in self.members])

    def label(self, queries, ledger):
        """Releases of all, the first of which pays."""
        return self.each(lambda member: member.label(queries, self.paying(member, ledger)))

    def paying(self, member, run):
        """What a process gets to pay by: the run on the first one."""
        return paying(member, run, self.shards[self.members.index(member)])


def paying(member, run, shard):
    """Handle by which a process pays, with the run on the first one."""
    return member.paying(None if shard.group.rank else run, "record", shard)
