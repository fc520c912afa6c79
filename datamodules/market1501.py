"""Market-1501: 30 attributes of pedestrians, grouped by person."""

from __future__ import annotations

import re
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
from pl_privknn.datamodules.formats.published import DamagedFileError, find_file, read_mat
from pl_privknn.datamodules.image_folder import FolderImages

_COLOURS_UP = ("black", "white", "red", "purple", "yellow", "gray", "blue", "green")
_COLOURS_DOWN = ("black", "white", "pink", "purple", "yellow", "gray", "blue", "green", "brown")
#: Attribute -> field of market_attribute.mat and the value that stands for 1.
MARKET_ATTRIBUTES: dict[str, tuple[str, int]] = {
    "female": ("gender", 2),
    "long_hair": ("hair", 2),
    "short_sleeves": ("up", 2),
    "short_lower_body": ("down", 2),
    "trousers": ("clothes", 2),
    "hat": ("hat", 2),
    "backpack": ("backpack", 2),
    "bag": ("bag", 2),
    "handbag": ("handbag", 2),
    **{name: ("age", value) for value, name in enumerate(("young", "teenager", "adult", "old"), start=1)},
    **{f"up_{colour}": (f"up{colour}", 2) for colour in _COLOURS_UP},
    **{f"down_{colour}": (f"down{colour}", 2) for colour in _COLOURS_DOWN},
}
_TABLE = "market_attribute.mat"
_NAME = re.compile(r"(-1|\d{4})_c\d+s\d+_\d+_\d+\.jpg(\.jpg)?")
_NOT_PEOPLE = (-1, 0)  # detections that show nobody, or nobody who was annotated
#: Images and people of the published folders.
_PUBLISHED = {"bounding_box_train": (12_936, 751), "bounding_box_test": (19_732, 750)}


