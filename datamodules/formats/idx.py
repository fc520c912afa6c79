"""The IDX file format of MNIST and its relatives, read with every check that a damaged file needs."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_UNSIGNED_BYTE = 0x08


class IDXError(ValueError):
    """A file is not the IDX file that it should be; the message names the file and never its contents."""


def read_idx(path: str | Path, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or compressed with gzip (whatever its name).

    The header is two zero bytes, the type code 0x08, the number of dimensions, and each dimension as a
    big-endian 32-bit number; the data follows, last dimension fastest.

    Args:
        path: the file.
        dimensions: 3 for images (n, height, width), 1 for labels (n).

    Returns:
        uint8 tensor with ``dimensions`` dimensions.

    Raises:
        IDXError: if the file is no IDX file, of another type or number of dimensions, cut off, too long, or
            damaged inside its gzip envelope.
        OSError: if it can't be read at all.
    """
    path = Path(path)
    data = _contents(path)
    if len(data) < 4 or data[0] != 0 or data[1] != 0:
        raise _damaged(path, "it doesn't begin as an IDX file does")
    if data[2] != _UNSIGNED_BYTE:
        raise _damaged(path, f"its type code is 0x{data[2]:02x}, want 0x08 (unsigned bytes)")
    if data[3] != dimensions:
        kind = {1: "labels", 3: "images"}.get(dimensions, "data")
        raise _damaged(path, f"it has {data[3]} dimensions, {kind} have {dimensions}")
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise _damaged(path, "it is cut off within its header")
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    if len(data) - start != math.prod(shape):
        state = "cut off" if len(data) - start < math.prod(shape) else "too long"
        raise _damaged(
            path, f"it is {state}: {len(data) - start} bytes of data where shape {tuple(shape)} is announced"
        )
    # A copy, because torch wants memory that may be written to.
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def _contents(path: Path) -> bytes:
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, "its gzip data is cut off or damaged") from error


def _damaged(path: Path, what: str) -> IDXError:
    return IDXError(f"{path}: {what}; put a sound copy in its place, or take it away and pass download=True")
