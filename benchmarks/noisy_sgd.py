"""NoisySGD beside Opacus' own training loop on Fashion-MNIST: ε, accuracy, examples a second.

Both train the same network from the same weights on the same 60,000 records with the same rate (Opacus': one over the
number of batches), noise, clipping norm, optimizer and physical batch size. Opacus' loop is the one of its tutorial:
``PrivacyEngine.make_private`` with Poisson sampling, ``BatchMemoryManager`` for physical batches. Runs take turns in
one process; seconds cover the training alone, from the first batch to the last. Coins and noise come from torch's
generator there and from a seeded source here, so accuracies differ as those of two seeds do.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import Measured
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.baselines import NoisySGD
from pl_privknn.baselines.updates import NoisyOptimization
from pl_privknn.comparison.marks import guarantee_of, stated
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.networks import build_network
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training.settings import Clipping, PoissonBatches, TrainingBudget

TORCH_NOISE = Guarantee(
    "none", ("Opacus' loop drew its noise from torch's seeded generator, which is not a cryptographic one",)
)
BATCH, SIGMA, CLIP, LR, MOMENTUM, DELTA = 1024, 1.0, 1.0, 1.0, 0.9, 1e-5
console = Console(stderr=True)


class Stopwatch(pl.Callback):
    """Seconds between the first and the last batch of a training."""

    seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start."""
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop."""
        self.seconds += time.perf_counter()


def ours(
    network: nn.Module, data: FashionMNISTDataModule, seed: int, options: argparse.Namespace, clipping: str
) -> dict[str, Any]:
    """One run of NoisySGD in a trainer."""
    count = len(data.private)
    rate = 1 / math.ceil(count / BATCH)
    module = NoisySGD(
        network=network,
        batches=PoissonBatches(batch_size=int(count * rate), sampling_rate=rate),
        budget=TrainingBudget(delta=DELTA, noise_multiplier=SIGMA),
        gradients=Clipping(CLIP, clipping, options.physical_batch_size),
        optimization=NoisyOptimization(lr=LR, momentum=MOMENTUM, scheduler="none"),
        noise_source=SeededNoise(seed),
    )
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=options.epochs,
            accelerator="cpu",
            **TRAINS_ALONE,
            default_root_dir=folder,
            callbacks=[watch],
        )
        trainer.fit(module, data)
        summary = module.privacy_summary()
    assert summary is not None
    return {
        "seconds": watch.seconds,
        "steps": summary["steps"],
        "epsilon_rdp": summary["epsilon_rdp"],
        "epsilon_pld": summary["epsilon_pld"],
        **stated(guarantee_of(summary)),
        "accuracy": accuracy(module.network, data),
    }


def theirs(
    network: nn.Module,
    records: tuple[Tensor, Tensor],
    data: FashionMNISTDataModule,
    seed: int,
    options: argparse.Namespace,
    clipping: str,
) -> dict[str, Any]:
    """One run of Opacus' loop."""
    torch.manual_seed(seed)
    engine = PrivacyEngine(accountant="rdp")
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(*records), batch_size=BATCH)
    made = engine.make_private(
        module=network.train(),
        optimizer=torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=loader,
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        poisson_sampling=True,
        **({"criterion": criterion, "grad_sample_mode": "ghost"} if clipping == "ghost" else {}),
    )
    if clipping == "ghost":
        network, optimizer, criterion, loader = made
    else:
        network, optimizer, loader = made
    started, steps = time.perf_counter(), 0
    for _ in range(options.epochs):
        steps += len(loader)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=options.physical_batch_size, optimizer=optimizer
        ) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                criterion(network(x), y).backward()
                optimizer.step()
    seconds = time.perf_counter() - started
    history = engine.accountant.history
    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = history
    return {
        "seconds": seconds,
        "steps": sum(count for _, _, count in history),
        "epsilon_rdp": rdp.get_epsilon(DELTA),
        "epsilon_prv": prv.get_epsilon(DELTA, eps_error=0.001),
        **stated(TORCH_NOISE),
        "accuracy": accuracy(network._module, data),
    }


@torch.no_grad()
def accuracy(network: nn.Module, data: FashionMNISTDataModule) -> float:
    """Share of the test images that the network gets right."""
    network.eval()
    right = count = 0
    for x, y in data.test_dataloader():
        right += int((network(x).argmax(dim=1) == y).sum())
        count += len(y)
    return right / count


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Each kind of clipping, both loops, all seeds."""
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    data = FashionMNISTDataModule(root=options.root, batch_size=1000)
    data.setup("fit")
    data.setup("test")
    batches = list(data.private_batches(5000))
    records = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    rows: list[dict[str, Any]] = []
    for clipping in options.clipping:
        pairs = []
        for seed in options.seeds:
            torch.manual_seed(seed)
            network = build_network(options.network, 10, 1, 28)
            run = {
                "opacus": theirs(copy.deepcopy(network), records, data, seed, options, clipping),
                "ours": ours(copy.deepcopy(network), data, seed, options, clipping),
            }
            console.print(clipping, seed, run)
            pairs.append(run)
        rows.append({"clipping": clipping, **_summary(pairs, len(records[0]), options.epochs)})
    settings = {
        "data": "Fashion-MNIST, 60,000 private records",
        "network": options.network,
        "batch_size": BATCH,
        "noise_multiplier": SIGMA,
        "clip_norm": CLIP,
        "delta": DELTA,
        "epochs": options.epochs,
        "physical_batch_size": options.physical_batch_size,
        "threads": options.threads,
    }
    yield Measured({"rows": rows}, seeds=options.seeds, settings=settings)


def _summary(pairs: list[dict[str, Any]], count: int, epochs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for who in ("opacus", "ours"):
        runs = [pair[who] for pair in pairs]
        accuracies = [run["accuracy"] for run in runs]
        found[who] = {
            "steps": runs[0]["steps"],
            **{name: runs[0][name] for name in runs[0] if name.startswith("epsilon")},
            **stated(weakest(map(guarantee_of, runs))),
            "accuracies": accuracies,
            "accuracy": statistics.mean(accuracies),
            "accuracy_deviation": statistics.stdev(accuracies) if len(runs) > 1 else math.nan,
            "examples_per_second": round(
                epochs * count / statistics.median(run["seconds"] for run in runs), 1
            ),
        }
    ratios = [pair["opacus"]["seconds"] / pair["ours"]["seconds"] for pair in pairs]
    found["speed_ratio"] = round(statistics.median(ratios), 3)
    found["speed_ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--network", default="tanh_cnn")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--clipping", nargs="+", choices=["flat", "ghost"], default=["flat", "ghost"])
    parser.add_argument("--physical-batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
