"""Base of the published data sets: places of files, fixed splits, and errors that name them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_installed, check_int
from pl_privknn.datamodules.base import Overlap, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import (
    ChosenImages,
    ImageStore,
    LabeledImages,
    PublicDataset,
    fixed_shuffle,
)


class DamagedFileError(ValueError):
    """Raised for a damaged file; the message names the file, the fault and the remedy."""


def check_attributes(attributes: Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Names of attributes, all of them by default; ``ValueError`` for one that isn't known."""
    names = tuple(known if attributes is None else attributes)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"attributes: {unknown[0]!r} is not one of {', '.join(known)}; choose among these")
    return names


#: Arguments with the sizes of parts.
SIZES = {"private": "private_records", "public": "public_examples", "test": "test_examples"}


class PublishedDataModule(PrivatePublicDataModule):
    """A published data set, split by fixed shuffles; a subclass defines :meth:`part`.

    Args:
        root: folder that holds (or will hold) the data.
        download: fetch the files by torchvision where they are missing.
        private_records: a fixed random choice of this many private records.
        public_examples: public images.
        test_examples: test images.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; published sets may hold an image
            twice, so it only warns here.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    #: Name of torchvision's class, which downloads, knows the checksums and reads.
    torchvision_name: ClassVar[str] = ""
    #: What to do where files are missing.
    remedy: ClassVar[str] = "pass download=True"

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        private_records: int | None = None,
        public_examples: int | None = None,
        test_examples: int | None = None,
        split_seed: int = 0,
        overlap: Overlap = "warn",
        **kwargs: Any,
    ) -> None:
        super().__init__(overlap=overlap, **kwargs)
        self.root = Path(root)
        self.download = download
        given = {
            "private_records": private_records,
            "public_examples": public_examples,
            "test_examples": test_examples,
        }
        self.counts = {name: None if n is None else check_int(name, n) for name, n in given.items()}
        self.split_seed = check_int("split_seed", split_seed, 0)
        self._files: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Download the files by torchvision if that was asked for and they are missing."""
        if self.download:
            self.torchvision_files(self.root, download=True)

    @abc.abstractmethod
    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """Images and labels of the file that a part comes from, and the part's rows, int64.

        Args:
            name: ``"private"``, ``"public"`` or ``"test"``.
        """

    def load_private(self) -> LabeledImages:
        """The private part, see the class."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """The public part, see the class."""
        store, labels, rows = self.part("public")
        return PublicDataset(ChosenImages(store, rows), self.num_classes, labels[rows], self.task)

    def load_test(self) -> LabeledImages:
        """The test part, see the class."""
        return self._labeled("test")

    def _labeled(self, name: str) -> LabeledImages:
        store, labels, rows = self.part(name)
        of = f"labels of the {name} part"
        return LabeledImages(ChosenImages(store, rows), labels[rows], self.num_classes, of, self.task)

    def shuffled(self, rows: Tensor | int, seed: int | None = None) -> Tensor:
        """Rows (or ``0 … rows - 1``) in the fixed order of ``split_seed``."""
        rows = torch.arange(rows) if isinstance(rows, int) else rows
        return rows[fixed_shuffle(len(rows), self.split_seed if seed is None else seed)]

    def cut(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The first rows, as many as an argument says (all where it is None), and the others.

        Raises:
            ValueError: if there are fewer.
        """
        wanted = self.counts[name]
        if wanted is not None and wanted > len(rows):
            raise ValueError(
                f"{name}={wanted}: there are {len(rows)} such images; ask for fewer, or leave {name} out"
            )
        return rows[:wanted], rows[len(rows) if wanted is None else wanted :]

    def chosen_private(self, rows: Tensor | int) -> Tensor:
        """All rows in their order, or a fixed random choice of ``private_records`` of them."""
        if self.counts["private_records"] is None:
            return torch.arange(rows) if isinstance(rows, int) else rows
        return self.cut("private_records", self.shuffled(rows))[0].sort().values

    def rows_of(self, name: str, count: int) -> Tensor:
        """Rows of a part in its file of ``count`` records: one that is all private, or one for both other parts."""
        if name == "private":
            return self.chosen_private(count)
        public, rest = self.cut("public_examples", self.shuffled(count))
        return public if name == "public" else self.cut("test_examples", rest)[0]

    def torchvision_files(self, root: Path, **options: Any) -> Any:
        """Torchvision's data set of these files, which compares their checksums; kept for other parts.

        Raises:
            FileNotFoundError: where they are missing or not the published ones.
            ImportError: where torchvision is not installed.
        """
        key = str(options)
        if key not in self._files:
            check_installed(type(self).__name__, "papers", "torchvision")
            import torchvision

            with self.reading(root):
                read = getattr(torchvision.datasets, self.torchvision_name)(root, **options)
            if "download" in options:  # in a separate process, or without need of what was read
                return read
            self._files[key] = read
        return self._files[key]

    @contextlib.contextmanager
    def reading(self, where: Path) -> Iterator[None]:
        """Convert any reader's exception into one that names the folder or file.

        Raises:
            FileNotFoundError: where files are missing or have another checksum.
            DamagedFileError: for any other exception.
        """
        try:
            yield
        except (FileNotFoundError, RuntimeError):  # torchvision's error for both
            raise FileNotFoundError(
                f"{type(self).__name__}(root={str(self.root)!r}): files are missing in {where}, cut off or altered; "
                f"{self.remedy}"
            ) from None
        # Damage shows itself as nearly any exception: OSError, IndexError, zlib.error and more.
        except Exception as error:
            raise DamagedFileError(
                f"{where}: no sound file of {type(self).__name__} ({type(error).__name__}: {error}); {self.remedy}"
            ) from None
