"""Checks of the package on a device, by benchmarks/gpu_check.sh: each says PASS or FAIL with its figure.

A check that raises has failed. ``PLACE`` is ``cuda``, or ``cpu`` for a dry run; results go into the folder ``OUT``.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pl_privknn import PrivateRecords, PrivateTraining
from pl_privknn.datamodules.datasets import LabeledImages, TensorImages
from pl_privknn.features import HOG, BackboneFeatures, PatchDictionary, Pixels
from pl_privknn.features.base import extract_on
from pl_privknn.labelers import PrivateKNN, ReverseKNN, Screening
from pl_privknn.neighbors import assign, nearest
from pl_privknn.networks import build_network
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.testing import FreeLedger
from pl_privknn.training import TrainingOptions
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData

warnings.filterwarnings("ignore")
PLACE = os.environ.get("PLACE", "cuda")
WORK = Path(tempfile.mkdtemp())
OUT = Path(os.environ.get("OUT", WORK))
HERE = torch.device("cuda", 0) if PLACE == "cuda" else torch.device("cpu")
CPU = torch.device("cpu")
ACCELERATOR = "gpu" if PLACE == "cuda" else "cpu"
CLIP = 1.0
CHECKS, RESULTS = [], {}


def check(function):
    CHECKS.append(function)
    return function


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def waited():
    if PLACE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Lit(pl.LightningModule):
    """A classifier that is trained privately."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        """Cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Last(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.out = kind(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        """Logits."""
        return self.out(self.inner(x)[0][:, -1])


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        """Logits."""
        return self.out(self.inner(x).mean(1))


class Words(nn.Module):
    """Means of embeddings."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, x):
        """Logits."""
        return self.out(self.inner(x).mean(1))


IMAGE, ROWS = (1, 8, 8), (5, 8)
NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)), IMAGE),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
        ),
        IMAGE,
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)),
        IMAGE,
    ),
    "attention": (Attention, ROWS),
    "attention, dropout": (lambda: Attention(0.1), ROWS),
    "LSTM": (lambda: Last(nn.LSTM), ROWS),
    "GRU": (lambda: Last(nn.GRU), ROWS),
    "words": (Words, None),
}


def records(shape, count=100):
    labels = torch.arange(count) % 4
    if shape is None:
        return torch.randint(50, (count, 6), generator=torch.Generator().manual_seed(1)), labels
    return drawn(count, *shape) * 4 - 2, labels


def gradients_of(name, place, data=None, **options):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module = Lit(make()).to(place)
    found = RecordGradients(
        module,
        PrivateData(TensorDataset(*(data or records(shape)))),
        CLIP,
        expected_batch_size=256,
        **options,
    )
    found.choose(timed=False)
    return found


# ---------------------------------------------------------------- neighbours, labelers, features


@check
def searches_are_those_of_the_cpu():
    """Indices equal to the last one, also with TF32 switched on and under autocast."""
    whole = drawn(3000, 64).mul(3).round()
    table, queries = (
        torch.cat([whole, drawn(3000, 64, seed=1), whole[:500]]),
        drawn(400, 64, seed=2).mul(3).round(),
    )
    here = nearest(queries, table, 40), assign(table, queries, 3)
    wrong = 0
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for mixed in (False, True):
            with torch.autocast(HERE.type, torch.bfloat16, enabled=mixed):
                there = nearest(queries, table, 40, device=HERE), assign(table, queries, 3, device=HERE)
            wrong += sum(int((a != b).sum()) for a, b in zip(here, there, strict=True))
    torch.set_float32_matmul_precision("highest")
    return wrong == 0, f"{wrong} indices differ"


@check
def labelers_answer_as_on_the_cpu():
    table, queries = drawn(2000, 32), drawn(100, 32, seed=2)
    makes = {
        "PrivateKNN": lambda: PrivateKNN(
            15, 0.5, Screening(5.0, Gaussian(1.0)), Gaussian(2.0), SeededNoise(3)
        ),
        "ReverseKNN": lambda: ReverseKNN(2, budget=Budget(epsilon=4.0), noise_source=SeededNoise(3)),
    }
    wrong = {}
    for name, make in makes.items():
        found = []
        for place in (None, HERE):
            labeler = make()
            labeler.fit(PrivateRecords.of(table, torch.arange(len(table)) % 3, 3, device=place))
            found.append(labeler.label(queries, FreeLedger()).labels)
        wrong[name] = int((found[0] != found[1]).sum())
    return not any(wrong.values()), wrong


@check
def features_are_those_of_the_cpu():
    """Largest relative distance of a vector, 1e-4 at most."""
    images, worst = drawn(64, 1, 28, 28), {}
    for extractor in (HOG(), Pixels(), PatchDictionary(centers=16)):
        if getattr(extractor, "learns", False):
            extractor.fit_public(images)
        here, there = (extract_on(extractor, images, place) for place in (CPU, HERE))
        worst[type(extractor).__name__] = float(
            ((here - there).norm(dim=1) / here.norm(dim=1).clamp_min(1e-9)).max()
        )
    return max(worst.values()) <= 1e-4, worst


@check
def vectors_do_not_depend_on_other_records():
    """Bits of the vectors of private records when one of them is taken away."""
    found = {}
    for name in ("small_cnn", "mlp"):
        torch.manual_seed(0)
        network = BackboneFeatures(build_network(name, 10, 1, 28).to(HERE))
        examples = LabeledImages(TensorImages(drawn(1025, 1, 28, 28)), torch.arange(1025) % 10, 10)
        for out in (0, 500, 1024):
            others = torch.arange(1025) != out
            whole, rest = (
                PrivateRecords(
                    examples, functools.partial(extract_on, network, device=HERE), rows=rows
                ).table()
                for rows in (None, others.nonzero().flatten())
            )
            found[f"{name} without {out}"] = int((whole[others] != rest).any(dim=1).sum())
    return not any(found.values()), found


# ---------------------------------------------------------------- private training


@check
def records_go_through_the_step_as_on_the_cpu():
    """Same way and condition; an untraced step would be slow, and its guarantee conditional."""
    found = {}
    for name in NETWORKS:
        here, there = (gradients_of(name, place) for place in (CPU, HERE))
        found[name] = [here.way.name, there.way.name, there.condition]
    return all(b in (a, "vmap") and said is None for a, b, said in found.values()), found


@check
def sums_are_those_of_the_cpu():
    """Relative distance of clipped sums, 2e-3 at most (TF32 in convolutions); dropout draws, so it is left out."""
    found = {}
    for name in NETWORKS:
        if "dropout" in name:
            continue
        here, there = (gradients_of(name, place).sum(range(100)).cpu() for place in (CPU, HERE))
        found[name] = float((here - there).norm() / here.norm())
    return max(found.values()) <= 2e-3, found


@check
def one_record_moves_a_sum_by_the_bound_at_most():
    """Over records left out from the front, the middle and the end: C (1 + 1e-5)."""
    found = {}
    for name in NETWORKS:
        if "dropout" in name:
            continue
        gradients = gradients_of(name, HERE)
        whole = gradients.sum(range(100))
        found[name] = max(
            float((whole - gradients.sum([place for place in range(100) if place != out])).norm())
            for out in (0, 36, 64, 99)
        )
    return max(found.values()) <= CLIP * (1 + 1e-5), found


@check
def a_failing_record_counts_as_zero():
    """Ids and labels out of range, in processes of their own: a device-side assertion would end the training."""
    found = {}
    for case in ("id", "label"):
        words = [sys.executable, "-m", "benchmarks.gpu_checks", "fails", case]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60 if PLACE == "cuda" else 400)
        found[case] = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return all(said.startswith("ok") for said in found.values()), found


def fails(case):
    x, y = records(None)
    if "id" in case:
        x[20, 0] = 5000
    else:
        y[20] = 77
    gradients = gradients_of("words", HERE, (x, y))
    rest = gradients.sum([place for place in range(100) if place != 20])
    moved = float((gradients.sum(range(100)) - rest).norm())
    print("ok" if moved <= CLIP * (1 + 1e-5) else "moved too far:", moved)


@check
def a_buffer_that_is_the_private_table_is_refused():
    class Centred(Lit):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0] - self.table.mean(0)), batch[1])

    x, y = records(IMAGE)
    module = Centred(NETWORKS["dense"][0]())
    module.register_buffer("table", x)
    try:
        fit(module, ACCELERATOR, TensorDataset(x, y), "table")
    except ValueError as error:
        return "shares memory" in str(error), str(error)[:120]
    return False, "accepted"


@check
def memory_that_ends_changes_no_sum():
    """Chunks that do not fit: the sum is that of chunks that do, and the time says what the way back costs."""
    if PLACE != "cuda":
        return True, "only on CUDA"
    x, y = records(IMAGE, 64)
    sums, seconds = [], []
    for size, share in ((4, 1.0), (64, 0.02)):  # 2.2 GB of gradients, of 2.8 GB
        torch.manual_seed(0)
        layers = [nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 1024), nn.ReLU(), nn.Linear(1024, 4)]
        module = Lit(nn.Sequential(nn.Flatten(), *layers)).to(HERE)
        gradients = RecordGradients(
            module, PrivateData(TensorDataset(x, y)), CLIP, options=TrainingOptions(physical_batch_size=size)
        )
        gradients.choose(timed=False)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)
        begun = waited()
        sums.append(gradients.sum(range(64)).cpu())
        seconds.append(round(waited() - begun, 2))
        torch.cuda.set_per_process_memory_fraction(1.0)
    distance = float((sums[0] - sums[1]).norm())
    return distance <= 1e-3 * float(sums[0].norm()), {"distance": distance, "seconds": seconds}


def fit(module, accelerator, data, name, epochs=2, resumed=None, **given):
    training = PrivateTraining(
        Budget(epsilon=2.0, delta=1e-5),
        CLIP,
        expected_batch_size=30,
        private_records=100,
        run_dir=WORK / name,
        options=TrainingOptions(noise_source=SeededNoise(1)),
    )
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator=accelerator, devices=1, callbacks=[training], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=WORK / name, **given,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, 10))
    return training, trainer


@check
def trainings_end_as_on_the_cpu():
    """Weights 1e-2 apart at most, the same ε and guarantee; the checkpoint is read without a GPU."""
    found, weights, privacy = {}, [], []
    for number, accelerator in enumerate(("cpu", ACCELERATOR)):
        torch.manual_seed(0)
        module = Lit(NETWORKS["convolutions"][0]())
        training, trainer = fit(module, accelerator, TensorDataset(*records(IMAGE)), f"fit{number}")
        weights.append(torch.cat([p.detach().cpu().flatten() for p in module.parameters()]))
        privacy.append((round(training.epsilon, 9), training.guarantee))
        trainer.save_checkpoint(WORK / f"fit{number}.ckpt")
    found["distance"] = float((weights[0] - weights[1]).norm() / weights[0].norm())
    found["privacy"] = privacy
    state = torch.load(WORK / "fit1.ckpt", map_location="cpu", weights_only=True)
    found["on the CPU"] = all(value.device.type == "cpu" for value in state["state_dict"].values())
    return found["distance"] <= 1e-2 and privacy[0] == privacy[1] and found["on the CPU"], found


@check
def mixed_precision_trains():
    """Traced: rounding to 16 bits must not make the guarantee conditional."""
    found = {}
    for name in ("convolutions", "attention"):
        torch.manual_seed(0)
        module = Lit(NETWORKS[name][0]())
        data = TensorDataset(*records(NETWORKS[name][1]))
        training, _ = fit(module, ACCELERATOR, data, f"mixed {name}", precision="bf16-mixed")
        found[name] = {
            "way": training.way,
            "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
        }
    return all(one["way"] == "traced" and one["finite"] for one in found.values()), found


@check
def the_strategy_of_several_processes_works():
    """With the one process that one GPU allows: DDP with NCCL, beside the package's own groups."""
    torch.manual_seed(0)
    module = Lit(NETWORKS["dense"][0]())
    training, _ = fit(module, ACCELERATOR, TensorDataset(*records(IMAGE)), "ddp", strategy="ddp")
    return training.way == "traced", {"epsilon": training.epsilon, "way": training.way}


@check
def a_step_waits_seldom_for_the_device():
    """Synchronisations in the sum of 100 records, 40 at most; and the seconds of a step of 11 million weights."""
    if PLACE != "cuda":
        return True, "only on CUDA"
    gradients = gradients_of("convolutions", HERE)
    gradients.sum(range(100))
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gradients.sum(range(100))
    torch.cuda.set_sync_debug_mode("default")
    found = {"synchronisations": sum("synchroniz" in str(one.message) for one in said)}
    import torchvision

    module = Lit(
        torchvision.models.resnet18(num_classes=4, norm_layer=lambda size: nn.GroupNorm(8, size))
    ).to(HERE)
    data = PrivateData(TensorDataset(drawn(64, 3, 32, 32), torch.arange(64) % 4))
    for size in (None, 64):
        gradients = RecordGradients(
            module, data, CLIP, expected_batch_size=64, options=TrainingOptions(physical_batch_size=size)
        )
        gradients.choose()
        gradients.sum(range(64))
        begun = waited()
        gradients.sum(range(64))
        found[f"ResNet-18, 64 records, chunks of {size}: seconds"] = round(waited() - begun, 3)
    begun = time.perf_counter()
    SystemNoise().normal(sum(p.numel() for p in module.parameters()), 1.0)
    found["its noise: seconds"] = round(time.perf_counter() - begun, 3)
    return found["synchronisations"] <= 40, found


def main():
    if sys.argv[1:2] == ["fails"]:
        fails(sys.argv[2])
        return
    CHECKS.sort(
        key=lambda one: one is a_failing_record_counts_as_zero
    )  # starts processes; the others come first
    for function in CHECKS:
        begun = time.perf_counter()
        try:
            passed, figure = function()
        except BaseException as error:
            traceback.print_exc()
            passed, figure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        line = f"{'PASS' if passed else 'FAIL'} {function.__name__}: {figure} ({time.perf_counter() - begun:.1f} s)"
        print(line)
        with (OUT / "summary.txt").open("a") as file:
            print(line, file=file)
        RESULTS[function.__name__] = {"passed": bool(passed), "figure": figure}
        (OUT / "checks.json").write_text(json.dumps(RESULTS, indent=1, default=str, ensure_ascii=False))
    sys.exit(not all(one["passed"] for one in RESULTS.values()))


if __name__ == "__main__":
    main()
