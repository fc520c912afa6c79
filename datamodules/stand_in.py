"""Public images with known truth in the place of private records, to choose settings without a look at those."""

from __future__ import annotations

import torch

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import fixed_shuffle
from pl_privknn.datamodules.formats.stores import ChosenImages
from pl_privknn.datamodules.formats.targets import known_rows


class PublicStandInDataModule(PrivatePublicDataModule):
    """The public images of another data module, split into "private", public and test images.

    Private records and the test set of ``data`` are not read. The "private" images are repeated up to ``records``,
    so that noise is as large beside them as it will be beside the real records: a count or a sum over all of them is
    as large. There are fewer different ones, so settings that suit the real records may be somewhat bolder, and the
    k nearest records are copies of k · share · images / records different ones.

    Args:
        data: the data module that a run is meant for; the truth of its public images must be known.
        records: about how many private records the run will have, a public constant.
        private_share: share of the images that stand in for private records.
        test_share: share that is kept for testing; the rest is public.
        seed: of the split, a public matter.

    Raises:
        ValueError: for arguments out of range; at ``setup`` where truth is not known, or a part gets no image.
    """

    def __init__(
        self,
        data: PrivatePublicDataModule,
        records: int,
        private_share: float = 0.5,
        test_share: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__(
            num_classes=data.num_classes,
            image_shape=data.image_shape,
            class_names=data.class_names,
            task=data.task,
            batch_size=data.batch_size,
            unlabeled_batch_size=data.unlabeled_batch_size,
            eval_batch_size=data.eval_batch_size,
            num_workers=data.num_workers,
            pin_memory=data.pin_memory,
            seed=data.seed,
            overlap="ignore",  # images that are there twice are not of one part more than of another
        )
        self.data = data
        self.records = check_int("records", records)
        self.private_share = check_open_unit("private_share", private_share)
        self.test_share = check_open_unit("test_share", test_share)
        if private_share + test_share >= 1:
            raise ValueError(
                f"private_share={private_share!r}, test_share={test_share!r}: they leave no public image; take less"
            )
        self.split_seed = check_int("seed", seed, 0)

    def prepare_data(self) -> None:
        """What the other data module does."""
        self.data.prepare_data()

    def load_private(self) -> LabeledImages:
        """The stand-in, repeated."""
        return self._labelled(0, self.records)

    def load_public(self) -> PublicDataset:
        """Images whose truth serves evaluation alone."""
        part = self._labelled(1)
        return PublicDataset(part.store, self.num_classes, part.labels, self.task)

    def load_test(self) -> LabeledImages:
        """Images that neither the teacher nor the student learned from."""
        return self._labelled(2)

    def _labelled(self, part: int, records: int | None = None) -> LabeledImages:
        self.data.setup("validate")  # the public part alone
        public = self.data.public
        if public.truth is None or not len(rows := torch.nonzero(known_rows(public.truth)).flatten()):
            raise ValueError(
                f"data: the public images of {type(self.data).__name__} have no truth to stand in for private "
                "labels; give it some (public_truth), or search on another data set"
            )
        rows = rows[fixed_shuffle(len(rows), self.split_seed)]
        ends = [0, *(round(share * len(rows)) for share in (self.private_share, 1 - self.test_share, 1))]
        chosen = rows[ends[part] : ends[part + 1]]
        if not len(chosen):
            raise ValueError(
                f"data: {len(rows)} public images of known truth are too few to split in three parts"
            )
        if records is not None:
            chosen = chosen.repeat(-(-records // len(chosen)))[:records]
        store = ChosenImages(public.store, chosen)
        return LabeledImages(
            store, public.truth[chosen], self.num_classes, "truth of public images", self.task
        )
