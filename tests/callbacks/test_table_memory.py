"""Tables of private features that memory need not hold: where they lie, who could read them, what is left."""

import os
import stat

import numpy as np
import pytest
import torch
from torch import nn

from pl_privknn.callbacks import ClusterSelection, labeling_round
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.datamodules.datasets import LabeledImages, TensorImages
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PrivateKNN, ReverseKNN
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


# --- teachers that hold no table


def test_a_streaming_teacher_never_sees_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(FeatureStore, "table", lambda *args: pytest.fail("a table was made"))
    teacher = ReverseKNN(1, budget=Budget(epsilon=2.0), noise_source=SeededNoise(3))
    _, data = fit_student(tmp_path, teacher, 0.1, queries_per_round=12, selection=ClusterSelection())
    assert int((data.public.labels >= 0).sum()) == 60


def small_records(count, extract=None, rows=None, **given):
    generator = torch.Generator().manual_seed(0)
    examples = LabeledImages(
        TensorImages(torch.rand(count, 3, 64, 64, generator=generator)), torch.arange(count) % 3, 3
    )
    return examples, PrivateRecords(examples, extract or nn.Flatten(), rows=rows, **given)


def test_blocks_are_the_rows_of_the_table_in_their_order():
    rows = torch.arange(1, 900, 2)
    examples, records = small_records(900, rows=rows)
    blocks = list(records.blocks())
    assert len(blocks) > 1
    assert torch.equal(torch.cat([features for features, _ in blocks]), records.table())
    assert torch.equal(records.table(), examples.images(rows).flatten(1))
    assert torch.equal(torch.cat([labels for _, labels in blocks]), records.labels)
    assert torch.equal(records.labels, rows % 3)


def test_a_record_without_finite_features_counts_as_zeros():
    def extract(images):
        found = images.flatten(1)[:, :4]
        return torch.where(found[:, :1] > 0.5, found / 0.0, found)

    examples, records = small_records(20, extract)
    bad = examples.images()[:, 0, 0, 0] > 0.5
    assert 0 < int(bad.sum()) < 20
    assert bool((records.table()[bad] == 0).all())
    assert bool((records.table()[~bad] != 0).any(dim=1).all())


def test_an_empty_shard_has_a_table_as_wide_as_the_others():
    _, records = small_records(9, rows=torch.arange(0))
    assert records.table().shape == (0, 3 * 64 * 64)
