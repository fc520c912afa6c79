"""From a user's arrays (in memory, or in .npy and .npz files) to images and labels of the expected form."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import shape_text

#: An array, or the path of a ``.npy`` or ``.npz`` file, or ``file.npz:member``.
ArrayOrPath = str | Path | np.ndarray | Tensor

_COLOURS = (1, 3)
_CHUNK = 4096


def array_shape(name: str, source: ArrayOrPath) -> tuple[int, ...]:
    """Shape of an array; of a file only the header is read.

    Args:
        name: of the argument, for messages and for the member of an ``.npz`` file.
        source: the array or its path.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, of another kind, or lacks the member.
    """
    if not isinstance(source, str | Path):
        return tuple(np.shape(source))
    path, wanted = _existing(name, source)
    try:
        if path.suffix == ".npy":
            return tuple(np.load(path, mmap_mode="r", allow_pickle=False).shape)
        with zipfile.ZipFile(path) as archive:
            members = [member.removesuffix(".npy") for member in archive.namelist()]
            with archive.open(f"{_member(wanted, members)}.npy") as file:
                version = np.lib.format.read_magic(file)
                read_header = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                return tuple(read_header(file)[0])
    except (OSError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise _unreadable(name, path, error) from None


def read_array(name: str, source: ArrayOrPath) -> Tensor:
    """The array as a tensor; ``.npy`` files stay on disk and are paged in when they are looked at.

    Args:
        name: of the argument, for messages and for the member of an ``.npz`` file.
        source: the array or its path.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, of another kind, or lacks the member, or for anything but numbers.
    """
    if isinstance(source, Tensor):
        return source.detach().cpu()
    array: Any = source
    if isinstance(source, str | Path):
        path, wanted = _existing(name, source)
        try:
            # "c": copy on write. The file is never changed, and torch gets memory that it may write to.
            array = np.load(path, mmap_mode="c" if path.suffix == ".npy" else None, allow_pickle=False)
            if path.suffix == ".npz":
                with array as members:
                    array = members[_member(wanted, members.files)]
        except (OSError, EOFError, zipfile.BadZipFile, ValueError) as error:
            raise _unreadable(name, path, error) from None
    array = np.asarray(array)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{name}: dtype {array.dtype}; want numbers of at most 64 bits")
    if not array.dtype.isnative or not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def image_shape(name: str, shape: tuple[int, ...], channels_last: bool | None) -> tuple[int, int, int]:
    """Channels, height and width of images in an array of ``shape``.

    Args:
        name: of the argument, for messages.
        shape: ``(n, h, w)``, ``(n, c, h, w)`` or ``(n, h, w, c)``.
        channels_last: where the colours are in four dimensions. None: in the dimension that is 1 or 3.

    Raises:
        ValueError: for another number of dimensions, or where the rule of None finds no single answer.
    """
    if len(shape) == 3:
        return (1, shape[1], shape[2])
    if _colours_are_last(name, shape, channels_last):
        return (shape[3], shape[1], shape[2])
    return (shape[1], shape[2], shape[3])


def as_images(name: str, array: Tensor, wanted: tuple[int, int, int], channels_last: bool | None) -> Tensor:
    """A view of ``array`` as ``(n, channels, height, width)``, after its values were checked.

    Args:
        name: of the argument, for messages.
        array: uint8 (0 … 255) or float (0 … 1); see :func:`image_shape` for its shapes.
        wanted: channels, height and width that every part of the data must have.
        channels_last: see :func:`image_shape`.

    Raises:
        ValueError: on a wrong shape, dtype or range; it shows no value.
    """
    shape = image_shape(name, tuple(array.shape), channels_last)
    if shape != wanted:
        raise ValueError(
            f"{name}: images of shape {shape} (channels, height, width), the public ones have {wanted}; "
            "bring all parts to one size"
        )
    if array.dtype != torch.uint8 and not array.is_floating_point():
        raise ValueError(
            f"{name}: dtype {array.dtype}; want uint8 with values 0 … 255 or float with values 0 … 1"
        )
    if array.is_floating_point() and not all(
        bool(((part >= 0) & (part <= 1)).all()) for part in array.split(_CHUNK)
    ):
        raise ValueError(
            f"{name}: float values outside [0, 1], or NaN; divide 0 … 255 data by 255, or pass it as uint8"
        )
    if array.ndim == 3:
        return array[:, None]
    last = _colours_are_last(name, tuple(array.shape), channels_last)
    return array.permute(0, 3, 1, 2) if last else array


def _colours_are_last(name: str, shape: tuple[int, ...], channels_last: bool | None) -> bool:
    if len(shape) != 4:
        raise ValueError(f"{name}: shape {shape_text(shape)}; want (n, h, w), (n, c, h, w) or (n, h, w, c)")
    if channels_last is not None:
        return channels_last
    first, last = shape[1] in _COLOURS, shape[3] in _COLOURS
    if first == last:
        raise ValueError(
            f"{name}: shape {shape_text(shape)} doesn't tell where the colours are; pass channels_last=True for "
            "(n, h, w, c) or channels_last=False for (n, c, h, w)"
        )
    return last


def _existing(name: str, source: str | Path) -> tuple[Path, str]:
    """The file, and the member to look for in it: the one that is named, or the argument's own name."""
    file, colon, member = str(source).rpartition(".npz:")
    path = Path(f"{file}.npz" if colon else source)
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{name}={str(source)!r}: want a .npy or .npz file (numpy.save, numpy.savez)")
    if not path.is_file():
        raise FileNotFoundError(f"{name}={str(source)!r}: there is no such file, seen from {Path.cwd()}")
    return path, member if colon else name


def _member(wanted: str, members: list[str]) -> str:
    if wanted in members:
        return wanted
    if len(members) == 1:
        return members[0]
    raise ValueError(f"it holds {', '.join(members) or 'nothing'} and no array called {wanted!r}")


def _unreadable(name: str, path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{name}={str(path)!r} can't be read ({type(error).__name__}: {error}); write it anew with numpy.save "
        "or numpy.savez, plain numbers only"
    )
