"""A module's step as a graph: its gradients are the module's own, and no record meets another one in them."""

import random
import re
from collections import UserDict
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.testing import clipped_sum
from pl_privknn.training.traced_step import RecordStep
from tests.training.training_setup import Lit, Silent, fit, training, weights

COUNT, CLASSES = 18, 2  # a chunk of 16, and two more
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(COUNT, 1, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (COUNT,), generator=GENERATOR)
PLAIN = TensorDataset(IMAGES, LABELS)


class Step(Lit):
    """A module whose loss is a function of itself and a batch."""

    def __init__(self, loss, **attributes):
        super().__init__()
        self.own_loss = loss
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        return self.own_loss(self, *batch)


def plain(module, x, y):
    return F.cross_entropy(module(x), y)


# ------------------------------------------------------------------ records stay apart


def contrast(module, x, y):
    rows = F.normalize(module.net[:2](x))
    same = (y[:, None] == y[None]).float()
    return 50 * (-(rows @ rows.T).log_softmax(1) * same).sum() + plain(module, x, y)


def bank(module, x, y):
    out = module.net[:3](x)
    module.centre.mul_(0.9).add_(out.detach().mean(0))
    module.mean = 0.5 * module.mean + out.detach().mean(0)
    loss = sum((out - old).square().sum() for old in module.bank)
    module.bank.append(out.detach())
    module.count += len(x)
    return loss + F.cross_entropy(module.net[3](out - module.centre - module.mean), y) * module.count


def with_bank():
    module = Step(bank, bank=[], mean=torch.ones(8), count=0)
    module.register_buffer("centre", torch.zeros(8))
    module.net[1].register_forward_hook(lambda layer, inputs, output: module.bank.append(output.detach()))
    return module


def coins(module, x, y):
    x = F.dropout(x) + torch.randn(x.shape, generator=module.generator) + random.random() * np.random.rand()  # noqa: NPY002
    return plain(module, x, y)


def metrics(module, x, y):
    loss = plain(module, x, y)
    module.log_dict({"accuracy": module.accuracy(module(x), y), "loss": loss.item()})
    module.others["top"].update(module(x), y)
    module.logger.experiment.add_scalar("loss", float(loss))
    print(f"loss {loss}")
    return {"loss": loss, "logits": module(x)}


class Normalised(Step):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.bank.append(x)
        return (x - torch.stack(self.bank).mean()) / (x.std() + 1e-6), y


def closing_over(total):
    def loss(module, x, y):
        total[0] = total[0] + x.detach().mean()
        return plain(module, x, y) * total[0]

    return loss


def branches(module, x, y):
    return plain(module, x, y) * (1.0 if x.sum() > 30 else 2.0)


APART = {
    "a contrastive loss": lambda: Step(contrast),
    "a memory bank, running means and counts, a hook": with_bank,
    "dropout and draws of its own": lambda: Step(coins, generator=torch.Generator().manual_seed(0)),
    "metrics, logs and prints": lambda: Step(metrics, others={"top": MulticlassAccuracy(CLASSES)}),
    "a batch hook that remembers": lambda: Normalised(plain, bank=[]),
    "a closure that sums": lambda: Step(closing_over([torch.ones(())])),
    "large common parts": lambda: Step(lambda module, x, y: plain(module, 1e4 + x, y) * 1e3),
    "a branch on values": lambda: Step(branches),
}


@pytest.mark.parametrize("name", APART)
def test_a_record_moves_the_sum_by_its_own_gradient_alone(name):
    everyone, norm = list(range(COUNT)), 0.3
    module = APART[name]()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    whole, less = (clipped_sum(module, PLAIN, rows, norm) for rows in (everyone, everyone[1:]))
    assert float((whole - less).norm()) <= norm * (1 + 1e-6)
    # A norm that clips nothing shows factors that clipping hides.
    whole, less, alone = (clipped_sum(module, PLAIN, rows, 1e6) for rows in (everyone, everyone[1:], [0]))
    assert float((whole - less - alone).norm()) <= 1e-5 * float(whole.norm())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not getattr(module, "bank", [])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class Counted(nn.Module):
    rows = 0


def in_a_class(module, x, y):
    Counted.rows += len(x)
    return plain(module, x, y) * Counted.rows


def test_a_step_that_keeps_records_in_classes_is_refused():
    with pytest.raises(ValueError, match="keeps something of a record outside of the module"):
        clipped_sum(Step(in_a_class), PLAIN, [0])


# ------------------------------------------------------------------ its gradients are the module's own


