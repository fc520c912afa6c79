"""Rows that a device can take: the same code runs on the processor, with fewer records."""

import argparse

import pytest
import torch

from benchmarks import speed


def options(*rows, device="cpu"):
    return argparse.Namespace(repeat=1, only=rows, device=torch.device(device))


@pytest.mark.parametrize("row", ["labelling, one thread", "epoch"])
def test_ratios_are_measured_on_a_device(row, monkeypatch):
    for name, value in {
        "_RECORDS": 4000,
        "_QUERIES": 100,
        "_DIMENSIONS": 64,
        "_IMAGES_OF_AN_EPOCH": 128,
    }.items():
        monkeypatch.setattr(speed, name, value)
    (measured,) = speed.measure(options(row))
    assert measured.part == row
    assert measured.results["ratio"] > 0


def test_rows_of_the_processor_are_left_out_on_a_device():
    assert list(speed.measure(options("exact ε", "import", "HOG, 28 x 28", device="cuda"))) == []


def test_rows_of_a_device_follow_those_of_the_processor(monkeypatch):
    stored = {"epoch, cuda": {"results": {"ratio": 0.5}}, "epoch": {"results": {"ratio": 0.25}}}
    monkeypatch.setattr(speed, "entries", lambda name: stored)
    assert [line.split("|")[1].strip() for line in speed.table().splitlines()[2:]] == [
        "epochs a second of a student (`small_cnn`)",
        "epochs a second of a student (`small_cnn`), cuda",
    ]
