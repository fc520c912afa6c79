"""Private training of unchanged third-party LightningModules and networks on synthetic records, and its speed.

Each is trained for two steps at a stated ε by ``PrivateTraining``, or refused with a reason; a row says whether its
step was traced, and the guarantee that noise of the operating system would have. Its sum of clipped gradients is held
against a literal loop: for each record a deep copy of the untrained module, ``training_step`` on a batch of one, the
gradient, clipped in double precision. Random numbers in both follow from a record's index. Packages that are not
dependencies (lightly, peft, torchgeo, transformers) are looked for; a row says where one is missing.

Speed is a ratio of examples per processor second of one thread; both sides take turns within one run. Hooks are those
of Opacus 1.6 (``GradSampleModule``) with the same clipping. Peak memory is what a process of its own takes beyond
what it began with.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import random
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from benchmarks.faulty import dealt
from benchmarks.record import Measured, entries, listed, markdown, rows_of
from benchmarks.speed import _in_turns
from pl_privknn._lightning import TRAINS_ALONE, Callback
from pl_privknn.comparison.results import SEEDED, stated
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.noisy_steps import clip_factors
from pl_privknn.testing import clipped_sum
from pl_privknn.training import NoisySGD, PrivateTraining, TrainingOptions, tanh_cnn
from pl_privknn.training.clipped_sums import ClippedSum
from pl_privknn.training.gradients import RecordGradients, replace_batch_norms
from pl_privknn.training.private_data import PrivateData

EPSILON, DELTA, RECORDS, BATCH, CLASSES, SIDE = 4.0, 1e-3, 8, 4, 3, 32
#: Records whose clipped gradients are compared.
COMPARED = 4


class Classifier(pl.LightningModule):
    """Plain classifier without any code for privacy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss."""
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam of what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Records(Dataset[Any]):
    """Synthetic records, each with its label."""

    def __init__(self, make: Callable[[torch.Generator, int], Any]) -> None:
        self.items = [make(torch.Generator().manual_seed(row), row % CLASSES) for row in range(RECORDS)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class _Tuned(nn.Module):
    """Model of transformers that returns logits only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Any:
        return self.model(input_ids=words).logits


def _loaded(make: Callable[[torch.Generator, int], Any]) -> DataLoader[Any]:
    return DataLoader(Records(make), BATCH, shuffle=True)


def _image(generator: torch.Generator, side: int = SIDE) -> Tensor:
    return torch.rand(3, side, side, generator=generator)


def _images(side: int = SIDE) -> DataLoader[Any]:
    return _loaded(lambda generator, label: (_image(generator, side), label))


def _on_words(network: nn.Module) -> tuple[Any, Any]:
    return Classifier(network), _loaded(lambda g, label: (torch.randint(50, (12,), generator=g), label))


def _timm(name: str, side: int = SIDE, **settings: Any) -> tuple[Any, Any]:
    import timm

    return Classifier(timm.create_model(name, num_classes=CLASSES, **settings)), _images(side)


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(intermediate_size=64, num_labels=CLASSES, **sizes))


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    of = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return get_peft_model(_bert(), LoraConfig(task_type="SEQ_CLS", r=4, **of))


def _lightly() -> tuple[Any, Any]:
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sizes = {"batch_size_per_device": BATCH, "feature_dim": 8, "num_classes": CLASSES, "topk": (1,)}
    return LinearClassifier(backbone, **sizes), _images()


def _geo(name: str, target: Callable[[torch.Generator], Tensor] | None, **settings: Any) -> tuple[Any, Any]:
    """A task of torchgeo on dicts; without a target on a data module of torchgeo, with its batch hooks."""
    import torchgeo.trainers
    from torchgeo.datamodules import NonGeoDataModule

    class Fields(Records):
        def __init__(self, split: str = "train") -> None:
            super().__init__(lambda g, label: {"image": 255 * _image(g), "label": torch.tensor(label)})

    data: Any = NonGeoDataModule(Fields, batch_size=BATCH)
    if target is not None:
        named = "mask" if "Segmentation" in name else "label"
        data = _loaded(lambda g, _: {"image": _image(g), named: target(g)})
    return getattr(torchgeo.trainers, name)(**settings), data