def pseudo_labels(module, x, y):
    with torch.no_grad():
        target = module(x.flip(3)).softmax(1)
    kept = module(x).detach() + module.net[3].bias.data
    return F.cross_entropy(module(x), target) + (module(x) - kept).square().sum()


def in_place(module, x, y):
    with torch.no_grad():
        module.net[3].weight.mul_(2.0)
    return plain(module, x, y)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def penalty(module, x, y):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(plain(module, x, y), x, create_graph=True)
    return gradient.square().sum()


def compiled(module, x, y):
    return F.cross_entropy(torch.compile(module.net)(x), y)


def re_entrant(module, x, y):
    return F.cross_entropy(checkpoint(module.net[2:], module.net[:2](x), use_reentrant=True), y)


def attention(module, x, y):
    parts = module.net[:2](x).unflatten(1, (4, 2))
    return F.cross_entropy(module.net[3](F.scaled_dot_product_attention(parts, parts, parts).flatten(1)), y)


def reverses(module, x, y):
    return F.cross_entropy(Reversed.apply(module(x)), y)


OWN = {
    "plain": (plain, None),
    "blocks without gradients": (pseudo_labels, None),
    "values for its log": (lambda module, x, y: module.log("x", x.sum().item()) or plain(module, x, y), None),
    "checkpointing": (
        lambda module, x, y: F.cross_entropy(checkpoint(module.net, x, use_reentrant=False), y),
        # torch 2.4, which has no set_stance yet, keeps the inputs by a function of autograd.
        None if hasattr(torch.compiler, "set_stance") else "RuntimeError in ",
    ),
    "re-entrant checkpointing": (re_entrant, None),
    "several lines a record": (lambda module, x, y: plain(module, x.repeat(3, 1, 1, 1), y.repeat(3)), None),
    "a mask": (lambda module, x, y: plain(module, x, y) + module(x)[module(x) > 0].sum(), None),
    "attention within a record": (attention, None),
    "a mapping": (lambda module, x, y: {"loss": plain(module, x, y), "logits": module(x)}, None),
    "weights in the loss": (lambda module, x, y: plain(module, x, y) + module.net[1].weight.square().sum(), None),
    "a compiled network": (compiled, None),
    "a branch": (branches, r"GuardOnDataDependentSymNode in [\w.]*\.branches"),
    "weights in place": (in_place, "its graph has another gradient than the step"),
    "a gradient of its own": (reverses, r"RuntimeError in [\w.]*\.reverses"),
    "a gradient penalty": (penalty, r"RuntimeError in [\w.]*\.penalty"),
    "numpy": (lambda module, x, y: plain(module, x, y) * float(x.numpy().mean()), "looks at values of tensors"),
}  # fmt: skip


def literal(module, loss, norm, rows=range(COUNT)):
    total = torch.zeros(len(weights(module)), dtype=torch.float64)
    for row in rows:
        alone = Step(loss)
        alone.load_state_dict(module.state_dict())
        made = loss(alone, IMAGES[row : row + 1], LABELS[row : row + 1])
        if made is not None:
            (made["loss"] if isinstance(made, dict) else made).backward()
            flat = torch.cat([part.grad.flatten() for part in alone.parameters()]).double()
            total += flat * min(1.0, norm / float(flat.norm()))
    return total


@pytest.mark.parametrize("name", OWN)
def test_sums_are_those_of_a_loop_over_records_and_the_guarantee_says_how(name, tmp_path):
    loss, reason = OWN[name]
    torch.testing.assert_close(
        clipped_sum(Step(loss), PLAIN, range(COUNT), 0.5),
        literal(Step(loss), loss, 0.5),
        rtol=1e-5,
        atol=1e-6,
    )
    callback, _ = fit(Step(loss), tmp_path, training(noise_source=None), epochs=1, limit_train_batches=1)
    summary = callback.privacy_summary()
    if reason is None:
        assert (callback.guarantee, summary["step"]) == ("unconditional", "traced")
    else:
        assert (callback.guarantee, summary["step"]) == ("conditional", "copies")
        said = rf"training_step can't be traced \({reason}"
        assert re.search(said, summary["reason"])
        assert summary["reason"] == callback.report().reason
        with pytest.raises(ValueError, match="can't be traced"):
            fit(Step(loss), tmp_path / "strict", training(step="traced"), epochs=1)


