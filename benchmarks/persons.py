"""Teachers that protect persons: 12,000 persons with 60,000 images of Fashion-MNIST.

Three ways to the same ε for a person: one record a person and record-level ε; all records with the person as unit;
all records with a record-level ε so small that group privacy for the largest person gives it. Persons have five
images each, or unequally many: the largest thousands, most two. Images are dealt out to persons at random, by the
seed; noise is the operating system's. Accuracy is that of released labels of public images.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.faulty import noise_for
from benchmarks.record import Measured, entries, markdown, rows_of, spread
from pl_privknn.comparison.results import stated
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features.hog import HOG
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    ShuffledReverseKNN,
    SufficientStatistics,
)
from pl_privknn.labelers.base import Labeler, ProtectsPersons, UsesPublicFeatures
from pl_privknn.labelers.ind_knn import IndKNNSwitches, PublicDensity
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.neighbors import assign
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.mechanisms.base import weakest
from pl_privknn.testing import FreeLedger

PERSONS, DELTA = 12_000, 1e-5
#: Queries of teachers that answer one by one, and places at which reverse kNN counts.
QUERIES, PLACES = 200, 400
COMPONENTS = 128
_CLASSES = 10


def noisy_knn(sigma: float, most: int = 1) -> Labeler:
    """Private-kNN with ``most`` times as many neighbours."""
    return PrivateKNN(100 * most, 0.15, noise=Gaussian(sigma))


def noisy_pate(sigma: float, most: int = 1) -> Labeler:
    """PATE of 200 linear teachers, or more, likewise."""
    return PATE(200 * most, LinearTeachers(steps=200), noise=Gaussian(sigma), progress=False)


def _voting(made: Callable[[float, int], Labeler], epsilon: float, delta: float, most: int) -> Labeler:
    """Labeler with the noise that QUERIES answers need."""
    return made(noise_for(functools.partial(made, most=most), epsilon, delta, QUERIES, _CLASSES), most)


def _released(made: Any, records: int, epsilon: float, delta: float, most: int) -> Labeler:
    several = {"records_per_person": records} if records > 1 else {}
    released: Labeler = made(epsilon, delta=delta, private_records=PERSONS * most, **several)
    return released


#: Of ε, δ and a factor by which votes may grow where there are more records.
TEACHERS: dict[str, Callable[[float, float, int], Labeler]] = {
    "Private-kNN": functools.partial(_voting, noisy_knn),
    "PATE": functools.partial(_voting, noisy_pate),
    "Reverse kNN": lambda epsilon, delta, most: ReverseKNN(1, budget=Budget(epsilon=epsilon)),
    "Reverse kNN, shuffled": lambda epsilon, delta, most: ShuffledReverseKNN(
        1,
        budget=Budget(epsilon=epsilon, delta=delta, adjacency="replace_one"),
        randomizer="shares",
        num_clients=PERSONS,
    ),
    "Ind-KNN": lambda epsilon, delta, most: IndKNN(
        budget=Budget(epsilon=epsilon, delta=delta),
        noise=Gaussian(0.8),
        num_queries=QUERIES,
        threshold=0.1,
        switches=IndKNNSwitches(density=PublicDensity(neighbors=50 * most, private_records=PERSONS * most)),
    ),
    "Noisy SGD": lambda epsilon, delta, most: NoisySGDTeacher(
        0.2, PERSONS * most // 5, budget=Budget(epsilon=epsilon, delta=delta), steps=100
    ),
    "Class sums": functools.partial(_released, SufficientStatistics, 1),
    "Released gradients": functools.partial(_released, PreconditionedGradients, 1),
    "Released gradients, 5 records a person": functools.partial(_released, PreconditionedGradients, 5),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(TEACHERS), default=list(TEACHERS))


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each teacher and ε."""
    torch.set_num_threads(1)
    tables = _features(options.root)
    for epsilon in options.epsilons:
        for name in options.only:
            part = f"{name}, ε {epsilon:g}"
            if part in entries("persons"):
                continue
            made = TEACHERS[name](epsilon, DELTA, 1)
            whole = weakest(charge.guarantee for charge in made.plan(QUERIES, QUERIES, _CLASSES))
            found: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "adjacency": made.adjacencies[0]}
            found |= stated(whole)
            for seed in options.seeds:
                for way, accuracy in _ways(tables, name, epsilon, seed):
                    found.setdefault(way, []).append(accuracy)
            settings = {"persons": PERSONS, "queries": QUERIES, "components": COMPONENTS}
            yield Measured(found, options.seeds, part, settings)


