"""However a module, its data or its hooks mix records, one record moves the sum by its norm at most."""

import argparse
import contextvars
import functools
import os
import queue
import random
import secrets
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import grouped
import jsonargparse
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.testing import clipped_sum

CLASSES, COUNT = 4, 18  # a chunk of 16, and two more
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(COUNT, 1, 6, 6, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (COUNT,), generator=GENERATOR)
SEEN, TOTALS = [], {"count": 0}
NUMBER = 0


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)
        self.made()

    def made(self):
        """What a subclass needs."""

    def logits(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self.logits(x), y) * self.factor(x, y)

    def factor(self, x, y):
        return 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BatchWeights(Lit):
    def loss(self, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return F.cross_entropy(self.logits(x), y, weight=len(y) / counts)


class ClassWeights(Lit):
    def loss(self, x, y):
        return F.cross_entropy(self.logits(x), y, weight=torch.tensor([1.0, 1.0, 1.0, 100.0]))


class Contrast(Lit):
    def loss(self, x, y):
        rows = F.normalize(self.body(x))
        same = (y[:, None] == y[None]).float()
        return 50 * (-(rows @ rows.T).log_softmax(1) * same).sum()


class Coins(Lit):
    def loss(self, x, y):
        if random.random() < 0.5:
            x = 0.5 * (x + x.roll(1, 0))
        logits = self.logits(F.dropout(x + 0.1 * torch.randn_like(x)))
        return F.cross_entropy(logits, y) * (1 + float(np.random.rand()))  # noqa: NPY002


class Bank(Lit):
    """Keeps what it computed: in a list, in a buffer, and by a hook."""

    def made(self):
        self.bank, self.outputs = [], []
        self.register_buffer("centre", torch.zeros(16))
        self.body.register_forward_hook(lambda module, inputs, output: self.outputs.append(output.detach()))

    def loss(self, x, y):
        z = self.body(x)
        self.centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        loss = sum((z - old).square().sum() for old in self.bank + self.outputs)
        self.bank.append(z.detach())
        return loss + F.cross_entropy(self.head(z - 5 * self.centre), y)


def remembering(function):
    """A decorator with a cache of its own."""
    calls = []

    @functools.wraps(function)
    def inner(self, x, y):
        calls.append(1)
        return function(self, x, y) + len(calls)

    return inner


class Counter(Lit):
    """Counts in what it holds, on its class, in defaults, closures, arguments of a command line and iterators."""

    number, rows, helper = 0, [], types.SimpleNamespace(total=0)

    def made(self):
        self.own, self.kept, self.stream = 0, types.SimpleNamespace(number=0), iter(range(10**6))
        self.numbered = enumerate(iter(range(10**6)), 1)
        self.args = argparse.Namespace(seen=jsonargparse.Namespace(count=0))
        self.kind = type("Kind", (), {"count": 0, "__module__": __name__})
        self.others, self.alive = weakref.WeakSet(), []

    @remembering
    def factor(self, x, y, given=[]):  # noqa: B006
        self.own += len(y)
        self.kept.number += 1
        type(self).number += 1
        self.rows.append(1)
        self.helper.total += 1
        given.append(1)
        self.args.seen.count += 1
        self.kind.count += 1
        self.alive.append(torch.zeros(1))
        self.others.add(self.alive[-1])
        return (
            self.own + self.kept.number + self.number + len(self.rows) + self.helper.total + len(given)
            + self.args.seen.count + self.kind.count + len(self.others) + next(self.stream) + next(self.numbered)[1]
        )  # fmt: skip


VARIABLE, HELD = contextvars.ContextVar("VARIABLE", default=0), contextvars.ContextVar("HELD")
HELD.set([])


class Globals(Lit):
    """Counts in its module, in a context variable and in the environment."""

    def made(self):
        self.helpers = sys.modules[__name__]

    def factor(self, x, y):
        global NUMBER
        NUMBER += 1
        SEEN.append(1)
        self.helpers.TOTALS["count"] += 1
        VARIABLE.set(VARIABLE.get() + 1)
        HELD.get().append(1)
        grouped.privknn_count = getattr(grouped, "privknn_count", 0) + 1
        os.environ["PRIVKNN_TEST_COUNT"] = str(1 + int(os.environ.get("PRIVKNN_TEST_COUNT", "0")))
        numbers = (
            NUMBER + len(SEEN) + TOTALS["count"] + VARIABLE.get() + len(HELD.get()) + grouped.privknn_count
        )
        return numbers + int(os.environ["PRIVKNN_TEST_COUNT"])


@functools.lru_cache
def numbered(shape):
    SEEN.append(1)
    return len(SEEN)


class Weigher:
    calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


class Remembered(Lit):
    """Asks caches, and a callable of its class."""

    weigh = Weigher()

    @staticmethod
    @functools.lru_cache(1)
    def first(key):
        return 1 + random.random() * 100

    def factor(self, x, y):
        return 1 + numbered(float(x.sum())) + self.weigh() + self.first("all")


class WeightsInPlace(Lit):
    def loss(self, x, y):
        with torch.no_grad():
            self.head.weight.data.add_(x.mean())
            self.body[1].bias.add_(x.mean())
        return F.cross_entropy(self.logits(x), y)


class OnTheTrainer(Lit):
    def factor(self, x, y):
        if self._trainer is None:
            return 1
        self.trainer.mine = getattr(self.trainer, "mine", 0) + 1
        return self.trainer.mine


class Metrics(Lit):
    def made(self):
        self.accuracy, self.others = MulticlassAccuracy(CLASSES), {"top": MulticlassAccuracy(CLASSES)}

    def loss(self, x, y):
        logits = self.logits(x)
        self.accuracy(logits, y)
        self.others["top"].update(logits, y)
        return F.cross_entropy(logits, y) * (1 + self.others["top"].update_count)


class Gradients(Lit):
    """Gradient hooks that remember."""

    def made(self):
        self.norms = [1.0]
        self.head.register_full_backward_hook(self.remember)

    def remember(self, module, inputs, outputs):
        self.norms.append(self.norms[-1] * 2)
        return tuple(None if one is None else one * self.norms[-1] for one in inputs)


class OwnGenerator(Lit):
    def made(self):
        self.generator, self.other = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def loss(self, x, y):
        drawn = torch.rand(x.shape, generator=self.generator) + self.other.random()
        return F.cross_entropy(self.logits(x + drawn), y)


class Broken(Lit):
    """Fails, or has no finite gradient, for some records."""

    def factor(self, x, y):
        if bool((y == 1).all()):
            raise RuntimeError("a record")
        return float("nan") if bool((y == 2).all()) else 1e30


class BatchHooks(Lit):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x - x.min()) / (x.max() - x.min() + 1e-9), y


