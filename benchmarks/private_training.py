"""PrivateTraining on Fashion-MNIST at δ = 1e-5, and what each addition gains.

One part a run, so that a run that stops goes on where it was: ``python -m benchmarks private_training`` measures what
is not stored. Noise of the accuracies is the operating system's; a seed is that of weights and augmentation. Settings
were chosen by the truth of public images, those without public images on 10,000 of the private ones, at no charge;
accuracies are those of test images. Seconds are the processor's.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import Measured, entries
from benchmarks.statistics import features_file, features_of, saved, sections_at
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.comparison.results import guarantee_of, stated
from pl_privknn.datamodules import EmbeddingsDataModule, FashionMNISTDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features import HOG, JoinedFeatures, PublicKernelPCA, PublicPCA, Scattering
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.training import NoisySGD, PrivateTraining
from pl_privknn.training.noisy_sgd import NoisyOptimization

NAME = "private_training"
DELTA, RECORDS = 1e-5, 60_000
#: Features that learn nothing, of data without public images.
ALONE = "scattering and HOG of each image alone"


class Setting(NamedTuple):
    """A training; its fields stand in the stored settings.

    Attributes:
        network: ``"head"`` on features, or ``"convolutions"`` from pixels.
        features: of the head.
        batch_size: expected size of a batch.
        epochs: of ⌈records / batch_size⌉ steps.
        lr: learning rate.
        momentum: of SGD.
        clip_norm: bound of a record's gradient.
        averaging: decay of the weights' moving average; 0 for none.
        views: of an image in a step.
        standardised: convolutions with standardised weights and group normalisation.
        patches: the first filters are levelled patches of public images.
        noise_limit: of NoisySGD, which has clipped sums from what its layers saw; 0 for a module as anyone writes it.
    """

    network: str = "head"
    features: str = "imagenet"
    batch_size: int = 30_000
    epochs: int = 15
    lr: float = 200.0
    momentum: float = 0.7
    clip_norm: float = 0.5
    averaging: float = 0.0
    views: int = 1
    standardised: bool = False
    patches: bool = False
    noise_limit: float = 0.0


HEAD = Setting()
PIXELS = Setting(
    "convolutions", "pixels", 4_096, 20, 8.0, 0.9, 0.1, averaging=0.95, standardised=True, patches=True
)
#: Name of a setting: what it is, and the values of ε at which it is measured.
SETTINGS: dict[str, tuple[Setting, tuple[float, ...]]] = {
    "head": (HEAD, (0.5, 1.0, 2.0)),
    "head on scattering": (HEAD._replace(features="scattering"), (1.0, 2.0)),
    "no public images": (
        Setting("head", ALONE, 12_000, 40, 800.0, 0.9, clip_norm=0.05, noise_limit=0.0068),
        (1.0, 2.0),
    ),
    "head, small batches": (HEAD._replace(batch_size=1_000, epochs=5, lr=10.0), (2.0,)),
    "head, average of weights": (HEAD._replace(averaging=0.8), (2.0,)),
    "pixels": (PIXELS, (1.0, 2.0)),
    "pixels, no average": (PIXELS._replace(averaging=0.0), (2.0,)),
    "pixels, no standardised weights": (PIXELS._replace(standardised=False), (2.0,)),
    "pixels, random first filters": (PIXELS._replace(patches=False), (2.0,)),
    "pixels, small batches": (PIXELS._replace(batch_size=1_000, epochs=5, lr=4.0, averaging=0.98), (2.0,)),
    "pixels, 4 views": (PIXELS._replace(views=4), (2.0,)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--cache", type=Path, default=Path("runs/private_training"), help="for features")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--epsilons", type=float, nargs="+", help="of these alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Run what is missing, seed by seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    options.cache.mkdir(parents=True, exist_ok=True)
    sources: dict[str, PrivatePublicDataModule] = {}
    for seed in options.seeds:
        for name in options.only:
            setting, epsilons = SETTINGS[name]
            for epsilon in epsilons:
                part = f"{name}, ε {epsilon:g}, seed {seed}"
                if part in entries(NAME) or epsilon not in (options.epsilons or epsilons):
                    continue
                if setting.features not in sources:
                    sources[setting.features] = _data(setting.features, options)
                results = _run(setting, epsilon, seed, sources[setting.features])
                yield Measured(results, [seed], part, {"setting": name, **setting._asdict()})


class Lit(pl.LightningModule):
    """A classifier as anyone would write it.

    Args:
        net: from images to logits.
        lr: learning rate.
        momentum: of SGD.
    """

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


# ------------------------------------------------------------------ accuracy


def _run(setting: Setting, epsilon: float, seed: int, data: PrivatePublicDataModule) -> dict[str, Any]:
    pl.seed_everything(seed, verbose=False)
    private = {
        "epsilon": epsilon,
        "delta": DELTA,
        "max_grad_norm": setting.clip_norm,
        "expected_batch_size": setting.batch_size,
        "expected_records": RECORDS,
        "noise_source": SystemNoise(),
    }
    module: Any
    callbacks: list[pl.Callback] = []
    if setting.noise_limit:
        steps = NoisyOptimization(
            lr=setting.lr, momentum=setting.momentum, scheduler="none", noise_limit=setting.noise_limit
        )
        module = NoisySGD(
            network(setting, data), clipping="ghost", physical_batch_size=4096, optimization=steps, **private
        )
        training = module.private_training
    else:
        module = Lit(network(setting, data), setting.lr, setting.momentum)
        augment = shifted if setting.views > 1 else None
        training = PrivateTraining(augment=augment, views=setting.views, **private)
        callbacks.append(training)
    if setting.averaging:
        callbacks.append(pl.callbacks.EMAWeightAveraging(decay=setting.averaging))
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            max_epochs=setting.epochs,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=callbacks,
            **TRAINS_ALONE,
        ).fit(module, data)
        summary = training.privacy_summary()
    assert summary is not None
    truth = data.public.truth
    public = {} if truth is None else {"public_accuracy": _accuracy(module, data.public.images(), truth)}
    return {
        "epsilon": summary["epsilon"],
        "delta": summary["delta"],
        "adjacency": summary["adjacency"],
        **stated(guarantee_of(summary)),
        "steps": summary["steps"],
        "noise_multiplier": summary["noise_multiplier"],
        **public,
        "test_accuracy": _accuracy(module, data.test.images(), data.test.labels),
        "processor_seconds": round(time.process_time() - started),
    }


def network(setting: Setting, data: PrivatePublicDataModule) -> nn.Module:
    """A linear head, or two convolutions of stride 2 and a linear layer; the last weights begin at 0."""
    if setting.network == "head":
        last = nn.Linear(data.image_shape[0], data.num_classes, bias=False)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.Flatten(), last)
    images = data.public.images()
    if setting.standardised:
        from timm.layers import StdConv2d as Convolution
    else:
        Convolution = nn.Conv2d
    layers: list[nn.Module] = []
    for inputs, outputs, side in ((1, 16, 7), (16, 32, 3)):
        layers.append(Convolution(inputs, outputs, side, stride=2, padding=side // 2))
        if setting.standardised:
            layers.append(nn.GroupNorm(outputs // 4, outputs))
        layers.append(nn.ReLU() if setting.standardised else nn.Tanh())
    if setting.patches:
        first: Any = layers[0]
        with torch.no_grad():
            filters = _patches(images, *first.weight.shape[::2])
            first.weight.copy_(filters * (first.weight.norm() / filters.norm()))
            if first.bias is not None:
                first.bias.zero_()
    last = nn.Linear(32 * 49, data.num_classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    level = Levelled(float(images.float().mean()), float(images.float().std()))
    return nn.Sequential(level, *layers, nn.Flatten(), last)


class Levelled(nn.Module):
    """Images by the mean and deviation of public ones."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

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


