"""Private training of LightningModules and networks of others, unchanged, on made-up records; and its speed.

Each is trained for two steps at a stated ε by ``PrivateTraining``, or refused with a reason. Its sum of clipped
gradients is held against a literal loop: for each record a deep copy of the untrained module, ``training_step`` on a
batch of one, the gradient, clipped in double precision. Networks of images are compared on permuted memory (channels
last) too. Random numbers in both follow from a record's index.

Packages that are not dependencies (lightly, peft, torchgeo, transformers) are looked for; a row says where one is
missing.

Speed is a ratio of examples per processor second of one thread; both sides take turns within one run. Hooks are those
of Opacus 1.6 (``GradSampleModule``) with the same clipping; the plain loop is a forward and backward pass, clipping,
and a sum for each record. Peak memory is what a process of its own takes beyond what it began with.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import random
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.noisy_steps import clip_factors
from pl_privknn.testing import clipped_sum
from pl_privknn.training import NoisySGD, PrivateTraining, tanh_cnn
from pl_privknn.training.gradients import IsolatedGradients, replace_batch_norms
from pl_privknn.training.private_data import PrivateData

EPSILON, DELTA, RECORDS, BATCH, CLASSES, SIDE = 4.0, 1e-3, 8, 4, 3, 32
#: Records whose clipped gradients are compared.
COMPARED = 4


class Case(NamedTuple):
    """Module that is trained.

    Attributes:
        package: that it comes from.
        make: gives a module and its data.
        replaced: whether batch normalisation is replaced.
        images: whether records hold images, whose memory can be permuted.
        after: looks at the trained module, and returns what it found.
    """

    package: str
    make: Callable[[], tuple[Any, Any]]
    replaced: bool = False
    images: bool = False
    after: Callable[[Any], str] | None = None


class Classifier(pl.LightningModule):
    """A module as anyone would write it, for batches of any kind.

    Args:
        network: gives logits.
        inputs: finds a network's input in a batch.
        loss: of logits and targets.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Callable[[Any], tuple[Any, Tensor]] = tuple,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.network, self.inputs, self.loss = network, inputs, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss."""
        given, targets = self.inputs(batch)
        loss = self.loss(self.network(given), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam of what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Records(Dataset[Any]):
    """Made-up records.

    Args:
        make: one, from a generator and its label.
    """

    def __init__(self, make: Callable[[torch.Generator, int], Any]) -> None:
        self.items = [make(torch.Generator().manual_seed(row), row % CLASSES) for row in range(RECORDS)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@dataclasses.dataclass
class Pair:
    """A batch of a kind of its own."""

    image: Tensor
    label: Tensor


def _image(generator: torch.Generator, side: int = SIDE) -> Tensor:
    return torch.rand(3, side, side, generator=generator)


def _images(side: int = SIDE) -> DataLoader[Any]:
    return DataLoader(Records(lambda generator, label: (_image(generator, side), label)), BATCH, shuffle=True)


def _dicts(**targets: Callable[[torch.Generator, int], Any]) -> DataLoader[Any]:
    def record(generator: torch.Generator, label: int) -> dict[str, Any]:
        return {
            "image": _image(generator),
            **{name: make(generator, label) for name, make in targets.items()},
        }

    return DataLoader(Records(record), BATCH, shuffle=True)


def _words() -> DataLoader[Any]:
    tokens = lambda generator, label: (torch.randint(50, (12,), generator=generator), label)  # noqa: E731
    return DataLoader(Records(tokens), BATCH, shuffle=True)


def _timm(name: str, side: int = SIDE, **settings: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        import timm

        return Classifier(timm.create_model(name, num_classes=CLASSES, **settings)), _images(side)

    return make


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Recurrent(nn.Module):
    """A classifier of sequences of words by what a recurrent layer ends with.

    Args:
        layer: class of it.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 16), layer(16, 24, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, words: Tensor) -> Any:
        """Logits ``(b, classes)``."""
        return self.head(self.layer(self.embedding(words))[0][:, -1])


