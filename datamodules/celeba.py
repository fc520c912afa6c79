"""CelebA: 40 attributes of faces, split as in Private-kNN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_switch
from pl_privknn.datamodules.base import Overlap, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import fixed_shuffle
from pl_privknn.datamodules.formats.published import DamagedFileError, check_md5, find_file
from pl_privknn.datamodules.image_folder import FolderImages

#: In the order of list_attr_celeba.txt.
CELEBA_ATTRIBUTES: tuple[str, ...] = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs", "Big_Lips", "Big_Nose",
    "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows", "Chubby", "Double_Chin", "Eyeglasses",
    "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache",
    "Narrow_Eyes", "No_Beard", "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks",
    "Sideburns", "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick",
    "Wearing_Necklace", "Wearing_Necktie", "Young",
)  # fmt: skip
_TRAINING, _VALIDATION, _TEST = 0, 1, 2
_ATTRIBUTES, _PARTITION, _IDENTITIES = (
    "list_attr_celeba.txt",
    "list_eval_partition.txt",
    "identity_CelebA.txt",
)
_IMAGES = "img_align_celeba"
_REMEDY = (
    f"put {_ATTRIBUTES}, {_PARTITION}, {_IDENTITIES} and the unpacked folder {_IMAGES} there, or pass download=True "
    "(needs the package gdown)"
)


class CelebADataModule(PrivatePublicDataModule):
    """CelebA (Liu et al. 2015): faces of celebrities with 40 attributes each; multi-label.

    The training partition is private (162,770 images of 8,192 people). A fixed shuffle of the test partition
    gives the public images, which are those that are asked about, and all the rest of it is for testing, as in
    Private-kNN (Zhu et al. 2020, section 4.4). The paper speaks of 60,000 test images; the published partition has
    19,962 (39,829 with ``include_validation``).

    **On disk**, in ``root/celeba`` or ``root``: the folder ``img_align_celeba`` with ``000001.jpg`` …
    ``202599.jpg`` (aligned and cropped, 178×218), ``list_attr_celeba.txt``, ``list_eval_partition.txt`` and, for
    :attr:`private_groups`, ``identity_CelebA.txt``; from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, for
    non-commercial research only. Images are stretched to ``image_size`` when they are first read and then kept as
    uint8 (2 GB at 64×64).

    Where identities are there, :attr:`private_groups` numbers the people, so that teachers can be given all images of
    a person (``groups: data``).

    Args:
        root: folder that holds (or will hold) the data.
        download: fetch the files by torchvision (and gdown) where they are missing.
        image_size: side of square images, or (height, width). Networks by name need square ones from YAML.
        attributes: names of the attributes to use, in this order; all 40 by default.
        num_private: a fixed random choice of this many private records; all by default.
        num_public: public images.
        num_test: a fixed random choice of test images; all that are left by default.
        include_validation: take queries and test images from the validation partition too.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        verify: compare lists with the published checksums. False for other data in this format.
        cache: keep decoded images in memory, as uint8.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files, and when it is
            read for a file that is no image (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        image_size: int | tuple[int, int] = 64,
        attributes: Sequence[str] | None = None,
        num_private: int | None = None,
        num_public: int = 800,
        num_test: int | None = None,
        include_validation: bool = False,
        split_seed: int = 0,
        verify: bool = True,
        cache: bool = True,
        overlap: Overlap = "warn",
        **kwargs: Any,
    ) -> None:
        names = CELEBA_ATTRIBUTES if attributes is None else tuple(attributes)
        if unknown := [name for name in names if name not in CELEBA_ATTRIBUTES]:
            raise ValueError(f"attributes: {unknown[0]!r} is not one of {', '.join(CELEBA_ATTRIBUTES)}")
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        super().__init__(
            num_classes=len(names),
            image_shape=(3, check_int("image_size", height), check_int("image_size", width)),
            class_names=names,
            task="multilabel",
            overlap=overlap,
            **kwargs,
        )
        self.root = Path(root)
        self.download = download
        self.num_private = None if num_private is None else check_int("num_private", num_private)
        self.num_public = check_int("num_public", num_public)
        self.num_test = None if num_test is None else check_int("num_test", num_test)
        self.include_validation = check_switch("include_validation", include_validation)
        self.split_seed = check_int("split_seed", split_seed, 0)
        self.verify = check_switch("verify", verify)
        self.cache = check_switch("cache", cache)
        self._lists: tuple[list[str], Tensor, Tensor] | None = None

    def prepare_data(self) -> None:
        """Download the files if that was asked for and none of them is there."""
        if self.download and not any((folder / _ATTRIBUTES).is_file() for folder in self._folders()):
            from torchvision.datasets import CelebA

            CelebA(self.root, download=True)

    def load_private(self) -> LabeledImages:
        """The training partition, or ``num_private`` records of it."""
        rows = self._rows(_TRAINING)
        if self.num_private is not None:
            if self.num_private > len(rows):
                raise ValueError(
                    f"num_private={self.num_private}: the training partition has {len(rows)} images; ask for "
                    "fewer, or leave num_private out"
                )
            rows = rows[fixed_shuffle(len(rows), self.split_seed)[: self.num_private].sort().values]
        self.private_groups = self._people(rows)
        return self._labeled(rows)

    def load_public(self) -> PublicDataset:
        """The first ``num_public`` images of the shuffled test partition."""
        rows = self._held_out()[: self.num_public]
        part = self._labeled(rows)
        return PublicDataset(part.store, self.num_classes, part.labels, self.task)

    def load_test(self) -> LabeledImages:
        """The rest of the test partition, or ``num_test`` of it."""
        stop = None if self.num_test is None else self.num_public + self.num_test
        return self._labeled(self._held_out()[self.num_public : stop])

    def _held_out(self) -> Tensor:
        rows = self._rows(_TEST)
        if self.include_validation:
            rows = torch.cat([rows, self._rows(_VALIDATION)])
        if self.num_public + (self.num_test or 1) > len(rows):
            raise ValueError(
                f"num_public={self.num_public}, num_test={self.num_test}: there are {len(rows)} images that aren't "
                "private; ask for fewer"
            )
        return rows[fixed_shuffle(len(rows), self.split_seed)]

    def _labeled(self, rows: Tensor) -> LabeledImages:
        names, values, _ = self._read()
        folder = self._image_folder()
        chosen = [CELEBA_ATTRIBUTES.index(name) for name in self.class_names]
        store = FolderImages(
            [folder / names[row] for row in rows.tolist()], self.image_shape, cache=self.cache
        )
        return LabeledImages(store, values[rows][:, chosen], self.num_classes, _ATTRIBUTES, self.task)

    def _rows(self, partition: int) -> Tensor:
        _, _, partitions = self._read()
        return torch.nonzero(partitions == partition).flatten()

    def _read(self) -> tuple[list[str], Tensor, Tensor]:
        """Names of all images, their attributes, int64 ``(n, 40)`` of 0 or 1, and their partitions."""
        if self._lists is not None:
            return self._lists
        path = self._list(_ATTRIBUTES)
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        if len(lines) < 2 or tuple(lines[1].split()) != CELEBA_ATTRIBUTES:
            raise DamagedFileError(
                f"{path}: its second line doesn't name the 40 attributes; get the file again"
            )
        names, values = _table(path, lines[2:], len(CELEBA_ATTRIBUTES))
        if lines[0].strip() != str(len(names)):
            raise DamagedFileError(
                f"{path}: its first line announces {lines[0].strip()[:20]!r} images and {len(names)} lines "
                "follow; it was cut off, get it again"
            )
        if not np.isin(values, (-1, 1)).all():
            raise DamagedFileError(f"{path}: some attributes are neither -1 nor 1; get the file again")
        self._lists = (
            names,
            torch.from_numpy((values > 0).astype(np.int64)),
            self._column(_PARTITION, names),
        )
        self._check_images(names)
        return self._lists

    def _people(self, rows: Tensor) -> Tensor | None:
        names, _, _ = self._read()
        if not any((folder / _IDENTITIES).is_file() for folder in self._folders()):
            return None
        return self._column(_IDENTITIES, names)[rows]

    def _column(self, file: str, names: list[str]) -> Tensor:
        """The numbers of a list with one number an image, in the order of ``names``."""
        path = self._list(file)
        listed, values = _table(path, path.read_text(encoding="ascii", errors="replace").splitlines(), 1)
        if listed != names:
            raise DamagedFileError(
                f"{path}: it lists {len(listed)} images, {_ATTRIBUTES} {len(names)}, and they must be the "
                "same in the same order; get both files again"
            )
        return torch.from_numpy(values[:, 0].astype(np.int64))

    def _check_images(self, names: list[str]) -> None:
        folder = self._image_folder()
        present = set(os.listdir(folder))
        if missing := [name for name in names if name not in present]:
            raise FileNotFoundError(
                f"{folder}: {len(missing)} of the {len(names)} images of {_ATTRIBUTES} are missing, the first is "
                f"{missing[0]}; unpack {_IMAGES}.zip again"
            )

    def _image_folder(self) -> Path:
        for folder in self._folders():
            if (folder / _IMAGES).is_dir():
                return folder / _IMAGES
        raise FileNotFoundError(
            f"CelebADataModule(root={str(self.root)!r}): no folder {_IMAGES} in "
            f"{', '.join(map(str, self._folders()))}; unpack {_IMAGES}.zip there, or {_REMEDY}"
        )

    def _folders(self) -> list[Path]:
        return [self.root / "celeba", self.root]

    def _list(self, name: str) -> Path:
        try:
            path = find_file(name, self._folders(), _REMEDY)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"CelebADataModule(root={str(self.root)!r}): {error}") from None
        if self.verify:
            from torchvision.datasets import CelebA

            check_md5(path, {file: md5 for _, md5, file in CelebA.file_list}[name])
        return path


def _table(path: Path, lines: list[str], columns: int) -> tuple[list[str], np.ndarray]:
    """Lines of a name and ``columns`` whole numbers: the names, and int32 ``(n, columns)``."""
    names: list[str] = []
    values = np.empty((len(lines), columns), dtype=np.int32)
    for row, line in enumerate(lines):
        name, *numbers = line.split()
        try:
            values[row] = [int(number) for number in numbers]
        except ValueError:  # another number of columns, or no number
            raise DamagedFileError(
                f"{path}: line {row + 1} of its table has {len(numbers)} values; want a name and {columns} "
                "whole numbers. The file was cut off or altered, get it again"
            ) from None
        names.append(name)
    return names, values
