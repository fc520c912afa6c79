"""Durable writing of files, and the digest of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from numpy.typing import NDArray


@contextlib.contextmanager
def replaced_durably(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically and durably: after a crash either the old or the new content is on disk.

    An exception in the block leaves the old file.

    Args:
        path: the file; its folder must exist.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes | str) -> None:
    """Replace a file by such content; see :func:`replaced_durably`. Text is written as UTF-8."""
    with replaced_durably(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON; see :func:`replaced_durably`.

    Of numbers that JSON does not have, NaN is written as null, and infinite ones as the texts ``inf`` and ``-inf``.
    """
    names = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}
    strict = json.loads(json.dumps(content), parse_constant=names.__getitem__)
    write_durably(path, json.dumps(strict, indent=2, ensure_ascii=False) + "\n")


def sync(descriptor: int) -> None:
    """Force a file's content to disk."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync alone leaves the data in the drive's cache there
    else:
        flush: Any = getattr(os, "fdatasync", os.fsync)
        flush(descriptor)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    if os.name != "posix":  # elsewhere folders can't be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def read_numbers(name: str, path: str | Path) -> NDArray[Any]:
    """Map the array of a ``.npy`` file into memory, to be read alone.

    Raises:
        ValueError: for a file that can't be read, by the argument that names it.
        FileNotFoundError: if there is none.
    """
    from numpy.lib import format as numpy_files

    if not Path(path).is_file():
        raise FileNotFoundError(f"{name}={str(path)!r}: there is no such file")
    try:
        return numpy_files.open_memmap(path, mode="r")
    except Exception:  # of a damaged header numpy raises whatever its tokenizer does
        raise ValueError(
            f"{name}={str(path)!r} can't be read as an array; write it with numpy.save, numbers alone"
        ) from None
