"""Code of others and private records: each entry point gives it one record at a time, traced or on a fresh copy."""

import pytest
import torch
from torch import nn

from pl_privknn import IndKNNPredictor, PrivateRecords
from pl_privknn.datamodules.datasets import LabeledImages, TensorImages
from pl_privknn.features import BackboneFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.federated import Client
from pl_privknn.labelers.ind_knn import IndKNNParameters
from pl_privknn.networks import build_network
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

COUNT = 40


def images(count=COUNT, seed=5):
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


class Keeping(Extractor):
    """Adds the sum of all that it has seen to its vectors, and keeps the last batch."""

    def __init__(self):
        self.seen, self.last = torch.zeros(()), None

    def __call__(self, batch):
        self.seen, self.last = self.seen + batch.sum(), batch
        return batch.flatten(1) + self.seen


class Branching(Keeping):
    """The same by Python that looks at values, which can't be traced."""

    def __call__(self, batch):
        found = super().__call__(batch)
        return found if float(batch.mean()) < 2 else -found


class Mixing(Extractor):
    """Subtracts the mean of the batch."""

    def __call__(self, batch):
        return (batch - batch.mean(dim=0)).flatten(1)


def mapped(function, private):
    store = LabeledImages(TensorImages(private), torch.arange(len(private)) % 2, 2)
    return PrivateRecords(store, nn.Identity()).map(function)


def predicted(function, private):
    """Vectors that a predictor's table holds."""
    parameters = IndKNNParameters(threshold=0.1, count_sigma=4.0, vote_sigma=1.0, rho=1.0)
    predictor = IndKNNPredictor(
        parameters, 2, 16, extractor=function, noise_source=SeededNoise(0), ledger=FreeLedger()
    )
    predictor.add(range(len(private)), private, torch.arange(len(private)) % 2)
    return predictor._engine.vectors, predictor.conditions


def sent(function, private, tmp_path_factory):
    """Vectors by which a client's records choose queries."""
    record = tmp_path_factory.mktemp("client") / "answered.sqlite"
    labels = torch.arange(len(private)) % 2
    client = Client(private, labels, 2, function, max_epsilon=1.0, record=record)
    return client._features, client.conditions


ENTRIES = {
    "map": lambda function, private, _: mapped(function, private),
    "predictor": lambda function, private, _: predicted(function, private),
    "client": sent,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [Keeping, Branching])
def test_no_record_moves_another_ones_vector_and_nothing_is_kept(entry, kind, tmp_path_factory):
    function, private = kind(), images()
    changed = private.clone()
    changed[3] = 1.0
    first, conditions = ENTRIES[entry](function, private, tmp_path_factory)
    second, _ = ENTRIES[entry](kind(), changed, tmp_path_factory)
    others = torch.arange(COUNT) != 3
    assert torch.equal(first[others], second[others])
    assert not torch.equal(first[3], second[3])
    kept = function.last
    assert kept is None or not any(torch.equal(one, record) for one in kept for record in private)
    said = f"{kind.__name__} computes a vector from one example alone"
    assert conditions == ((said,) if kind is Branching else ())


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_mixes_records_is_refused(entry, tmp_path_factory):
    with pytest.raises(ValueError, match="Mixing gives a public image another vector alone"):
        ENTRIES[entry](Mixing(), images(), tmp_path_factory)


def test_a_client_refuses_an_extractor_that_both_sides_could_not_compare(tmp_path_factory):
    with pytest.raises(ValueError, match="extractor=Sequential is no Extractor"):
        sent(nn.Sequential(nn.Flatten()), images(), tmp_path_factory)


def test_vectors_are_those_of_the_function_on_each_record():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU()).eval()
    found, conditions = mapped(network, images())
    torch.testing.assert_close(found, network(images()).detach())
    assert conditions == ()


@pytest.mark.parametrize("taken", [0, 100, 128])
def test_a_record_less_changes_no_bit_of_another_ones_vector(taken):
    """Kernels are chosen by the size of a batch, so each has the same; the last record of 129 would be alone."""
    torch.manual_seed(0)
    sizes, network = set(), BackboneFeatures(build_network("small_cnn", 2, 1, 8).eval())
    store = LabeledImages(TensorImages(torch.rand(129, 1, 8, 8)), torch.arange(129) % 2, 2)
    others = torch.arange(129) != taken

    def extract(images):
        sizes.add(len(images))
        return network(images)

    def vectors(rows):
        records = PrivateRecords(store, extract, rows=rows.nonzero().flatten())
        return records.table(), records.map(network.module)[0]

    for whole, rest in zip(vectors(others | True), vectors(others), strict=True):
        assert torch.equal(whole[others], rest)
    assert len(sizes) == 1


def test_a_function_that_is_called_for_each_record_gets_no_others():
    store = LabeledImages(TensorImages(images()), torch.arange(COUNT) % 2, 2)
    seen = []

    def extract(batch):
        seen.append(len(batch))
        return batch.flatten(1)

    PrivateRecords(store, extract, one_by_one=True).table()
    assert seen == [COUNT]
