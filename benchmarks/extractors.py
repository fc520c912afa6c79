"""Extractors on Fashion-MNIST: accuracy of a linear model and of ten neighbours on their features, and their speed.

There is no privacy here: models are fitted on true labels of records, without noise. Extractors that learn do so from
the public images alone. Speed is in processor seconds of one thread, and other programs on the same cores change it:
``relative_speed`` is the number of images a second over that of HOG in the same run, and ``load`` how many programs
wanted a core meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.record import ROOT, Measured, entries
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.configuration import instantiate
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.documents import read_configuration
from pl_privknn.features import HOG, PatchDictionary, Pixels, PublicPCA, Scattering, TimmFeatures


def shipped() -> Any:
    """The features of configs/fashion_mnist_statistics.yaml."""
    document = read_configuration(ROOT / "configs/fashion_mnist_statistics.yaml")
    return instantiate({"labeling": document["labeling"]}, {"labeling": PrivateLabeler}).labeling.features[0]


EXTRACTORS: dict[str, Callable[[], Any]] = {
    "HOG": HOG,
    "pixels": Pixels,
    "patch dictionary": PatchDictionary,
    "patch dictionary, 400 public components": lambda: PublicPCA(PatchDictionary(), 400),
    "scattering": Scattering,
    "EfficientNet-Lite0 at 64 pixels": lambda: TimmFeatures("tf_efficientnet_lite0", image_size=64),
    "all of fashion_mnist_statistics.yaml": shipped,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--records", type=int, default=10_000, help="how many train the models")
    parser.add_argument("--tests", type=int, default=5_000, help="how many test images")
    parser.add_argument("--only", nargs="+", choices=list(EXTRACTORS), default=list(EXTRACTORS))
    parser.add_argument(
        "--timm", nargs="+", default=[], metavar="NAME@FILE", help="timm backbones from local files, as well"
    )
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part an extractor; HOG is timed each time that another one is measured."""
    torch.set_num_threads(options.threads)
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    train = slice(options.records)
    images, labels = data.private.images(train), data.private.labels[train]
    tests, truth = data.test.images(slice(options.tests)), data.test.labels[: options.tests]
    chosen = {name: EXTRACTORS[name] for name in options.only}
    chosen |= {
        f"timm {name.partition('@')[0]}": lambda name=name: TimmFeatures(name) for name in options.timm
    }
    stored = entries("extractors")
    for name, make in chosen.items():
        if stored.get(name, {}).get("results", {}).get("records") == options.records:
            continue
        extractor = make()
        started = time.process_time()
        if extractor.learns:
            extractor.fit_public(data.public.images())
        learning = time.process_time() - started
        _mapped(extractor, tests[:64])  # compiles what is compiled
        learned = time.process_time()
        features = _mapped(extractor, images)
        mapped = time.process_time()
        _mapped(HOG(), images)
        hog = time.process_time() - mapped
        unseen = _mapped(extractor, tests)
        yield Measured(
            {
                "records": options.records,
                "width": features.shape[1],
                "linear": _share(_linear(features, labels, unseen), truth),
                "neighbors": _share(_neighbors(features, labels, unseen), truth),
                "seconds_to_learn": round(learning, 1),
                "images_per_second": round(len(images) / (mapped - learned)),
                "relative_speed": round(hog / (mapped - learned), 3),
                "load": round(os.getloadavg()[0], 1),
            },
            [],
            name,
            {"records": options.records, "tests": options.tests, "threads": options.threads, "split_seed": 0},
        )


def _mapped(extractor: Any, images: Tensor) -> Tensor:
    return torch.cat([extractor(part).float() for part in images.split(1024)])


def _linear(features: Tensor, labels: Tensor, unseen: Tensor) -> Tensor:
    """Classes by ridge regression on features of unit length; the penalty by leaving one record out."""
    from sklearn.linear_model import RidgeClassifierCV

    model = RidgeClassifierCV(alphas=[10.0**power for power in range(-4, 3)])
    model.fit(functional.normalize(features, dim=1).numpy(), labels.numpy())
    return torch.from_numpy(model.predict(functional.normalize(unseen, dim=1).numpy()))


def _neighbors(features: Tensor, labels: Tensor, unseen: Tensor) -> Tensor:
    """Classes by the votes of the ten records with the largest cosine."""
    unit = functional.normalize(features, dim=1)
    found = [
        labels[(functional.normalize(part, dim=1) @ unit.T).topk(10).indices].mode(dim=1).values
        for part in unseen.split(1000)
    ]
    return torch.cat(found)


def _share(found: Tensor, truth: Tensor) -> float:
    return round(float((found == truth).double().mean()), 4)
