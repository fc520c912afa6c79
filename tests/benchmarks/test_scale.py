"""What a round costs in shards: bytes are those that a process sends, and the table extrapolates."""

import argparse
import functools

import pytest
import torch

from benchmarks import record, scale
from pl_privknn._processes import Shard
from tests.setup.threads import Threads


@pytest.mark.parametrize("name", scale.TEACHERS)
def test_bytes_of_a_round_are_those_that_a_process_sends(name, monkeypatch):
    monkeypatch.setattr(scale, "STEPS", 5)
    features, queries, threads = torch.randn(700, 8), torch.randn(30, 8), Threads(2)

    def in_shard(group):
        teacher = scale.TEACHERS[name].make()
        shard = Shard(group, group.rank, 2, len(features))
        scale._round(teacher, features[group.rank :: 2], queries, shard)

    threads.run([functools.partial(in_shard, group) for group in threads.groups])
    assert max(group.sent for group in threads.groups) == scale.TEACHERS[name].sent(30, 8)


def test_the_table_extrapolates(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(scale, "STEPS", 5)
    options = argparse.Namespace(
        records=[700, 900], dimensions=8, queries=30, repeat=1, only=list(scale.TEACHERS)
    )
    for measured in scale.measure(options):
        record.store("scale", measured, {"dimensions": 8})
    # A shard of 10⁶ records: what a round and a record take.
    stored = record.entries("scale")
    stored["SufficientStatistics"]["results"] |= {"seconds_a_record": 36e-6, "seconds_a_round": 36.0}
    monkeypatch.setattr(scale, "entries", lambda name: stored)
    row = next(line for line in scale.table().splitlines() if "SufficientStatistics" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == ["0.0", "0.72 kB", "0.02"]