def _features(root: str) -> dict[str, Tensor]:
    data = FashionMNISTDataModule(root=root, public_examples=5000)
    data.setup("fit")
    extractor = HOG()
    assert data.public.truth is not None
    public = extractor(data.public.images())
    whitening = PublicWhitening(public.shape[1], COMPONENTS, 0.5).fit(public)
    return {
        "private": torch.cat([whitening(extractor(images)) for images, _ in data.private_batches()]),
        "labels": data.private.labels,
        "public": whitening(public),
        "truth": data.public.truth,
    }


def owners_of(count: int, unequal: bool, seed: int) -> Tensor:
    """Owners of ``count`` records: five records each, or unequal numbers, at least one."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.arange(1, PERSONS + 1).double().pow(-1.0) if unequal else torch.ones(PERSONS)
    more = (shares / shares.sum() * (count - PERSONS)).floor().long()
    more[: count - PERSONS - int(more.sum())] += 1
    owners = torch.arange(PERSONS).repeat_interleave(1 + more)
    return owners[torch.randperm(len(owners), generator=generator)]


def _ways(tables: dict[str, Tensor], name: str, epsilon: float, seed: int) -> Iterator[tuple[str, float]]:
    """Accuracy of each way to protect persons."""
    features, labels = tables["private"], tables["labels"]
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + 100))[:PERSONS]
    yield "record", _accuracy(tables, TEACHERS[name](epsilon, DELTA, 1), features[rows], labels[rows])
    for kind in ("five each", "unequal"):
        owners = owners_of(len(labels), kind == "unequal", seed)
        teacher = TEACHERS[name](epsilon, DELTA, 1)
        assert isinstance(teacher, ProtectsPersons)
        teacher.private_owners = owners
        yield f"person, {kind}", _accuracy(tables, teacher, features, labels)
        small = epsilon / int(owners.bincount().max())
        # k neighbouring records: ε k, and a δ that grows by (e^{kε} − 1)/(e^ε − 1).
        delta = DELTA * math.expm1(small) / math.expm1(epsilon)
        # Where more records bring more votes, these may be five times as many.
        teacher = TEACHERS[name](small, delta, len(labels) // PERSONS)
        yield f"group, {kind}", _accuracy(tables, teacher, features, labels)


def _accuracy(tables: dict[str, Tensor], teacher: Labeler, features: Tensor, labels: Tensor) -> float:
    """Accuracy of labels of public images, each from the nearest query where queries are few."""
    public, truth = tables["public"], tables["truth"]
    reverse, queries = isinstance(teacher, RecordVotes), public[:QUERIES]
    if isinstance(teacher, UsesPublicFeatures):
        teacher.fit_public(public)
        queries = queries if isinstance(teacher, IndKNN) else public
    teacher.fit(features, labels, _CLASSES)
    answers = teacher.label(public[:PLACES] if reverse else queries, FreeLedger()).labels
    if reverse:
        answers = answers[assign(public, public[:PLACES], 1)[:, 0].long()]
    return round(float((answers == truth[: len(answers)]).double().mean()), 4)


def table() -> str:
    """Table for the documentation."""
    ways = {
        "a record a person": "record",
        "five each": "person, five each",
        "… by group privacy": "group, five each",
        "1 to 4,816": "person, unequal",
        "… of these by group privacy": "group, unequal",
    }
    lines = [[row["part"], *(spread(row[way]) for way in ways.values())] for row in rows_of("persons")]
    return markdown(["teacher", *ways], lines)
