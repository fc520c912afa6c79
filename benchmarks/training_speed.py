"""One training of ``PrivateTraining`` or of Opacus' own loop, in processes of its own: seconds and peak memory.

The process prints one line of JSON. ``private_training`` starts these by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import ROOT, Measured
from pl_privknn.baselines import tanh_cnn
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training import PrivateTraining

WHO = ("opacus", "ours")
SIGMA, CLIP, LR, MOMENTUM = 1.0, 1.0, 1.0, 0.9
_BATCH, _PHYSICAL = 1024, 64


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
    """Seconds and peak memory between the first and the last batch of a training."""

    seconds = wall = 0.0
    memory = 0

    def on_train_start(self, *_: Any) -> None:
        """Start."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        self.memory = -_status("VmRSS")
        self.seconds, self.wall = -time.process_time(), -time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        """Stop."""
        self.seconds += time.process_time()
        self.wall += time.perf_counter()
        self.memory += _status("VmHWM")


def run(
    who: str, clipping: str, records: int, batch: int, physical: int, processes: int = 1
) -> dict[str, float]:
    """One training in a child process, or in several of them.

    Args:
        who: ``"opacus"`` or ``"ours"``.
        clipping: ``"flat"`` or ``"ghost"``.
        records: how many random images there are; an epoch is trained.
        batch: expected size of a Poisson batch.
        physical: examples at once.
        processes: that train together, of one thread each; of ``"ours"``.

    Returns:
        seconds of the first process' processor and of the clock, and the bytes by which its peak exceeds what lay in
        memory before the training.
    """
    words = [who, clipping, *map(str, (records, batch, physical, processes))]
    command = [sys.executable, "-m", "benchmarks.training_speed", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(options: argparse.Namespace, stored: set[str]) -> Iterator[Measured]:
    """Both loops by turns, each in a process of its own; and one process and two of them.

    Args:
        options: ``records`` and ``turns``.
        stored: parts that are not measured again.
    """
    settings = {
        "network": "tanh_cnn",
        "records": options.records,
        "batch_size": _BATCH,
        "physical_batch_size": _PHYSICAL,
        "turns": options.turns,
        "threads": 1,
    }
    for name in ("flat", "ghost", "two processes"):
        if (part := f"speed, {name}") not in stored:
            found = _of_two(options) if name == "two processes" else _beside_opacus(options, name)
            yield Measured(found, [0], part, settings)


def _beside_opacus(options: argparse.Namespace, clipping: str) -> dict[str, Any]:
    turns = [
        {who: run(who, clipping, options.records, _BATCH, _PHYSICAL) for who in WHO}
        for _ in range(options.turns)
    ]
    ratios = [turn["opacus"]["processor_seconds"] / turn["ours"]["processor_seconds"] for turn in turns]
    memory = [turn["ours"]["bytes"] / turn["opacus"]["bytes"] for turn in turns]
    results = {**_ratio("speed_ratio", ratios), **_ratio("memory_ratio", memory)}
    for who in WHO:
        seconds = statistics.median(turn[who]["processor_seconds"] for turn in turns)
        results[who] = {
            "examples_per_processor_second": round(options.records / seconds),
            "peak_megabytes": round(statistics.median(turn[who]["bytes"] for turn in turns) / 1e6, 1),
        }
    return results


def _of_two(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the clock, of one process and of two, one thread each."""
    turns = [
        {n: run("ours", "flat", options.records, _BATCH, _PHYSICAL, n)["seconds"] for n in (1, 2)}
        for _ in range(options.turns)
    ]
    results = _ratio("speed_ratio", [turn[1] / turn[2] for turn in turns])
    for count in (1, 2):
        seconds = statistics.median(turn[count] for turn in turns)
        results[f"{count}_examples_per_second"] = round(options.records / seconds)
    return results


def _ratio(name: str, turns: list[float]) -> dict[str, Any]:
    return {
        name: round(statistics.median(turns), 3),
        f"{name}_range": [round(min(turns), 3), round(max(turns), 3)],
    }


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
            devices=options.processes,
            strategy="ddp" if options.processes > 1 else "auto",
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
    for name in ("records", "batch", "physical", "processes"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    images, labels = torch.rand(options.records, 1, 28, 28), torch.arange(options.records) % 10
    network, clock = tanh_cnn(10, 1, 28), Clock()
    (_ours if options.who == "ours" else _theirs)(options, images, labels, network, clock)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found = {"processor_seconds": clock.seconds, "seconds": clock.wall, "bytes": clock.memory}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
