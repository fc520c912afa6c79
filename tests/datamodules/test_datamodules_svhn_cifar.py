"""SVHN and CIFAR: read from their own file formats, split, refused when damaged."""

import hashlib
import pickle
import shutil

import numpy as np
import pytest
import torch
from paper_checks import (
    CIFAR_SMALL,
    SVHN_SMALL,
    as_bytes,
    assert_labels_stay_with_images,
    disjoint,
    sizes,
    source,
    write_papers,
)
from scipy.io import savemat

from pl_privknn.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    DamagedFileError,
    SVHNDataModule,
    TensorImages,
)
from pl_privknn.datamodules.formats.published import read_array_pickle
from pl_privknn.datamodules.formats.stores import ChosenImages, JoinedImages


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return root, write_papers(root)


# ---------------------------------------------------------------------------- stores


def test_chosen_and_joined_images_read_what_they_are_made_of():
    images = torch.randint(0, 256, (7, 1, 2, 2), dtype=torch.uint8)
    first, second = TensorImages(images[:3]), TensorImages(images[3:])
    joined = JoinedImages([first, second])
    rows = torch.tensor([6, 0, 2, 3, 3])
    assert len(joined) == 7
    assert torch.equal(joined.read(rows), images[rows].float().div(255))
    chosen = ChosenImages(TensorImages(images), rows)
    assert (len(chosen), chosen.shape) == (5, (1, 2, 2))
    assert torch.equal(chosen.read(torch.tensor([4, 1])), images[[3, 0]].float().div(255))
    assert chosen.digests() == [joined.digests()[row] for row in rows.tolist()]
    assert len(set(chosen.digests())) == 4
    with pytest.raises(ValueError, match="one shape"):
        JoinedImages([first, TensorImages(torch.zeros(1, 3, 2, 2))])


# ---------------------------------------------------------------------------- SVHN


def test_svhn_split(written):
    root, contents = written
    data = SVHNDataModule(root, **SVHN_SMALL)
    data.setup("fit")
    assert sizes(data) == [90, 25, 10]
    assert disjoint(data)
    for part, labels, files in (
        (data.private, data.private.labels, ("train", "extra")),
        (data.public, data.public.truth, ("test",)),
        (data.test, data.test.labels, ("test",)),
    ):
        known = {key: label for file in files for key, label in source(*contents["svhn"][file]).items()}
        assert_labels_stay_with_images(part, labels, known)
    # Pixels stay one byte a value.
    assert all(store._images.dtype == torch.uint8 for store in data.private.store.stores)
    without = SVHNDataModule(root, extra=False, num_private=20, **SVHN_SMALL)
    without.setup("fit")
    assert sizes(without) == [20, 25, 10]
    assert set(as_bytes(without.private.images())) <= set(source(*contents["svhn"]["train"]))
    everything = SVHNDataModule(root, **{**SVHN_SMALL, "num_test": None})
    everything.setup("test")
    assert len(everything.test) == 25


def test_svhn_reads_what_torchvision_reads(written, monkeypatch):
    from torchvision.datasets import SVHN

    root, _ = written
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    reference = SVHN(root, split="train")
    data = SVHNDataModule(root, extra=False, **SVHN_SMALL)
    data.setup("fit")
    assert torch.equal((data.private.images() * 255).round().byte(), torch.from_numpy(reference.data))
    assert data.private.labels.tolist() == reference.labels.tolist()


def test_svhn_defaults_are_the_papers_and_ask_for_the_published_files(written):
    root, _ = written
    data = SVHNDataModule(root)
    assert (data.num_public, data.num_test, data.extra) == (25_000, 1_000, True)
    with pytest.raises(DamagedFileError, match=r"train_32x32\.mat: \d+ bytes whose MD5 isn't"):
        data.setup("fit")
    with pytest.raises(ValueError, match="num_public=25000, num_test=1000: the test file has 50 images"):
        SVHNDataModule(root, verify=False).setup("test")
    with pytest.raises(FileNotFoundError, match=r"train_32x32\.mat not found in .*download=True"):
        SVHNDataModule(root / "nowhere").setup("fit")


def test_svhn_with_the_right_checksum_is_accepted(written, monkeypatch):
    from torchvision.datasets import SVHN

    root, _ = written
    sums = {
        part: ["", "", hashlib.md5((root / f"{part}_32x32.mat").read_bytes()).hexdigest()]
        for part in ("train", "extra", "test")
    }
    monkeypatch.setattr(SVHN, "split_list", sums)
    data = SVHNDataModule(root, num_public=25, num_test=10)
    data.setup("fit")
    assert sizes(data) == [90, 25, 10]


@pytest.mark.parametrize("kept", [0, 60, 1000, -3])
def test_svhn_cut_off_is_refused_by_name(written, tmp_path, kept):
    root, _ = written
    whole = (root / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[:kept])
    with pytest.raises(DamagedFileError, match=r"test_32x32\.mat: no sound MATLAB file .* bytes long"):
        SVHNDataModule(tmp_path, **SVHN_SMALL).setup("test")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, "no variable 'y'"),
        ({"X": np.zeros((32, 30, 3, 4), np.uint8), "y": np.ones(4)}, "format 2"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones(3)}, "3 entries for 4 images"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.zeros(4)}, "one of 1 … 10"),
    ],
)
def test_svhn_other_contents_are_refused_by_name(tmp_path, variables, message):
    savemat(tmp_path / "test_32x32.mat", variables)
    with pytest.raises(DamagedFileError, match=message):
        SVHNDataModule(tmp_path, **SVHN_SMALL).setup("test")


