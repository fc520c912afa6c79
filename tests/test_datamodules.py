"""Public labels, training loaders that follow them, and the parts of a data module."""

import subprocess
import sys

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pl_privknn.datamodules import (
    ArraysDataModule,
    DigitsDataModule,
    NoLabeledExamplesError,
    PrivatePublicDataModule,
    PublicDataset,
    TensorImages,
)
from pl_privknn.datamodules.datasets import LabelTable
from pl_privknn.datamodules.images import fixed_shuffle
from pl_privknn.datamodules.loading import LabeledSampler, UnlabeledBatches, UnlabeledSampler

CLASSES = 3
PRIVATE, PUBLIC, TEST = 30, 40, 12


def numbered(start, count):
    """Images whose two pixels spell their number, so that every batch tells which images it holds."""
    numbers = torch.arange(start, start + count)
    return torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8).reshape(count, 1, 1, 2)


def number_of(images):
    pixels = (images.reshape(-1, 2) * 255).round().long()
    return pixels[:, 0] * 256 + pixels[:, 1]


def make_data(truth=True, **kwargs):
    settings = {
        "private_images": numbered(1000, PRIVATE),
        "private_labels": torch.arange(PRIVATE) % CLASSES,
        "public_images": numbered(0, PUBLIC),
        "public_truth": (torch.arange(PUBLIC) * 7 + 1) % CLASSES if truth else None,
        "test_images": numbered(2000, TEST),
        "test_labels": torch.arange(TEST) % CLASSES,
        "num_classes": CLASSES,
        "batch_size": 4,
        "unlabeled_batch_size": 8,
    }
    return ArraysDataModule(**{**settings, **kwargs})


@pytest.fixture
def data():
    module = make_data()
    module.setup("fit")
    return module


