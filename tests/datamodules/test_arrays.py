"""Data modules of a user's own tables: arrays, .npy, .npz and Parquet files, folders of files, one file a process."""

import itertools
import json
import pickle
import types
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import scipy.sparse
import torch

from pl_privknn.config import build, read_document
from pl_privknn.datamodules import ArraysDataModule, EmbeddingsDataModule, array_files
from pl_privknn.datamodules.array_files import rows_of
from pl_privknn.datamodules.at import data_at
from pl_privknn.datamodules.columns import Columns
from pl_privknn.privacy.redaction import RedactedError

# ---------------------------------------------------------------------------- images


def array_arguments(shape=(4, 5), dtype=np.uint8, **changes):
    rng, arguments = np.random.default_rng(2), {"num_classes": 3}
    for part, count in {"private": 9, "public": 7, "test": 5}.items():
        images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        arguments[f"{part}_images"] = images if dtype == np.uint8 else (images / 255).astype(dtype)
        arguments[f"{part}_{'truth' if part == 'public' else 'labels'}"] = np.arange(count) % 3
    return {**arguments, **changes}


LAYOUTS = [
    ((4, 5), None, (1, 4, 5)),
    ((4, 5), True, (1, 4, 5)),
    ((3, 4, 5), None, (3, 4, 5)),
    ((4, 5, 3), None, (3, 4, 5)),
    ((3, 4, 3), True, (3, 3, 4)),
    ((3, 4, 3), False, (3, 4, 3)),
    ((2, 4, 5), False, (2, 4, 5)),
]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_array_layouts(dtype):
    for shape, channels_last, wanted in LAYOUTS:
        arguments = array_arguments(shape, dtype, channels_last=channels_last)
        data = ArraysDataModule(**arguments)
        assert data.image_shape == wanted
        data.setup("fit")
        source = arguments["public_images"].astype(np.float64) / (255 if dtype == np.uint8 else 1)
        if len(shape) == 2:
            source = source[:, None]
        elif shape != wanted or channels_last:
            source = np.moveaxis(source, -1, 1)
        assert data.public.images().dtype == torch.float32
        np.testing.assert_allclose(data.public.images().numpy(), source, atol=1e-7)


def test_arrays_are_neither_copied_nor_widened_unless_torch_cannot_share_them():
    arguments = array_arguments((4, 5, 3))
    shared = {name: torch.from_numpy(value) for name, value in arguments.items() if name != "num_classes"}
    data = ArraysDataModule(**shared, num_classes=3)
    data.setup("fit")
    shared["private_images"][0] = 255
    assert (data.private.images([0]) == 1).all()
    assert data.private.images([0]).is_contiguous()
    flipped, frozen = arguments["private_images"][:, ::-1], arguments["public_images"].copy()
    frozen.flags.writeable = False
    labels = arguments["private_labels"].astype(">i4")
    changed = {"private_images": flipped, "public_images": frozen, "private_labels": labels}
    data = ArraysDataModule(**{**arguments, **changed})
    data.setup("fit")
    np.testing.assert_allclose(data.private.images().permute(0, 2, 3, 1).numpy(), flipped / 255, atol=1e-7)
    assert data.private.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("kind", ["npy", "npz", "members"])
def test_array_files_from_yaml(tmp_path, kind):
    arguments, section = array_arguments(), {"num_classes": 3, "batch_size": 5}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    np.savez_compressed(tmp_path / "all.npz", **{f"my_{name}": value for name, value in arrays.items()})
    for name, value in arrays.items():
        if kind != "members":
            (np.save if kind == "npy" else np.savez)(tmp_path / f"{name}.{kind}", value)
        section[name] = f"{tmp_path}/all.npz:my_{name}" if kind == "members" else f"{tmp_path}/{name}.{kind}"
    document = {"data": {"class_path": "ArraysDataModule", "init_args": section}}
    (tmp_path / "data.yaml").write_text(json.dumps(document))
    data = build(read_document(tmp_path / "data.yaml")).data
    assert (data.batch_size, data.image_shape) == (5, (1, 4, 5))
    in_memory = ArraysDataModule(**arguments)
    for module in (data, in_memory):
        module.setup("fit")
    assert torch.equal(data.private.images(), in_memory.private.images())
    assert torch.equal(data.private.labels, in_memory.private.labels)
    assert torch.equal(data.public.truth, in_memory.public.truth)


