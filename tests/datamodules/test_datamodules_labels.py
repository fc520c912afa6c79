"""Public labels, what training can reach of the data, and samplers that follow the labels."""

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from pl_privknn.datamodules import NoLabeledExamplesError, TensorImages
from pl_privknn.datamodules.datasets import LabelTable
from pl_privknn.datamodules.loaders import Batches, LabeledSampler, UnlabeledSampler
from tests.datamodules.datamodule_setup import CLASSES, PUBLIC, loaded, make_data, numbered


@pytest.fixture
def data():
    return loaded()


# ---------------------------------------------------------------------------- labels


def test_labels_start_unknown_and_follow_releases(data):
    public = data.public
    assert public.labels.dtype == torch.int64
    assert (public.labels == -1).all()
    public.set_labels(torch.tensor([3, 5, 9]), torch.tensor([2, -1, 0]))
    assert public.table.labeled.nonzero().flatten().tolist() == [3, 9]
    assert public.labels[[3, 5, 9]].tolist() == [2, -1, 0]
    public.set_labels([3, 5, 5], [-1, 0, 1])  # a label is taken away; the last of two stays
    assert public.table.labeled.nonzero().flatten().tolist() == [5, 9]
    assert int(public.labels[5]) == 1
    public.set_labels(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    public.set_labels(slice(0, 2), [1, 2])
    assert public.table.labeled.nonzero().flatten().tolist() == [0, 1, 5, 9]
    public.set_labels(public.truth >= 0, public.truth)  # what a supervised run needs
    assert torch.equal(public.labels, public.truth)
    public.clear_labels()
    assert not public.table.labeled.any()


def test_a_data_module_prints_before_it_has_labels(data):
    assert type(data).__name__ in str(data)


def test_soft_labels_turn_all_targets_into_rows(data):
    public = data.public
    assert public.soft_labels is None
    public.set_labels([1, 2], [0, 2])
    assert public.table[torch.tensor([2, 1])].tolist() == [2, 0]
    soft = torch.tensor([[0.2, 0.7, 0.1], [0.0, 0.0, 0.0]])
    public.set_labels([7, 8], [1, -1], soft)  # the second query was refused
    assert public.soft_mask.nonzero().flatten().tolist() == [7]
    expected = [[1.0, 0.0, 0.0], [0.2, 0.7, 0.1], [0.0, 0.0, 1.0]]
    torch.testing.assert_close(public.table[torch.tensor([1, 7, 2])], torch.tensor(expected))
    public.set_labels([7], [1])  # a later hard label takes the soft one away
    assert public.soft_labels is None
    assert public.table[torch.tensor([1, 7])].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("indices", "labels", "soft", "error", "words"),
    [
        ([40], [0], None, IndexError, "not positions of examples"),
        ([0, 1], [0], None, ValueError, "not as many labels as examples"),
        ([0], [3], None, ValueError, "num_classes=3"),
        ([0], [1.0], None, ValueError, "whole numbers"),
        ([[0]], [1], None, IndexError, "shape"),
        ([0], [1], torch.tensor([[0.5, 0.5]]), ValueError, r"\(n, 3\)"),
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
            assert all(map(torch.equal, left["labeled"], right["labeled"]))
            assert torch.equal(left["unlabeled"], right["unlabeled"])


# ---------------------------------------------------------------------------- samplers


def test_unlabeled_ranks_share_one_permutation():
    view = Batches(TensorImages(numbered(0, 103)))
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
