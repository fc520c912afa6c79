"""CelebA and Market-1501: images with attributes, grouped by person."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_switch
from pl_privknn.datamodules.datasets import ImageStore, LabeledImages
from pl_privknn.datamodules.folder import FileImages, image_shape_of
from pl_privknn.datamodules.published import SIZES, DamagedFileError, PublishedDataModule, check_attributes

#: In the order of list_attr_celeba.txt.
CELEBA_ATTRIBUTES: tuple[str, ...] = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs", "Big_Lips", "Big_Nose",
    "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows", "Chubby", "Double_Chin", "Eyeglasses",
    "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache",
    "Narrow_Eyes", "No_Beard", "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks",
    "Sideburns", "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick",
    "Wearing_Necklace", "Wearing_Necktie", "Young",
)  # fmt: skip


class CelebADataModule(PublishedDataModule):
    """CelebA (Liu et al. 2015): faces of celebrities with 40 attributes each; multi-label.

    The training partition is private (162,770 images of 8,192 people). A fixed shuffle of the test partition
    gives the public images, which are those that are asked about, and all the rest of it is for testing, as in
    Private-kNN (Zhu et al. 2020, section 4.4). The paper speaks of 60,000 test images; the published partition has
    19,962.

    **On disk**, in ``root/celeba``: the folder ``img_align_celeba`` with ``000001.jpg`` … ``202599.jpg`` (aligned and
    cropped, 178×218) and the five lists, from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, for non-commercial
    research only. torchvision compares the checksums of the lists and reads them. Images are stretched to
    ``image_size`` when they are first read and then kept as uint8 (2 GB at 64×64).

    :attr:`private_groups` numbers the people, who own their images where the unit of privacy is a person.

    Args:
        root: folder that holds (or will hold) the data.
        image_size: side of square images, or (height, width). Networks by name need square ones from YAML.
        attributes: names of the attributes to use, in this order; all 40 by default.
        public_examples: public images.
        test_examples: a fixed random choice of test images; all that are left by default.
        cache: keep decoded images in memory, as uint8.
        **kwargs: see :class:`~pl_privknn.datamodules.published.PublishedDataModule`.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files, and when it is
            read for a file that is no image (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing, or lists are not the published ones.
    """

    torchvision_name: ClassVar[str] = "CelebA"
    remedy: ClassVar[str] = (
        "put the lists and the unpacked folder img_align_celeba there, or pass download=True"
    )

    def __init__(
        self,
        root: str | Path = "data",
        *,
        image_size: int | tuple[int, int] = 64,
        attributes: Sequence[str] | None = None,
        public_examples: int | None = 800,
        test_examples: int | None = None,
        cache: bool = True,
        **kwargs: Any,
    ) -> None:
        names = check_attributes(attributes, CELEBA_ATTRIBUTES)
        super().__init__(
            root,
            num_classes=len(names),
            image_shape=image_shape_of(image_size),
            class_names=names,
            task="multilabel",
            public_examples=public_examples,
            test_examples=test_examples,
            **kwargs,
        )
        self.cache = check_switch("cache", cache)

    def load_private(self) -> LabeledImages:
        """The training partition, or ``private_records`` of its records."""
        people = self.torchvision_files(self.root, split="train").identity[:, 0]
        self.private_groups = people[self.part("private")[2]]
        return super().load_private()

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        published = self.torchvision_files(self.root, split="train" if name == "private" else "test")
        folder = self.root / "celeba" / "img_align_celeba"
        names = published.filename
        if missing := set(names).difference(os.listdir(folder)):
            raise FileNotFoundError(
                f"{folder}: {len(missing)} of {len(names)} images are missing, the first is {min(missing)}; unpack "
                "img_align_celeba.zip again"
            )
        store = FileImages([folder / file for file in names], self.image_shape, cache=self.cache)
        labels = published.attr[:, [CELEBA_ATTRIBUTES.index(n) for n in self.class_names]]
        return store, labels, self.rows_of(name, len(store))


_COLOURS_UP = ("black", "white", "red", "purple", "yellow", "gray", "blue", "green")
_COLOURS_DOWN = ("black", "white", "pink", "purple", "yellow", "gray", "blue", "green", "brown")
#: Attribute -> field of market_attribute.mat and the value that means 1.
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
_NAME = re.compile(r"(-1|\d{4})_c\d+s\d+_\d+_\d+\.jpg(\.jpg)?")
_NOT_PEOPLE = (-1, 0)  # detections without a person, or without an annotated one
#: Images and people of the published folders.
_PUBLISHED = {"train": (12_936, 751), "test": (19_732, 750)}


class Market1501DataModule(PublishedDataModule):
    """Market-1501 (Zheng et al. 2015) with the attributes of Lin et al. (2019): multi-label, grouped by person.

    The 751 people of the training folder are split by a fixed shuffle: images of ``num_public_people`` of them
    are public, those of all others private. People of the test folder are others again; its images are for
    testing, without detections that show no person (names with ``0000`` or ``-1``). Private-kNN (Zhu et al. 2020,
    section 4.4) splits the training set into private data and a "validation set" for queries without saying how; by
    person, no person is on both sides, and 651 private people on 300 teachers are 2 people of some 37 images each,
    about as in the paper.

    27 annotations make the paper's 30 attributes: the age has four values, each a separate attribute.
    Annotations are of people, so all images of a person have the same ones.

    :attr:`private_groups` numbers the people of private images. A person has some 17 images, so a guarantee for one
    image says little about a person: set ``budget: {unit: person}``.

    **On disk**: the folders ``bounding_box_train`` and ``bounding_box_test`` with images named as in
    ``0002_c1s1_000451_03.jpg`` (person, camera and sequence, frame, box), in ``root/Market-1501-v15.09.15``;
    ``market_attribute.mat`` next to them or in their sub-folder ``attribute``. Images come from
    https://zheng-lab.cecs.anu.edu.au/Project/project_reid.html, attributes from
    https://github.com/vana77/Market-1501_Attribute, both for academic use; nothing is downloaded from here. Images
    are stretched to ``image_size`` when they are first read and then kept as uint8.

    Args:
        root: folder that holds the data.
        image_size: (height, width), or the side of square images.
        attributes: names of the attributes to use, in this order; all 30 by default.
        num_public_people: people whose images are public.
        verify: compare numbers of images and people with those of the published set. False for other data in this
            format.
        cache: keep decoded images in memory, as uint8.
        **kwargs: see :class:`~pl_privknn.datamodules.published.PublishedDataModule`; all images by default.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files. Messages never
            name a private image, since its name identifies the person.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    remedy: ClassVar[str] = (
        "unpack Market-1501-v15.09.15.zip there, with market_attribute.mat of "
        "https://github.com/vana77/Market-1501_Attribute in it"
    )

    def __init__(
        self,
        root: str | Path = "data",
        *,
        image_size: int | tuple[int, int] = (128, 64),
        attributes: Sequence[str] | None = None,
        num_public_people: int = 100,
        verify: bool = True,
        cache: bool = True,
        **kwargs: Any,
    ) -> None:
        names = check_attributes(attributes, MARKET_ATTRIBUTES)
        shape = image_shape_of(image_size)
        super().__init__(
            root, num_classes=len(names), image_shape=shape, class_names=names, task="multilabel", **kwargs
        )
        self.num_public_people = check_int("num_public_people", num_public_people)
        self.verify = check_switch("verify", verify)
        self.cache = check_switch("cache", cache)

    def load_private(self) -> LabeledImages:
        """Images of the private people."""
        people = self._images("train")[1]
        self.private_groups = people[self.part("private")[2]]
        return super().load_private()

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        folder = "test" if name == "test" else "train"
        (paths, people), table = self._images(folder), self._attributes(folder)
        labels = torch.stack([table[person] for person in people.tolist()]) if paths else torch.empty(0)
        labels = labels.reshape(-1, self.num_classes).long()
        hidden = self._folder(folder) if name == "private" else None
        store = FileImages(paths, self.image_shape, hidden, self.cache)
        if name == "test":
            rows = torch.arange(len(paths))
        else:
            public = torch.isin(people, self._public_people())
            rows = torch.nonzero(public if name == "public" else ~public).flatten()
        if self.counts[SIZES[name]] is not None:
            rows = self.cut(SIZES[name], self.shuffled(rows))[0]
        return store, labels, rows

    def _public_people(self) -> Tensor:
        people = torch.tensor(sorted(self._attributes("train")))
        if self.num_public_people >= len(people):
            raise ValueError(
                f"num_public_people={self.num_public_people}: there are {len(people)} people in the training "
                "folder, and some must be private; ask for fewer"
            )
        return self.shuffled(people)[: self.num_public_people]

    def _images(self, part: str) -> tuple[list[Path], Tensor]:
        """Paths, in order, and people of the images of the training or test folder."""
        folder = self._folder(part)
        with self.reading(folder):
            paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".jpg")
        if any(_NAME.fullmatch(path.name) is None for path in paths):
            raise DamagedFileError(
                f"{folder}: some images aren't named as in 0002_c1s1_000451_03.jpg; remove them"
            )
        people = torch.tensor([int(path.name.partition("_")[0]) for path in paths], dtype=torch.int64)
        found = len(paths), len(self._attributes(part))
        if self.verify and found != _PUBLISHED[part]:
            raise DamagedFileError(
                f"{folder}: {found[0]} images and {found[1]} people in the table, expected {_PUBLISHED[part]}; it "
                " was unpacked in part or altered. Unpack it again, or pass verify=False for data of your own in "
                "this format"
            )
        keep = ~torch.isin(people, torch.tensor(_NOT_PEOPLE))
        if not set(people[keep].tolist()) <= set(self._attributes(part)):
            raise DamagedFileError(
                f"market_attribute.mat doesn't have all people of {folder}; get the table of these images"
            )
        return [path for path, kept in zip(paths, keep.tolist(), strict=True) if kept], people[keep]

    def _attributes(self, part: str) -> dict[int, Tensor]:
        """Person of the training or test folder -> its attributes, int64 ``(num_classes,)``."""
        if part not in self._files:
            from scipy.io import loadmat

            places = [self._folder(part).parent / sub / "market_attribute.mat" for sub in (".", "attribute")]
            path = next((place for place in places if place.is_file()), places[0])
            with self.reading(path), path.open("rb") as file:
                whole = loadmat(file, squeeze_me=True, struct_as_record=False)["market_attribute"]
                table = getattr(whole, part)
                people = [int(str(person)) for person in np.atleast_1d(table.image_index)]
                columns = []
                for field, value in (MARKET_ATTRIBUTES[name] for name in self.class_names):
                    column = np.atleast_1d(getattr(table, field))
                    if not np.isin(column, range(1, 5 if field == "age" else 3)).all():
                        raise ValueError(f"market_attribute.{part}.{field} has values out of range")
                    columns.append(column.astype(np.int64) == value)
                rows = torch.from_numpy(np.stack(columns, axis=1)).long()
                self._files[part] = dict(zip(people, rows, strict=True))
        return self._files[part]

    def _folder(self, part: str) -> Path:
        return self.root / "Market-1501-v15.09.15" / f"bounding_box_{part}"