class Large(Lit):
    """Large common parts, in single precision."""

    def loss(self, x, y):
        return F.cross_entropy(self.logits(1e4 + x) * 1e3, y)


class ByItsName(Lit):
    """Names that the code has as words, of its own module and of a library."""

    def factor(self, x, y):
        globals()["NUMBER"] = globals()["NUMBER"] + 1
        torch.privknn_count = getattr(torch, "privknn_count", 0) + 1
        nn.Module.privknn_count = getattr(nn.Module, "privknn_count", 0) + 1
        setattr(F.cross_entropy, "count", getattr(F.cross_entropy, "count", 0) + 1)  # noqa: B010
        return NUMBER + torch.privknn_count + nn.Module.privknn_count + F.cross_entropy.count


class FromTheSystem(Lit):
    """Random numbers of the operating system, and new generators."""

    def loss(self, x, y):
        drawn = random.SystemRandom().random() + secrets.randbelow(5) + np.random.default_rng().random()
        return F.cross_entropy(self.logits(x + drawn), y)


class ByTheClock(Lit):
    def factor(self, x, y):
        return 1 + time.time_ns() % 7 + time.perf_counter_ns() % 5


class Seeds(Lit):
    """Takes its randomness from what came before."""

    def loss(self, x, y):
        noise = torch.rand(x.shape) + random.random()
        torch.manual_seed(int(1e6 * x.sum()))
        random.seed(float(x.sum()))
        return F.cross_entropy(self.logits(x + noise), y)


class Switches(Lit):
    """A record of class 1 turns gradients and single precision off for whoever comes next."""

    def loss(self, x, y):
        loss = F.cross_entropy(self.logits(x), y)
        if bool((y == 1).any()):
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
        return loss * torch.ones(1).element_size()


class InAThread(Lit):
    def made(self):
        self.waiting = queue.SimpleQueue()

    def factor(self, x, y):
        thread = threading.Thread(target=SEEN.append, args=(1,))
        thread.start()
        thread.join()
        return 1 + len(SEEN)


class InAQueue(InAThread):
    def factor(self, x, y):
        self.waiting.put(1)
        return self.waiting.qsize()


class InAFile(Lit):
    def factor(self, x, y):
        path = Path(os.environ["PRIVKNN_TEST_FOLDER"]) / f"{time.time_ns()}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        return len(list(path.parent.iterdir()))


MODULES = [
    Lit, BatchWeights, ClassWeights, Contrast, Coins, Bank, Counter, Globals, Remembered, WeightsInPlace,
    OnTheTrainer, Metrics, Gradients, OwnGenerator, Broken, BatchHooks, Large, ByItsName, FromTheSystem, ByTheClock,
    Seeds, Switches,
]  # fmt: skip


def standardised(items):
    x, y = default_collate(items)
    return (x - x.mean()) / (x.std() + 1e-6), y


class Collated:
    def __init__(self):
        self.seen = []

    def __call__(self, items):
        self.seen += items
        x, y = default_collate(items)
        return x * len(self.seen), y