class Letters(nn.Module):
    """A classifier of texts, which a collate function hands over as strings."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(128, CLASSES)

    def forward(self, texts: Sequence[str]) -> Any:
        """Logits ``(b, classes)``."""
        codes = [torch.tensor([ord(letter) % 128 for letter in text]) for text in texts]
        return torch.stack([self.bag(one[None])[0] for one in codes])


def _autoencoder() -> tuple[Any, Any]:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()
    )
    return Classifier(network, lambda batch: (batch[0], batch[0]), F.mse_loss), _images()


def _dataclasses() -> tuple[Any, Any]:
    data = Records(lambda generator, label: Pair(_image(generator), torch.tensor(label)))

    def collate(items: list[Pair]) -> Pair:
        return Pair(torch.stack([one.image for one in items]), torch.stack([one.label for one in items]))

    return Classifier(_mlp(), lambda b: (b.image, b.label)), DataLoader(data, BATCH, collate_fn=collate)


def _strings() -> tuple[Any, Any]:
    texts = Records(lambda generator, label: ("abc"[label] * (3 + label), label))

    def collate(items: list[Any]) -> Any:
        return [text for text, _ in items], torch.tensor([label for _, label in items])

    return Classifier(Letters()), DataLoader(texts, BATCH, collate_fn=collate)


class _Tuned(nn.Module):
    """A model of transformers that gives logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Any:
        return self.model(input_ids=words).logits


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=CLASSES,
        )
    )


def _lora() -> tuple[Any, Any]:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    return Classifier(_Tuned(get_peft_model(_bert(), settings))), _words()


def _saved_adapter(module: Any) -> str:
    """Whether what peft saves is what was trained."""
    from safetensors.torch import load_file

    trained = [p for p in module.parameters() if p.requires_grad]
    with tempfile.TemporaryDirectory() as folder:
        module.network.model.save_pretrained(folder)
        saved = list(load_file(Path(folder) / "adapter_model.safetensors").values())
    ours = sorted((tuple(p.shape), p.detach().double().sum().item()) for p in trained)
    theirs = sorted((tuple(p.shape), p.double().sum().item()) for p in saved)
    return "the saved adapter is what was trained" if ours == theirs else "the saved adapter differs"


def _lightly() -> tuple[Any, Any]:
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    made = LinearClassifier(
        backbone, batch_size_per_device=BATCH, feature_dim=8, num_classes=CLASSES, topk=(1,)
    )
    return made, _images()


