"""Base class of data modules: private, public and test parts, and their loaders."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pl_privknn import _lightning as pl
from pl_privknn._checks import InputError, check_choice, check_int, counted
from pl_privknn.config import HasInitArguments
from pl_privknn.datamodules.datasets import (
    TASKS,
    ImageShape,
    ImageStore,
    JoinedImages,
    LabeledImages,
    PublicDataset,
    TensorImages,
    as_part,
    common_images,
    first_of_each,
    known_rows,
    same_images,
)
from pl_privknn.datamodules.loaders import (
    Batches,
    LabeledSampler,
    LateStartLoader,
    UnlabeledSampler,
    take_batch,
)
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.partitions import PaidNames, UnnamedRecords
from pl_privknn.privacy.public_rows import DrawnRows, Release
from pl_privknn.privacy.redaction import redacted

if TYPE_CHECKING:
    from typing_extensions import Self

Overlap = Literal["leave_out", "error", "warn", "ignore"]
Unusable = Literal["leave_out", "error"]
_EVALUATED_AT_ONCE = 256  # images in a batch of validation, test and prediction
_MOST_CLASSES = 10**6  # each has a name, and each image may get a probability for it
#: The condition of a run whose classes no public data, and no argument, name.
CLASSES_ARE_PUBLIC = (
    "the names of the classes, which are those of the private records, and whether any record has several may become "
    "public"
)

#: Names of classes before they are paid for.
UNKNOWN = ("unknown 1", "unknown 2")


class PrivatePublicDataModule(HasInitArguments, pl.LightningDataModule):
    """Base class of data modules with a private, a public and a test part; the public part is served for training.

    A data module for new data is a subclass with three methods: :meth:`load_private`, :meth:`load_public`
    and :meth:`load_test` (and, where they make sense, :meth:`load_validation` and :meth:`load_predict`). They may
    return ordinary data sets of ``(x, y)``, with ``x`` of shape ``image_shape``: a public ``y`` is its truth.

    Training batches are ``{"labeled": (x, y), "unlabeled": x}``: float32 images in [0, 1] of shape
    ``(b, channels, height, width)``, or vectors ``(b, d)``, with ``y`` int64 ``(b,)``, or float32
    ``(b, num_classes)`` once soft labels were released; under ``"multilabel"`` always ``(b, num_classes)``. An epoch
    is one pass over the public images; the labelled part walks over the labels that exist when the epoch begins, as
    often as needed. Labels that change between epochs are followed without a reload. Nothing in the training loader
    holds private data or the public truth. Validation runs on the public images
    whose truth is known (unless there is a validation set), so public images serve training and validation
    and only the test set is unseen.

    The private part is loaded for ``fit`` alone and has no loader: labelers read it through :attr:`private`
    and :meth:`private_batches`. No argument is saved as a hyper-parameter, since arguments may hold data.

    Args:
        num_classes: number of classes, a public constant.
        image_shape: channels, height and width of every image, or the length of every vector, ``(d,)``.
        class_names: names of the classes; their numbers by default. Under ``"multilabel"`` the attributes'.
        task: ``"multiclass"`` (one class an image) or ``"multilabel"`` (``num_classes`` attributes of 0 or 1
            an image; labels everywhere are then int64 ``(n, num_classes)``).
        batch_size: labelled images in a training batch (of one process).
        unlabeled_batch_size: unlabelled images in a training batch; as many as labelled ones by default.
        num_workers: loader processes for each loader; 0 loads in the main process.
        seed: of the order of training examples, a public constant.
        public: ``"images"``, those of :meth:`load_public`, or ``"none"``, where there is no public image at all: one
            blank image is put in the public part then, from which nothing can be learned. Private training needs no
            more, nor does a teacher whose own model is released (``released: head``), as long as their features
            learn nothing from public images.
        name: a name that people know, for reports and privacy cards; the class's name by default.
        train_on_truth: label the public images with their truth from the start: the bound without privacy that
            labelers are compared with. Leave the labeler out then.
        overlap: what to do when an example is both public and in the test set, which would make test accuracy
            meaningless: ``"leave_out"`` of the public part, with a warning that counts them, ``"error"``, ``"warn"``
            or ``"ignore"`` (not even looked for). Only equal examples are found, no similar ones. The private images
            are not compared: what such a message says would depend on private data.
        unusable: what to do with records of a user's own data that cannot be used, such as an empty text or a file
            that cannot be decoded: ``"leave_out"``, each because of its own content alone, or ``"error"``. Those of
            public and test parts are counted in a warning; private ones are never mentioned.

    Attributes:
        num_classes: as given.
        image_shape: as given, a tuple.
        class_names: tuple of names, one per class.
        task: as given.
        private_groups: the person (or other unit) that each private record belongs to, int64 ``(n_private,)``,
            or None where every record is its own person; a subclass sets it in :meth:`load_private`. Private.
        private_ids: lasting numbers of the private records, int64 ``(n_private,)``, which stay with their records
            when others come and go, or None; likewise. Private.
        reads_alone: whether reading a private record uses that record alone, which a subclass states for data sets
            that are not this package's; the guarantee of a run has it as a condition otherwise.
        conditions: what the guarantee of a run on these data rests on, in words; a subclass whose classes are those
            of the private records says so.
        needs_private: whether an empty private set is refused; a subclass for a first stage on public data alone
            sets it to False.

    Raises:
        ValueError: for arguments out of range.
    """

    needs_private: bool = True
    reads_alone: bool = False
    private_in_shards: bool = False  # whether each process of a training loads different private records
    conditions: tuple[str, ...] = ()
    names: PaidNames | None = None  # classes and kinds of columns that the run pays for
    owes_names: bool = False  # whether they are still to be paid for
    leaves_out: ClassVar[str] = ""  # which private records ``unusable`` concerns, for people
    _holds_data = True

    def __init__(
        self,
        *,
        num_classes: int,
        image_shape: ImageShape,
        class_names: Sequence[str] | None = None,
        task: str = "multiclass",
        batch_size: int = 64,
        unlabeled_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        public: str = "images",
        name: str | None = None,
        train_on_truth: bool = False,
        overlap: Overlap = "leave_out",
        unusable: Unusable = "leave_out",
    ) -> None:
        super().__init__()
        self.num_classes = check_int("num_classes", num_classes, 2, _MOST_CLASSES)
        if len(image_shape) not in (1, 3):
            raise ValueError(
                f"image_shape={image_shape!r}: expected (channels, height, width), or (d,) of vectors"
            )
        self.image_shape: ImageShape = tuple(check_int("image_shape", side) for side in image_shape)
        names = tuple(class_names) if class_names is not None else tuple(map(str, range(self.num_classes)))
        if len(names) != self.num_classes or len(set(names)) != self.num_classes:
            raise ValueError(
                f"class_names: {len(set(names))} different names for num_classes={num_classes}; expected one per "
                "class"
            )
        self.class_names = names
        self.task = check_choice("task", task, TASKS)
        self.private_groups: Tensor | None = None
        self.private_ids: Tensor | None = None
        self.batch_size = check_int("batch_size", batch_size)
        unlabeled = batch_size if unlabeled_batch_size is None else unlabeled_batch_size
        self.unlabeled_batch_size = check_int("unlabeled_batch_size", unlabeled)
        self.num_workers = check_int("num_workers", num_workers, 0)
        self.seed = check_int("seed", seed, 0)
        self.has_public = check_choice("public", public, ("images", "none")) == "images"
        if train_on_truth and not self.has_public:
            raise ValueError(
                'train_on_truth=True, and public="none" leaves nothing to train on; drop one of them'
            )
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise ValueError(f"name={name!r}: expected a text, or leave it out")
        self.name = name
        self.train_on_truth = train_on_truth
        self.overlap = check_choice("overlap", overlap, get_args(Overlap))
        self.unusable = check_choice("unusable", unusable, get_args(Unusable))
        self._private: LabeledImages | None = None
        self._public: PublicDataset | None = None
        self._test: LabeledImages | None = None
        self._validation: LabeledImages | None = None
        self._predict: ImageStore | None = None

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Names of the attributes where ``task`` is ``"multilabel"``; none otherwise."""
        return self.class_names if self.task == "multilabel" else ()

    # ------------------------------------------------------------------ what a subclass says

    def load_private(self) -> LabeledImages:
        """Load the private images and labels; called once, for ``fit`` only."""
        raise NotImplementedError(f"{type(self).__name__} must define load_private() -> LabeledImages")

    def load_public(self) -> PublicDataset:
        """Load the public images, with their true labels where these are known; called once."""
        raise NotImplementedError(f"{type(self).__name__} must define load_public() -> PublicDataset")

    def load_test(self) -> LabeledImages:
        """Load the test images and labels, possibly none; called once."""
        raise NotImplementedError(f"{type(self).__name__} must define load_test() -> LabeledImages")

    def load_validation(self) -> LabeledImages | None:
        """Load a validation set; None (the default) validates on public images with known labels."""
        return None

    def load_predict(self) -> ImageStore | None:
        """Load images to predict; None (the default) predicts the test images."""
        return None

    # ------------------------------------------------------------------ public examples that a run pays for

    @property
    def pays_for_public(self) -> bool:
        """Whether the run pays for the public examples, which are blank before."""
        return False

    @property
    def public_is_blank(self) -> bool:
        """Whether public examples must be paid for, and no run has drawn them yet."""
        return False

    def public_plan(self, budget: Budget) -> list[Charge]:
        """Charges of names (:meth:`names_plan`) and of public examples, where these are not at hand."""
        return self.names_plan(budget)

    def budget_left(self, budget: Budget) -> Budget:
        """Budget left to a teacher after the charges of :meth:`public_plan`."""
        return budget if self.names is None or budget.epsilon is None else self.names.left(budget)

    def names_plan(self, budget: Budget) -> list[Charge]:
        """Charges of the classes and kinds of columns that the run pays for, once each."""
        return [] if self.names is None or budget.epsilon is None else self.names.plan(budget)

    def unnamed_records(self, unit: str) -> UnnamedRecords:
        """**Private.** Classes and cells of the private records, from which names are released."""
        raise NotImplementedError(f"{type(self).__name__} pays for no names")

    def arguments_of(self, released: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
        """Arguments of this class that state the result of :func:`~pl_privknn.privacy.partitions.release_names`."""
        raise NotImplementedError(f"{type(self).__name__} pays for no names")

    def draw_public(self, budget: Budget, release: Release) -> DrawnRows:
        """Pay for the releases from which public examples are drawn, and draw them.

        Args:
            budget: of the run.
            release: adds the noise of a paid mechanism.
        """
        raise NotImplementedError(f"{type(self).__name__} pays for no public examples")

    def take_public(self, drawn: DrawnRows, folder: Path | None = None) -> None:
        """Take the result of :meth:`draw_public`, and write it to a run's folder for its user."""

    def columns(self) -> list[dict[str, Any]] | None:
        """Public description of the columns that examples are read from, for users of the model; None (the default).

        See :class:`~pl_privknn.datamodules.schema.Schema`.
        """
        return None

    def take_columns(self, columns: list[dict[str, Any]]) -> None:
        """Take the columns of a run, with bounds that it paid for."""

    def shown_texts(self, part: str, examples: Tensor) -> list[str] | None:
        """Beginnings of texts for a report; None (the default) where examples are no texts.

        Args:
            part: ``"public"`` or ``"test"``.
            examples: positions in the part, int64 ``(n,)``.
        """
        return None

    # Lightning's iterates the loaders, which need labels.
    __str__ = object.__repr__

    # ------------------------------------------------------------------ the parts

    def setup(self, stage: str | None = None) -> None:
        """Load the parts of ``stage`` that are not loaded yet; labels of the public images are never reset.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, or None for everything.

        Raises:
            FileNotFoundError: if data is missing.
            ValueError: if data is damaged, doesn't fit, or overlaps (see ``overlap``).
        """
        compared = self._public is not None and self._test is not None
        if stage in ("fit", None) and self._private is None:
            if self.owes_names:
                raise InputError(
                    "names: classes or kinds of columns are not known before they are paid for; train with the "
                    "result of recommend(data, ...).with_names(run_dir), or state them"
                )
            if self.leaves_out and self.unusable == "leave_out":
                # Said of all data: said of some, it would reveal a record.
                pl.rank_zero_info(
                    f"Private records {self.leaves_out} are left out, if there are any; unusable=error refuses them."
                )
            private = self.load_private()
            self._private = redacted(self._checked, "private", private, may_be_empty=not self.needs_private)
            for name, numbers in (("groups", self.private_groups), ("ids", self.private_ids)):
                if numbers is not None and (
                    numbers.shape != (len(self._private),) or numbers.dtype != torch.int64
                ):
                    raise InputError(f"private_{name}: expected int64, one number for each private record")
        if stage in ("fit", "validate", None) and self._public is None:
            self._public = self._checked("public", self.load_public() if self.has_public else self._blank())
            if self.train_on_truth:
                if self._public.truth is None:
                    raise ValueError("train_on_truth=True, but public examples have no labels; leave it out")
                self._public.set_labels(slice(None), self._public.truth)
            validation = self._without_private("load_validation")
            self._validation = None if validation is None else self._checked("validation", validation)
        if self._test is None:  # whatever the stage is: public examples are compared with it
            self._test = self._checked("test", self._without_private("load_test"), may_be_empty=True)
        if stage in ("predict", None) and self._predict is None:
            self._predict = self.load_predict()
        if not compared and self._public is not None and self._test is not None:
            self._public = self._without_overlap(self._public, self._test)

    def hold_out(self, held: Tensor) -> tuple[LabeledImages, Callable[[], None]]:
        """Take records out of the private part, with their persons and numbers.

        Args:
            held: bool ``(n,)``, for all private records.

        Returns:
            The records that are held out, and what puts them back. **Private**.
        """
        kept = self._private, self.private_groups, self.private_ids
        stays, held = torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
        whole = self.private
        if self.needs_private and len(stays) == 0:
            raise ValueError("evaluate: no private record is left to learn from; hold out a smaller share")
        self._private, out = whole.chosen(stays), whole.chosen(held)
        self.private_groups, self.private_ids = (None if of is None else of[stays] for of in kept[1:])

        def restore() -> None:
            self._private, self.private_groups, self.private_ids = kept

        return out, restore

    def with_private(self, more: LabeledImages) -> Self:
        """Copy with further private records appended, each of a new person where there are persons.

        Args:
            more: the records; not empty.
        """
        made, own = copy.copy(self), self.private
        store, labels = JoinedImages([own.store, more.store]), torch.cat([own.labels, more.labels])
        made._private = LabeledImages(store, labels, self.num_classes, task=self.task)
        for name in ("private_groups", "private_ids"):
            if (numbers := getattr(self, name)) is not None:
                new = torch.arange(len(more)) + int(numbers.max()) + 1
                setattr(made, name, torch.cat([numbers, new]))
        return made

    def _without_private(self, name: str) -> Any:
        """Call a loading method; refuse a part with private records, whose figures would be uncharged."""

        def refuse(*args: Any) -> Any:
            raise ValueError(
                f"{name}: returns private records, and their figures are not covered by ε; return public ones, or "
                "leave it out (validation runs on labelled public examples)"
            )

        kept, self._private = self._private, None
        self.__dict__["load_private"] = refuse
        try:
            made = getattr(self, name)()
        finally:
            del self.__dict__["load_private"]
            self._private = kept
        if made is not None and kept is not None and same_images(kept.store, getattr(made, "store", made)):
            refuse()
        return made

    def _blank(self) -> PublicDataset:
        blank = TensorImages(torch.zeros(1, *self.image_shape))
        return PublicDataset(blank, self.num_classes, task=self.task)

    def _checked(self, name: str, part: Any, *, may_be_empty: bool = False) -> Any:
        """Return a part after checking its shape, classes and task."""
        if len(part) == 0 and not may_be_empty:
            raise InputError(f"{type(self).__name__}: the {name} set is empty; it needs at least one example")
        part = as_part(part, name, name == "public", self.image_shape, self.num_classes, self.task)
        for what in ("task", "num_classes", "image_shape"):
            if getattr(part, what) != getattr(self, what):
                raise InputError(
                    f"{type(self).__name__}: the {name} set was made with {what}={getattr(part, what)!r}, the data "
                    f"module is {getattr(self, what)!r}; pass {what}= to LabeledImages and PublicDataset"
                )
        return part

    def _without_overlap(self, public: PublicDataset, test: LabeledImages) -> PublicDataset:
        ignored = self.overlap == "ignore" or not self.has_public or self.pays_for_public
        if ignored or not (common := common_images(public.store, test.store)):
            return public
        message = (
            f"overlap: {counted(len(common), 'public example')} in the test part (public example {common[0][0]} is "
            f"test example {common[0][1]}), where accuracy says nothing about unseen examples"
        )
        if self.overlap == "leave_out":
            rows = torch.ones(len(public), dtype=torch.bool)
            rows[[place for place, _ in common]] = False
            if not bool(rows.any()):
                raise ValueError(f"{message}; no other public example is left")
            warnings.warn(f"{message}; left out of the public part", stacklevel=3)
            return public.chosen(torch.nonzero(rows).flatten())
        if self.overlap == "error":
            raise ValueError(
                f'{message}. Remove them from one of the two parts, or set overlap="leave_out" or overlap="ignore"'
            )
        warnings.warn(message, stacklevel=3)
        return public

    def _usable(self, part: str, faults: Mapping[str, Tensor]) -> Tensor:
        """Positions of the records of a part that have no fault, int64; see ``unusable``.

        Args:
            part: ``"private"``, …
            faults: for what can be wrong with a record ("no label"), bool ``(n,)``, each entry a function of its
                record alone.
        """
        bad = torch.stack(list(faults.values())).any(0)
        found = [
            what
            if part == "private"
            else f"{int(rows.sum())} with {what} (the first is record {int(rows.int().argmax()) + 1})"
            for what, rows in faults.items()
            if bool(rows.any())
        ]
        # Predictions are in the order of the records, so that none may be missing.
        if found and (self.unusable == "error" or part == "predict"):
            raise InputError(
                f"{part}: some records cannot be used: {', '.join(found)}; correct or remove them"
            )
        if found and part != "private":
            warnings.warn(f"{part}: records are left out: {', '.join(found)}", stacklevel=4)
        return torch.nonzero(~bad).flatten()

    @property
    def private(self) -> LabeledImages:
        """The private images and labels, after ``setup("fit")``. For labelers and baselines alone.

        Whatever reads it owes the privacy accounting; nothing derived from it may be logged, stored or shown
        without having been released through a charged mechanism.
        """
        return _present("private", "fit", self._private)

    @property
    def public(self) -> PublicDataset:
        """The public images and their released labels, after ``setup("fit")`` or ``setup("validate")``."""
        return _present("public", "fit", self._public)

    @property
    def has_validation(self) -> bool:
        """Whether validation runs, after ``setup("fit")``: on its own set, or on public images of known truth."""
        truth = self.public.truth
        return self._validation is not None or (truth is not None and bool((truth >= 0).any()))

    @property
    def test(self) -> LabeledImages:
        """The test images and labels, after ``setup("fit")`` or ``setup("test")``; may be empty."""
        return _present("test", "test", self._test)

    def private_batches(self, batch_size: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all private images and labels, in order and in batches; for labelers and baselines only.

        Yields:
            Images, float32 ``(b, channels, height, width)``, or vectors ``(b, d)``, and labels, int64 ``(b,)`` or
            ``(b, num_classes)``.
        """
        check_int("batch_size", batch_size)
        for start in range(0, len(self.private), batch_size):
            rows = slice(start, start + batch_size)
            yield self.private.images(rows), self.private.labels[rows]

    def private_as_read(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all private records and labels, independent of released bounds; a resumed run compares them."""
        return self.private_batches()

    # ------------------------------------------------------------------ the loaders

    def train_dataloader(self) -> pl.CombinedLoader | DataLoader[Any]:
        """``{"labeled": (x, y), "unlabeled": x}``; see the class. May be called before labels exist.

        Without ``"labeled"`` for a module whose ``needs_labels`` is False.

        Batches raise :class:`~pl_privknn.datamodules.loaders.NoLabeledExamplesError` where an epoch begins
        and no public image has a label.
        """
        public = self.public
        if self.num_workers > 0:
            public.store.preload()
        world = {
            "num_replicas": self.trainer.world_size if self.trainer is not None else 1,
            "rank": self.trainer.global_rank if self.trainer is not None else 0,
            "seed": self.seed,
        }
        common = self._loader_options()
        inputs = self._inputs(public, training=True)
        images, size = Batches(inputs), self.unlabeled_batch_size
        sampler = UnlabeledSampler(images, size, **world)
        loaders = {"unlabeled": LateStartLoader(images, batch_size=size, sampler=sampler, **common)}
        if getattr(getattr(self.trainer, "lightning_module", None), "needs_labels", True):
            steps = -(-len(sampler) // size)
            loaders["labeled"] = LateStartLoader(
                Batches(inputs, public.table),
                batch_size=self.batch_size,
                sampler=LabeledSampler(public.table, steps * self.batch_size, **world),
                **common,
            )
        return pl.CombinedLoader(dict(sorted(loaders.items())), mode="max_size_cycle")

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """``(x, y)`` of the validation set, or of public images with known truth; nothing if there are none."""
        if self._validation is not None:
            return self._evaluation(Batches(self._inputs(self._validation), self._validation.labels))
        truth = self.public.truth
        if truth is None or not self.has_validation:
            return []
        known = torch.nonzero(known_rows(truth)).flatten()
        return self._evaluation(Batches(self._inputs(self.public), truth, known))

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """``(x, y)`` of the test set; nothing if it is empty."""
        return self._evaluation(Batches(self.test.store, self.test.labels)) if len(self.test) else []

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """``x`` of the images to predict: the subclass's own, or else the test set."""
        store = self._predict if self._predict is not None else self.test.store
        return self._evaluation(Batches(store)) if len(store) else []

    def _inputs(self, part: LabeledImages | PublicDataset, training: bool = False) -> ImageStore | Tensor:
        """Inputs in batches of a part: vectors where the module trains on frozen features, else images."""
        module = getattr(self.trainer, "lightning_module", None)
        give = getattr(module, "inputs_of", None)
        return part.store if give is None else give(part, public=part is self._public, training=training)

    def _evaluation(self, batches: Batches) -> DataLoader[Any]:
        # By keyword: where a trainer builds a loader anew, it passes batch_size by keyword itself.
        return DataLoader(batches, batch_size=_EVALUATED_AT_ONCE, shuffle=False, **self._loader_options())

    def _loader_options(self) -> dict[str, Any]:
        pin_memory = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return {"num_workers": self.num_workers, "pin_memory": pin_memory, "collate_fn": take_batch}


class OwnDataModule(PrivatePublicDataModule):
    """Base class of data modules of a user's own records, without the records that can't be used.

    A subclass says which parts it has and reads them; ``unusable`` says what is done with records that have a fault.
    """

    #: What a record without a label is called.
    unlabeled: ClassVar[str] = "no label"
    #: Whether private records that are equal in all that is read of them are one record.
    copies_are_one: ClassVar[bool] = False

    def _has(self, part: str) -> bool:
        """Whether the data have a part: ``"private"``, ``"public"``, ``"test"``, ``"val"`` or ``"predict"``."""
        raise NotImplementedError

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        """Records of a part, their labels (-1: not known), and faults by position; see :meth:`_usable`."""
        raise NotImplementedError

    def _numbers(self, faults: dict[str, Tensor]) -> dict[str, Tensor]:
        """``private_groups`` and ``private_ids`` of all private records; may add faults."""
        return {}

    def load_private(self) -> LabeledImages:
        """The private records and their labels, persons and ids."""
        return redacted(self._labeled, "private")

    def load_public(self) -> PublicDataset:
        """The public records, with their labels where there are any."""
        store, truth, faults = self._records("public")
        return PublicDataset(store, self.num_classes, truth, self.task).chosen(self._usable("public", faults))

    def load_test(self) -> LabeledImages:
        """The test records and their labels, or an empty set."""
        if not self._has("test"):
            return LabeledImages.none(self.image_shape, self.num_classes, self.task)
        return self._labeled("test")

    def load_validation(self) -> LabeledImages | None:
        """The validation records, if there are any."""
        return self._labeled("val") if self._has("val") else None

    def load_predict(self) -> ImageStore | None:
        """The records to predict, if there are any; none may be left out."""
        if not self._has("predict"):
            return None
        store, _, faults = self._records("predict")
        self._usable("predict", faults)
        return store

    def _labeled(self, part: str) -> LabeledImages:
        store, labels, faults = self._records(part)
        assert labels is not None
        if labels.shape == (len(store),):
            faults[self.unlabeled] = labels == -1
            labels = labels.where(labels != -1, 0)
        numbers = self._numbers(faults) if part == "private" else {}
        rows = self._usable(part, faults)
        whole = LabeledImages(store, labels, self.num_classes, f"{part}_labels", self.task)
        for name, of in numbers.items():
            if len(of) != len(store):
                raise InputError(f"{name}: expected int64, one number for each private record")
        if part == "private" and self.copies_are_one:
            keys = (of[rows].tolist() for of in (labels, *numbers.values()))
            rows = rows[first_of_each(zip(store.digests(rows), *keys, strict=True))]
        for name, of in numbers.items():
            setattr(self, name, of[rows])
        return whole.chosen(rows)


def check_unlike(names: Iterable[str], argument: str, public: bool = True) -> list[str]:
    """Return class names found in data; raise ``ValueError`` where two differ in case or spaces alone.

    Args:
        names: of the classes.
        argument: that names them in their place.
        public: whether the names may be shown.
    """
    found: dict[str, str] = {}
    for name in names:
        if (other := found.setdefault("".join(name.casefold().split()), name)) != name:
            which = f"the classes {other!r} and {name!r}" if public else "some classes of the private records"
            raise ValueError(
                f"{argument}: {which} differ in case or spaces alone; give them one name, or name all classes by "
                f"{argument}="
            )
    return list(found.values())


def _present(name: str, stage: str, part: Any) -> Any:
    if part is None:
        raise RuntimeError(f'the {name} data isn\'t loaded; call setup("{stage}") first (a trainer does)')
    return part
