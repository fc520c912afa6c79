"""Embeddings in folders of files and in Parquet: the values of arrays in memory, and few of them at a time."""

import itertools

import numpy as np
import pytest
import torch

from pl_privknn.datamodules import EmbeddingsDataModule, tables
from pl_privknn.datamodules.tables import Table, dimension_of, numbers_of, rows_of

COUNT, D, GROUP = 103, 6, 8
CUTS = (0, 40, 40, 71, COUNT)  # one file is empty
SMALL = np.ones((4, D), np.float32)


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    return generator.normal(size=(COUNT, D)), generator.integers(0, 3, COUNT)


def write_parquet(path, rows, labels, kind=None):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    kind = pyarrow.list_(pyarrow.float64()) if kind is None else kind(pyarrow)
    columns = {"x": pyarrow.array(list(map(list, rows)), kind), "y": pyarrow.array(labels)}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=GROUP)


def in_parts(folder, table, kind):
    """A folder of embeddings and one of labels, or one of both; what names them."""
    folder.mkdir()
    rows, labels = table
    (folder / "README.txt").write_text("not a table")
    for number, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        if kind == ".npy":
            for name, values in (("x", rows.astype(np.float32)), ("y", labels)):
                (folder / name).mkdir(exist_ok=True)
                np.save(folder / name / f"part-{number:03d}.npy", values[start:stop])
        elif stop > start:
            write_parquet(folder / f"part-{number:03d}.parquet", rows[start:stop], labels[start:stop])
    return (folder / "x", folder / "y") if kind == ".npy" else (f"{folder}:x", f"{folder}:y")


def data_of(embeddings, labels, **named):
    data = EmbeddingsDataModule(
        **{"private_embeddings": embeddings, "private_labels": labels, "public_embeddings": SMALL, **named},
        num_classes=3, batch_size=4,
    )  # fmt: skip
    data.setup("fit")
    return data


