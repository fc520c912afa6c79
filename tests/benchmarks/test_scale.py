"""What a round costs in shards: all teachers that take them are measured, and bytes are those that they must send."""

import argparse

from benchmarks import record, scale


def test_bytes_are_counted_and_the_table_extrapolates(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(scale, "STEPS", 5)
    options = argparse.Namespace(
        records=[700, 900], dimensions=8, queries=30, repeat=1, only=list(scale.TEACHERS)
    )
    for measured in scale.measure(options):
        record.store("scale", measured, {})
    found = {part: entry["results"] for part, entry in record.entries("scale").items()}
    m, width = 30, 9  # a bias beside eight features
    assert {part: one["bytes_sent_a_round"] for part, one in found.items()} == {
        "PrivateKNN": 2 * 16 * 300 * m,
        "ReverseKNN": 8 * 10 * m,
        "SufficientStatistics": 8 * 10 * width,
        "PreconditionedGradients": 6 * 8 * 10 * width,
        "IndKNN": 8 * (1 + 10) * m + 4,
        "NoisySGDTeacher": 5 * 8 * 10 * width,
        "PATE": 8 * 10 * m,
    }
    # A shard of 10⁶ records: what a round and a record take.
    entry = record.entries("scale")["SufficientStatistics"]
    entry["results"] |= {"seconds_a_record": 36e-6, "seconds_a_round": 36.0}
    stored = {**record.entries("scale"), "SufficientStatistics": entry}
    monkeypatch.setattr(scale, "entries", lambda name: stored)
    row = next(line for line in scale.table().splitlines() if "SufficientStatistics" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == ["0.0", "0.72 kB", "0.02"]
