"""Shards of a table, all of them in one process."""

from benchmarks.simulated_shards import SimulatedGroup
from pl_privknn.neighbors.processes import Shard


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


def in_shards(shards, lead, follow):
    """``lead(shard, rows)`` of the first shard, whose orders the others carry out by ``follow(shard, rows)``."""
    exchange = SimulatedGroup(len(shards))
    total = sum(len(rows) for _, _, rows in shards)
    held = [
        (Shard(exchange.end(rank), first, stride, total), rows)
        for rank, (first, stride, rows) in enumerate(shards)
    ]
    exchange.run_command = [follow(*each) for each in held[1:]]
    return lead(*held[0])


def members_of(make, shards, features, labels, num_classes):
    """Teachers that hold a shard each, the first of which leads, and what joins them."""
    exchange = SimulatedGroup(len(shards))
    members = []
    for rank, (first, stride, rows) in enumerate(shards):
        member = make()
        member.shard = Shard(exchange.end(rank), first, stride, len(labels))
        member.fit(features[rows], labels[rows], num_classes)
        members.append(member)
    exchange.run_command = [member.run_command for member in members[1:]]
    return members, exchange