class Recorder(pl.LightningModule):
    """Notes what each training batch holds; ``scheduled`` asks for the number of steps before any epoch."""

    def __init__(self, scheduled=False):
        super().__init__()
        self.layer, self.scheduled = nn.Linear(2, CLASSES), scheduled
        self.labeled, self.unlabeled, self.evaluated = {}, {}, {"val": [], "test": []}

    def forward(self, x):
        return self.layer(x.flatten(1))

    def training_step(self, batch, batch_idx):
        (x, y), unlabeled = batch["labeled"], batch["unlabeled"]
        self.labeled.setdefault(self.current_epoch, []).append((number_of(x), y.clone()))
        self.unlabeled.setdefault(self.current_epoch, []).append(number_of(unlabeled))
        return nn.functional.cross_entropy(self(x), y) + 0 * self(unlabeled).sum()

    def validation_step(self, batch, batch_idx):
        self.evaluated["val"].append((number_of(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.evaluated["test"].append((number_of(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return number_of(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]

    def seen(self, epoch):
        """Public image -> its label, as trained on in ``epoch``; fails if one image had two labels."""
        pairs = {}
        for numbers, labels in self.labeled[epoch]:
            for number, label in zip(numbers.tolist(), labels.tolist(), strict=True):
                assert pairs.setdefault(number, label) == label
        return pairs


def trainer(tmp_path, epochs=3, callbacks=(), **kwargs):
    options = {"logger": False, "enable_checkpointing": False}
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, **kwargs},
    )


# ---------------------------------------------------------------------------- labels


def test_labels_start_unknown_and_follow_releases(data):
    public = data.public
    assert public.labels.dtype == torch.int64
    assert public.labels.is_shared()
    assert (public.labels == -1).all()
    public.set_labels(torch.tensor([3, 5, 9]), torch.tensor([2, -1, 0]))
    assert public.labeled_indices.tolist() == [3, 9]
    assert public.labels[[3, 5, 9]].tolist() == [2, -1, 0]
    public.set_labels([3, 5, 5], [-1, 0, 1])  # a label is taken away; the last of two stays
    assert public.labeled_indices.tolist() == [5, 9]
    assert int(public.labels[5]) == 1
    public.set_labels(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    public.set_labels(slice(0, 2), [1, 2])
    assert public.labeled_indices.tolist() == [0, 1, 5, 9]
    public.set_labels(public.truth >= 0, public.truth)  # what a supervised run needs
    assert torch.equal(public.labels, public.truth)
    public.clear_labels()
    assert len(public.labeled_indices) == 0


def test_soft_labels_turn_all_targets_into_rows(data):
    public = data.public
    assert public.soft_labels is None
    public.set_labels([1, 2], [0, 2])
    assert public.table[torch.tensor([2, 1])].tolist() == [2, 0]
    soft = torch.tensor([[0.2, 0.7, 0.1], [0.0, 0.0, 0.0]])
    public.set_labels([7, 8], [1, -1], soft)  # the second query was refused
    assert public.soft_mask.nonzero().flatten().tolist() == [7]
    assert public.soft_labels.is_shared()
    expected = [[1.0, 0.0, 0.0], [0.2, 0.7, 0.1], [0.0, 0.0, 1.0]]
    torch.testing.assert_close(public.table[torch.tensor([1, 7, 2])], torch.tensor(expected))
    public.set_labels([7], [1])  # a later hard label takes the soft one away
    assert public.soft_labels is None
    assert public.table[torch.tensor([1, 7])].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("indices", "labels", "soft", "error", "words"),
    [
        ([40], [0], None, IndexError, "0 … 39"),
        ([-1], [0], None, IndexError, "0 … 39"),
        ([0, 1], [0], None, ValueError, "1 labels for 2 images"),
        ([0], [3], None, ValueError, "num_classes=3"),
        ([0], [-2], None, ValueError, "num_classes=3"),
        ([0], [1.0], None, ValueError, "whole numbers"),
        ([[0]], [1], None, ValueError, "shape"),
        ([0.5], [1], None, ValueError, "whole numbers"),
        ([0], [1], torch.tensor([[0.5, 0.5]]), ValueError, r"\(1, 3\)"),
        ([0], [1], torch.tensor([[1, 0, 0]]), ValueError, "float"),
        ([0], [1], torch.tensor([[0.9, 0.5, 0.1]]), ValueError, "sum 1"),
        ([0], [1], torch.tensor([[1.5, -0.5, 0.0]]), ValueError, "at least 0"),
        ([0], [1], torch.tensor([[float("nan"), 0.5, 0.5]]), ValueError, "finite"),
    ],
)
def test_bad_labels_are_refused_and_change_nothing(data, indices, labels, soft, error, words):
    data.public.set_labels([0], [2])
    before = data.public.labels.clone()
    with pytest.raises(error, match=words):
        data.public.set_labels(torch.tensor(indices), torch.tensor(labels), soft)
    assert torch.equal(data.public.labels, before)
    assert data.public.soft_labels is None


def reachable(value, seen):
    """Storages of all tensors that can be reached from ``value`` by attributes and containers."""
    if id(value) in seen:
        return set()
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple | set):
        children = list(value)
    else:
        bound_to = getattr(value, "__self__", None)
        children = [*getattr(value, "__dict__", {}).values(), *([] if bound_to is None else [bound_to])]
    return set().union(*(reachable(child, seen) for child in children)) if children else set()


def test_training_loader_reaches_neither_truth_nor_private_nor_test_data(data):
    data.public.set_labels([0], [1])
    parts = {name: reachable(getattr(data, name), {}) for name in ("private", "public", "test")}
    truth = data.public.truth.untyped_storage().data_ptr()
    assert truth in parts["public"]  # the walk does see what is there
    loader = data.train_dataloader()
    iterator = iter(loader)
    next(iterator)
    found = reachable(loader, {})
    assert data.public.labels.untyped_storage().data_ptr() in found
    assert truth not in found
    assert not found & (parts["private"] | parts["test"])


def test_training_batches_do_not_depend_on_the_truth():
    batches = []
    for truth in (torch.zeros(PUBLIC, dtype=torch.int64), torch.arange(PUBLIC) % CLASSES, None):
        module = make_data(public_truth=truth)
        module.setup("fit")
        module.public.set_labels([1, 2, 3], [0, 1, 2])
        batches.append([batch for batch, _, _ in module.train_dataloader()])
    for other in batches[1:]:
        for left, right in zip(batches[0], other, strict=True):
            assert torch.equal(left["labeled"][0], right["labeled"][0])
            assert torch.equal(left["labeled"][1], right["labeled"][1])
            assert torch.equal(left["unlabeled"], right["unlabeled"])


# ---------------------------------------------------------------------------- samplers


def test_unlabeled_ranks_share_one_permutation():
    view = UnlabeledBatches(TensorImages(numbered(0, 103)))
    for world in (1, 2, 3):
        samplers = [UnlabeledSampler(view, 5, world, rank, seed=1) for rank in range(world)]
        parts = [list(sampler) for sampler in samplers]
        everything = [index for part in parts for index in part]
        assert len(set(everything)) == len(everything) == 103 // (5 * world) * 5 * world
        assert {len(part) for part in parts} == {len(samplers[0])}
        assert [list(sampler) for sampler in samplers] != parts  # the next pass is another epoch
        for sampler in samplers:
            sampler.set_epoch(0)
        assert [list(sampler) for sampler in samplers] == parts


def test_few_unlabeled_images_are_one_batch_of_equal_size_on_all_ranks():
    view = UnlabeledBatches(TensorImages(numbered(0, 7)))
    parts = [list(UnlabeledSampler(view, 8, 3, rank)) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert {index for part in parts for index in part} == set(range(7))
    lone = [list(UnlabeledSampler(UnlabeledBatches(TensorImages(numbered(0, 1))), 8, 3, r)) for r in range(3)]
    assert lone == [[0], [0], [0]]


def test_labeled_ranks_cycle_evenly_over_what_is_labeled_now():
    table = LabelTable(50, CLASSES)
    labeled = torch.tensor([4, 8, 15, 16, 23, 42, 49])
    table.labels[labeled] = 1
    for world in (1, 2, 3):
        samplers = [LabeledSampler(table, 20, world, rank, seed=2) for rank in range(world)]
        drawn = torch.tensor([list(sampler) for sampler in samplers])
        assert drawn.shape == (world, 20)
        counts = torch.bincount(drawn.flatten(), minlength=50)
        assert set(counts.nonzero().flatten().tolist()) == set(labeled.tolist())
        assert counts[labeled].max() - counts[labeled].min() <= 1
        # Ranks interleave one sequence: side by side they are permutations, one after another.
        sequence = drawn.T.flatten().tolist()
        assert all(set(sequence[i : i + 7]) == set(labeled.tolist()) for i in range(0, len(sequence) - 6, 7))
    sampler = LabeledSampler(table, 20)
    first, second = list(sampler), list(sampler)
    assert first != second
    table.labels[0] = 2
    assert 0 in list(sampler)
    table.labels.fill_(-1)
    with pytest.raises(NoLabeledExamplesError, match="lower its threshold"):
        list(sampler)


def test_lengths_do_not_depend_on_labels(data):
    loader = data.train_dataloader()
    lengths = [len(part) for part in loader.flattened]
    assert lengths == [5, 5]
    data.public.set_labels([1], [1])
    assert [len(part) for part in loader.flattened] == [5, 5]
    batches = [batch for batch, _, _ in loader]
    assert len(batches) == 5
    assert {len(batch["labeled"][0]) for batch in batches} == {4}
    assert sorted(torch.cat([number_of(batch["unlabeled"]) for batch in batches]).tolist()) == list(
        range(PUBLIC)
    )
    assert batches[0]["labeled"][1].dtype == torch.int64
    assert batches[0]["unlabeled"].dtype == torch.float32


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_without_labels_says_what_to_do(workers):
    module = make_data(num_workers=workers)
    module.setup("fit")
    iterator = iter(module.train_dataloader())  # makes no noise before the first batch
    with pytest.raises(NoLabeledExamplesError, match="set_labels"):
        next(iterator)


def test_samplers_stay_in_place_under_several_processes(data):
    class ManyProcesses:
        world_size, global_rank = 4, 2
        strategy = type("Strategy", (), {"root_device": torch.device("cpu")})

    data.trainer = ManyProcesses()
    for loader in data.train_dataloader().flattened:
        assert isinstance(loader.sampler, DistributedSampler)  # the mark by which a trainer lets it be
        assert (loader.sampler.num_replicas, loader.sampler.rank) == (4, 2)
        assert len(loader) == 1
    data.trainer = None


# ---------------------------------------------------------------------------- inside a fit


class Relabel(pl.Callback):
    """Plays the private teacher: labels at the start of the fit, others after each epoch."""

    def __init__(self, soft_from=99):
        self.soft_from, self.plan = soft_from, {}

    def label(self, trainer, epoch):
        indices = torch.arange(epoch * 5, epoch * 5 + 6)
        labels = (indices + epoch) % CLASSES
        soft = torch.full((6, CLASSES), 0.1).scatter(1, labels[:, None], 0.8)
        public = trainer.datamodule.public
        public.clear_labels()
        public.set_labels(indices, labels, soft if epoch >= self.soft_from else None)
        self.plan[epoch] = dict(zip(indices.tolist(), labels.tolist(), strict=True))

    def on_fit_start(self, trainer, pl_module):
        self.label(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.label(trainer, trainer.current_epoch + 1)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_epoch_trains_on_the_labels_of_its_beginning(tmp_path, workers, persistent):
    module = make_data(num_workers=workers, persistent_workers=persistent)
    # The scheduler has the loader made before on_fit_start, when there is no label at all.
    model, teacher = Recorder(scheduled=True), Relabel()
    trainer(tmp_path, callbacks=[teacher], limit_val_batches=0).fit(model, module)
    for epoch in range(3):
        assert model.seen(epoch) == teacher.plan[epoch]
        assert sorted(torch.cat(model.unlabeled[epoch]).tolist()) == list(range(PUBLIC))
    assert [batch.tolist() for batch in model.unlabeled[0]] != [b.tolist() for b in model.unlabeled[1]]


def test_running_workers_see_soft_labels_that_come_later(tmp_path):
    module = make_data(num_workers=1, persistent_workers=True)
    model, teacher = Recorder(), Relabel(soft_from=1)
    trainer(tmp_path, epochs=2, callbacks=[teacher], limit_val_batches=0).fit(model, module)
    assert all(y.dtype == torch.int64 for _, y in model.labeled[0])
    for _, y in model.labeled[1]:
        assert y.shape == (4, CLASSES)
        torch.testing.assert_close(y.max(1).values, torch.full((4,), 0.8))
    found = {n: int(row.argmax()) for x, y in model.labeled[1] for n, row in zip(x.tolist(), y, strict=True)}
    assert found == teacher.plan[1]


def test_a_resumed_run_goes_on_with_the_order_of_an_unbroken_one(tmp_path):
    def labeled_data():
        module = make_data()
        module.setup("fit")
        module.public.set_labels(torch.arange(9), torch.arange(9) % CLASSES)
        return module

    unbroken, first, second = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, epochs=4).fit(unbroken, labeled_data())
    stopped = trainer(tmp_path, epochs=2)
    stopped.fit(first, labeled_data())
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    trainer(tmp_path, epochs=4).fit(second, labeled_data(), ckpt_path=tmp_path / "two.ckpt")
    assert sorted(second.unlabeled) == [2, 3]
    for epoch in (2, 3):
        for left, right in zip(unbroken.labeled[epoch], second.labeled[epoch], strict=True):
            assert torch.equal(left[0], right[0])
        for left, right in zip(unbroken.unlabeled[epoch], second.unlabeled[epoch], strict=True):
            assert torch.equal(left, right)


def test_replaced_samplers_are_noticed(tmp_path, data):
    data.public.set_labels([1, 2], [0, 1])
    with pytest.raises(RuntimeError, match="overfit_batches"):
        trainer(tmp_path, overfit_batches=2).fit(Recorder(), data)


def test_checkpoints_hold_nothing_of_the_data(tmp_path, data):
    data.public.set_labels([1, 2], [0, 1])
    stopped = trainer(tmp_path, epochs=1)
    stopped.fit(Recorder(), data)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert not dict(data.hparams)
    assert not [key for key in checkpoint if "datamodule" in key.lower()]
    assert "ArraysDataModule" not in checkpoint
    assert "1." not in repr(data.private)


# ---------------------------------------------------------------------------- evaluation and parts


def test_evaluation_sets(tmp_path):
    truth = torch.arange(PUBLIC) % CLASSES
    truth[::4] = -1
    module, model = make_data(public_truth=truth), Recorder()
    runner = trainer(tmp_path)
    runner.validate(model, module, verbose=False)
    numbers, labels = (torch.cat(part) for part in zip(*model.evaluated["val"], strict=True))
    assert numbers.tolist() == [i for i in range(PUBLIC) if i % 4]
    assert torch.equal(labels, truth[numbers])
    runner.test(model, module, verbose=False)
    numbers, labels = (torch.cat(part) for part in zip(*model.evaluated["test"], strict=True))
    assert numbers.tolist() == list(range(2000, 2000 + TEST))
    assert torch.equal(labels, (numbers - 2000) % CLASSES)
    assert torch.cat(runner.predict(model, module)).tolist() == list(range(2000, 2000 + TEST))
    with pytest.raises(RuntimeError, match="private data isn't loaded"):
        _ = module.private  # evaluation never loads it


def test_own_validation_and_prediction_sets(tmp_path):
    module = make_data(
        val_images=numbered(3000, 5), val_labels=[0, 1, 2, 0, 1], predict_images=numbered(4000, 3)
    )
    model, runner = Recorder(), trainer(tmp_path)
    runner.validate(model, module, verbose=False)
    assert torch.cat([numbers for numbers, _ in model.evaluated["val"]]).tolist() == list(range(3000, 3005))
    assert torch.cat(runner.predict(model, module)).tolist() == [4000, 4001, 4002]


def test_without_truth_and_test_set_nothing_is_evaluated(tmp_path):
    module, model = make_data(truth=False, test_images=None, test_labels=None), Recorder()
    module.setup("fit")
    assert (module.val_dataloader(), module.test_dataloader(), module.predict_dataloader()) == ([], [], [])
    assert len(module.test) == 0
    module.public.set_labels([0], [0])
    trainer(tmp_path, epochs=1).fit(model, module)
    assert len(model.labeled[0]) == 5
    assert model.evaluated == {"val": [], "test": []}


def test_setup_again_keeps_labels(data):
    data.public.set_labels([1], [1])
    for stage in ("fit", "validate", "test", "predict", None):
        data.setup(stage)
    assert data.public.labeled_indices.tolist() == [1]


def test_private_images_come_in_batches_and_in_order(data):
    images, labels = zip(*data.private_batches(8), strict=True)
    assert [len(part) for part in images] == [8, 8, 8, 6]
    assert number_of(torch.cat(images)).tolist() == list(range(1000, 1000 + PRIVATE))
    assert torch.equal(torch.cat(labels), torch.arange(PRIVATE) % CLASSES)
    assert number_of(data.private_images(3, 5)).tolist() == [1003, 1004]
    assert images[0].dtype == torch.float32
    image, label = data.private[4]
    assert (int(number_of(image)), label) == (1004, 1)


def test_parts_work_with_an_ordinary_loader(data):
    images, labels = next(iter(DataLoader(data.test, batch_size=5)))
    assert number_of(images).tolist() == list(range(2000, 2005))
    assert labels.tolist() == [0, 1, 2, 0, 1]
    assert number_of(next(iter(DataLoader(data.public, batch_size=3)))).tolist() == [0, 1, 2]


def test_public_images_by_any_kind_of_index(data):
    public = data.public
    assert number_of(public.images([5, 1])).tolist() == [5, 1]
    assert number_of(public.images(slice(2, 4))).tolist() == [2, 3]
    assert number_of(public.images(torch.arange(PUBLIC) == 7)).tolist() == [7]
    assert len(public.images()) == PUBLIC
    assert public.images([]).shape == (0, 1, 1, 2)
    with pytest.raises(IndexError, match="mask of length 2"):
        public.images(torch.tensor([True, False]))


def test_overlap_of_public_and_test_images():
    both = torch.cat([numbered(2000, TEST - 1), numbered(17, 1)])
    with pytest.raises(ValueError, match="test image 11 is public image 17"):
        make_data(test_images=both).setup("fit")
    late = make_data(test_images=both)
    late.setup("test")
    with pytest.raises(ValueError, match="1 test images are public"):
        late.setup("fit")
    # The same pixels as floats are the same image.
    with pytest.raises(ValueError, match="overlap="):
        make_data(test_images=both / 255).setup("fit")
    with pytest.warns(UserWarning, match="1 test images are public"):
        make_data(test_images=both, overlap="warn").setup("fit")
    make_data(test_images=both, overlap="ignore").setup("fit")


def test_private_overlaps_are_counted_on_request_only(recwarn):
    module = make_data(
        private_images=torch.cat([numbered(0, 3), numbered(1000, PRIVATE - 4), numbered(2000, 1)])
    )
    module.setup("fit")
    assert not recwarn.list
    assert module.count_overlaps() == {"public/test": 0, "private/public": 3, "private/test": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"unlabeled_batch_size": -1}, "unlabeled_batch_size=-1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_classes": 1}, "num_classes=1"),
        ({"seed": -1}, "seed=-1"),
        ({"overlap": "fine"}, "overlap='fine'"),
        ({"class_names": ["a", "b"]}, "class_names: 2 different names"),
        ({"class_names": ["a", "b", "b"]}, "class_names: 2 different names"),
    ],
)
def test_bad_options_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_data(**arguments)


