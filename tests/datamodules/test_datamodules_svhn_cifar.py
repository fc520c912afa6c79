"""SVHN and CIFAR: read from their own file formats, split, refused when damaged."""

import pickle
import shutil

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
from paper_data import published

from pl_privknn.datamodules import CIFAR10DataModule, CIFAR100DataModule, SVHNDataModule, TensorImages
from pl_privknn.datamodules.datasets import ChosenImages, JoinedImages


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    contents = write_papers(root)
    with published(root):
        yield root, contents


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
    digests = chosen.digests(torch.arange(5))
    assert digests == joined.digests(rows)
    assert len(set(digests)) == 4
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
    assert all(part._images.dtype == torch.uint8 for part in data.private.store.store.stores)
    without = SVHNDataModule(root, extra=False, num_private=20, **SVHN_SMALL)
    without.setup("fit")
    assert sizes(without) == [20, 25, 10]
    assert set(as_bytes(without.private.images())) <= set(source(*contents["svhn"]["train"]))
    everything = SVHNDataModule(root, **{**SVHN_SMALL, "num_test": None})
    everything.setup("test")
    assert len(everything.test) == 25


def test_svhn_asks_for_the_published_files(written, tmp_path):
    root, _ = written
    data = SVHNDataModule(root)
    assert data.counts == {"num_private": None, "num_public": 25_000, "num_test": 1_000}
    assert data.private_files == ("train", "extra")
    with pytest.raises(ValueError, match="num_public=25000: there are 50 such images"):
        data.setup("test")
    with pytest.raises(FileNotFoundError, match=r"SVHNDataModule\(root=.*missing in .*SVHN.*download=True"):
        SVHNDataModule(tmp_path).setup("fit")
    (tmp_path / "SVHN").mkdir()
    whole = (root / "SVHN" / "test_32x32.mat").read_bytes()
    for kept in (0, 60, 1000, -3):
        (tmp_path / "SVHN" / "test_32x32.mat").write_bytes(whole[:kept])
        with pytest.raises(FileNotFoundError, match="cut off or altered; pass download=True"):
            SVHNDataModule(tmp_path, **SVHN_SMALL).setup("test")


def test_downloads_only_on_request(tmp_path, monkeypatch):
    from torchvision import datasets

    asked = []
    monkeypatch.setattr(datasets, "SVHN", lambda root, **options: asked.append((root, options)))
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, **options: asked.append((root, options)))
    for download in (False, True):
        SVHNDataModule(tmp_path, extra=False, download=download).prepare_data()
        CIFAR10DataModule(tmp_path, download=download).prepare_data()
    folder = tmp_path / "SVHN"
    assert asked == [
        (folder, {"split": "train", "download": True}),
        (folder, {"split": "test", "download": True}),
        (tmp_path, {"download": True}),
    ]


# ---------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize(
    ("split", "counts", "parts"),
    [
        ("private_knn", CIFAR_SMALL, [30, 29, 10]),
        ("reverse_knn", {"num_public": 30, "num_test": 5}, [45, 30, 5]),
        ("train_test", {"num_public": 15, "num_test": 5}, [60, 15, 5]),
        ("pretraining", {}, [0, 60, 20]),
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
    parts = CIFAR10DataModule(split=split).rows(50_000, 10_000)
    assert tuple(len(parts[name]) for name in ("private", "public", "test")) == published
    rows = torch.cat(list(parts.values()))
    assert len(rows.unique()) == len(rows)


def test_cifar100_is_a_public_first_stage(written):
    root, _ = written
    data = CIFAR100DataModule(root, train_on_truth=True)
    data.setup("fit")
    assert sizes(data) == [0, 200, 120]
    assert data.num_classes == 100
    assert torch.equal(data.public.labels, data.public.truth)
    guided = CIFAR100DataModule(root, split="train_test", num_public=90, num_test=10)
    guided.setup("fit")
    assert sizes(guided) == [200, 90, 10]


class _Harm:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_cifar_files_that_are_not_the_published_ones_are_never_unpickled(written, tmp_path, capsys):
    root, _ = written
    folder = tmp_path / "cifar-10-batches-py"
    shutil.copytree(root / "cifar-10-batches-py", folder)
    small = {"root": tmp_path, **CIFAR_SMALL}
    with pytest.raises(ValueError, match="num_public=61: there are 60 such images"):
        CIFAR10DataModule(**{**small, "num_public": 61}, split="reverse_knn").setup("test")
    whole = (folder / "data_batch_3").read_bytes()
    for content in (b"", whole[:-1], pickle.dumps({"data": _Harm()}, protocol=2)):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(FileNotFoundError, match=r"CIFAR10DataModule\(root=.*altered; pass download=True"):
            CIFAR10DataModule(**small).setup("test")
    assert capsys.readouterr().out == ""