class Stateful(Dataset):
    """Augments by coins, counts, and remembers the record before."""

    def __init__(self):
        self.count, self.last = 0, None

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.count += 1
        image = IMAGES[index] * self.count + torch.rand(1, 6, 6) + random.random()
        image = image if self.last is None else image + self.last
        self.last = image
        return image, int(LABELS[index])


class Tables(Stateful):
    """Counts what it reads in large tables of every kind, and keeps what it read."""

    def __init__(self):
        self.counts = {"list": [0] * 10_001, "dict": dict.fromkeys(range(10_001), 0)}
        self.shared = torch.zeros(270_000).share_memory_()
        self.cache = [None] * 10_001

    def __getitem__(self, index):
        for table in self.counts.values():
            table[0] += 1
        self.shared[0] += 1
        self.cache[index] = IMAGES[index]
        seen = sum(one is not None for one in self.cache[:COUNT])
        number = seen + self.counts["list"][0] + self.counts["dict"][0] + float(self.shared[0])
        return IMAGES[index] * number, int(LABELS[index])


PLAIN = TensorDataset(IMAGES, LABELS)
DATA = {
    "a collate function": lambda: DataLoader(PLAIN, batch_size=8, collate_fn=standardised),
    "one that remembers": lambda: DataLoader(PLAIN, batch_size=8, collate_fn=Collated()),
    "a dataset that remembers": Stateful,
    "tables that count": Tables,
    "a part of a table": lambda: Subset(
        TensorDataset(IMAGES.flip(0), LABELS.flip(0)), range(COUNT - 1, -1, -1)
    ),
}


def check_moves(make, data):
    """Removing each of a few records moves the sum by the norm at most, and by nothing of the others'."""
    everyone = list(range(COUNT))
    norm = 0.3
    whole = clipped_sum(make(), data, everyone, norm)
    torch.testing.assert_close(whole, clipped_sum(make(), data, everyone, norm), rtol=0, atol=1e-5 * norm)
    for gone in (0, COUNT - 1):
        less = clipped_sum(make(), data, [one for one in everyone if one != gone], norm)
        assert float((whole - less).norm()) <= norm * (1 + 1e-6)
    if make is ByTheClock:  # each sum has a time of its own
        return
    # A norm that clips nothing shows factors that clipping hides.
    free = 1e6
    module = make()
    whole, less, alone = (clipped_sum(module, data, rows, free) for rows in (everyone, everyone[1:], [0]))
    assert float((whole - less - alone).norm()) <= 1e-5 * min(free, float(whole.norm()))


@pytest.mark.parametrize("make", MODULES, ids=lambda made: made.__name__)
def test_no_module_lets_one_record_into_the_gradient_of_another(make):
    check_moves(make, PLAIN)
    assert (SEEN, NUMBER, TOTALS, Counter.number, Counter.rows) == ([], 0, {"count": 0}, 0, [])
    assert "PRIVKNN_TEST_COUNT" not in os.environ
    for place, name in ((torch, "privknn_count"), (nn.Module, "privknn_count"), (F.cross_entropy, "count")):
        assert not hasattr(place, name)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("make", [InAThread, InAQueue, InAFile])
def test_what_leads_out_of_a_step_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVKNN_TEST_FOLDER", str(tmp_path))
    with pytest.raises(ValueError, match=r"training_step: fails on a made-up record .*can't be"):
        clipped_sum(make(), PLAIN, range(3))
    SEEN.clear()


@pytest.mark.parametrize("name", DATA)
def test_no_data_lets_one_record_into_another(name):
    check_moves(Lit, DATA[name]())


def test_sums_are_those_of_a_loop_over_records():
    module, total = Lit(), 0
    for x, y in zip(IMAGES.split(1), LABELS.split(1), strict=True):
        gradient = torch.cat(
            [p.flatten() for p in torch.autograd.grad(module.loss(x, y), list(module.parameters()))]
        )
        total = total + gradient.double() * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(clipped_sum(module, PLAIN, range(COUNT), 0.5), total, rtol=1e-6, atol=1e-7)


def test_broken_records_count_as_none():
    good = [place for place in range(COUNT) if LABELS[place] not in (1, 2)]
    whole = clipped_sum(Broken(), PLAIN, range(COUNT), 0.5)
    torch.testing.assert_close(whole, clipped_sum(Broken(), PLAIN, good, 0.5), rtol=0, atol=1e-9)


def test_a_step_leaves_no_trace_on_the_module_or_the_generators():
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    for make in (Bank, Counter, Metrics, WeightsInPlace):
        module = make()
        torch.set_rng_state(states[0])
        before = {name: value.clone() for name, value in module.state_dict().items()}
        clipped_sum(module, PLAIN, [1, 2, 3])
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert not any(p.grad is not None for p in module.parameters())
        assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
