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

from benchmarks.record import Measured, entries, listed, markdown, rows_of
from benchmarks.speed import _in_turns
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.comparison.table import SEEDED, stated
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.privacy import Budget
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.privacy.mechanisms.steps import clip_factors
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import clipped_sum
from pl_privknn.training import NoisySGD, PrivateTraining, TrainingOptions, tanh_cnn
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from pl_privknn.training.requirements import replace_batch_norms

EPSILON, DELTA, RECORDS, BATCH, CLASSES, SIDE = 4.0, 1e-3, 8, 4, 3, 32
#: Records whose clipped gradients are compared.
COMPARED = 4

Case = tuple[Any, Any]


def _loss(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.network(batch[0]), batch[1])


class Classifier(pl.LightningModule):
    """Classifier with a loss of the module and a batch; without any code for privacy."""

    def __init__(self, network: nn.Module, loss: Callable[..., Tensor] = _loss) -> None:
        super().__init__()
        self.network, self.own_loss = network, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, which is logged."""
        loss = self.own_loss(self, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam of what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Network(nn.Module):
    """Network of named layers, and a function of these and the input."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.function(x, **self.layers)


class Records(Dataset[Any]):
    """Synthetic records, each with its label."""

    def __init__(self, make: Callable[[torch.Generator, int], Any]) -> None:
        self.items = [make(torch.Generator().manual_seed(row), row % CLASSES) for row in range(RECORDS)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


# -- records -----------------------------------------------------------------------------------------------------


def _image(generator: torch.Generator, label: int, side: int = SIDE) -> Case:
    return torch.rand(3, side, side, generator=generator), label


def _sentence(generator: torch.Generator, label: int) -> Case:
    return torch.randint(50, (12,), generator=generator), label


def _masks(generator: torch.Generator, label: int) -> Case:
    return _image(generator, label)[0], torch.randint(CLASSES, (SIDE, SIDE), generator=generator)


def _loaded(make: Callable[[torch.Generator, int], Any]) -> DataLoader[Any]:
    return DataLoader(Records(make), BATCH, shuffle=True)


# -- networks and losses -----------------------------------------------------------------------------------------


def _weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    layers = normed(nn.Conv2d(3, 8, 3, 2)), nn.ReLU(), nn.Flatten(), normed(nn.Linear(1800, CLASSES))
    return nn.Sequential(*layers)


def _recurrent(x: Tensor, words: nn.Module, layer: nn.Module, out: nn.Module) -> Tensor:
    return out(layer(words(x))[0][:, -1])


def _packed(x: Tensor, words: nn.Module, layer: nn.Module, out: nn.Module) -> Tensor:
    """Logits of as many words as there are before the first zero."""
    lengths = (x > 0).sum(1).clamp(min=1).cpu()
    settings: dict[str, Any] = {"batch_first": True, "enforce_sorted": False}
    return out(layer(nn.utils.rnn.pack_padded_sequence(words(x), lengths, **settings))[1][0][-1])


def _of_words(kind: Any, function: Callable[..., Tensor] = _recurrent) -> nn.Module:
    words, layer = nn.Embedding(50, 8), kind(8, 16, batch_first=True)
    return Network(function, words=words, layer=layer, out=nn.Linear(16, CLASSES))


def _attention() -> nn.Module:
    def function(x: Tensor, words: nn.Module, attention: nn.Module, out: nn.Module) -> Tensor:
        seen = words(x)
        return out(attention(seen, seen, seen)[0].mean(1))

    words, attention = nn.Embedding(50, 16), nn.MultiheadAttention(16, 4, batch_first=True)
    return Network(function, words=words, attention=attention, out=nn.Linear(16, CLASSES))


def _bags() -> nn.Module:
    def function(x: Tensor, bags: nn.Module, out: nn.Module) -> Tensor:
        flat = x.flatten()
        return out(bags(flat, torch.arange(0, len(flat), x.shape[1])))

    return Network(function, bags=nn.EmbeddingBag(50, 16), out=nn.Linear(16, CLASSES))


def _u_net() -> nn.Module:
    def function(x: Tensor, down: nn.Module, below: nn.Module, up: nn.Module, out: nn.Module) -> Tensor:
        wide = down(x).relu()
        return out(torch.cat([wide, up(below(wide).relu())], 1))

    down, below = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
    up, out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)
    return Network(function, down=down, below=below, up=up, out=out)


def _of_pixels(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.network(batch[0]), batch[1], ignore_index=0)


def _language(module: Any, batch: Any) -> Tensor:
    return module.network(input_ids=batch[0], labels=batch[0]).loss


# -- modules -----------------------------------------------------------------------------------------------------


