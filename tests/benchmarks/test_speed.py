"""The speed benchmark runs, with fewer records."""

import argparse

import pytest

from benchmarks import speed


@pytest.mark.parametrize("row", ["labelling, one thread", "epoch"])
def test_ratios_are_measured(row, monkeypatch):
    smaller = {"_RECORDS": 4000, "_QUERIES": 100, "_DIMENSIONS": 64, "_IMAGES_OF_AN_EPOCH": 128}
    for name, value in smaller.items():
        monkeypatch.setattr(speed, name, value)
    (measured,) = speed.measure(argparse.Namespace(repeat=1, only=[row]))
    assert measured.part == row
    assert measured.results["ratio"] > 0