@pytest.mark.parametrize("kind", [".npy", ".parquet"])
def test_folders_hold_what_one_array_holds(tmp_path, table, kind):
    embeddings, labels = in_parts(tmp_path / "parts", table, kind)
    found, expected = data_of(embeddings, labels), data_of(*table)
    assert torch.equal(found.private.images(), expected.private.images())
    assert torch.equal(found.private.labels, expected.private.labels)
    everything = torch.arange(COUNT)
    assert found.private.store.digests(everything) == expected.private.store.digests(everything)
    chosen = torch.randint(0, COUNT, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.private.images(chosen), expected.private.images(chosen))
    for (ours, classes), (theirs, truth) in zip(
        found.private_batches(9), expected.private_batches(9), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert torch.equal(classes, truth)


@pytest.mark.parametrize(
    "kind",
    [
        lambda arrow: arrow.list_(arrow.float32()),
        lambda arrow: arrow.list_(arrow.float32(), D),
        lambda arrow: arrow.large_list(arrow.float64()),
    ],
    ids=["float32", "fixed size", "large"],
)
def test_every_kind_of_list_is_read(tmp_path, table, kind):
    write_parquet(tmp_path / "a.parquet", *table, kind)
    store = rows_of("x", tmp_path / "a.parquet")
    assert torch.equal(store.read(torch.arange(COUNT))[:, :, 0, 0], torch.from_numpy(table[0]).float())
    assert torch.equal(numbers_of("y", tmp_path / "a.parquet"), torch.from_numpy(table[1]))


@pytest.fixture
def groups_read(monkeypatch):
    """Rows of each row group that was read, one after another."""
    read, original = [], Table.group

    def noted(self, number):
        group = original(self, number)
        read.append(len(group))
        return group

    monkeypatch.setattr(Table, "group", noted)
    return read


@pytest.mark.parametrize("kept", [0, 3])
def test_no_more_row_groups_are_in_memory_than_said(tmp_path, table, monkeypatch, groups_read, kept):
    write_parquet(tmp_path / "a.parquet", *table)
    bound = max(kept, 1) * GROUP * D * 4
    monkeypatch.setattr(tables, "_KEPT_BYTES", kept * GROUP * D * 4)
    data = data_of(f"{tmp_path}/a.parquet:x", f"{tmp_path}/a.parquet:y")
    groups = -(-COUNT // GROUP)
    assert len(groups_read) == groups
    assert max(groups_read) == GROUP
    held = []
    for _ in data.private_batches(5):
        held.append(sum(group.nbytes for group in data.private.store._kept.values()))
    assert 0 < max(held) <= bound
    # In order, each row group is read once more, and where one batch ends in it and the next begins not again.
    assert len(groups_read) == 2 * groups


def test_a_small_table_is_read_once(tmp_path, table, groups_read):
    write_parquet(tmp_path / "a.parquet", *table)
    data = data_of(f"{tmp_path}/a.parquet:x", f"{tmp_path}/a.parquet:y")
    for _ in range(3):
        data.private.images(torch.randperm(COUNT))
    assert sum(groups_read) == COUNT


def test_npy_files_of_a_folder_are_mapped_and_not_read(tmp_path, table, monkeypatch):
    embeddings, _ = in_parts(tmp_path / "parts", table, ".npy")
    load, modes = np.load, []

    def noted(path, mmap_mode=None, **how):
        modes.append(mmap_mode)
        return load(path, mmap_mode=mmap_mode, **how)

    monkeypatch.setattr(np, "load", noted)
    assert dimension_of("x", embeddings) == D
    store = rows_of("x", embeddings)
    assert len(store) == COUNT
    assert modes == ["r"] * 4 + ["c"] * 4


def test_the_dimension_takes_one_row_of_a_parquet_file(tmp_path, table, groups_read):
    write_parquet(tmp_path / "a.parquet", *table)
    assert dimension_of("x", tmp_path / "a.parquet") == D
    assert groups_read == []


def test_each_process_reads_its_own_parquet_file(tmp_path, table):
    for rank in range(2):
        write_parquet(tmp_path / f"s-{rank}.parquet", table[0][rank::2], table[1][rank::2])
    names = (f"{tmp_path}/s-{{rank}}.parquet:x", f"{tmp_path}/s-{{rank}}.parquet:y")
    data = EmbeddingsDataModule(*names, SMALL, num_classes=3)
    data.trainer = type("Trainer", (), {"global_rank": 1, "world_size": 2})
    data.setup("fit")
    assert torch.equal(data.private.labels, torch.from_numpy(table[1][1::2]))


def refused(message, source, error=ValueError):
    with pytest.raises(error, match=message) as caught:
        rows_of("x", source)
    assert "\n" not in str(caught.value)


def test_bad_folders_and_files_are_named(tmp_path, table):
    pyarrow = pytest.importorskip("pyarrow")
    rows, labels = table
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(r"x='.*folder': want a folder of \.npy files, or one of \.parquet files; it holds none", folder)
    np.save(folder / "a.npy", rows)
    np.save(folder / "b.npy", rows[:, :4])
    with pytest.raises(
        ValueError, match=r"x='.*folder': its files have rows of 4, 6 numbers; want one length"
    ):
        dimension_of("x", folder)
    (folder / "b.npy").write_bytes(b"\x93NUMPY nonsense")
    refused(r"x='.*b\.npy' can't be read", folder)
    spoiled = rows.copy()
    spoiled[5, 1] = np.nan
    np.save(folder / "b.npy", spoiled)
    refused(r"x='.*b\.npy': some values are NaN or infinite", folder)
    write_parquet(folder / "c.parquet", rows, labels)
    refused(r"it holds both", folder)

    write_parquet(tmp_path / "nan.parquet", spoiled, labels)
    refused(r"x='.*nan\.parquet': some values are NaN", tmp_path / "nan.parquet")
    refused(r"x='.*nan\.parquet:y': 'y' holds int64; want lists of floats", f"{tmp_path}/nan.parquet:y")
    refused(r"nan\.parquet:z': it holds x, y and no column 'z'", f"{tmp_path}/nan.parquet:z")
    write_parquet(
        tmp_path / "whole.parquet", labels[:, None], labels, lambda arrow: arrow.list_(arrow.int64())
    )
    refused(r"'x' holds torch\.int64; want lists of floats", tmp_path / "whole.parquet")
    write_parquet(tmp_path / "none.parquet", rows[:0], labels[:0])
    refused(r"none\.parquet': it is empty", tmp_path / "none.parquet")
    ragged = [[0.0] * D] * GROUP + [[0.0] * 4] * GROUP  # a length for each row group
    write_parquet(tmp_path / "ragged.parquet", ragged, labels[: 2 * GROUP])
    refused(r"the lists of 'x' differ in length", tmp_path / "ragged.parquet")
    write_parquet(tmp_path / "gaps.parquet", [[0.0] * D], labels[:1])
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"x": [[0.0] * D, None]}), tmp_path / "gaps.parquet")
    refused(r"some rows of 'x' are empty", tmp_path / "gaps.parquet")
    whole = (tmp_path / "nan.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:200])
    refused(r"cut\.parquet' can't be read \(\w+: ", tmp_path / "cut.parquet")
    broken = bytearray(whole)
    broken[4:600] = bytes(596)
    (tmp_path / "broken.parquet").write_bytes(broken)
    refused(r"broken\.parquet' can't be read", tmp_path / "broken.parquet")