def test_a_module_that_lacks_a_part_says_which():
    module = PrivatePublicDataModule(num_classes=2, image_shape=(1, 4, 4))
    with pytest.raises(NotImplementedError, match="load_private"):
        module.setup("fit")
    with pytest.raises(RuntimeError, match=r'setup\("fit"\)'):
        module.train_dataloader()
    with pytest.raises(ValueError, match="the public set is empty"):
        make_data(public_images=numbered(0, 0), public_truth=None).setup("validate")


def test_truth_must_fit():
    with pytest.raises(ValueError, match="public_truth: 2 labels for 3 images"):
        PublicDataset(TensorImages(numbered(0, 3)), 2, torch.tensor([0, 1]))


# ---------------------------------------------------------------------------- digits


def test_digits_split_is_fixed_and_complete():
    from sklearn.datasets import load_digits

    module = DigitsDataModule(image_size=8)
    assert (module.num_classes, module.image_shape) == (10, (1, 8, 8))
    module.setup("fit")
    parts = (module.private, module.public, module.test)
    assert [len(part) for part in parts] == [1000, 500, 297]
    source = load_digits()
    order = fixed_shuffle(1797, 0)
    assert order[:5].tolist() == [1335, 392, 942, 404, 87]  # must never change
    assert sorted(order.tolist()) == list(range(1797))
    images = torch.cat([part.images() for part in parts])[:, 0]
    labels = torch.cat([module.private.labels, module.public.truth, module.test.labels])
    torch.testing.assert_close(
        images, torch.tensor(source.images[order] / 16).float(), atol=0.501 / 255, rtol=0
    )
    assert labels.tolist() == source.target[order].tolist()
    assert module.count_overlaps() == {"public/test": 0, "private/public": 0, "private/test": 0}


def test_enlarged_digits_suit_histograms_of_gradients():
    from skimage.feature import hog

    module = DigitsDataModule()
    module.setup("fit")
    assert module.image_shape == (1, 20, 20) == tuple(module.private.images().shape[1:])

    def features(part):
        vectors = [hog(image[0], 9, (4, 4), (2, 2)) for image in part.images().numpy()]
        return torch.from_numpy(np.stack(vectors))

    nearest = torch.cdist(features(module.public), features(module.private)).argmin(1)
    accuracy = (module.private.labels[nearest] == module.public.truth).float().mean()
    assert accuracy > 0.97


@pytest.mark.parametrize("arguments", [{"num_private": 1500}, {"image_size": 4}, {"num_public": 0}])
def test_digits_refuse_splits_that_do_not_work(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DigitsDataModule(**arguments)


def test_import_adds_nothing_heavy_to_that_of_lightning():
    code = (
        "import sys, pytorch_lightning; before = set(sys.modules); import pl_privknn.datamodules; "
        "heavy = {'torchvision', 'sklearn', 'PIL', 'matplotlib', 'skimage'}; "
        "sys.exit(str(heavy & (set(sys.modules) - before) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
