"""The speed benchmark runs, with fewer records."""

import argparse

import pytest
import torch

from benchmarks import speed


def options(*rows, device="cpu"):
    return argparse.Namespace(repeat=1, only=rows, device=torch.device(device))


@pytest.mark.parametrize("row", ["labelling, one thread", "epoch"])
def test_ratios_are_measured(row, monkeypatch):
    smaller = {"_RECORDS": 4000, "_QUERIES": 100, "_DIMENSIONS": 64, "_IMAGES_OF_AN_EPOCH": 128}
    for name, value in smaller.items():
        monkeypatch.setattr(speed, name, value)
    (measured,) = speed.measure(options(row))
    assert measured.part == row
    assert measured.results["ratio"] > 0


def test_a_device_takes_its_own_rows_and_one_that_fails_is_named_at_the_end(monkeypatch):
    seen = []

    def extraction(repeat, place, name, side):
        seen.append((name, place.type))
        if name == "resnet50":
            raise ValueError("no room")
        return {"ratio": 1.0}

    rows = {
        name: (*row[:3], extraction, *row[4:]) for name, row in speed.ROWS.items() if "extraction" in name
    }
    monkeypatch.setattr(speed, "ROWS", {**speed.ROWS, **rows})
    monkeypatch.setattr(speed, "_OF_DEVICES", (extraction,))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "pretended")
    found = []
    with pytest.raises(RuntimeError, match="extraction, resnet50: ValueError: no room"):
        found.extend(speed.measure(options(*list(speed.ROWS), device="cuda")))
    assert len(seen) == 4
    assert [one.part for one in found] == [
        f"extraction, {name}, cuda" for name, _ in seen if name != "resnet50"
    ]
    assert found[0].settings["device"] == "pretended"