def _resnet() -> tuple[Any, Any]:
    from torchvision.models import resnet18

    return Classifier(resnet18(num_classes=CLASSES)), _images()


def _boring() -> tuple[Any, Any]:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    return BoringModel(), BoringDataModule()


class _Own(Classifier):
    """Module with a given loss."""

    def __init__(self, network: nn.Module, loss: Callable[..., Tensor], schedule: bool = False) -> None:
        super().__init__(network)
        self.own_loss, self.schedule = loss, schedule

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return self.own_loss(self, batch)

    def configure_optimizers(self) -> Any:
        """Adam, with a schedule of one cycle where that is asked for."""
        optimizer = super().configure_optimizers()
        if not self.schedule:
            return optimizer
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def _of_pixels(loss: Callable[..., Tensor], network: nn.Module | None = None, **own: Any) -> tuple[Any, Any]:
    small = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
    )
    return _Own(small if network is None else network, loss, **own), _images()


def _loss(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.network(batch[0]), batch[1])


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words, self.layer, self.out = (
            nn.Embedding(50, 8),
            kind(8, 16, batch_first=True),
            nn.Linear(16, CLASSES),
        )

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        return self.out(self.layer(self.words(words))[0][:, -1])


class _Packed(_Recurrent):
    def forward(self, words: Tensor) -> Tensor:
        """Logits, of as many words as there are before the first zero."""
        lengths = (words > 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(self.layer(packed)[1][0][-1])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(50, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        x = self.words(words)
        return self.out(self.attention(x, x, x)[0].mean(1))


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(50, 16), nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        flat = words.flatten()
        return self.out(self.bags(flat, torch.arange(0, len(flat), words.shape[1])))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.below = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of each pixel."""
        wide = self.down(images).relu()
        return self.out(torch.cat([wide, self.up(self.below(wide).relu())], 1))


def _segmentation(network: nn.Module) -> tuple[Any, Any]:
    def loss(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module.network(batch[0]), batch[1], ignore_index=0)

    masks = lambda g, label: (_image(g), torch.randint(CLASSES, (SIDE, SIDE), generator=g))  # noqa: E731
    return _Own(network, loss), _loaded(masks)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _language(module: Any, batch: Any) -> Tensor:
    return module.network(input_ids=batch[0], labels=batch[0]).loss


def _weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        normed(nn.Conv2d(3, 8, 3, 2)), nn.ReLU(), nn.Flatten(), normed(nn.Linear(1800, CLASSES))
    )


def _sizes() -> tuple[Any, Any]:
    pooled = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)
    )
    return Classifier(pooled), _loaded(lambda g, label: (_image(g, 16 + 4 * (label % 2)), label))


def _dicts() -> tuple[Any, Any]:
    def loss(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module.network(batch["image"]), batch["label"])

    made = _of_pixels(loss)[0]
    return made, _loaded(lambda g, label: {"image": _image(g), "label": label, "file": f"{label}.png"})


def _item(module: Any, batch: Any) -> Tensor:
    loss = _loss(module, batch)
    module.log("loss", loss.item())
    return loss


def _metrics() -> tuple[Any, Any]:
    from torchmetrics.classification import MulticlassAccuracy

    def loss(module: Any, batch: Any) -> Tensor:
        logits = module.network(batch[0])
        module.accuracy(logits, batch[1])
        module.log("accuracy", module.accuracy)
        return F.cross_entropy(logits, batch[1])

    module, data = _of_pixels(loss)
    module.accuracy = MulticlassAccuracy(CLASSES)
    return module, data


def _checkpointed(module: Any, batch: Any) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return F.cross_entropy(checkpoint(module.network, batch[0], use_reentrant=False), batch[1])


def _auxiliary() -> tuple[Any, Any]:
    module, data = _of_pixels(_loss)
    module.auxiliary = nn.Linear(8, 2)
    return module, data


def _bias_alone() -> tuple[Any, Any]:
    module, data = _of_pixels(_loss)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return module, data


def _mixup(module: Any, batch: Any) -> Tensor:
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002
    return share * _loss(module, batch) + (1 - share) * _loss(module, [batch[0].flip(0), batch[1].flip(0)])


def _branch(module: Any, batch: Any) -> Tensor:
    loss = _loss(module, batch)
    return loss if loss > 1 else 2 * loss


_REFUSED = "torchvision, ResNet-18 with batch normalisation"
_SWIN = {"img_size": SIDE, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
_FCN = {"model": "fcn", "num_filters": 8, "num_classes": CLASSES}
#: What makes a module and its data, by the package that it comes from and a name.
CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "lightly, LinearClassifier": _lightly,
    "torchgeo, ClassificationTask (ResNet-18)": lambda: _geo(
        "ClassificationTask", None, model="resnet18", num_classes=CLASSES
    ),
    "torchgeo, SemanticSegmentationTask (FCN)": lambda: _geo(
        "SemanticSegmentationTask", lambda g: torch.randint(CLASSES, (SIDE, SIDE), generator=g), **_FCN
    ),
    "torchgeo, RegressionTask (ResNet-18)": lambda: _geo(
        "RegressionTask", lambda g: torch.rand(1, generator=g), model="resnet18"
    ),
    "timm, ResNet": lambda: _timm("resnet10t"),
    "timm, EfficientNet": lambda: _timm("test_efficientnet", 64),
    "timm, MobileNet": lambda: _timm("mobilenetv3_small_050"),
    "timm, RegNet": lambda: _timm("regnetx_002"),
    "timm, ViT": lambda: _timm("test_vit", img_size=SIDE, patch_size=8),
    "timm, ConvNeXt": lambda: _timm("test_convnext"),
    "timm, Swin": lambda: _timm("swin_tiny_patch4_window7_224", **_SWIN),
    "torchvision, ResNet-18": _resnet,
    "transformers, BERT": lambda: _on_words(_Tuned(_bert())),
    "peft, LoRA of BERT": lambda: _on_words(_Tuned(_lora())),
    "pytorch_lightning, BoringModel and BoringDataModule": _boring,
    _REFUSED: _resnet,
    "transformers, GPT-2 with tied head": lambda: (
        _Own(_gpt2(), _language),
        _loaded(lambda g, label: (torch.randint(50, (12,), generator=g), label)),
    ),
    "torch, GRU": lambda: _on_words(_Recurrent(nn.GRU)),
    "torch, LSTM": lambda: _on_words(_Recurrent(nn.LSTM)),
    "torch, multi-head attention": lambda: _on_words(_Attention()),
    "torch, EmbeddingBag": lambda: _on_words(_Bags()),
    "torch, weight norm": lambda: _of_pixels(_loss, _weight_norm()),
    "torch, segmentation with ignore_index": lambda: _segmentation(nn.Conv2d(3, CLASSES, 3, padding=1)),
    "torch, U-Net": lambda: _segmentation(_UNet()),
    "torch, images of several sizes": _sizes,
    "torch, dicts with words": _dicts,
    "torch, loss.item()": lambda: _of_pixels(_item),
    "torch, torchmetrics in the step": _metrics,
    "torch, OneCycleLR": lambda: _of_pixels(_loss, schedule=True),
    "torch, gradient checkpointing": lambda: _of_pixels(_checkpointed),
    "torch, a network of torch.compile": lambda: _of_pixels(
        _loss, torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES)), backend="eager")
    ),
    "torch, an auxiliary head out of the loss": _auxiliary,
    "torch, frozen weights beside trained biases": _bias_alone,
    "torch, mixup by numpy": lambda: _of_pixels(_mixup),
    "torch, a branch on the loss": lambda: _of_pixels(_branch),
    "torch, packed sequences": lambda: _on_words(_Packed(nn.LSTM)),
}


# -- trainings -------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    groups = ["modules", "speed"]
    parser.add_argument("--only", nargs="+", choices=[*groups, *CASES, *SPEEDS], default=groups)
    parser.add_argument("--repeat", type=int, default=5, help="turns of a comparison of speed")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each module and each speed comparison."""
    torch.set_num_threads(1)
    for name in CASES:
        if {"modules", name} & set(options.only):
            yield Measured(
                _outcome(name), [0], name, {"epsilon": EPSILON, "delta": DELTA, "records": RECORDS}
            )
    for name, compare in SPEEDS.items():
        if {"speed", name} & set(options.only):
            yield Measured(compare(options.repeat), [0], name, {"repeat": options.repeat})


def _outcome(name: str) -> dict[str, Any]:
    """Result of one module; its errors do not stop the others."""
    package = name.partition(",")[0]
    try:
        version = importlib.metadata.version(package.replace("_", "-"))
        return {"package": package, "version": version, **_trial(name)}
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        return {"package": package, "outcome": "not installed", "reason": str(error)}
    except Exception as error:
        return {"package": package, "outcome": "failed", "reason": f"{type(error).__name__}: {error}"}


def _trial(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data = CASES[name]()
    replaced, watched, untrained = name != _REFUSED, _Way(), CASES[name]()[0]
    untrained.load_state_dict(module.state_dict())
    private: dict[str, Any] = {"expected_batch_size": BATCH, "private_records": RECORDS}
    options = TrainingOptions(reads_alone=True, noise_source=SeededNoise(0))
    training = PrivateTraining(
        budget=Budget(epsilon=EPSILON, delta=DELTA), replace_batch_norm=replaced, options=options, **private
    )
    # The package whose Trainer takes it.
    lightning = pl if isinstance(module, pl.LightningModule) else importlib.import_module("lightning.pytorch")
    # Lightning's demonstration validates on a part of the table that it trains on.
    limits = {**TRAINS_ALONE, "limit_val_batches": 0 if "Boring" in name else 1.0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"default_root_dir": folder, "callbacks": [training, watched], "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=1, **own, **limits)
        try:
            if isinstance(data, DataLoader):
                trainer.fit(module, data, CASES[name]()[1])
            else:
                trainer.fit(module, datamodule=data)
        except ValueError as error:
            return {"outcome": "refused", "reason": str(error)}
    if replaced:
        replace_batch_norms(untrained)
    for part in untrained.modules():  # eager attention and its graph drop different values
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    data = CASES[name]()[1]  # one that no trainer has
    ours, literal = clipped_sum(untrained, data, list(range(COMPARED))), _literal(untrained, data)
    return {
        "outcome": "trained",
        "way": watched.way,
        "step": training.way,
        "level": "conditional" if training.conditions else "unconditional",
        "condition": "; ".join(training.conditions),
        "epsilon": training.epsilon,
        **stated(SEEDED),
        "steps": trainer.global_step,
        "difference": float((ours - literal).norm() / literal.norm()),
    }


class _Way(Callback):
    way = ""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        (training,) = [one for one in trainer.callbacks if isinstance(one, PrivateTraining)]
        self.way = training._gradients.way


def _literal(module: Any, data: Any, norm: float = 1.0) -> Tensor:
    hooks, loader = (None, data) if isinstance(data, DataLoader) else (data, data.train_dataloader())
    total: Any = 0.0
    for row in range(COMPARED):
        alone = copy.deepcopy(module)
        _seed(1 + row)
        batch = (loader.collate_fn or default_collate)([loader.dataset[row]])
        if hooks is not None:
            _seed(1 + row)
            batch = hooks.on_before_batch_transfer(batch, 0)
            batch = hooks.transfer_batch_to_device(batch, torch.device("cpu"), 0)
            batch = hooks.on_after_batch_transfer(batch, 0)
        _seed(1 + row)
        output = alone.training_step(batch, 0)
        parameters = [p for p in alone.parameters() if p.requires_grad]
        loss = output["loss"] if isinstance(output, dict) else output
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([part.flatten().double() for part in parts])
        total = total + flat * min(1.0, norm / float(flat.norm()))
    return total


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


# -- speed -------------------------------------------------------------------------------------------------


def _gradients(module: Any, data: Any) -> RecordGradients:
    layers = module.private_training.layers_of(module) if isinstance(module, NoisySGD) else None
    made = RecordGradients(module, PrivateData(data), 1.0, expected_batch_size=1024, layers=layers)
    made.choose()
    return made


def _pictures(count: int, channels: int, side: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(count, channels, side, side, generator=generator), torch.arange(count) % 10
    )


def _summed(network: nn.Module, data: TensorDataset) -> Callable[[], Tensor]:
    """Clipped sum by Opacus' hooks, in chunks."""
    from opacus.grad_sample import GradSampleModule

    hooked = GradSampleModule(network, loss_reduction="sum")
    parameters = [p for p in hooked.parameters() if p.requires_grad]

    def work() -> Tensor:
        totals = [torch.zeros_like(p) for p in parameters]
        for images, labels in DataLoader(data, 128):
            F.cross_entropy(hooked(images), labels, reduction="sum").backward()
            rows: Any = [p.grad_sample.flatten(1) for p in parameters]
            factors = clip_factors(torch.stack([r.norm(dim=1) for r in rows]).norm(dim=0).double(), 1.0)
            for total, part in zip(totals, rows, strict=True):
                total += (factors.float() @ part).view_as(total)
            hooked.zero_grad()
        return torch.cat([total.flatten() for total in totals])

    return work


def _peak(made: Callable[[], Callable[[], Any]]) -> int:
    """Additional peak memory (bytes) of a separate process that makes ``made()`` and calls it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        made()()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        theirs.send(peak - pages * os.sysconf("SC_PAGE_SIZE"))

    process = context.Process(target=run)
    process.start()
    found = int(ours.recv())
    process.join()
    return found


def _looped(network: nn.Module, data: TensorDataset) -> Callable[[], Tensor]:
    """Clipped sum by a loop over records."""
    parameters = list(network.parameters())

    def work() -> Tensor:
        total = ClippedSum([p.numel() for p in parameters], 1.0, torch.device("cpu"))
        for image, label in data:
            loss = F.cross_entropy(network(image[None]), label[None])
            total.add_one(torch.autograd.grad(loss, parameters))
        return total.finish()

    return work


def _compared(
    repeat: int,
    network: nn.Module,
    rows: TensorDataset,
    module: Any,
    data: Any = None,
    summed: Callable[[nn.Module, TensorDataset], Callable[[], Tensor]] = _summed,
) -> dict[str, Any]:
    """Comparison of this package with another implementation; memory is measured first, before any can be reused."""
    few, count = _pictures(2, 1, 2), len(rows)
    for _ in range(2):  # all that is imported late
        small = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
        _gradients(Classifier(small), few).sum([0])
        _summed(small, few)()
    data = rows if data is None else data
    other = functools.partial(summed, network, rows)
    peaks = _peak(lambda: functools.partial(_gradients(module, data).sum, range(count))), _peak(other)
    made, beside = _gradients(module, data), other()
    ours = functools.partial(made.sum, range(count))
    difference = float((ours() - beside()).norm() / beside().norm())
    # Seconds of theirs over ours: examples a second of ours over theirs.
    found = _in_turns(beside, ours, repeat)
    return {
        **{name: found[name] for name in ("ratio", "ratio_min", "ratio_max")},
        "examples_per_second": round(count / found["bare_seconds"], 1),
        "beside_per_second": round(count / found["seconds"], 1),
        "peak_mb": round(peaks[0] / 1e6, 1),
        "beside_peak_mb": round(peaks[1] / 1e6, 1),
        "difference": difference,
        "load": round(os.getloadavg()[0], 1),
        "way": made.way,
    }


def _cnn(repeat: int) -> dict[str, Any]:
    network = tanh_cnn(10, 1, 28)
    return _compared(repeat, network, _pictures(512, 1, 28), Classifier(copy.deepcopy(network)))


def _vit(repeat: int) -> dict[str, Any]:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    network = VisionTransformer(  # Opacus has no gradients of bare parameters, such as class tokens
        SIDE, 4, 3, 10, "avg", embed_dim=64, depth=4, num_heads=4, class_token=False, pos_embed="none"
    )
    return _compared(repeat, network, _pictures(256, 3, SIDE), Classifier(copy.deepcopy(network)))


def _wide(repeat: int) -> dict[str, Any]:
    module, _ = _resnet()
    module.network.fc = nn.Linear(512, 10)
    replace_batch_norms(module)
    network = copy.deepcopy(module.network)
    return _compared(repeat, network, _pictures(16, 3, SIDE), module, summed=_looped)


def _layers(repeat: int) -> dict[str, Any]:
    count, data, network = 512, _pictures(560, 1, 28), tanh_cnn(10, 1, 28)
    tables = dealt(*data.tensors, count, 24, num_classes=10)
    tables.setup("fit")
    sizes: dict[str, Any] = {"image_size": 28, "expected_batch_size": 256, "private_records": count}
    module = NoisySGD(copy.deepcopy(network), budget=Budget(epsilon=1.0), **sizes)
    rows = TensorDataset(*(table[:count] for table in data.tensors))
    return _compared(repeat, network, rows, module, tables)


SPEEDS = {
    "speed: CNN, 28 x 28, traced beside Opacus": _cnn,
    "speed: ViT, 32 x 32, traced beside Opacus": _vit,
    "speed: ResNet-18, 32 x 32, traced beside a plain loop": _wide,
    "speed: CNN, 28 x 28, layers of NoisySGD beside Opacus": _layers,
}


# -- tables -------------------------------------------------------------------------------------------------


def table() -> str:
    """Table of third-party modules by outcome, with the reasons of conditional and refused ones."""
    trained: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    refused = []
    for name, entry in entries("foreign_modules").items():
        found = entry["results"]
        if found.get("outcome") == "trained":
            key = found["step"], found["level"], found["condition"]
            trained.setdefault(key, []).append((name, found["difference"]))
        elif "outcome" in found:
            refused.append(["1", name, found["outcome"], "–", "–", found["reason"]])
    rows = [
        [
            str(len(here)),
            "; ".join(n for n, _ in here),
            step,
            level,
            f"{max(d for _, d in here):.0e}",
            why or "–",
        ]
        for (step, level, why), here in trained.items()
    ]
    names = ("", "module", "step", "guarantee", "largest difference", "condition, or reason")
    return markdown(names, [*rows, *refused])


def speed_table() -> str:
    """Table of speed and peak memory."""
    columns = {
        "comparison": "{part}",
        "way": "{way}",
        "records/s": "{examples_per_second:.0f}",
        "of the other": "{beside_per_second:.0f}",
        "ratio": "{ratio:.2f}",
        "peak MB": "{peak_mb:.0f}",
        "peak MB of the other": "{beside_peak_mb:.0f}",
    }
    rows = ({**row, "part": row["part"].removeprefix("speed: ")} for row in rows_of("foreign_modules"))
    return listed(columns, (row for row in rows if "peak_mb" in row))