def test_records_of_several_shapes_have_a_graph_each():
    images = [torch.rand(1, 8, 8 + 2 * (row % 3)) for row in range(COUNT)]

    class Sizes(Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, row):
            return {"image": images[row], "label": int(LABELS[row]), "name": f"record {row}"}

    class Pooled(Lit):
        def training_step(self, batch, batch_idx):
            x = F.adaptive_avg_pool2d(batch["image"], 8)
            return F.cross_entropy(self(x), batch["label"])

    data = TensorDataset(torch.stack([F.adaptive_avg_pool2d(one, 8) for one in images]), LABELS)
    found, wanted = clipped_sum(Pooled(), Sizes(), range(COUNT)), clipped_sum(Lit(), data, range(COUNT))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_later_shape_that_cannot_be_traced_counts_as_zero():
    wide = [(torch.rand(1, 8, 10), 1), (torch.rand(1, 8, 12), 0)]
    plain = [(IMAGES[row], int(LABELS[row])) for row in range(5)]
    found = clipped_sum(Lit(), DataLoader([plain[0], wide[0], *plain[1:], wide[1]]), range(7))
    torch.testing.assert_close(found, clipped_sum(Lit(), DataLoader(plain), range(5)), rtol=1e-5, atol=1e-6)


class Masked(Lit):
    """Its graph holds a constant of the record's length."""

    def training_step(self, batch, batch_idx):
        x = F.adaptive_avg_pool1d(batch[0].flatten(1), 64)
        mask = torch.from_numpy(np.triu(np.ones((len(batch[0][0]), 2)), k=1))
        return F.cross_entropy(self(x) + mask.mean(), batch[1])


def test_public_facts_follow_from_tables_and_examples_and_not_from_the_first_record(tmp_path):
    records = [(torch.rand(70 + 10 * (row % 3)), row % 2) for row in range(60)]
    options = {"noise_source": None, "private_records": 60}

    def facts(name, data, **more):
        class Data(pl.LightningDataModule):
            def train_dataloader(self):
                return DataLoader(data, batch_size=1)

        callback, _ = fit(
            Masked(), tmp_path / name, training(**options, **more), epochs=1, data=Data(), limit_val_batches=0
        )
        return callback.guarantee, callback.report().reason, callback.privacy_summary().get("constants")

    guarantee, reason, _ = facts("list", records)
    assert (guarantee, reason) == ("conditional", "the structure of the first record is public")
    example = torch.zeros(90), 1
    all_, fewer = (
        facts(name, data, example=example) for name, data in (("all", records), ("fewer", records[1:]))
    )
    assert all_ == fewer
    assert all_[0] == "unconditional"
    assert all_[2] == {"constant 0": [90, 2]}
    table = TensorDataset(torch.rand(60, 70), torch.arange(60) % 2)
    assert (
        facts("table", table)[0]
        == facts("parts", ConcatDataset([table, Subset(table, [])]))[0]
        == "unconditional"
    )


class Fields(UserDict):
    """A mapping that keeps more of a record than its items."""

    words: ClassVar[str] = "none"


def test_a_trace_holds_nothing_of_the_record_whose_shapes_it_has():
    fields = Fields(image=IMAGES[:1], label=LABELS[:1])
    fields.words = "a private word"
    seen = []

    class Looks(Lit):
        def training_step(self, batch, batch_idx):
            seen.append((batch.words, batch["label"].shape))
            return F.cross_entropy(self(batch["image"]), batch["label"])

    RecordStep(Looks()).trace(fields)
    assert seen
    assert {words for words, _ in seen} == {"none"}