def _geo(name: str, data: Callable[[], Any], **settings: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        import torchgeo.trainers

        return getattr(torchgeo.trainers, name)(**settings), data()

    return make


def _geo_data() -> Any:
    """A data module of torchgeo, with its batch hooks, over made-up images."""
    from torchgeo.datamodules import NonGeoDataModule

    class Fields(Records):
        def __init__(self, split: str = "train") -> None:
            super().__init__(lambda g, label: {"image": 255 * _image(g), "label": torch.tensor(label)})

    return NonGeoDataModule(Fields, batch_size=BATCH)


def _resnet() -> tuple[Any, Any]:
    from torchvision.models import resnet18

    return Classifier(resnet18(num_classes=CLASSES)), _images()


def _manual() -> tuple[Any, Any]:
    module = Classifier(_mlp())
    module.automatic_optimization = False
    return module, _images()


def _boring() -> tuple[Any, Any]:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    return BoringModel(), BoringDataModule()


def _pictured(network: Callable[[], nn.Module]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (Classifier(network()), _images())


def _on_words(network: Callable[[], nn.Module]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (Classifier(network()), _words())


CASES = {
    "lightly, LinearClassifier": Case("lightly", _lightly, images=True),
    "torchgeo, ClassificationTask (ResNet-18)": Case(
        "torchgeo", _geo("ClassificationTask", _geo_data, model="resnet18", num_classes=CLASSES), True, True
    ),
    "torchgeo, SemanticSegmentationTask (FCN)": Case(
        "torchgeo",
        _geo(
            "SemanticSegmentationTask",
            lambda: _dicts(mask=lambda g, _: torch.randint(CLASSES, (SIDE, SIDE), generator=g)),
            model="fcn",
            num_filters=8,
            num_classes=CLASSES,
        ),
        images=True,
    ),
    "torchgeo, RegressionTask (ResNet-18)": Case(
        "torchgeo",
        _geo(
            "RegressionTask", lambda: _dicts(label=lambda g, _: torch.rand(1, generator=g)), model="resnet18"
        ),
        True,
        True,
    ),
    "timm, ResNet": Case("timm", _timm("resnet10t"), True, True),
    "timm, EfficientNet": Case("timm", _timm("test_efficientnet", side=64), True, True),
    "timm, MobileNet": Case("timm", _timm("mobilenetv3_small_050"), True, True),
    "timm, RegNet": Case("timm", _timm("regnetx_002"), True, True),
    "timm, ViT": Case("timm", _timm("test_vit", img_size=SIDE, patch_size=8), images=True),
    "timm, ConvNeXt": Case("timm", _timm("test_convnext"), images=True),
    "timm, Swin": Case(
        "timm",
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=SIDE,
            embed_dim=24,
            depths=(1, 1),
            num_heads=(2, 2),
            window_size=4,
        ),
        images=True,
    ),
    "torchvision, ResNet-18": Case("torchvision", _resnet, True, True),
    "transformers, BERT": Case("transformers", _on_words(lambda: _Tuned(_bert()))),
    "peft, LoRA of BERT": Case("peft", _lora, after=_saved_adapter),
    "pytorch_lightning, BoringModel and BoringDataModule": Case("pytorch_lightning", _boring),
    "nn.LSTM": Case("torch", _on_words(lambda: Recurrent(nn.LSTM))),
    "nn.GRU": Case("torch", _on_words(lambda: Recurrent(nn.GRU))),
    "nn.EmbeddingBag": Case("torch", _on_words(lambda: nn.EmbeddingBag(50, CLASSES))),
    "MLP": Case("torch", _pictured(_mlp), images=True),
    "autoencoder": Case("torch", _autoencoder, images=True),
    "MLP on dicts": Case(
        "torch",
        lambda: (
            Classifier(_mlp(), lambda b: (b["image"], b["label"])),
            _dicts(label=lambda _, label: label),
        ),
        images=True,
    ),
    "MLP on dataclasses": Case("torch", _dataclasses),
    "texts as strings": Case("torch", _strings),
    "torchvision, ResNet-18 with batch normalisation": Case("torchvision", _resnet),
    "manual optimisation": Case("torch", _manual),
}


# -- trainings -------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument(
        "--only", nargs="+", choices=["modules", "speed", *CASES, *SPEEDS], default=["modules", "speed"]
    )
    parser.add_argument("--repeat", type=int, default=5, help="turns of a comparison of speed")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part a module, and one a comparison of speed."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if {"modules", name} & set(options.only):
            yield Measured(_told(case), [0], name, {"epsilon": EPSILON, "delta": DELTA, "records": RECORDS})
    for name, compare in SPEEDS.items():
        if {"speed", name} & set(options.only):
            yield Measured(compare(options.repeat), [0], name, {"repeat": options.repeat})


def _told(case: Case) -> dict[str, Any]:
    """One module's row; whatever else goes wrong with it stops no other."""
    try:
        return _trial(case)
    except Exception as error:
        return {"package": case.package, "outcome": "failed", "reason": f"{type(error).__name__}: {error}"}


def _trial(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {"package": case.package}
    try:
        found["version"] = importlib.metadata.version(case.package.replace("_", "-"))
        module, data = case.make()
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        return {**found, "outcome": "not installed", "reason": str(error)}
    training, watched = _training(case), _Way()
    untrained = copy.deepcopy(module)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _lightning_of(module).Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[training, watched],
            **{**TRAINS_ALONE, "limit_val_batches": 1.0},
        )
        try:
            if isinstance(data, DataLoader):
                trainer.fit(module, data, data)
            else:
                trainer.fit(module, datamodule=data)
        except ValueError as error:
            return {**found, "outcome": "refused", "reason": str(error)}
        found |= {"outcome": "trained", "way": watched.way, "epsilon": training.epsilon, **stated(SEEDED)}
        found |= {"steps": trainer.global_step}
        if case.after is not None:
            found["after"] = case.after(module)
        if case.replaced:
            replace_batch_norms(untrained)
        data = case.make()[1]  # one that no trainer has
        found["difference"] = _difference(untrained, data)
        if case.images:
            found["difference_permuted"] = _difference(untrained, _Permuted.of(data))
    return found


def _training(case: Case) -> PrivateTraining:
    return PrivateTraining(
        EPSILON,
        DELTA,
        expected_batch_size=BATCH,
        expected_records=RECORDS,
        replace_batch_norm=case.replaced,
        noise_source=SeededNoise(0),
    )


def _lightning_of(module: Any) -> Any:
    """The package whose Trainer takes a module."""
    return pl if isinstance(module, pl.LightningModule) else importlib.import_module("lightning.pytorch")


class _Way(Callback):
    way = ""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        (training,) = [one for one in trainer.callbacks if isinstance(one, PrivateTraining)]
        self.way = training._gradients.way


class _Permuted:
    """A collate function whose images lie with their channels last in memory."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    @classmethod
    def of(cls, data: Any) -> DataLoader[Any]:
        """The loader of some data, with images so."""
        if not isinstance(data, DataLoader):
            data.setup("fit")
            data = data.train_dataloader()
        return DataLoader(data.dataset, BATCH, collate_fn=cls(data.collate_fn))

    def __call__(self, items: list[Any]) -> Any:
        batch = self.collate(items)
        last = lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t  # noqa: E731
        return torch.utils._pytree.tree_map_only(Tensor, last, batch)


def _difference(module: Any, data: Any) -> float:
    """Relative difference of the clipped sum and of a literal loop."""
    ours = clipped_sum(module, data, list(range(COMPARED)))
    literal = _literal(module, data)
    return float((ours - literal).norm() / literal.norm())


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
            batch = hooks.on_after_batch_transfer(
                hooks.transfer_batch_to_device(batch, torch.device("cpu"), 0), 0
            )
        _seed(1 + row)
        output = alone.training_step(batch, 0)
        parameters = [p for p in alone.parameters() if p.requires_grad]
        loss = output["loss"] if isinstance(output, dict) else output
        parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = torch.cat(
            [
                (torch.zeros_like(p) if part is None else part).flatten().double()
                for part, p in zip(parts, parameters, strict=True)
            ]
        )
        total = total + flat * min(1.0, norm / float(flat.norm()))
    return total


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


# -- speed -------------------------------------------------------------------------------------------------


def _gradients(module: Any, data: Any, chunk: int | None = None) -> IsolatedGradients:
    made = IsolatedGradients(
        module, PrivateData(data), 1.0, expected_batch_size=1024, physical_batch_size=chunk
    )
    made.choose_way()
    return made


def _pictures(count: int, channels: int, side: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(count, channels, side, side, generator=generator), torch.arange(count) % 10
    )


def _hooked(network: nn.Module, data: TensorDataset, chunk: int = 128) -> Callable[[], Tensor]:
    """The clipped sum by Opacus' hooks, in chunks."""
    from opacus.grad_sample import GradSampleModule

    hooked = GradSampleModule(network, loss_reduction="sum")
    parameters = [p for p in hooked.parameters() if p.requires_grad]

    def work() -> Tensor:
        totals = [torch.zeros_like(p) for p in parameters]
        for images, labels in DataLoader(data, chunk):
            F.cross_entropy(hooked(images), labels, reduction="sum").backward()
            rows = [p.grad_sample.flatten(1) for p in parameters]
            factors = clip_factors(torch.stack([r.norm(dim=1) for r in rows]).norm(dim=0).double(), 1.0)
            for total, part in zip(totals, rows, strict=True):
                total += (factors.float() @ part).view_as(total)
            hooked.zero_grad()
        return torch.cat([total.flatten() for total in totals])

    return work


def _plain(network: nn.Module, data: TensorDataset) -> Callable[[], Tensor]:
    """The clipped sum by a loop of forward and backward passes of single records."""
    parameters = [p for p in network.parameters() if p.requires_grad]

    def work() -> Tensor:
        totals = [torch.zeros_like(p) for p in parameters]
        for images, labels in DataLoader(data, 1):
            parts = torch.autograd.grad(F.cross_entropy(network(images), labels), parameters)
            factor = float(clip_factors(torch.stack([p.norm() for p in parts]).norm()[None].double(), 1.0))
            for total, part in zip(totals, parts, strict=True):
                total.add_(part, alpha=factor)
        return torch.cat([total.flatten() for total in totals])

    return work


def _peak(made: Callable[[], Callable[[], Any]]) -> int:
    """Memory (bytes) that a process of its own takes to make ``made()`` and call it, beyond what it began with."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        before = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        made()()
        theirs.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)

    process = context.Process(target=run)
    process.start()
    found = int(ours.recv())
    process.join()
    return found


def _compared(
    count: int,
    gradients: Callable[[], IsolatedGradients],
    other: Callable[[], Callable[[], Tensor]],
    repeat: int,
) -> dict[str, Any]:
    """Ours beside another way, each from its beginning; memory comes first, before there is any to use again."""
    few = _pictures(2, 1, 2)
    for _ in range(2):  # all that is imported late
        small = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
        _gradients(Classifier(small), few).sum([0])
        _hooked(small, few)()
    peaks = _peak(lambda: functools.partial(gradients().sum, range(count))), _peak(other)
    made, beside = gradients(), other()
    ours = functools.partial(made.sum, range(count))
    difference = float((ours() - beside()).norm() / beside().norm())
    found = _in_turns(
        beside, ours, repeat
    )  # seconds of theirs over ours: examples a second of ours over theirs
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


def _isolated_beside_hooks(
    network: nn.Module, count: int, channels: int, side: int, repeat: int
) -> dict[str, Any]:
    data = _pictures(count, channels, side)
    module = Classifier(copy.deepcopy(network))
    return _compared(count, lambda: _gradients(module, data), lambda: _hooked(network, data), repeat)


def _cnn(repeat: int) -> dict[str, Any]:
    return _isolated_beside_hooks(tanh_cnn(10, 1, 28), 512, 1, 28, repeat)


def _vit(repeat: int) -> dict[str, Any]:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    network = VisionTransformer(  # Opacus has no gradients of bare parameters, such as class tokens
        SIDE, 4, 3, 10, "avg", embed_dim=64, depth=4, num_heads=4, class_token=False, pos_embed="none"
    )
    return _isolated_beside_hooks(network, 256, 3, SIDE, repeat)


def _proven(repeat: int) -> dict[str, Any]:
    count, data = 512, _pictures(560, 1, 28)
    tables = dealt(*data.tensors, count, 24, num_classes=10)
    tables.setup("fit")
    network = tanh_cnn(10, 1, 28)
    module = NoisySGD(
        copy.deepcopy(network), image_size=28, epsilon=1.0, expected_batch_size=256, expected_records=count
    )
    rows = TensorDataset(*(table[:count] for table in data.tensors))
    return _compared(count, lambda: _gradients(module, tables), lambda: _hooked(network, rows), repeat)


def _wide(repeat: int) -> dict[str, Any]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    network = resnet18(num_classes=10, norm_layer=functools.partial(nn.GroupNorm, 32))
    data, count = _pictures(32, 3, SIDE), 32
    module = Classifier(copy.deepcopy(network))
    return _compared(count, lambda: _gradients(module, data), lambda: _plain(network, data), repeat)


SPEEDS = {
    "speed: CNN, 28 x 28, isolated beside Opacus": _cnn,
    "speed: ViT, 32 x 32, isolated beside Opacus": _vit,
    "speed: CNN, 28 x 28, proven network beside Opacus": _proven,
    "speed: ResNet-18, 32 x 32, isolated beside a plain loop": _wide,
}


# -- tables -------------------------------------------------------------------------------------------------


def table() -> str:
    """Foreign modules by what became of them; those that were refused with the reason."""
    trained: dict[str, list[tuple[str, float]]] = {}
    refused = []
    for name, entry in entries("foreign_modules").items():
        if name in CASES:
            found = entry["results"]
            if found["outcome"] == "trained":
                trained.setdefault(found["way"], []).append((name, found["difference"]))
            else:
                refused.append([name, found["outcome"], "–", found["reason"]])
    rows = [
        ["; ".join(name for name, _ in here), "trained", way, f"{max(size for _, size in here):.0e}"]
        for way, here in trained.items()
    ]
    return markdown(("module", "outcome", "way", "largest difference, or reason"), [*rows, *refused])


def speed_table() -> str:
    """Speed and peak memory."""
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
