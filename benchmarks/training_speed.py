"""One training of ``PrivateTraining`` or of Opacus' own loop, in a process of its own: seconds and peak memory.

The process prints one line of JSON. ``private_training`` starts these by turns.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import ROOT
from pl_privknn.baselines import tanh_cnn
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training import PrivateTraining

WHO = ("opacus", "ours")
SIGMA, CLIP, LR, MOMENTUM = 1.0, 1.0, 1.0, 0.9


class Lit(pl.LightningModule):
    """A classifier that knows nothing of privacy."""

    def __init__(self, network: nn.Module, lr: float = LR, momentum: float = MOMENTUM) -> None:
        super().__init__()
        self.network, self.lr, self.momentum = network, lr, momentum

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.network(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Clock(pl.Callback):
    """Processor seconds and peak memory between the first and the last batch of a training."""

    seconds = 0.0
    memory = 0

    def on_train_start(self, *_: Any) -> None:
        """Start."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        self.memory = -_status("VmRSS")
        self.seconds = -time.process_time()

    def on_train_end(self, *_: Any) -> None:
        """Stop."""
        self.seconds += time.process_time()
        self.memory += _status("VmHWM")


def run(who: str, clipping: str, records: int, batch: int, physical: int) -> dict[str, float]:
    """One training in a child process.

    Args:
        who: ``"opacus"`` or ``"ours"``.
        clipping: ``"flat"`` or ``"ghost"``.
        records: how many random images there are; an epoch is trained.
        batch: expected size of a Poisson batch.
        physical: examples at once.

    Returns:
        processor seconds of the training, and the bytes by which its peak exceeds what lay in memory before it.
    """
    words = [who, clipping, *map(str, (records, batch, physical))]
    command = [sys.executable, "-m", "benchmarks.training_speed", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def _ours(
    options: argparse.Namespace, images: Tensor, labels: Tensor, network: nn.Module, clock: Clock
) -> None:
    data = ArraysDataModule(images, labels, images[:10], num_classes=10)
    private = PrivateTraining(
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=options.batch,
        expected_records=options.records,
        clipping=options.clipping,
        physical_batch_size=options.physical,
        noise_source=SeededNoise(0),
    )
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            callbacks=[private, clock],
        ).fit(Lit(network), data)


def _theirs(
    options: argparse.Namespace, images: Tensor, labels: Tensor, network: nn.Module, clock: Clock
) -> None:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.utils.data import DataLoader, TensorDataset

    criterion: Any = nn.CrossEntropyLoss()
    made: Any = PrivacyEngine(accountant="rdp").make_private(
        module=network.train(),
        optimizer=torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=DataLoader(TensorDataset(images, labels), batch_size=options.batch),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        poisson_sampling=True,
        **({"criterion": criterion, "grad_sample_mode": "ghost"} if options.clipping == "ghost" else {}),
    )
    if options.clipping == "ghost":
        network, optimizer, criterion, loader = made
    else:
        network, optimizer, loader = made
    clock.on_train_start()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=options.physical, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()
    clock.on_train_end()


def main() -> None:
    """One training, as the command says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_speed", description=__doc__)
    parser.add_argument("who", choices=WHO)
    parser.add_argument("clipping", choices=["flat", "ghost"])
    for name in ("records", "batch", "physical"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    images, labels = torch.rand(options.records, 1, 28, 28), torch.arange(options.records) % 10
    network, clock = tanh_cnn(10, 1, 28), Clock()
    (_ours if options.who == "ours" else _theirs)(options, images, labels, network, clock)
    print(json.dumps({"processor_seconds": clock.seconds, "bytes": clock.memory}))


if __name__ == "__main__":
    main()
