"""From the public side of one's own data to a configuration that runs: which teacher, why, and what to expect.

Settings of teachers that count votes are tried on public records that stand in for the private ones. The noise of
each setting follows from the target ε. What it does is tried: neighbours of the stand-in vote, as often as so many
records would, the planned mechanisms answer, and a linear model learns from the answers. Queries are the means of
public clusters, and public examples mix the noisy counts around them. Nothing private is read, so nothing is charged.
How far votes reach is kept: k neighbours among n sampled records reach as far as those among the stand-in's that are
the same share of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool, Selection, spread_scores
from pl_privknn.config import write_yaml
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.datamodules.arrays import image_shape
from pl_privknn.datamodules.folder import SUFFIXES
from pl_privknn.datamodules.tables import Table
from pl_privknn.features import HOG
from pl_privknn.labelers import PrivateKNN, ReverseKNN, Screening
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import AdditiveNoise, Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise

#: Teachers that are recommended, and what they are called.
TEACHERS = {"private-knn": "Private-kNN", "reverse-knn": "reverse kNN"}
_ARRAYS = ("private_images", "private_labels", "public_images", "public_truth", "test_images", "test_labels")
_NEEDED = _ARRAYS[:3]
# Neighbours, sampling rates, numbers of queries of Private-kNN; clusters of public examples of reverse kNN.
_NEIGHBORS = (20, 50, 100, 200, 400)
_RATES = (0.05, 0.15, 0.4)
_QUERIES = (50, 100, 200, 400)
_CLUSTERS = (20, 40, 80, 160, 320)
_SEEDS = 3
# How the search asks, and the configuration that it writes.
_SELECTION: dict[str, Any] = {"ask": "means", "spread": "kernel", "bandwidth": 0.45}
# How many of the best settings are tried with a screening too, the answers that it is planned for, its threshold in
# shares of k, and its noise over that of the votes.
_SCREENED, _ANSWERED, _THRESHOLD, _SIGMA_RATIO = 2, 0.8, 0.6, 3.0


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """Public records with known classes: features float ``(n, d)``, classes int64 ``(n,)``."""

    private: Tensor
    private_labels: Tensor
    public: Tensor
    public_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclasses.dataclass(frozen=True)
class Found:
    """A setting and what it did on the stand-in.

    Attributes:
        labeling: section of a configuration, without its budget.
        answers: of the queries that were asked.
        labels: share of the public examples' labels that are right.
        student: test accuracy of a linear model that learned from the answers.
    """

    labeling: dict[str, Any]
    answers: float
    labels: float
    student: float

    @property
    def score(self) -> float:
        """What settings are ranked by: the mean of both shares, each of some hundred examples of a few seeds."""
        return (self.labels + self.student) / 2


def nearest_votes(queries: Tensor, private: Tensor, labels: Tensor) -> Tensor:
    """Votes of the k nearest for each k, int64 ``(queries, k, classes)``."""
    order = torch.cdist(queries, private).argsort(1)
    return torch.nn.functional.one_hot(labels[order], int(labels.max()) + 1).cumsum(1)


@functools.cache
def digits() -> StandIn:
    """scikit-learn's digits with HOG features: the stand-in that is always at hand."""
    data, extract = DigitsDataModule(), HOG()
    parts = []
    for part in (data.load_private(), data.load_public(), data.load_test()):
        images = part.store.read(torch.arange(len(part)))
        parts.append(extract(images.float() / 255 if images.dtype == torch.uint8 else images))
    truth = data.load_public().truth
    assert truth is not None
    return StandIn(parts[0], data.load_private().labels, parts[1], truth, parts[2], data.load_test().labels)


