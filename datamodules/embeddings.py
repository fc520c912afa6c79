"""Tables of precomputed embeddings, for instance of sentences, in the place of images."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.array_files import ArrayOrPath, array_shape, read_array
from pl_privknn.datamodules.formats.images import ImageStore, TensorImages
from pl_privknn.datamodules.formats.shards import in_shards, own_shard, shard_file

# Looked through for values that are not finite: 16 MB at a time.
_VALUES_AT_A_TIME = 1 << 22


class EmbeddingsDataModule(PrivatePublicDataModule):
    """Private, public and test embeddings from arrays, or from ``.npy``, ``.npz`` or ``.parquet`` files.

    An embedding of d numbers stands where other data modules have an image, as one of d channels and a single
    pixel, ``(d, 1, 1)``: ``torch.nn.Flatten()`` is the extractor that gives it back as a vector, and a student
    needs a network that begins by flattening. The numbers may be any finite floats.

    Of an ``.npz`` file the member with the argument's name is taken, or its only one, or the one named as in
    ``data.npz:x``. Of a ``.parquet`` file (which needs pyarrow) the column with the argument's name is taken,
    or the one named as in ``data.parquet:embedding``; embeddings are a column of lists of equal length.

    A training of several processes may have one file of private records for each: ``shards/features-{rank:05d}.npy``
    and ``shards/labels-{rank:05d}.npy`` are then each process's own, by its global rank. A file that is missing,
    empty, the same as another, or left over is refused by name.

    Embeddings must have been made by a model of public data, one record at a time: what is centred or scaled
    by private records carries them along.

    Args:
        private_embeddings: of the sensitive records, float, shape ``(n, d)``.
        private_labels: their classes, whole numbers, shape ``(n,)``.
        public_embeddings: of records that may be seen by anybody.
        public_truth: their classes where known, else -1; for evaluation only, never for training.
        test_embeddings: for the final accuracy; none by default.
        test_labels: their classes.
        num_classes: number of classes, a public constant.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a file is missing.
        ImportError: for a ``.parquet`` file without pyarrow.
        ValueError: if shapes, dtypes or values don't fit. Shapes are checked at once, values at ``setup``.
    """

    def __init__(
        self,
        private_embeddings: ArrayOrPath,
        private_labels: ArrayOrPath | Sequence[int],
        public_embeddings: ArrayOrPath,
        public_truth: ArrayOrPath | Sequence[int] | None = None,
        test_embeddings: ArrayOrPath | None = None,
        test_labels: ArrayOrPath | Sequence[int] | None = None,
        *,
        num_classes: int,
        **kwargs: Any,
    ) -> None:
        self._sources: dict[str, Any] = {
            "private_embeddings": private_embeddings,
            "private_labels": private_labels,
            "public_embeddings": public_embeddings,
            "public_truth": public_truth,
            "test_embeddings": test_embeddings,
            "test_labels": test_labels,
        }
        if (test_embeddings is None) != (test_labels is None):
            raise ValueError("test_embeddings and test_labels go together; pass both or neither")
        private = [self._sources[name] for name in ("private_embeddings", "private_labels")]
        if in_shards(private[0]) != in_shards(private[1]):
            raise ValueError(
                "private_embeddings and private_labels go together; name both with {rank}, or neither"
            )
        self.private_in_shards = in_shards(private[0])
        dimensions = {
            name: _dimension(name, shard_file(name, source) if in_shards(source) else source)
            for name, source in self._sources.items()
            if source is not None and name.endswith("_embeddings")
        }
        wanted = dimensions["public_embeddings"]
        for name, dimension in dimensions.items():
            if dimension != wanted:
                raise ValueError(
                    f"{name}: {dimension} numbers a record, the public ones have {wanted}; embed all parts by "
                    "the same model"
                )
        self._own: dict[str, str] = {}  # files that are this process's own
        super().__init__(num_classes=num_classes, image_shape=(wanted, 1, 1), **kwargs)

    def load_private(self) -> LabeledImages:
        """``private_embeddings`` and ``private_labels``."""
        if not self.private_in_shards:
            return self._labeled("private")
        rank, size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        for name in ("private_embeddings", "private_labels"):
            unlike = name == "private_embeddings"
            self._own[name] = own_shard(name, self._sources[name], rank, size, unlike)
        found = self._labeled("private")
        if not len(found):
            raise ValueError(
                f"private_embeddings={self._own['private_embeddings']!r}: the shard is empty; start fewer "
                "processes, or spread the records anew"
            )
        return found

    def load_public(self) -> PublicDataset:
        """``public_embeddings`` and ``public_truth``."""
        source = self._sources["public_truth"]
        truth = None if source is None else _read("public_truth", source)
        return PublicDataset(self._store("public_embeddings"), self.num_classes, truth)

    def load_test(self) -> LabeledImages:
        """``test_embeddings`` and ``test_labels``, or an empty set."""
        if self._sources["test_embeddings"] is not None:
            return self._labeled("test")
        nothing = TensorImages(torch.empty(0, *self.image_shape))
        return LabeledImages(nothing, torch.empty(0, dtype=torch.int64), self.num_classes)

    def _labeled(self, part: str) -> LabeledImages:
        name = f"{part}_labels"
        labels = _read(name, self._own.get(name, self._sources[name]))
        return LabeledImages(self._store(f"{part}_embeddings"), labels, self.num_classes, name)

    def _store(self, name: str) -> ImageStore:
        table = _read(name, self._own.get(name, self._sources[name]))
        if table.ndim != 2 or not table.is_floating_point():
            raise ValueError(
                f"{name}: shape {shape_text(table.shape)}, {table.dtype}; want float of shape (n, d)"
            )
        if not all(
            bool(torch.isfinite(part).all())
            for part in table.split(max(1, _VALUES_AT_A_TIME // table.shape[1]))
        ):
            raise ValueError(f"{name}: some values are NaN or infinite; leave those records out")
        return TensorImages(table[:, :, None, None])


def _dimension(name: str, source: ArrayOrPath) -> int:
    if _parquet(source):
        return int(_read(name, source).shape[-1])
    shape = array_shape(name, source)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"{name}: shape {shape_text(shape)}; want (n, d), one row a record")
    return shape[1]


def _read(name: str, source: Any) -> Tensor:
    if _parquet(source):
        return _read_parquet(name, str(source))
    return read_array(name, source if isinstance(source, Tensor | str | Path) else np.asarray(source))


def _parquet(source: Any) -> bool:
    return isinstance(source, str | Path) and ".parquet" in Path(str(source)).name


def _read_parquet(name: str, source: str) -> Tensor:
    """One column of a Parquet file: numbers as ``(n,)``, lists of equal length as ``(n, d)``."""
    file, _, column = source.rpartition(".parquet")
    path, column = Path(f"{file}.parquet"), column.removeprefix(":") or name
    if not path.is_file():
        raise FileNotFoundError(f"{name}={source!r}: there is no such file, seen from {Path.cwd()}")
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"{name}={source!r}: Parquet files need pyarrow; install it, or write a .npy file"
        ) from None
    known = parquet.read_schema(path).names
    if column not in known:
        raise ValueError(
            f"{name}={source!r}: it holds {', '.join(known)} and no column {column!r}; name one as in "
            "data.parquet:embedding"
        )
    values = parquet.read_table(path, columns=[column])[column].combine_chunks()
    if values.null_count:
        raise ValueError(f"{name}={source!r}: some rows of {column!r} are empty; leave those records out")
    if not hasattr(values, "flatten") or not hasattr(values.type, "value_type"):
        return read_array(name, values.to_numpy(zero_copy_only=False))
    flat = values.flatten().to_numpy(zero_copy_only=False)
    if not len(values) or len(flat) % len(values) or len(set(values.value_lengths().to_pylist())) != 1:
        raise ValueError(f"{name}={source!r}: the lists of {column!r} differ in length; want one length")
    return read_array(name, flat.reshape(len(values), -1))
