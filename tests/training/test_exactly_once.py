"""A record counts once or as zero, whatever fails in its step, in its chunk or in the addition."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pl_privknn.networks.base import FeatureNetwork
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from pl_privknn.training.traced_step import TracedStep
from tests.training.training_setup import Lit

COUNT, NORM = 18, 0.3
GENERATOR = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.rand(COUNT, 1, 8, 8, generator=GENERATOR), torch.arange(COUNT) % 2
BAD = 5
WAYS = ("vmap", "loop", "copies", "layers")


class Net(Lit):
    """A network of which records can share a forward pass."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(FeatureNetwork(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh()), 8, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def gradients(way, label=None):
    """Gradients of records by one way, where one record may have a label out of range."""
    labels, module = LABELS.clone(), Net()
    if label is not None:
        labels[BAD] = label
    layers = (module.net, lambda x: x) if way == "layers" else None
    made = RecordGradients(module, PrivateData(TensorDataset(IMAGES, labels)), NORM, layers=layers)
    made.choose(timed=False)
    assert made.way.name == ("layers" if way == "layers" else "vmap")
    if way == "loop":
        made.way.by_vmap = False
    elif way == "copies":
        made.way = made._copies
    assert made.way.name == way
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", [-1, 2, 10**6])
def test_a_record_that_fails_counts_as_zero_itself_and_no_other_does(way, label):
    others = [row for row in range(COUNT) if row != BAD]
    found = gradients(way, label)
    assert not found.sum([BAD]).any()
    torch.testing.assert_close(found.sum(range(COUNT)), gradients(way).sum(others), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("place", [1, 2, 4])
def test_an_addition_that_fails_is_not_repeated(monkeypatch, way, place):
    calls, add_rows = [], ClippedSum.add_rows

    def fails(*args):
        calls.append(args)
        if len(calls) == place:
            raise torch.OutOfMemoryError("in an addition")
        add_rows(*args)

    made = gradients(way)
    monkeypatch.setattr(ClippedSum, "add_rows", staticmethod(fails))
    with pytest.raises(torch.OutOfMemoryError):
        made.sum(range(COUNT))
    assert len(calls) == place


def test_a_chunk_that_fails_is_run_record_by_record(monkeypatch):
    whole, made = gradients("vmap").sum(range(COUNT)), gradients("vmap")

    def fails(self, stack):
        raise torch.OutOfMemoryError("in a chunk")

    monkeypatch.setattr(TracedStep, "rows", fails)
    torch.testing.assert_close(made.sum(range(COUNT)), whole, rtol=1e-5, atol=1e-6)


def test_a_person_with_a_record_that_fails_counts_as_zero():
    persons = [row // 3 for row in range(COUNT)]
    others = [row for row in range(COUNT) if row // 3 != BAD // 3]
    found = gradients("loop", -1).sum(range(COUNT), persons=persons)
    wanted = gradients("loop").sum(others, persons=[persons[row] for row in others])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
