"""Searches, assignments and extractors on another device than the CPU: the same answers, to the last bit.

The device is pretended: see :mod:`tests.setup.pretended_device`.
"""

import numpy as np
import pytest
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.callbacks.labeling_arguments import device_of
from pl_privknn.features import (
    HOG,
    BackboneFeatures,
    JoinedFeatures,
    PatchDictionary,
    Pixels,
    PublicPCA,
    TimmFeatures,
)
from pl_privknn.features.base import extract_on
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE, IndKNN, LinearTeachers, PrivateKNN, ReverseKNN, Screening
from pl_privknn.labelers.attributes import FixedThresholds
from pl_privknn.labelers.teachers import StackedTeachers
from pl_privknn.neighbors import search
from pl_privknn.networks import build_network
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.multilabel.attributes_setup import attribute_reverse_knn
from tests.setup.pretended_device import CPU, CUDA, PretendedDevice
from tests.setup.small_fit import fit_student


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def table():
    """Records of which many are equal, and many at equal distances from queries."""
    whole = drawn(300, 6).mul(3).round()
    return torch.cat([whole, drawn(200, 6, seed=1), whole[:50]])


@pytest.fixture
def queries():
    return torch.cat([drawn(20, 6, seed=2), drawn(20, 6, seed=3).mul(3).round()])


def noise():
    return SeededNoise(3)


LABELERS = {
    "private_knn": lambda: PrivateKNN(15, 0.5, Screening(5.0, Gaussian(1.0)), Gaussian(2.0), noise()),
    "reverse_knn": lambda: ReverseKNN(2, budget=Budget(epsilon=4.0), noise_source=noise()),
    "multilabel_reverse_knn": lambda: attribute_reverse_knn(
        1, 2.0, epsilon=4.0, rule=FixedThresholds(), noise_source=noise()
    ),
    "ind_knn": lambda: IndKNN(0.8, Gaussian(0.5), Budget(epsilon=2.0), num_queries=40, noise_source=noise()),
}