def shifted(views: Tensor) -> Tensor:
    """Each view mirrored or not, and moved by up to two pixels; of one image."""
    flipped = torch.where(torch.rand(len(views), 1, 1, 1) < 0.5, views.flip(3), views)
    padded = F.pad(flipped, (2, 2, 2, 2), mode="replicate")
    height, width = views.shape[2:]
    corners = torch.randint(0, 5, (len(views), 2)).tolist()
    return torch.stack(
        [
            view[:, down : down + height, right : right + width]
            for view, (down, right) in zip(padded, corners, strict=True)
        ]
    )


@torch.no_grad()
def _accuracy(module: nn.Module, images: Tensor, truth: Tensor) -> float:
    module.eval()
    right = sum(
        int((module(x.float()).argmax(dim=1) == y).sum())
        for x, y in zip(images.split(500), truth.split(500), strict=True)
    )
    return round(right / len(truth), 6)


def _data(features: str, options: argparse.Namespace) -> PrivatePublicDataModule:
    """Images, or their features, which depend on public images alone and are kept in the cache."""
    if features == "pixels":
        images = FashionMNISTDataModule(root=options.root)
        images.setup("fit")
        images.setup("test")
        return images
    if features == "imagenet":
        sections = sections_at(2.0, 0, options.root, own=False)
        tables = features_of(sections, options.cache / features_file(0, own=False))
    else:
        tables = _scattering(options, alone=features == ALONE)
    known = {"public_embeddings": "public", "public_truth": "public_labels"} if "public" in tables else {}
    names = {
        f"{part}_{what}": part if what == "embeddings" else f"{part}_labels"
        for part in ("private", "test")
        for what in ("embeddings", "labels")
    }
    made = EmbeddingsDataModule(
        **{argument: tables[name].numpy() for argument, name in (names | known).items()},
        num_classes=10,
        public="images" if known else "none",
    )
    made.setup("fit")
    made.setup("test")
    return made


def _scattering(options: argparse.Namespace, alone: bool) -> dict[str, Tensor]:
    """Kernel principal components of a scattering transform; or that of each image by itself, and its HOG."""
    path = options.cache / f"{'scattering_hog' if alone else 'scattering_0'}.pt"
    if not path.is_file():
        data = _data("pixels", options)
        extractor: Any
        if alone:
            extractor = JoinedFeatures([Scattering(normalize=False, groups=27), HOG()], weights=[0.7, 0.3])
        else:
            extractor = PublicKernelPCA(PublicPCA(Scattering(), 500), gamma=1.3, components=600, power=0.7)
            extractor.fit_public(data.public.images())

        def mapped(images: Tensor) -> Tensor:
            return torch.cat([extractor(part) for part in images.split(1024)])

        found = {"test": mapped(data.test.images()), "test_labels": data.test.labels}
        found |= {"private": torch.cat([mapped(images) for images, _ in data.private_batches()])}
        found |= {"private_labels": data.private.labels}
        if not alone:
            assert data.public.truth is not None
            found |= {"public": mapped(data.public.images()), "public_labels": data.public.truth}
        saved(found, path)
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
    return loaded