def _on_words(network: nn.Module) -> Case:
    return Classifier(network), _loaded(_sentence)


def _segmentation(network: nn.Module) -> Case:
    return Classifier(network, _of_pixels), _loaded(_masks)


def _timm(name: str, side: int = SIDE, **settings: Any) -> Case:
    import timm

    network = timm.create_model(name, num_classes=CLASSES, **settings)
    return Classifier(network), _loaded(functools.partial(_image, side=side))


def _resnet() -> Case:
    from torchvision.models import resnet18

    return Classifier(resnet18(num_classes=CLASSES)), _loaded(_image)


def _boring() -> Case:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    return BoringModel(), BoringDataModule()


def _lightly() -> Case:
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sizes = {"batch_size_per_device": BATCH, "feature_dim": 8, "num_classes": CLASSES, "topk": (1,)}
    return LinearClassifier(backbone, **sizes), _loaded(_image)


def _bert(tuned: Callable[[Any], Any] = lambda model: model) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(intermediate_size=64, num_labels=CLASSES, **sizes))
    return _on_words(Network(lambda words, model: model(input_ids=words).logits, model=tuned(model)))


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    of = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, **of))


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return Classifier(model, _language), _loaded(_sentence)


def _geo(name: str, target: Callable[[torch.Generator], Tensor] | None, **settings: Any) -> Case:
    """Task of torchgeo on dicts; without a target on a data module of torchgeo, with its batch hooks."""
    import torchgeo.trainers
    from torchgeo.datamodules import NonGeoDataModule

    class Fields(Records):
        def __init__(self, split: str = "train") -> None:
            super().__init__(lambda g, label: {"image": 255 * _image(g, 0)[0], "label": torch.tensor(label)})

    data: Any = NonGeoDataModule(Fields, batch_size=BATCH)
    if target is not None:
        named = "mask" if "Segmentation" in name else "label"
        data = _loaded(lambda g, label: {"image": _image(g, label)[0], named: target(g)})
    return getattr(torchgeo.trainers, name)(**settings), data


_REFUSED = "torchvision, ResNet-18 with batch normalisation"
_SWIN = {"img_size": SIDE, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
_FCN = {"model": "fcn", "num_filters": 8, "num_classes": CLASSES}
#: What makes a module and its data, by the package that it comes from and a name.
CASES: dict[str, Callable[[], Case]] = {
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
    "transformers, BERT": _bert,
    "peft, LoRA of BERT": lambda: _bert(_lora),
    "pytorch_lightning, BoringModel and BoringDataModule": _boring,
    _REFUSED: _resnet,
    "transformers, GPT-2 with tied head": _gpt2,
    "torch, GRU": lambda: _on_words(_of_words(nn.GRU)),
    "torch, LSTM": lambda: _on_words(_of_words(nn.LSTM)),
    "torch, multi-head attention": lambda: _on_words(_attention()),
    "torch, EmbeddingBag": lambda: _on_words(_bags()),
    "torch, weight norm": lambda: (Classifier(_weight_norm()), _loaded(_image)),
    "torch, segmentation with ignore_index": lambda: _segmentation(nn.Conv2d(3, CLASSES, 3, padding=1)),
    "torch, U-Net": lambda: _segmentation(_u_net()),
    "torch, packed sequences": lambda: _on_words(_of_words(nn.LSTM, _packed)),
}  # fmt: skip


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
            settings = {"epsilon": EPSILON, "delta": DELTA, "records": RECORDS}
            yield Measured(_outcome(name), [0], name, settings)
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
    (module, data), (untrained, same) = CASES[name](), CASES[name]()
    untrained.load_state_dict(module.state_dict())
    replaced = name != _REFUSED
    if not isinstance(data, DataLoader):
        data.setup("fit")
    loader = data if isinstance(data, DataLoader) else data.train_dataloader()
    training = PrivateTraining(
        Budget(epsilon=EPSILON, delta=DELTA),
        expected_batch_size=BATCH,
        private_records=RECORDS,
        replace_batch_norm=replaced,
        options=TrainingOptions(reads_alone=True, example=loader.dataset[0], noise_source=SeededNoise(0)),
    )
    # The package whose Trainer takes it.
    lightning = pl if isinstance(module, pl.LightningModule) else importlib.import_module("lightning.pytorch")
    # Lightning's demonstration validates on a part of the table that it trains on.
    limits = {**TRAINS_ALONE, "limit_val_batches": 0 if "Boring" in name else 1.0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"default_root_dir": folder, "callbacks": [training], "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=1, **own, **limits)
        try:
            if isinstance(data, DataLoader):
                trainer.fit(module, data, same)
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
        "step": training.way,
        "level": "conditional" if training.conditions else "unconditional",
        "condition": "; ".join(training.conditions),
        "epsilon": training.epsilon,
        **stated(SEEDED),
        "steps": trainer.global_step,
        "difference": float((ours - literal).norm() / literal.norm()),
    }


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
    images = torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(count) % 10)