BAD_FLOATS = np.full((9, 4, 5), 0.5)
BAD_FLOATS[3, 2, 1] = 7.125
NOT_NUMBERS = BAD_FLOATS.clip(0, 1)
NOT_NUMBERS[3, 2, 1] = np.nan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"public_images": np.zeros((7, 5), np.uint8)},
            r"public_images: shape \(n, 5\).*EmbeddingsDataModule",
        ),
        ({"public_images": np.zeros((7, 4, 4, 4), np.uint8)}, "channels_last=True"),
        ({"private_images": np.zeros((9, 5, 4), np.uint8)}, r"private_images: images of shape \(1, 5, 4\)"),
        ({"private_images": np.full((9, 4, 5), "7.125")}, "private_images: dtype .*; expected numbers"),
        ({"private_images": BAD_FLOATS}, "private_images: float values outside"),
        (
            {"private_images": NOT_NUMBERS, "unusable": "error"},
            "private: .* cannot be used: NaN or infinite values",
        ),
        ({"private_labels": np.full((9, 2), 2)}, r"private_labels: shape \(n, 2\)"),
        ({"private_images": np.zeros((0, 4, 5)), "private_labels": np.zeros(0, int)}, "private set is empty"),
        ({"public_truth": np.arange(7) - 2}, "public_truth: .* -1 where it isn't known"),
        ({"test_labels": None}, "test_images and test_labels go together"),
        ({"val_labels": [0]}, "val_images and val_labels go together"),
        ({"public_images": None}, 'public_images, public="none": expected one of the two'),
        ({"private_images": "images.txt"}, "images.txt': expected a .npy, .npz"),
        ({"task": "multilabel"}, r"private_labels: .*expected whole numbers of shape \(n, 3\)"),
    ],
)
def test_bad_arrays_are_refused_without_showing_a_value(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        ArraysDataModule(**array_arguments(**changes)).setup("fit")
    assert "7.125" not in str(caught.value)


# ---------------------------------------------------------------------------- embeddings

COUNT, D, GROUP = 103, 6, 8
CUTS = (0, 40, 40, 71, COUNT)  # one file is empty
SMALL = np.ones((4, D), np.float32)


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    return generator.normal(size=(COUNT, D)), generator.integers(0, 3, COUNT)


def write_parquet(path, rows, labels, kind=None):
    kind = pyarrow.list_(pyarrow.float64()) if kind is None else kind(pyarrow)
    rows = pyarrow.array([None if row is None else list(row) for row in rows], kind)
    pyarrow.parquet.write_table(
        pyarrow.table({"x": rows, "y": pyarrow.array(labels)}), path, row_group_size=GROUP
    )


def data_of(embeddings, labels, **named):
    data = EmbeddingsDataModule(
        **{"private_embeddings": embeddings, "private_labels": labels, "public_embeddings": SMALL, **named},
        num_classes=3, batch_size=4,
    )  # fmt: skip
    data.setup("fit")
    return data


def written(folder, table, kind):
    """A table in files of some kind; what names its rows and its labels."""
    rows, labels = table
    folder.mkdir()
    if kind == "npz":
        np.savez(folder / "all.npz", private_embeddings=rows, y=labels)
        return folder / "all.npz", f"{folder}/all.npz:y"
    if kind == "parquet":
        write_parquet(folder / "a.parquet", rows, labels)
        return f"{folder}/a.parquet:x", f"{folder}/a.parquet:y"
    (folder / "README.txt").write_text("not a table")
    for number, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        if kind == "npy folder":
            for name, values in (("x", rows.astype(np.float32)), ("y", labels)):
                (folder / name).mkdir(exist_ok=True)
                np.save(folder / name / f"part-{number:03d}.npy", values[start:stop])
        elif stop > start:
            write_parquet(folder / f"part-{number:03d}.parquet", rows[start:stop], labels[start:stop])
    return (folder / "x", folder / "y") if kind == "npy folder" else (f"{folder}:x", f"{folder}:y")


@pytest.mark.parametrize("kind", ["npz", "parquet", "npy folder", "parquet folder"])
def test_files_hold_what_one_array_holds(tmp_path, table, kind):
    embeddings, labels = written(tmp_path / "parts", table, kind)
    found, expected = data_of(embeddings, labels), data_of(*table)
    assert found.image_shape == (D,)
    assert torch.equal(found.private.images(), expected.private.images())
    assert torch.equal(found.private.labels, expected.private.labels)
    everything = torch.arange(COUNT)
    assert found.private.store.digests(everything) == expected.private.store.digests(everything)
    chosen = torch.randint(0, COUNT, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.private.images(chosen), expected.private.images(chosen))
    for ours, theirs in zip(found.private_batches(9), expected.private_batches(9), strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kept", [0, 3, None])
def test_no_more_row_groups_are_in_memory_than_said(tmp_path, table, monkeypatch, kept):
    read, original = [], Columns.vectors

    def noted(self, name, number=None):
        read.append(number)
        return original(self, name, number)

    monkeypatch.setattr(Columns, "vectors", noted)
    write_parquet(tmp_path / "a.parquet", *table)
    groups = -(-COUNT // GROUP)
    if kept is not None:
        monkeypatch.setattr(array_files, "_KEPT_BYTES", kept * GROUP * D * 4)
    data = data_of(f"{tmp_path}/a.parquet:x", f"{tmp_path}/a.parquet:y")
    assert read == list(range(groups))
    held = [sum(group.nbytes for group in data.private.store._kept.values()) for _ in data.private_batches(5)]
    if kept is None:  # a small table is read once
        data.private.images(torch.randperm(COUNT))
        assert len(read) == groups
    else:
        assert 0 < max(held) <= max(kept, 1) * GROUP * D * 4
        # In order, each row group is read once more, and where one batch ends in it and the next begins not again.
        assert len(read) == 2 * groups


def test_bad_parquet_files_are_named(tmp_path, table):
    rows, labels = table
    spoiled = rows.copy()
    spoiled[5, 1] = np.nan
    ragged = [[0.0] * D] * GROUP + [[0.0] * 4] * GROUP  # a length for each row group
    write_parquet(tmp_path / "nan.parquet", spoiled, labels)
    whole = labels[:, None], labels, lambda arrow: arrow.list_(arrow.int64())
    write_parquet(tmp_path / "whole.parquet", *whole)
    write_parquet(tmp_path / "none.parquet", rows[:0], labels[:0])
    write_parquet(tmp_path / "ragged.parquet", ragged, labels[: 2 * GROUP])
    write_parquet(tmp_path / "gaps.parquet", [[0.0] * D, None], labels[:2])
    whole = (tmp_path / "nan.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:200])
    (tmp_path / "broken.parquet").write_bytes(whole[:4] + bytes(596) + whole[600:])
    assert rows_of("x", tmp_path / "gaps.parquet")[1].tolist() == [True, False]
    assert rows_of("x", tmp_path / "nan.parquet")[1].tolist() == [row != 5 for row in range(COUNT)]
    for name, words in [
        (
            "nan.parquet:y",
            r"x='.*nan\.parquet': the column 'y' holds int64; expected a list of equally many floats",
        ),
        (
            "nan.parquet:z",
            r"nan\.parquet' has no column 'z'; it has x, y: name the right one as in data\.parquet",
        ),
        ("whole.parquet", r"'x' holds list<\w+: int64>; expected a list of equally many floats"),
        ("none.parquet", r"none\.parquet': it is empty"),
        ("ragged.parquet", r"'x' holds .*; expected a list of equally many floats"),
        ("cut.parquet", r"cut\.parquet' can't be read \(\w+\)"),
        ("broken.parquet", r"broken\.parquet' can't be read"),
    ]:
        with pytest.raises(ValueError, match=words):
            rows_of("x", f"{tmp_path}/{name}")


# ---------------------------------------------------------------------------- a file for each process

#: Records that are in every process.
TABLE = {"private_embeddings": np.ones((4, D), np.float32), "private_labels": np.arange(4) % 2}


def write_shards(folder, counts):
    generator = np.random.default_rng(0)
    for rank, count in enumerate(counts):
        np.save(folder / f"features-{rank:05d}.npy", generator.random((count, D), np.float32))
        np.save(folder / f"labels-{rank:05d}.npy", np.arange(count) % 2 if count else np.zeros(0, np.int64))


def shard_of(folder, rank=0, size=2, **named):
    names = {
        "private_embeddings": str(folder / "features-{rank:05d}.npy"),
        "private_labels": str(folder / "labels-{rank:05d}.npy"),
        **named,
    }
    data = EmbeddingsDataModule(**names, public_embeddings=SMALL, num_classes=2)
    data.trainer = types.SimpleNamespace(global_rank=rank, world_size=size)
    data.setup("fit")
    return data


def test_each_process_reads_its_own_file(tmp_path):
    write_shards(tmp_path, [8, 8])  # with equal labels
    for rank in range(2):
        data = shard_of(tmp_path, rank)
        assert data.private_in_shards
        expected = np.load(tmp_path / f"features-{rank:05d}.npy")
        assert np.array_equal(data.private.images(slice(0, 8)).numpy(), expected)
    assert not shard_of(tmp_path, **TABLE).private_in_shards


def test_shards_that_are_missing_empty_doubled_or_left_over_are_named(tmp_path):
    def refused(words, rank, size=2):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            shard_of(tmp_path, rank, size)

    write_shards(tmp_path, [5, 8])
    refused(r"private_embeddings='.*features-00002.npy': no such shard", 2, 3)
    refused(r"private_embeddings='.*features-00001.npy': no process would read this shard", 0, 1)
    write_shards(tmp_path, [5, 0])
    refused(r"private_embeddings='.*features-00001.npy': the shard is empty", 1)
    np.save(tmp_path / "features-00001.npy", np.load(tmp_path / "features-00000.npy"))
    for rank in range(2):
        refused(rf"features-0000{rank}.npy' is the same as '.*features-0000{1 - rank}.npy'", rank)


def test_records_that_cannot_be_compared_are_not_told(tmp_path, monkeypatch):
    data = shard_of(tmp_path, **TABLE)

    def broken(indices):
        raise OSError("patient-Jones.png is truncated")

    monkeypatch.setattr(data.private, "images", broken)
    with pytest.raises(RedactedError) as caught:
        data.private.check_same(lambda digest: True)
    assert "Jones" not in str(caught.value)
    monkeypatch.undo()
    digests = []
    for labels in (data.private.labels, data.private.labels.flip(0)):
        data.private.labels = labels
        data.private.check_same(lambda digest: digests.append(digest) or True)
    assert len(set(digests)) == 2
    assert {len(digest) for digest in digests} == {32}


def test_files_whose_names_differ_in_the_case_of_the_suffix_are_refused(tmp_path):
    for name in ("images.npy", "labels.npy", "labels.NPY"):
        with (tmp_path / name).open("wb") as file:
            np.save(file, np.zeros((4, 8, 8)) if name == "images.npy" else np.arange(4) % 2)
    if len(list(tmp_path.iterdir())) < 3:
        pytest.skip("this file system has one file for both names")
    with pytest.raises(ValueError, match=r"labels\.npy|labels\.NPY") as error:
        data_at(tmp_path)
    assert "is there twice, with suffixes that differ in case" in str(error.value)


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="tells which pages are in memory on Linux alone"
)
def test_what_was_read_of_a_mapped_file_does_not_stay_in_memory(tmp_path):
    table = np.random.default_rng(0).random((40_000, 100), dtype=np.float32)
    np.save(tmp_path / "private.npy", table)
    np.save(tmp_path / "public.npy", table[:10])
    data = EmbeddingsDataModule(
        tmp_path / "private.npy", np.arange(40_000) % 3, tmp_path / "public.npy", num_classes=3
    )
    data.setup("fit")
    batches = [images for images, _ in data.private_batches(1000)]
    assert torch.equal(torch.cat(batches).flatten(1), torch.from_numpy(table))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    resident = [
        int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        for line in lines
        if line.endswith("private.npy")
    ]
    assert resident
    assert sum(resident) < 100  # kB, of 16,000
    again = pickle.loads(pickle.dumps(data.private.store))
    assert torch.equal(again.read(torch.tensor([39_999])).flatten(), torch.from_numpy(table[-1]))


def test_hidden_copies_in_a_folder_are_no_records(tmp_path):
    for name, count in (("a.npy", 3), (".~0.npy", 5), ("~$b.npy", 7), ("b.npy", 2)):
        np.save(tmp_path / name, np.ones((count, 4), np.float32))
    assert len(rows_of("private_embeddings", tmp_path)[0]) == 5


def test_masked_numbers_are_not_known():
    rows = np.ma.masked_equal(np.array([[1.0, 2.0], [3.0, 9.0]], np.float32), 9.0)
    labels = np.ma.masked_equal(np.array([0, 1, 7]), 7)
    _, finite = rows_of("public_embeddings", rows)
    assert finite.tolist() == [True, False]
    assert array_files.labels_of("public_truth", labels).tolist() == [0, 1, -1]


def test_sparse_matrices_are_refused_with_what_to_do():
    for sparse in (
        scipy.sparse.csr_matrix(np.eye(3)),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    ):
        with pytest.raises(
            ValueError, match=r"private_embeddings: a sparse .*; make it dense by .toarray\(\)"
        ):
            EmbeddingsDataModule(sparse, [0, 1, 0], public="none")
