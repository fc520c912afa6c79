"""What the Ind-KNN benchmarks share: Fashion-MNIST in roles, and its features.

The 60,000 training images are private. Of the test file one half is the pool of queries; the other half plays
labelled public data, on which settings are searched for, from which thresholds by density are taken, and from which
alone the principal components are learned.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers.ind_knn.engine import unit_rows

DELTA, CLASSES, RECORDS = 1e-5, 10, 60_000
FEATURES = {"hog": "HOG", "efficientnet": "EfficientNet-Lite0"}
#: Directions kept of the public principal components, for neighbours.
COMPONENTS = 64
LOG = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Part:
    """Features and true classes of the images of one role: float32 ``(n, d)``, int64 ``(n,)``."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Tables:
    """The three roles: ``private``, ``pool`` of queries, and labelled ``public`` images."""

    private: Part
    pool: Part
    public: Part

    def seen_as(self, view: str, components: int = COMPONENTS) -> Tables:
        """The same images in features ``"plain"``, or ``"components"``: levelled public principal components.

        A map that is fixed by public data acts on each record by itself, so it changes no privacy statement.
        """
        if view == "plain":
            return self
        whitening = PublicWhitening(self.public.features.shape[1], components).fit(self.public.features)
        parts = (Part(whitening(p.features), p.labels) for p in (self.private, self.pool, self.public))
        return Tables(*parts)

    def unit(self) -> Tables:
        """Every vector by itself scaled to length 1."""
        parts = (Part(unit_rows(p.features), p.labels) for p in (self.private, self.pool, self.public))
        return Tables(*parts)


def load(options: argparse.Namespace) -> Tables:
    """Features of all images, from ``options.cache`` where they lie there."""
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    extractor: Any = None
    parts = []
    for name, images, labels in (
        ("private", data.private, data.private.labels),
        ("pool", data.public, data.public.truth),
        ("public", data.test, data.test.labels),
    ):
        cache = options.cache / f"{options.features}_{name}.npy" if options.cache else None
        if cache is not None and cache.exists():
            parts.append(Part(torch.from_numpy(np.load(cache)), labels))
            continue
        extractor = extractor or _extractor(options)
        started = time.perf_counter()
        batches = [
            extractor(images.images(slice(start, start + 1024))) for start in range(0, len(images), 1024)
        ]
        parts.append(Part(torch.cat(batches), labels))
        LOG.print(f"{options.features} features, {name}: {time.perf_counter() - started:.0f} s")
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            np.save(cache, parts[-1].features.numpy())
    return Tables(*parts)


def _extractor(options: argparse.Namespace) -> Any:
    if options.features == "hog":
        return HOG()
    return TimmFeatures(weights=options.weights, image_size=options.image_size)


def add_feature_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`load`."""
    parser.add_argument("--features", choices=tuple(FEATURES), default="hog")
    parser.add_argument("--root", default="data", help="folder of Fashion-MNIST's four files")
    parser.add_argument("--weights", default=None, help="file of EfficientNet-Lite0's weights")
    parser.add_argument("--image-size", type=int, default=160, help="side to which images are resized for it")
    parser.add_argument("--cache", type=Path, default=None, help="folder for features, private")
    parser.add_argument("--threads", type=int, default=1)
