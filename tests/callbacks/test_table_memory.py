"""Tables of private features that memory need not hold: where they lie, who could read them, what is left."""

import os
import stat

import numpy as np
import pytest
import torch

from pl_privknn.callbacks import ClusterSelection, labeling_round
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.labelers import PrivateKNN, ReverseKNN
from pl_privknn.labelers.base import RecognisesRecords
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.small_fit import fit_student

TINY = 1e-9  # gigabytes: one byte


def test_a_large_table_lies_in_a_file_that_only_its_owner_could_read_and_that_has_no_name(
    tmp_path, monkeypatch
):
    seen, memmap = [], np.memmap

    def look(file, *args, **kwargs):
        status = os.fstat(file.fileno())
        seen[:] = [stat.S_IMODE(status.st_mode), status.st_nlink, stat.S_ISREG(status.st_mode)]
        return memmap(file, *args, **kwargs)

    monkeypatch.setattr(np, "memmap", look)
    table = FeatureStore(limit_gb=TINY).table(1000, 7, tmp_path / "a" / "b")
    assert seen == [0o600, 0, True]
    assert list(tmp_path.iterdir()) == []
    # It is a table like any other.
    values = torch.rand(1000, 7)
    table[:] = values
    assert torch.equal(table, values)
    assert table.is_contiguous()


def test_a_disk_without_room_is_told_by_its_folder_alone(tmp_path, monkeypatch):
    usage = labeling_round.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(labeling_round.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(OSError, match=r"memory.scratch='.*': its disk has too little room") as caught:
        FeatureStore(limit_gb=TINY, scratch=tmp_path).table(12345, 77, tmp_path)
    said = str(caught.value).replace(str(tmp_path), "")
    assert not any(str(number) in said for number in (12345, 77, 12345 * 77 * 4))


def test_answers_are_the_same_and_nothing_is_left(tmp_path, monkeypatch):
    made, labels, memmap = [], {}, np.memmap
    monkeypatch.setattr(np, "memmap", lambda *args, **kwargs: made.append(1) or memmap(*args, **kwargs))
    for limit in (None, TINY):
        teacher = PrivateKNN(15, 0.5, noise=Gaussian(2.0), noise_source=SeededNoise(3))
        memory = FeatureStore(limit_gb=limit, scratch=tmp_path / "s")
        _, data = fit_student(tmp_path / str(limit), teacher, 0.1, queries_per_round=30, memory=memory)
        labels[limit] = data.public.labels
    assert made == [1]
    assert torch.equal(labels[None], labels[TINY])
    assert not (tmp_path / "s").exists()
    left = [{path.name for path in (tmp_path / str(limit)).rglob("*")} for limit in labels]
    assert left[0] == left[1]


def test_a_teacher_owns_its_table_in_the_fit_alone(tmp_path):
    owned = []

    class Failing(PrivateKNN, RecognisesRecords):
        def record_digests(self, images, labels):
            return None

        def fit(self, *args):
            owned.append(self.owns_table)
            super().fit(*args)
            raise RuntimeError("stop")

    teacher = Failing(3, 1.0)
    with pytest.raises(RuntimeError):
        fit_student(tmp_path, teacher, 0.1, queries_per_round=30)
    assert owned == [True]
    assert not teacher.owns_table


# --- teachers that hold no table


def test_a_streaming_teacher_never_sees_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_privknn.callbacks.labeling_round._IMAGES_AT_ONCE", 64)
    monkeypatch.setattr(FeatureStore, "table", lambda *args: pytest.fail("a table was made"))
    monkeypatch.setattr(ReverseKNN, "fit", lambda *args: pytest.fail("a table was given"))
    teacher = ReverseKNN(1, budget=Budget(epsilon=2.0), noise_source=SeededNoise(3))
    blocks = []
    table = ReverseKNN.fit_blocks

    def spied(self, given, num_classes):
        def counted():
            for block in given():
                blocks.append(len(block[0]))
                yield block

        table(self, counted, num_classes)

    monkeypatch.setattr(ReverseKNN, "fit_blocks", spied)
    _, data = fit_student(tmp_path, teacher, 0.1, queries_per_round=12, selection=ClusterSelection())
    assert blocks == [64, 64, 64, 64, 44]
    assert int((data.public.labels >= 0).sum()) == 60


def test_blocks_and_a_table_give_the_same_counts():
    generator = torch.Generator().manual_seed(0)
    table, queries = torch.rand(200, 5, generator=generator), torch.rand(9, 5, generator=generator)
    labels = torch.arange(200) % 3
    whole, streamed = ReverseKNN(2, budget=Budget(epsilon=2.0)), ReverseKNN(2, budget=Budget(epsilon=2.0))
    whole.fit(table, labels, 3)
    streamed.fit_blocks(lambda: zip(table.split(17), labels.split(17), strict=True), 3)
    assert torch.equal(whole.counts(queries), streamed.counts(queries))
    assert torch.equal(streamed.counts(queries), streamed.counts(queries))


def test_bad_records_of_a_block_are_refused_before_anything_is_paid():
    teacher = ReverseKNN(1, budget=Budget(epsilon=2.0))
    features = torch.rand(4, 2)
    features[2, 1] = torch.nan
    teacher.fit_blocks(lambda: [(features, torch.tensor([0, 1, 0, 1]))], 2)
    with pytest.raises(ValueError, match="features: some are NaN"):
        teacher.label(torch.rand(3, 2), None)