# ---------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize(
    ("split", "counts", "parts"),
    [
        ("private_knn", CIFAR_SMALL, [30, 29, 10]),
        ("reverse_knn", {"num_public": 30, "num_test": 5, "verify": False}, [45, 30, 5]),
        ("train_test", {"num_public": 15, "num_test": 5, "verify": False}, [60, 15, 5]),
        ("pretraining", {"verify": False}, [0, 60, 20]),
    ],
)
def test_cifar10_splits(written, split, counts, parts):
    root, contents = written
    data = CIFAR10DataModule(root, split=split, **counts)
    data.setup("fit")
    assert sizes(data) == parts
    assert disjoint(data)
    files = {name: source(*content) for name, content in contents["cifar10"].items()}
    known = {key: label for labels in files.values() for key, label in labels.items()}
    assert_labels_stay_with_images(data.private, data.private.labels, known)
    assert_labels_stay_with_images(data.public, data.public.truth, known)
    assert_labels_stay_with_images(data.test, data.test.labels, known)
    in_test_file = set(files["test_batch"])
    public, test = set(as_bytes(data.public.images())), set(as_bytes(data.test.images()))
    if split == "reverse_knn":
        assert not public & in_test_file
        assert test <= in_test_file
    if split in ("train_test", "pretraining"):
        assert test <= in_test_file
        assert public <= in_test_file if split == "train_test" else not public & in_test_file


def test_cifar10_split_is_fixed_and_seeded(written):
    root, _ = written
    first, again, other = (CIFAR10DataModule(root, split_seed=seed, **CIFAR_SMALL) for seed in (0, 0, 1))
    first.setup("fit")
    again.setup("test")
    other.setup("test")
    assert torch.equal(first.test.images(), again.test.images())
    assert not torch.equal(first.test.images(), other.test.images())


@pytest.mark.parametrize(
    ("split", "published"),
    [
        ("private_knn", (30_000, 29_000, 1_000)),
        ("reverse_knn", (29_000, 30_000, 1_000)),
        ("train_test", (50_000, 9_000, 1_000)),
        ("pretraining", (0, 50_000, 10_000)),
    ],
)
def test_cifar10_default_sizes_are_the_papers(split, published):
    parts = CIFAR10DataModule(split=split)._parts(50_000, 10_000)
    assert tuple(len(parts[name]) for name in ("private", "public", "test")) == published
    rows = torch.cat(list(parts.values()))
    assert len(rows.unique()) == len(rows)


def test_cifar_reads_what_torchvision_reads(written, monkeypatch):
    from torchvision.datasets import CIFAR10

    root, _ = written
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    reference = CIFAR10(root, train=False)
    data = CIFAR10DataModule(root, split="pretraining", num_test=20, verify=False)
    data.setup("test")
    assert sorted(as_bytes(data.test.images())) == sorted(
        np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes() for image in reference.data
    )


def test_cifar100_is_a_public_first_stage(written):
    root, _ = written
    data = CIFAR100DataModule(root, verify=False, train_on_truth=True)
    data.setup("fit")
    assert sizes(data) == [0, 200, 120]
    assert data.num_classes == 100
    assert torch.equal(data.public.labels, data.public.truth)
    guided = CIFAR100DataModule(root, split="train_test", num_public=90, num_test=10, verify=False)
    guided.setup("fit")
    assert sizes(guided) == [200, 90, 10]


def test_cifar_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    with pytest.raises(DamagedFileError, match=r"data_batch_1: \d+ bytes whose MD5 isn't .*verify=False"):
        CIFAR10DataModule(root).setup("test")
    folder = tmp_path / "cifar-10-batches-py"
    shutil.copytree(root / "cifar-10-batches-py", folder)
    small = {"root": tmp_path, **CIFAR_SMALL}
    with pytest.raises(ValueError, match="num_public=61: split='reverse_knn' takes 61 images where 60"):
        CIFAR10DataModule(**{**small, "num_public": 61}, split="reverse_knn").setup("test")
    whole = (folder / "data_batch_3").read_bytes()
    for kept in (0, 7, 5000, -1):
        (folder / "data_batch_3").write_bytes(whole[:kept])
        with pytest.raises(DamagedFileError, match="data_batch_3: no sound pickle"):
            CIFAR10DataModule(**small).setup("test")
    for entry, message in (
        ({"data": np.zeros((4, 3071), np.uint8), "labels": [0] * 4}, "'data' is no uint8"),
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0] * 3}, "4 labels"),
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 10]}, "0 … 9"),
        ([1, 2], "list instead of a dictionary"),
    ):
        (folder / "data_batch_3").write_bytes(pickle.dumps(entry, protocol=2))
        with pytest.raises(DamagedFileError, match=f"data_batch_3: .*{message}"):
            CIFAR10DataModule(**small).setup("test")
    (folder / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3 not found in .*download=True"):
        CIFAR10DataModule(**small).setup("test")


class _Harm:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_a_pickle_can_not_run_code(tmp_path, capsys):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": _Harm()}, protocol=2))
    with pytest.raises(DamagedFileError, match=r"print has no place in a file of arrays"):
        read_array_pickle(tmp_path / "batch")
    assert capsys.readouterr().out == ""
