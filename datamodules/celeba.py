"""CelebA: 40 attributes of faces, split as in Private-kNN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from pl_privknn._checks import check_switch
from pl_privknn.datamodules.datasets import ImageStore, LabeledImages
from pl_privknn.datamodules.folder import FileImages, image_shape_of
from pl_privknn.datamodules.published import PublishedDataModule, check_attributes

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