class Market1501DataModule(PrivatePublicDataModule):
    """Market-1501 (Zheng et al. 2015) with the attributes of Lin et al. (2019): multi-label, grouped by person.

    The 751 people of the training folder are split by a fixed shuffle: images of ``num_public_people`` of them
    are public, those of all others private. People of the test folder are others again; its images are for
    testing, without detections of nobody (names that begin with ``0000`` or ``-1``). Private-kNN (Zhu et al. 2020,
    section 4.4) splits the training set into private data and a "validation set" for queries without saying how; by
    person, nobody is on both sides, and 651 private people on 300 teachers are 2 people of some 37 images each,
    about what the paper tells.

    27 annotations make the paper's 30 attributes: the age has four values, each an attribute of its own.
    Annotations are of people, so all images of a person have the same ones.

    :attr:`private_groups` numbers the people of private images. A person has some 17 images, so a guarantee for one
    image says little about a person: pass ``groups: data`` to teachers that take groups.

    **On disk**: the folders ``bounding_box_train`` and ``bounding_box_test`` with images named as in
    ``0002_c1s1_000451_03.jpg`` (person, camera and sequence, frame, box), in ``root/Market-1501-v15.09.15`` or
    ``root``; ``market_attribute.mat`` beside them, in their sub-folder ``attribute`` or in
    ``root/Market-1501_Attribute``. Images come from
    https://zheng-lab.cecs.anu.edu.au/Project/project_reid.html, attributes from
    https://github.com/vana77/Market-1501_Attribute, both for academic use; nothing is downloaded from here. Images
    are stretched to ``image_size`` when they are first read and then kept as uint8.

    Args:
        root: folder that holds the data.
        image_size: (height, width), or the side of square images.
        attributes: names of the attributes to use, in this order; all 30 by default.
        num_public_people: people whose images are public.
        num_public: a fixed random choice of this many of their images; all by default.
        num_test: a fixed random choice of test images; all by default.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        verify: compare numbers of images and people with those of the published set. False for other data in this
            format.
        cache: keep decoded images in memory, as uint8.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files. Messages never
            name a private image, since its name tells the person.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    def __init__(
        self,
        root: str | Path = "data",
        *,
        image_size: int | tuple[int, int] = (128, 64),
        attributes: Sequence[str] | None = None,
        num_public_people: int = 100,
        num_public: int | None = None,
        num_test: int | None = None,
        split_seed: int = 0,
        verify: bool = True,
        cache: bool = True,
        overlap: Overlap = "warn",
        **kwargs: Any,
    ) -> None:
        names = tuple(MARKET_ATTRIBUTES) if attributes is None else tuple(attributes)
        if unknown := [name for name in names if name not in MARKET_ATTRIBUTES]:
            raise ValueError(f"attributes: {unknown[0]!r} is not one of {', '.join(MARKET_ATTRIBUTES)}")
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
        self.num_public_people = check_int("num_public_people", num_public_people)
        self.num_public = None if num_public is None else check_int("num_public", num_public)
        self.num_test = None if num_test is None else check_int("num_test", num_test)
        self.split_seed = check_int("split_seed", split_seed, 0)
        self.verify = check_switch("verify", verify)
        self.cache = check_switch("cache", cache)
        self._tables: dict[str, dict[int, Tensor]] | None = None

    def load_private(self) -> LabeledImages:
        """Images of the private people."""
        images = self._images("train")
        public = self._public_people()
        images = [(path, person) for path, person in images if person not in public]
        self.private_groups = torch.tensor([person for _, person in images], dtype=torch.int64)
        return self._labeled("train", images, hidden=self._folder("bounding_box_train"))

    def load_public(self) -> PublicDataset:
        """Images of the public people, or ``num_public`` of them."""
        public = self._public_people()
        images = [(path, person) for path, person in self._images("train") if person in public]
        part = self._labeled("train", self._choose("num_public", images))
        return PublicDataset(part.store, self.num_classes, part.labels, self.task)

    def load_test(self) -> LabeledImages:
        """Images of the test folder that show a person."""
        return self._labeled("test", self._choose("num_test", self._images("test")))

    def _choose(self, name: str, images: list[tuple[Path, int]]) -> list[tuple[Path, int]]:
        wanted: int | None = getattr(self, name)
        if wanted is None:
            return images
        if wanted > len(images):
            raise ValueError(
                f"{name}={wanted}: there are {len(images)} such images; ask for fewer, or leave {name} out"
            )
        return [images[row] for row in fixed_shuffle(len(images), self.split_seed)[:wanted].tolist()]

    def _labeled(
        self, part: str, images: list[tuple[Path, int]], hidden: Path | None = None
    ) -> LabeledImages:
        table = self._attributes()[part]
        labels = torch.stack([table[person] for _, person in images]) if images else torch.empty(0)
        store = FolderImages([path for path, _ in images], self.image_shape, hidden, self.cache)
        return LabeledImages(
            store, labels.reshape(-1, self.num_classes).long(), self.num_classes, _TABLE, self.task
        )

    def _public_people(self) -> set[int]:
        people = sorted(self._attributes()["train"])
        if self.num_public_people >= len(people):
            raise ValueError(
                f"num_public_people={self.num_public_people}: there are {len(people)} people in the training "
                "folder, and some must be private; ask for fewer"
            )
        order = fixed_shuffle(len(people), self.split_seed)
        return {people[place] for place in order[: self.num_public_people].tolist()}

    def _images(self, part: str) -> list[tuple[Path, int]]:
        """Paths, in order, and people of the images of the training or test folder."""
        folder = self._folder(f"bounding_box_{part}")
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".jpg")
        if any(_NAME.fullmatch(path.name) is None for path in paths):
            raise DamagedFileError(
                f"{folder}: some images aren't named as in 0002_c1s1_000451_03.jpg; take them away"
            )
        images = [(path, int(path.name.partition("_")[0])) for path in paths]
        published, people = _PUBLISHED[folder.name]
        if self.verify and len(images) != published:
            raise DamagedFileError(
                f"{folder}: {len(images)} images, want {published}; it was unpacked in part or altered. "
                "Unpack it again, or pass verify=False for data of your own in this format"
            )
        images = [(path, person) for path, person in images if person not in _NOT_PEOPLE]
        table = self._attributes()[part]
        if any(person not in table for _, person in images):
            raise DamagedFileError(
                f"{self._table_path()}: it doesn't have all people of {folder}; get the table that belongs to "
                "these images"
            )
        if self.verify and len(table) != people:
            raise DamagedFileError(
                f"{self._table_path()}: {len(table)} people in {part!r}, want {people}; get the file again"
            )
        return images

    def _attributes(self) -> dict[str, dict[int, Tensor]]:
        """For training and test folder: person -> its attributes, int64 ``(num_classes,)``."""
        if self._tables is None:
            path = self._table_path()
            structure = read_mat(path, ["market_attribute"], squeeze_me=True, struct_as_record=False)
            self._tables = {
                part: _people(
                    path, getattr(structure["market_attribute"], part, None), part, self.class_names
                )
                for part in ("train", "test")
            }
        return self._tables

    def _table_path(self) -> Path:
        places = [
            folder / sub
            for folder in (*self._roots(), self.root / "Market-1501_Attribute")
            for sub in (".", "attribute")
        ]
        try:
            return find_file(
                _TABLE, places, "get it from https://github.com/vana77/Market-1501_Attribute and put it there"
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(f"Market1501DataModule(root={str(self.root)!r}): {error}") from None

    def _folder(self, name: str) -> Path:
        for root in self._roots():
            if (root / name).is_dir():
                return root / name
        raise FileNotFoundError(
            f"Market1501DataModule(root={str(self.root)!r}): no folder {name} in "
            f"{' or '.join(map(str, self._roots()))}; unpack Market-1501-v15.09.15.zip there"
        )

    def _roots(self) -> list[Path]:
        return [self.root / "Market-1501-v15.09.15", self.root]


def _people(path: Path, part: Any, name: str, attributes: Sequence[str]) -> dict[int, Tensor]:
    """Attributes of each person of one part of the table."""
    where = f"{path}: market_attribute.{name}"
    remedy = "get the file again"
    columns = {}
    for field in ("image_index", *{MARKET_ATTRIBUTES[attribute][0]: None for attribute in attributes}):
        if not hasattr(part, field):
            raise DamagedFileError(f"{where} has no field {field!r}; {remedy}")
        columns[field] = np.atleast_1d(getattr(part, field))
    index = columns["image_index"]
    if any(column.shape != index.shape for column in columns.values()):
        raise DamagedFileError(f"{where}: its fields differ in length; {remedy}")
    rows = []
    for attribute in attributes:
        field, value = MARKET_ATTRIBUTES[attribute]
        if not np.isin(columns[field], range(1, 5 if field == "age" else 3)).all():
            raise DamagedFileError(f"{where}.{field} has values out of range; {remedy}")
        rows.append(columns[field].astype(np.int64) == value)
    try:
        people = [int(str(person)) for person in index]
    except ValueError:
        raise DamagedFileError(f"{where}.image_index holds other things than people; {remedy}") from None
    return dict(zip(people, torch.from_numpy(np.stack(rows, axis=1)).long(), strict=True))
