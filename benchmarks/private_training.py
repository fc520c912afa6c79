"""PrivateTraining from pixels on Fashion-MNIST, beside published accuracies.

The module is one as anyone would write it: convolutions with standardised weights and group normalisation, of which
the first ones are levelled patches of public images; large batches, and the moving average of the weights. Settings
were chosen by the truth of public images, accuracies are those of test images. Noise is the operating system's; a
seed is that of the weights. A part that is stored is not measured again.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import Measured, entries, explained, markdown, spread
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.comparison.table import guarantee_of, mark, stated
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms.base import weakest
from pl_privknn.training import PrivateTraining

DELTA, RECORDS = 1e-5, 60_000
PRIVATE = {"expected_batch_size": 4096, "max_grad_norm": 0.1}
SETTINGS = {**PRIVATE, "epochs": 20, "lr": 8.0, "momentum": 0.9, "averaging": 0.95}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=SETTINGS["epochs"])


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Missing measurements, seed by seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    data.setup("test")
    settings = {"setting": "pixels", **SETTINGS, "epochs": options.epochs}
    for seed in options.seeds:
        for epsilon in options.epsilons:
            part = f"pixels, ε {epsilon:g}, seed {seed}"
            if part not in entries("private_training"):
                yield Measured(_run(settings, epsilon, seed, data), [seed], part, settings)


class Lit(pl.LightningModule):
    """Plain classifier without any code for privacy."""

    def __init__(self, net: nn.Module, lr: float, momentum: float) -> None:
        super().__init__()
        self.net, self.lr, self.momentum = net, lr, momentum

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def _run(settings: dict[str, Any], epsilon: float, seed: int, data: FashionMNISTDataModule) -> dict[str, Any]:
    pl.seed_everything(seed, verbose=False)
    training = PrivateTraining(
        budget=Budget(epsilon=epsilon, delta=DELTA), private_records=RECORDS, **PRIVATE
    )
    module = Lit(network(data.public.images()), settings["lr"], settings["momentum"])
    average = pl.callbacks.EMAWeightAveraging(decay=settings["averaging"])
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = {"default_root_dir": folder, "callbacks": [training, average]}
        trainer = pl.Trainer(max_epochs=settings["epochs"], accelerator="cpu", **own, **TRAINS_ALONE)
        trainer.fit(module, data)
        summary = training.privacy_summary()
    assert summary is not None
    assert data.public.truth is not None
    return {
        **{name: summary[name] for name in ("epsilon", "delta", "adjacency", "steps", "noise_multiplier")},
        **stated(guarantee_of(summary)),
        "public_accuracy": _accuracy(module, data.public.images(), data.public.truth),
        "test_accuracy": _accuracy(module, data.test.images(), data.test.labels),
        "processor_seconds": round(time.process_time() - started),
    }


def network(images: Tensor) -> nn.Module:
    """Network of two convolutions of stride 2 and a zero-initialised linear layer, normalised by public images."""
    from timm.layers import StdConv2d

    layers: list[Any] = []
    for inputs, outputs, side in ((1, 16, 7), (16, 32, 3)):
        layers.append(StdConv2d(inputs, outputs, side, stride=2, padding=side // 2))
        layers += [nn.GroupNorm(outputs // 4, outputs), nn.ReLU()]
    last = nn.Linear(32 * 49, 10)
    with torch.no_grad():
        first = layers[0].weight
        filters = _patches(images, *first.shape[::2])
        first.copy_(filters * (first.norm() / filters.norm()))
        last.weight.zero_()
        last.bias.zero_()
    return nn.Sequential(Levelled(images.float()), *layers, nn.Flatten(), last)


class Levelled(nn.Module):
    """Normalisation of images by mean and deviation of public ones."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.mean, self.deviation = float(images.mean()), float(images.std())

    def forward(self, x: Tensor) -> Tensor:
        """Shape as given."""
        return (x - self.mean) / self.deviation


def _patches(images: Tensor, count: int, side: int) -> Tensor:
    """Random patches of public images, levelled: filters ``(count, 1, side, side)`` of length 1."""
    found = F.unfold(images[:2000].float(), side).transpose(1, 2).flatten(0, 1)
    found = found[torch.randperm(len(found))[:100_000]]
    found = found - found.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(found.T @ found / len(found))
    levelling = vectors @ torch.diag((values + 0.1 * values.mean()).rsqrt()) @ vectors.T
    lengths = found.norm(dim=1)
    chosen = F.normalize(found[lengths > lengths.median()][:count] @ levelling, dim=1)
    return F.normalize(chosen @ levelling, dim=1).view(count, 1, side, side)


@torch.no_grad()
def _accuracy(module: nn.Module, images: Tensor, truth: Tensor) -> float:
    module.eval()
    told = torch.cat([module(part.float()).argmax(dim=1) for part in images.split(500)])
    return round(float((told == truth).double().mean()), 6)


#: (method, ε, test accuracy, source): trained on 60,000 records without public data, at the same δ and adjacency.
PUBLISHED = (
    ("DP-SGD, tempered sigmoids", "2.7", "0.861", "Papernot et al. 2021 (arXiv:2007.14191)"),
    ("DP-SGD, linear on scattering", "2.7", "0.895", "Tramèr, Boneh 2021 (arXiv:2011.11660)"),
    ("DP-SGD on scattering", "3", "0.897", "Tramèr, Boneh 2021 (arXiv:2011.11660)"),
)


def table() -> str:
    """Table of the measured accuracies and of published ones."""
    found: dict[str, list[dict[str, Any]]] = {}
    for part, entry in entries("private_training").items():
        found.setdefault(part.rpartition(", seed")[0].rpartition("ε ")[2], []).append(entry["results"])
    lines, named = [], []
    for epsilon, here in sorted(found.items()):
        weak = weakest(guarantee_of(one) for one in here)
        accuracy = spread(one["test_accuracy"] for one in here) + mark(weak)
        lines.append(
            [
                "PrivateTraining",
                epsilon,
                accuracy,
                f"`python -m benchmarks private_training`, {len(here)} seeds",
            ]
        )
        named.append(("PrivateTraining", weak))
    return explained(markdown(["method", "ε", "test accuracy", "source"], [*lines, *PUBLISHED]), named)