def _by_hooks(network: nn.Module, data: TensorDataset) -> Callable[[], Tensor]:
    """Clipped sum by Opacus' hooks, in chunks."""
    from opacus.grad_sample import GradSampleModule

    hooked = GradSampleModule(network, loss_reduction="sum")
    parameters = [p for p in hooked.parameters() if p.requires_grad]

    def work() -> Tensor:
        total: Any = 0.0
        for images, labels in DataLoader(data, 128):
            F.cross_entropy(hooked(images), labels, reduction="sum").backward()
            rows: Any = [p.grad_sample.flatten(1) for p in parameters]
            factors = clip_factors(torch.stack([r.norm(dim=1) for r in rows]).norm(dim=0).double(), 1.0)
            total = total + torch.cat([factors.float() @ part for part in rows])
            hooked.zero_grad()
        return total

    return work


def _by_loop(network: nn.Module, data: TensorDataset) -> Callable[[], Tensor]:
    """Clipped sum by a loop over records."""
    parameters = list(network.parameters())

    def work() -> Tensor:
        total = ClippedSum([p.numel() for p in parameters], 1.0, torch.device("cpu"))
        for image, label in data:
            loss = F.cross_entropy(network(image[None]), label[None])
            total.add_one(torch.autograd.grad(loss, parameters))
        return total.finish()

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


def _compared(
    repeat: int,
    network: nn.Module,
    rows: TensorDataset,
    module: Any,
    data: Any = None,
    beside: Any = _by_hooks,
) -> dict[str, Any]:
    """Comparison with another implementation; memory is measured first, before any can be reused."""
    few, count, data = _pictures(2, 1, 2), len(rows), rows if data is None else data
    for _ in range(2):  # all that is imported late
        small = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
        _gradients(Classifier(small), few).sum([0])
        _by_hooks(small, few)()
    other = functools.partial(beside, network, rows)
    peaks = _peak(lambda: functools.partial(_gradients(module, data).sum, range(count))), _peak(other)
    made, theirs = _gradients(module, data), other()
    ours = functools.partial(made.sum, range(count))
    difference = float((ours() - theirs()).norm() / theirs().norm())
    # Seconds of theirs over ours: examples a second of ours over theirs.
    found = _in_turns(theirs, ours, repeat)
    return {
        **{name: found[name] for name in ("ratio", "ratio_min", "ratio_max")},
        "examples_per_second": round(count / found["bare_seconds"], 1),
        "beside_per_second": round(count / found["seconds"], 1),
        "peak_mb": round(peaks[0] / 1e6, 1),
        "beside_peak_mb": round(peaks[1] / 1e6, 1),
        "difference": difference,
        "load": round(os.getloadavg()[0], 1),
        "way": made.way.name,
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
    return _compared(repeat, network, _pictures(16, 3, SIDE), module, beside=_by_loop)


def _layers(repeat: int) -> dict[str, Any]:
    network, rows = tanh_cnn(10, 1, 28), _pictures(512, 1, 28)
    images, labels = rows.tensors
    sizes: dict[str, Any] = {"image_size": 28, "expected_batch_size": 256, "private_records": len(rows)}
    module = NoisySGD(copy.deepcopy(network), budget=Budget(epsilon=1.0), **sizes)
    data = ArraysDataModule(images, labels, public_images=images[:24], num_classes=10, overlap="ignore")
    data.setup("fit")
    return _compared(repeat, network, rows, module, data)


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
    rows = []
    for (step, level, why), here in trained.items():
        largest, names = max(difference for _, difference in here), "; ".join(name for name, _ in here)
        rows.append([str(len(here)), names, step, level, f"{largest:.0e}", why or "–"])
    header = ("", "module", "step", "guarantee", "largest difference", "condition, or reason")
    return markdown(header, [*rows, *refused])


def speed_table() -> str:
    """Table of speed and peak memory."""
    columns = {
        "comparison": "{part}",
        "records/s": "{examples_per_second:.0f}",
        "of the other": "{beside_per_second:.0f}",
        "ratio": "{ratio:.2f}",
        "peak MB": "{peak_mb:.0f}",
        "peak MB of the other": "{beside_peak_mb:.0f}",
    }
    rows = ({**row, "part": row["part"].removeprefix("speed: ")} for row in rows_of("foreign_modules"))
    return listed(columns, (row for row in rows if "peak_mb" in row))
