"""From the public side of one's own data to a configuration that runs: which teacher, why, and what to expect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pl_privknn._checks import check_int
from pl_privknn.datamodules.arrays import image_shape
from pl_privknn.datamodules.folder import SUFFIXES
from pl_privknn.datamodules.tables import Table
from pl_privknn.documents import write_yaml
from pl_privknn.planning.options import SEARCHED
from pl_privknn.planning.vote_search import Found, search_settings

_NAMES = {"private-knn": "Private-kNN", "reverse-knn": "reverse kNN"}
_ARRAYS = ("private_images", "private_labels", "public_images", "public_truth", "test_images", "test_labels")
_NEEDED = _ARRAYS[:3]


@dataclasses.dataclass(frozen=True)
class PublicSide:
    """What may be known of one's data without looking at a private record.

    Attributes:
        data: the ``data`` section of a configuration.
        public: number of public examples.
        num_classes: number of classes.
        image_shape: channels, height and width.
    """

    data: dict[str, Any]
    public: int
    num_classes: int
    image_shape: tuple[int, int, int]


def public_side(path: str | Path, num_classes: int | None = None) -> PublicSide:
    """Look at the public side of a folder of images, a folder of ``.npy`` files, or an ``.npz`` file.

    Sizes come from the public images' header, the classes from the test set (its folders or labels) unless they are
    given. Of private files only the names are used.

    Args:
        path: ``private/``, ``public/`` and ``test/`` with images; ``public_images.npy`` and so on; or one ``.npz``.
        num_classes: number of classes, for data without a test set.

    Raises:
        FileNotFoundError: where nothing of the kind is there.
        ValueError: where the number of classes can't be told.
    """
    path = Path(path)
    if (path / "public").is_dir():
        return _folder(path, num_classes)
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as archive:
            files = {name: str(path) for name in _ARRAYS if name in archive.files}
    else:
        files = {name: str(path / f"{name}.npy") for name in _ARRAYS if (path / f"{name}.npy").is_file()}
    if missing := [name for name in _NEEDED if name not in files]:
        raise FileNotFoundError(
            f"--data {path}: there is no {missing[0]}; want private/<class>/, public/ and test/<class>/ with "
            f"images, or {', '.join(_NEEDED)} and test_images, test_labels as .npy files or in one .npz"
        )
    shape = Table("public_images", files["public_images"]).shape()
    if num_classes is None:
        if "test_labels" not in files:
            raise ValueError(f"--data {path}: no test_labels tell the number of classes; give --num-classes")
        num_classes = int(Table("test_labels", files["test_labels"]).numbers().max()) + 1
    section = {"class_path": "ArraysDataModule", "init_args": {**files, "num_classes": num_classes}}
    return PublicSide(section, shape[0], num_classes, image_shape("public_images", shape, None))


def _folder(path: Path, num_classes: int | None) -> PublicSide:
    from PIL import Image

    public = sorted(file for file in (path / "public").rglob("*") if file.suffix.lower() in SUFFIXES)
    if not public:
        raise FileNotFoundError(f"--data {path}: there are no images in public/")
    if num_classes is None:
        classes = [entry for entry in (path / "test").glob("*") if entry.is_dir()]
        if len(classes) < 2:
            raise ValueError(f"--data {path}: test/<class>/ does not tell the classes; give --num-classes")
        num_classes = len(classes)
    with Image.open(public[0]) as image:
        side = min(64, max(8, min(image.size)))
    section = {"class_path": "ImageFolderDataModule", "init_args": {"root": str(path), "image_size": side}}
    return PublicSide(section, len(public), num_classes, (3, side, side))


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A teacher with its reasons.

    Attributes:
        teacher: the name of its plan.
        best: the best setting of each teacher that was tried.
        reasons: lines for a reader.
        config: the configuration as YAML, with comments.
    """

    teacher: str
    best: dict[str, Found]
    reasons: tuple[str, ...]
    config: str


def recommend(
    side: PublicSide, *, epsilon: float, delta: float, records: int, teacher: str | None = None
) -> Recommendation:
    """Recommend a teacher for one's data, and write its configuration.

    Args:
        side: see :func:`public_side`.
        epsilon: target ε.
        delta: target δ.
        records: number of private records, as it may be told to anybody.
        teacher: the one that is wanted; by default the one that does best on the stand-in.

    Raises:
        ValueError: for arguments out of range.
    """
    records = check_int("private_records", records, 10)
    best = {
        name: search_settings(
            name,
            epsilon=epsilon,
            delta=delta,
            records=records,
            public=side.public,
            num_classes=side.num_classes,
        )[0]
        for name in SEARCHED
    }
    chosen = max(best, key=lambda name: best[name].score) if teacher is None else teacher
    other = next(name for name in best if name != chosen)
    reasons = (
        f"{side.public} public examples, {side.num_classes} classes, images {'×'.join(map(str, side.image_shape))}; "
        f"{records} private records, as you state; ε {epsilon:g} at δ {delta:g}.",
        f"Teacher: {_NAMES[chosen]}. {_WHY[chosen]}",
        f"Expected where data are as easy as scikit-learn's digits: {100 * best[chosen].labels:.0f} % of its labels "
        f"right ({_NAMES[other]}: {100 * best[other].labels:.0f} %), and {100 * best[chosen].student:.0f} % of a "
        f"linear model that learns from them ({_NAMES[other]}: {100 * best[other].student:.0f} %). "
        "Harder data give less.",
    )
    header = "".join(f"# {line}\n" for line in reasons)
    return Recommendation(chosen, best, reasons, header + _config(side, best[chosen], chosen, epsilon, delta))


_WHY = {
    "reverse-knn": "Every record votes once, for its nearest cluster of public examples, so that ε does not grow "
    "with the number of queries, and all public examples are labelled.",
    "private-knn": "A random sample of the records votes on each query, so that one record weighs little.",
}


def _config(side: PublicSide, found: Found, teacher: str, epsilon: float, delta: float) -> str:
    """The configuration, with a comment at each section."""
    labeling = {**found.plan.fragment["labeling"], "epochs_per_round": 12}
    if teacher == "reverse-knn":  # its noise follows from ε, so that ε can be changed
        labeling["labeler"] = {"class_path": "ReverseKNN", "init_args": {"k": 1, "epsilon": epsilon}}
    labeling["budget"] = {"delta": delta, "max_epsilon": epsilon}
    about = "One round asks about the means of public clusters; the second smooths their noisy counts for nothing."
    sections = (
        (
            "The three parts must not overlap. Private records are read by the teacher alone.",
            {"data": side.data},
        ),
        ("Learns from released labels and unlabelled public images.", {"model": _MODEL}),
        (f"{about} A run whose worst case passes max_epsilon stops before it asks.", {"labeling": labeling}),
        (
            "Accuracy of the last epoch is reported; never pick the best one on the test set.",
            {"trainer": _TRAINER},
        ),
    )
    return "".join(
        f"# {text}\n{write_yaml(section, flow_style=None, width=100)}" for text, section in sections
    )


_MODEL = {
    "class_path": "VATStudent",
    "init_args": {"network": "small_cnn", "ema_decay": 0.99, "optimization": {"schedule_epochs": 12}},
}
_TRAINER = {"max_epochs": 24, "accelerator": "auto", "devices": 1}
