"""Tables of precomputed embeddings, for instance of sentences, in the place of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.array_files import ArrayOrPath
from pl_privknn.datamodules.formats.images import ImageStore
from pl_privknn.datamodules.formats.shards import in_shards, own_shard, shard_file
from pl_privknn.datamodules.formats.tables import dimension_of, numbers_of, rows_of


class EmbeddingsDataModule(PrivatePublicDataModule):
    """Private, public and test embeddings from arrays, from files, or from folders of them.

    An embedding of d numbers stands where other data modules have an image, as one of d channels and a single
    pixel, ``(d, 1, 1)``: ``torch.nn.Flatten()`` is the extractor that gives it back as a vector, and a student
    needs a network that begins by flattening. The numbers may be any finite floats.

    Files are ``.npy``, ``.npz`` or ``.parquet``; a folder holds ``.npy`` or ``.parquet`` files, one after another by
    their names. Of an ``.npz`` file the member with the argument's name is taken, or its only one, or the one named
    as in ``data.npz:x``. Of ``.parquet`` files (``pip install 'pl-privknn[parquet]'``) the column with the argument's
    name is taken, or the one named as in ``data.parquet:embedding`` or ``folder:embedding``; embeddings are a column
    of lists of equal length.

    Embeddings are not loaded: ``.npy`` files are mapped into memory, Parquet is read row group by row group, of which
    256 MB are kept. Values are looked through once, at ``setup``. Labels are held in memory.

    A training of several processes may have one file of private records for each: ``shards/features-{rank:05d}.npy``
    and ``shards/labels-{rank:05d}.npy`` are then each process's own, by its global rank. A file that is missing,
    empty, the same as another, or left over is refused by name.

    Embeddings must have been made by a model of public data, one record at a time: what is centred or scaled
    by private records carries them along.

    Args:
        private_embeddings: of the sensitive records, float, shape ``(n, d)``.
        private_labels: their classes, whole numbers, shape ``(n,)``; with ``task="multilabel"`` rows of 0 and 1,
            ``(n, num_classes)``, from ``.npy`` or ``.npz`` files.
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
            name: dimension_of(name, shard_file(name, source) if in_shards(source) else source)
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
        truth = None if source is None else numbers_of("public_truth", source)
        return PublicDataset(self._store("public_embeddings"), self.num_classes, truth, self.task)

    def load_test(self) -> LabeledImages:
        """``test_embeddings`` and ``test_labels``, or an empty set."""
        if self._sources["test_embeddings"] is not None:
            return self._labeled("test")
        return LabeledImages.none(self.image_shape, self.num_classes, self.task)

    def _labeled(self, part: str) -> LabeledImages:
        name = f"{part}_labels"
        labels = numbers_of(name, self._own.get(name, self._sources[name]))
        return LabeledImages(self._store(f"{part}_embeddings"), labels, self.num_classes, name, self.task)

    def _store(self, name: str) -> ImageStore:
        return rows_of(name, self._own.get(name, self._sources[name]))
