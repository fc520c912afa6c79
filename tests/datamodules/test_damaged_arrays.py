"""Damaged files of arrays end in one line that names the file, whatever is wrong with them."""

import numpy as np
import pytest

from pl_privknn.datamodules.array_files import Array
from pl_privknn.privacy.files import read_numbers

INPUTS = 80
_HEADERS = (b"\xff\xff\xff\x7f", b"(", b"}", b"9" * 12, b"\x00")


def damaged(data, random):
    """A file with a few bytes changed, cut off or put in, most of them near its beginning."""
    data = bytearray(data)
    for _ in range(1 + random.integers(3)):
        place = int(random.integers(len(data) if random.random() < 0.3 else min(len(data), 128)))
        way = random.integers(4)
        if way == 0:
            data[place] = random.integers(256)
        elif way == 1:
            data[place : place + 4] = _HEADERS[random.integers(len(_HEADERS))]
        elif way == 2:
            del data[place : place + int(random.choice([1, 8, len(data) // 2]))]
        else:
            data[place:place] = data[:16]
        data = data or bytearray(b"x")
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("npy", lambda path: Array("ids", path).numbers()),
        ("npy", lambda path: read_numbers("ids", path)),
        ("npz", lambda path: Array("ids", path).numbers()),
        ("npz", lambda path: Array("ids", path).shape()),
    ],
    ids=["a table", "numbers", "a member", "its shape"],
)
def test_damaged_arrays_are_one_line(tmp_path, kind, read):
    path, random, refused, array = tmp_path / f"ids.{kind}", np.random.default_rng(0), 0, np.arange(120)
    np.save(path, array) if kind == "npy" else np.savez_compressed(path, ids=array)
    kept = path.read_bytes()
    for _ in range(INPUTS):
        path.write_bytes(damaged(kept, random))
        try:
            read(path)
        except ValueError as error:  # anything else comes through
            refused += 1
            told = str(error)
            assert str(path) in told
            assert "\n" not in told
            assert "write it" in told
    assert refused > INPUTS / 4