@pytest.mark.parametrize("name", LABELERS)
def test_labelers_search_where_they_are_told_to(table, queries, name):
    def answers(device):
        labeler = LABELERS[name]()
        labels = torch.arange(len(table)) % 3
        if "multilabel" in name:
            labeler.fit(
                PrivateRecords.of(table, torch.stack([labels % 2, labels // 2], dim=1), 2, device=device)
            )
        else:
            labeler.fit(PrivateRecords.of(table, labels, 3, device=device))
        return labeler.label(queries, FreeLedger()).labels

    with PretendedDevice() as device:
        there = answers(CUDA)
    assert device.products > 0
    assert torch.equal(there, answers(None))


@pytest.mark.parametrize(("stated", "wanted"), [(None, "cuda"), ("cpu", "cpu")])
def test_teachers_train_where_the_labelling_runs_unless_another_device_was_stated(
    stated, wanted, monkeypatch
):
    teachers = LinearTeachers(steps=1, device=stated)
    seen = []
    train = StackedTeachers.train

    def noted(self, *given):
        seen.append(self.device.type)
        self.device = CPU
        return train(self, *given)

    monkeypatch.setattr(StackedTeachers, "train", noted)
    labeler = PATE(3, teachers, noise=Gaussian(4.0), noise_source=noise(), progress=False)
    labeler.fit(PrivateRecords.of(drawn(30, 4), torch.arange(30) % 2, 2, device=CUDA))
    assert seen == [wanted]


class Frozen(BackboneFeatures):
    """A frozen network, as :class:`~pl_privknn.features.TimmFeatures` holds it."""

    follow = TimmFeatures.follow


def test_frozen_networks_follow_the_device_unless_another_one_was_stated(monkeypatch):
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: moved.append(str(device)) or self)
    network = build_network("mlp", 3, 1, 8)
    free, stated = Frozen(network), Frozen(network, device="cpu")
    for extractor in (free, stated, JoinedFeatures([HOG(), free]), PublicPCA(stated)):
        extractor.follow(CUDA)
    assert moved == ["cuda", "cuda"]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_features_are_extracted_in_full_precision_whatever_a_training_has_set(precision):
    seen, before = [], torch.get_float32_matmul_precision()

    def extract(images):
        seen.append((torch.backends.cudnn.deterministic, torch.is_autocast_enabled("cpu")))
        return images.flatten(1)

    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            extract_on(extract, drawn(2, 1, 4, 4), CPU)
            with PretendedDevice():
                extract_on(extract, drawn(2, 1, 4, 4), CUDA)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [(False, False), (True, True)]
    assert not torch.backends.cudnn.deterministic


def test_a_table_that_a_gpu_has_room_for_travels_once(table, queries, monkeypatch):
    monkeypatch.setattr(search, "_QUERIES_AT_A_TIME", 5)
    wanted = search.nearest(queries, table, 7)
    sent = []
    for room in (0, 10**9):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, room=room: (room, room))
        with PretendedDevice() as device:
            assert torch.equal(search.nearest(queries, table, 7, device=CUDA), wanted)
        sent.append(device.sent)
    assert sent[1] < 2 * table.numel()
    assert sent[0] >= len(queries) // 5 * table.numel()


def test_candidates_reach_as_far_as_products_may_err():
    d = 1000
    rows = torch.nn.functional.normalize(drawn(700, d).sub(0.5), dim=1)
    query = torch.nn.functional.normalize(drawn(1, d, seed=1).sub(0.5), dim=1)
    exact = (rows.double() @ query.double().T)[:, 0].numpy()
    error = 2 * d * 2.0**-24  # of two sums of d products, at most
    bounds = exact + 0.95 * error  # each row comes so near to one of them
    queries = query.expand(len(bounds), d).contiguous()
    found = search.reaching(queries, rows, bounds, CPU)
    assert all(place in part for place, part in enumerate(found))
    for part, bound in zip(found, bounds, strict=True):
        assert (exact[part] >= bound - 2 * error).all()
        assert set(np.flatnonzero(exact >= bound - error)) <= set(part.tolist())
        assert (np.diff(part) > 0).all()
    # What the user sets for training is not for these products.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = search.reaching(queries, rows, bounds, CPU)
    assert all(np.array_equal(*pair) for pair in zip(found, coarse, strict=True))
    assert [len(part) for part in search.reaching(queries[:2], rows[:0], bounds[:2], CPU)] == [0, 0]


@pytest.mark.parametrize(
    "extractor",
    [
        HOG(),
        Pixels(),
        PatchDictionary(centers=8),
        JoinedFeatures([HOG(), torch.nn.Flatten()]),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 2)),
    ],
    ids=lambda extractor: type(extractor).__name__,
)
def test_extractors_work_there(extractor):
    images = drawn(24, 1, 16, 16)
    if getattr(extractor, "learns", False):
        extractor.fit_public(images)
    here = extract_on(extractor, images, torch.device("cpu"))
    with PretendedDevice():
        there = extract_on(extractor, images, CUDA)
    assert type(there) is torch.Tensor
    torch.testing.assert_close(there, here, atol=1e-6, rtol=1e-5)


def test_a_run_takes_its_device_from_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_privknn.callbacks.labeling_arguments.check_device", lambda device: device)
    labels = {}
    for name in ("cpu", "cuda"):
        with PretendedDevice() as device:
            _, data = fit_student(
                tmp_path / name, PrivateKNN(15, 0.5, noise=Gaussian(2.0), noise_source=noise()), 0.1,
                queries_per_round=30, delta=1e-4, device=name, features=Pixels(),
            )  # fmt: skip
        assert (device.products > 0) == (name == "cuda")
        labels[name] = data.public.labels
    assert torch.equal(labels["cpu"], labels["cuda"])


def test_auto_is_where_the_trainer_is():
    assert device_of("auto", torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert device_of("auto", torch.device("mps")) == torch.device("cpu")
    assert device_of("cpu", torch.device("cuda", 1)) == torch.device("cpu")
    assert PrivateLabeler().options.device == "auto"


def test_devices_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in {"gpuu": "must be 'auto' or", "cuda": "finds no such device"}.items():
        with pytest.raises(ValueError, match=f"device='{device}'.*{said}"):
            PrivateLabeler(options={"device": device})