def test_records_that_fail_or_have_no_finite_gradient_count_as_none():
    class Holes(Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, row):
            if row == 3:
                raise OSError("unreadable")
            return IMAGES[row] * (float("nan") if row == 5 else 1.0), 7 if row == 7 else LABELS[row]

    others = [row for row in range(COUNT) if row not in (3, 5, 7)]
    whole, less = clipped_sum(Lit(), Holes(), range(COUNT), 0.5), clipped_sum(Lit(), PLAIN, others, 0.5)
    torch.testing.assert_close(whole, less, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ what a graph holds, and for how long


class Linear(pl.LightningModule):
    """A weight that moves by a fact of the training at each step."""

    def __init__(self, fact):
        super().__init__()
        self.weight, self.scale, self.fact = nn.Parameter(torch.zeros(1)), 1.0, fact

    def training_step(self, batch, batch_idx):
        return -(self.weight * self.fact(self, batch_idx)).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_end(self):
        self.scale = 5.0


def facts_of(fact, folder, batch=45, epochs=2):
    """The fact of each step, as the weight's moves tell it."""

    class Watch(pl.Callback):
        def __init__(self):
            self.moves = []

        def on_train_batch_start(self, trainer, module, *_):
            self.before, self.rate = float(module.weight), trainer.optimizers[0].param_groups[0]["lr"]

        def on_train_batch_end(self, trainer, module, *_):
            self.moves.append((float(module.weight) - self.before) / self.rate)

    watch = Watch()
    sizes = {"expected_batch_size": batch, "private_records": 90, "max_grad_norm": 1e13}
    callback = training(noise_source=Silent(0), **sizes)
    fit(Linear(fact), folder, callback, epochs, callbacks=[watch], limit_val_batches=0)
    return watch.moves


@pytest.mark.parametrize(
    ("fact", "wanted"),
    [
        (lambda module, number: 1 + module.current_epoch, [1, 1, 2, 2]),
        (lambda module, number: 1 + module.global_step, [1, 2, 3, 4]),
        (lambda module, number: 1.0 if number % 2 else 2.0, [2, 1, 2, 1]),
        (lambda module, number: module.optimizers().param_groups[0]["lr"] * 10, [1, 2, 3, 4]),
        (lambda module, number: module.scale, [1, 1, 5, 5]),
    ],
)
def test_facts_of_the_training_are_those_of_the_epoch_or_the_step(fact, wanted, tmp_path):
    # Batches differ in size: 45 of 90 records are expected, and 40 % are four standard errors.
    for found, want in zip(facts_of(fact, tmp_path), wanted, strict=True):
        assert 0.6 * want < found < 1.4 * want


def test_numbers_of_numpy_are_drawn_at_every_step(tmp_path):
    found = facts_of(lambda module, number: 10.0 ** np.random.randint(6), tmp_path, batch=9, epochs=1)  # noqa: NPY002
    assert (
        len({round(np.log10(one)) for one in found if one}) > 1
    )  # all ten are alike once in 10 million times


def test_constants_of_a_graph_are_in_the_summary(tmp_path):
    constant = torch.tensor([1.0, 3.0])

    def weighted(module, x, y):
        return F.cross_entropy(module(x), y, weight=constant) * module.own.sum()

    module = Step(weighted, own=torch.ones(3))
    callback, _ = fit(module, tmp_path, epochs=1)
    assert callback.privacy_summary()["constants"] == {"own": [3], "constant 0": [2]}


TABLE = torch.rand(90, 1, 8, 8)


class Tensors(pl.LightningDataModule):
    """Holds its records as plain tensors."""

    def __init__(self):
        super().__init__()
        self.images, self.labels = TABLE, torch.arange(90) % 2

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=30)


class Hooked(Tensors):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - self.images.mean(0), batch[1]


def wants(said, loss, hooks=False, **attributes):
    return said, lambda folder: fit(
        Step(loss, **attributes), folder, epochs=1, data=(Hooked if hooks else Tensors)(), limit_val_batches=0
    )


@pytest.mark.parametrize(
    ("said", "run"),
    [
        wants("reads trainer.datamodule", lambda m, x, y: plain(m, x, y) * m.trainer.datamodule.labels.sum()),
        wants("shares memory with the private records", lambda m, x, y: plain(m, x - TABLE[:5].mean(0), y)),
        wants("shares memory with the private records", plain, hooks=True),
        wants(
            "shares memory with the private records",
            lambda m, x, y: plain(m, x - m.held[0], y),
            held=TABLE[3:5],
        ),
        wants(
            "more than 1048576 values",
            lambda m, x, y: plain(m, x, y) * m.held.mean(),
            held=torch.rand(1 << 21),
        ),
        wants("holds records", lambda m, x, y: plain(m, x - m.held[0][0], y), held=TensorDataset(TABLE)),
    ],
)
def test_a_step_does_not_reach_the_records(said, run, tmp_path):
    with pytest.raises(ValueError, match=said):
        run(tmp_path)
    assert not list(tmp_path.rglob("*.sqlite"))


def test_a_step_that_uses_a_word_of_its_batch_says_which(tmp_path):
    class Named(Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, row):
            return {"image": IMAGES[row], "label": LABELS[row], "eye": "left"}

    class OfWords(Lit):
        def training_step(self, batch, batch_idx):
            scale = 2.0 if batch["eye"][0] == "left" else 1.0
            return F.cross_entropy(self(batch["image"]) * scale, batch["label"])

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Named(), batch_size=4)

    callback, _ = fit(OfWords(), tmp_path, epochs=1, data=Data(), limit_val_batches=0)
    assert callback.guarantee == "none"  # of the tests' seeds
    assert "uses batch['eye'][0], of type str: make it a tensor in the data set" in callback.report().reason
