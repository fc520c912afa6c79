"""Estimated cost of a recommended run."""

import numpy as np
import pytest

from pl_privknn import recommend
from pl_privknn.cli.cost import cost_of

RECORDS, WIDTH = 1_000_000, 64


def memory(data):
    return cost_of(recommend(data, epsilon=1.0, private_records=RECORDS, num_classes=2))[1]


def test_vectors_in_a_mapped_file_are_not_counted_as_held_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    rows = {part: rng.normal(size=(60, WIDTH)).astype(np.float32) for part in ("private", "public", "test")}
    labels = {f"{part}_labels": np.arange(60) % 2 for part in ("private", "test")}
    tables = {**{f"{part}_embeddings": values for part, values in rows.items()}, **labels}
    (tmp_path / "mapped").mkdir()
    for name, values in tables.items():
        np.save(tmp_path / "mapped" / f"{name}.npy", values)
    np.savez(tmp_path / "held.npz", **tables)
    difference = memory(tmp_path / "held.npz") - memory(tmp_path / "mapped")
    assert difference == pytest.approx(1e-9 * (RECORDS + 120) * 4 * WIDTH)