def search_settings(
    teacher: str,
    *,
    epsilon: float,
    delta: float,
    records: int,
    public: int,
    num_classes: int = 10,
    stand_in: StandIn | None = None,
) -> list[Found]:
    """Try settings of a teacher at a target ε, best first.

    Args:
        teacher: one of :data:`TEACHERS`.
        epsilon: target ε.
        delta: target δ.
        records: number of private records, as it may be told to anybody.
        public: number of public examples.
        num_classes: number of classes.
        stand_in: public records of a similar kind; :func:`digits` by default.

    Raises:
        ValueError: for arguments out of range.
    """
    check_choice("teacher", teacher, tuple(TEACHERS))
    records, public = check_int("records", records, 10), check_int("public", public, 10)
    data = digits() if stand_in is None else stand_in
    if teacher == "reverse-knn":
        arguments = {"k": 1, "epsilon": epsilon}  # its noise follows from ε, so that ε can be changed
        noise = ReverseKNN(k=1, epsilon=epsilon).mechanism(num_classes)
        counts = [count for count in _CLUSTERS if count <= public // 2] or [max(2, public // 2)]
        return _best_first(
            [
                Found(
                    _section("ReverseKNN", arguments, count),
                    *_try_clusters(data, noise, count, public, records),
                )
                for count in counts
            ]
        )

    def section(k: int, rate: float, queries: int, sigma: float, screened: bool) -> dict[str, Any]:
        limits = {"threshold": _THRESHOLD * k, "sigma": float(f"{_SIGMA_RATIO * sigma:.6g}")}
        arguments: dict[str, Any] = {"k": k, "sampling_rate": rate, "release_counts": True}
        arguments |= {"noise": {"class_path": "Gaussian", "init_args": {"sigma": sigma}}}
        arguments |= {"screening": limits} if screened else {}
        more = {"max_answers": math.ceil(_ANSWERED * queries)} if screened else {}
        return _section("PrivateKNN", arguments, queries) | more

    def noise_for(k: int, rate: float, queries: int, screened: bool) -> float:
        def charges(sigma: float) -> list[Charge]:
            made = section(k, rate, queries, sigma, screened)
            limits = made["labeler"]["init_args"].get("screening")
            screening = None if limits is None else Screening(**limits)
            labeler = PrivateKNN(k, rate, screening, Gaussian(sigma))
            return labeler.plan(queries, made.get("max_answers", queries), num_classes)

        parameter = Parameter("sigma", start=math.sqrt(queries) / epsilon, low=1e-2, high=1e9, rising=False)
        return calibrate(charges, parameter, epsilon=epsilon, delta=delta, exact=False).value

    tried: list[tuple[tuple[int, float, int], Found]] = []
    for rate in _RATES:
        reach = [k for k in _NEIGHBORS if k * num_classes <= 2 * rate * records] or [_NEIGHBORS[0]]
        for queries in [count for count in _QUERIES if count <= public] or [public]:
            sigma = noise_for(reach[0], rate, queries, False)  # without a screening the same for every k
            for k in reach:
                done = _try_votes(data, Gaussian(sigma), k, rate, queries, public, records, None)
                tried.append(((k, rate, queries), Found(section(k, rate, queries, sigma, False), *done)))
    tried.sort(key=lambda item: -item[1].score)
    for (k, rate, queries), _ in tried[:_SCREENED]:
        sigma = noise_for(k, rate, queries, True)
        made = section(k, rate, queries, sigma, True)
        screening = Screening(**made["labeler"]["init_args"]["screening"])
        done = _try_votes(data, Gaussian(sigma), k, rate, queries, public, records, screening)
        tried.append(((k, rate, queries), Found(made, *done)))
    return _best_first([item for _, item in tried])


def _section(teacher: str, arguments: dict[str, Any], clusters: int) -> dict[str, Any]:
    """A labeling section that asks about means of public clusters, as the search does.

    Noisy counts are released, whose price is that of the winner: a second round of no queries smooths them anew.
    """
    return {
        "labeler": {"class_path": teacher, "init_args": arguments},
        "rounds": 2,
        "queries_per_round": [clusters, 0],
        "selection": {
            "class_path": "pl_privknn.callbacks.selection.ClusterSelection",
            "init_args": _SELECTION,
        },
        "features": [{"class_path": "HOG"}, [{"class_path": "HOG"}, "student"]],
    }


@functools.lru_cache(maxsize=64)
def _asked(data: StandIn, clusters: int, public: int, seed: int) -> tuple[Selection, Tensor]:
    """A round's queries and their features, with as many public examples a cluster as there will be."""
    groups = max(2, min(round(clusters * len(data.public) / public), len(data.public) // 2))
    nothing = torch.full((len(data.public),), -1)
    pool = PublicPool(nothing, nothing >= 0, lambda: data.public)
    selection = ClusterSelection(**_SELECTION)(pool, groups, torch.Generator().manual_seed(seed))
    return selection, selection.query_features(data.public)


@functools.lru_cache(maxsize=64)
def _votes_around(data: StandIn, clusters: int, public: int, seed: int) -> Tensor:
    return nearest_votes(_asked(data, clusters, public, seed)[1], data.private, data.private_labels)


def _try_votes(
    data: StandIn,
    noise: AdditiveNoise,
    k: int,
    rate: float,
    clusters: int,
    public: int,
    records: int,
    screening: Screening | None,
) -> tuple[float, float, float]:
    """Answers, share of right labels and accuracy, means over seeds."""
    reach = max(1, min(round(k / (rate * records) * len(data.private)), len(data.private) - 1))
    results = []
    for seed in range(_SEEDS):
        generator, source = torch.Generator().manual_seed(seed), SeededNoise(seed)
        shares = _votes_around(data, clusters, public, seed)[:, reach - 1].double() / reach
        cast = torch.multinomial(shares, k, replacement=True, generator=generator)
        votes = torch.nn.functional.one_hot(cast, shares.shape[1]).sum(1).double()
        noisy = noise.add_noise(votes, source)
        if screening is not None:
            most = votes.max(1).values
            passed = most + source.normal(tuple(most.shape), screening.sigma) >= screening.threshold
            noisy[~passed] = torch.nan
        results.append(_learned(data, _asked(data, clusters, public, seed)[0], noisy, noise, clusters))
    return _mean(results)


def _try_clusters(
    data: StandIn, noise: AdditiveNoise, clusters: int, public: int, records: int
) -> tuple[float, float, float]:
    results = []
    for seed in range(_SEEDS):
        selection, queries = _asked(data, clusters, public, seed)
        counts = torch.zeros(len(queries), int(data.private_labels.max()) + 1, dtype=torch.float64)
        own = torch.cdist(data.private, queries).argmin(1)
        counts.index_put_(
            (own, data.private_labels), torch.ones(len(own), dtype=torch.float64), accumulate=True
        )
        votes = (counts * (records / len(own)) * (len(queries) / clusters)).round()
        noisy = noise.add_noise(votes, SeededNoise(seed))
        results.append(_learned(data, selection, noisy, noise, clusters))
    return _mean(results)


def _learned(
    data: StandIn, selection: Selection, noisy: Tensor, noise: AdditiveNoise, clusters: int
) -> tuple[float, float, float]:
    """Public examples mix the noisy counts around them, and a linear model learns from their labels."""
    from sklearn.linear_model import RidgeClassifier

    assert selection.spread is not None
    answers = clusters * float(torch.isfinite(noisy[:, 0]).double().mean())
    sums, left = spread_scores(selection.spread, noisy, noise.deviation)
    known, labels = left > 0, sums.argmax(1)
    if len(labels[known].unique()) < 2:
        return answers, 0.0, 0.0
    right = (data.public_labels == labels)[known].double().mean().item()
    model = RidgeClassifier().fit(data.public[known].numpy(), labels[known].numpy())
    return answers, right, float(model.score(data.test.numpy(), data.test_labels.numpy()))


def _mean(results: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    answers, right, student = (sum(column) / len(results) for column in zip(*results, strict=True))
    return answers, right, student


def _best_first(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda item: -item.score)


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
        for name in TEACHERS
    }
    chosen = max(best, key=lambda name: best[name].score) if teacher is None else teacher
    other = next(name for name in best if name != chosen)
    reasons = (
        f"{side.public} public examples, {side.num_classes} classes, images {'×'.join(map(str, side.image_shape))}; "
        f"{records} private records, as you state; ε {epsilon:g} at δ {delta:g}.",
        f"Teacher: {TEACHERS[chosen]}. {_WHY[chosen]}",
        f"Expected where data are as easy as scikit-learn's digits: {100 * best[chosen].labels:.0f} % of its labels "
        f"right ({TEACHERS[other]}: {100 * best[other].labels:.0f} %), and {100 * best[chosen].student:.0f} % of a "
        f"linear model that learns from them ({TEACHERS[other]}: {100 * best[other].student:.0f} %). "
        "Harder data give less.",
    )
    header = "".join(f"# {line}\n" for line in reasons)
    return Recommendation(chosen, best, reasons, header + _config(side, best[chosen], epsilon, delta))


_WHY = {
    "reverse-knn": "Every record votes once, for its nearest cluster of public examples, so that ε does not grow "
    "with the number of queries, and all public examples are labelled.",
    "private-knn": "A random sample of the records votes on each query, so that one record weighs little.",
}


def _config(side: PublicSide, found: Found, epsilon: float, delta: float) -> str:
    """The configuration, with a comment at each section."""
    budget = {"delta": delta, "max_epsilon": epsilon}
    labeling = {**found.labeling, "epochs_per_round": 12, "budget": budget}
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
