"""What a first stage on public images is worth as features.

Votes of the 50 nearest private records (by cosine) against the truth of the public images of Fashion-MNIST, without
noise: the bound that a kNN teacher has with HOG, with the checkpoint's backbone, and with both side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.record import Measured
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG, CheckpointFeatures, JoinedFeatures
from pl_privknn.features.base import Extractor


def agreement(extractor: Extractor, private: Tensor, labels: Tensor, public: Tensor, truth: Tensor) -> float:
    """Share of public images whose 50 nearest private records vote for the true class."""
    table = functional.normalize(extractor(private), dim=1)
    queries = functional.normalize(extractor(public), dim=1)
    nearest = torch.cat([(part @ table.T).topk(50, dim=1).indices for part in queries.split(512)])
    votes = functional.one_hot(labels[nearest], 10).sum(dim=1)
    return float((votes.argmax(dim=1) == truth).float().mean())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("checkpoint", help="last.ckpt of a run of configs/fashion_mnist_simclr.yaml")
    parser.add_argument("--records", type=int, default=20_000, help="private records, drawn at random")
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """All three kinds of features."""
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    chosen = torch.randperm(len(data.private), generator=torch.Generator().manual_seed(0))[: options.records]
    private, labels = data.private.images(chosen), data.private.labels[chosen]
    public = data.public.images(torch.arange(len(data.public)))
    assert data.public.truth is not None
    learned = CheckpointFeatures(options.checkpoint)
    epochs = torch.load(options.checkpoint, map_location="cpu", weights_only=True)["epoch"] + 1
    kinds: dict[str, Extractor] = {
        "hog": HOG(),
        "checkpoint": learned,
        "joined": JoinedFeatures([HOG(), learned]),
    }
    result = {
        name: agreement(extractor, private, labels, public, data.public.truth)
        for name, extractor in kinds.items()
    }
    yield Measured(result, seeds=[0], settings={"records": options.records, "epochs": epochs})
