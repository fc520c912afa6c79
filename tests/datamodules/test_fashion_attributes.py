"""Attributes of Fashion-MNIST: the table, the parts, groups, and runs of the configs on small files in IDX format."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pl_privknn.cli.main import main
from pl_privknn.datamodules import (
    DamagedFileError,
    FashionMNISTAttributesDataModule,
    FashionMNISTDataModule,
)
from pl_privknn.datamodules.mnist import FASHION_ATTRIBUTES

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLASSES = FashionMNISTDataModule.default_names
# Written out once more by class, independently of the table by attribute.
EXPECTED = {
    "T-shirt/top": {"upper_body", "sleeves", "closed_front"},
    "Trouser": {"legs"},
    "Pullover": {"upper_body", "sleeves", "long_sleeves", "closed_front", "cold_weather"},
    "Dress": {"upper_body", "legs", "closed_front"},
    "Coat": {"upper_body", "sleeves", "long_sleeves", "button_front", "cold_weather"},
    "Sandal": {"footwear"},
    "Shirt": {"upper_body", "sleeves", "long_sleeves", "button_front"},
    "Sneaker": {"footwear", "closed_shoe"},
    "Bag": {"bag"},
    "Ankle boot": {"footwear", "closed_shoe", "cold_weather"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Fashion-MNIST's four files with 200 and 81 images, gzipped; a bright column says the class."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("fashion") / "FashionMNIST" / "raw"
    root.mkdir(parents=True)
    for part, count in (("train", 200), ("t10k", 81)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label + 3 : 2 * label + 6] += 200
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (root / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return root.parents[1]


def test_table_of_attributes(folder):
    data = FashionMNISTAttributesDataModule(folder)
    assert data.task == "multilabel"
    assert data.attribute_names == tuple(FASHION_ATTRIBUTES)
    assert (data.num_classes, data.image_shape) == (10, (1, 28, 28))
    for name, row in zip(CLASSES, data.table.tolist(), strict=True):
        have = {attribute for attribute, bit in zip(data.attribute_names, row, strict=True) if bit}
        assert have == EXPECTED[name]
    # Ten classes, ten different rows: nothing of the class is lost.
    assert len({tuple(row) for row in data.table.tolist()}) == 10


def test_docstring_table_is_the_table():
    shares = {
        words[0]: float(words[-1])
        for words in map(str.split, (FashionMNISTAttributesDataModule.__doc__ or "").splitlines())
        if words and words[0] in FASHION_ATTRIBUTES
    }
    assert shares == {name: row.count("1") / 10 for name, row in FASHION_ATTRIBUTES.items()}


def test_parts_are_those_of_the_classes(folder):
    classes, data = FashionMNISTDataModule(folder), FashionMNISTAttributesDataModule(folder)
    for module in (classes, data):
        module.setup("fit")
    for part in ("private", "public", "test"):
        theirs, ours = getattr(classes, part), getattr(data, part)
        assert torch.equal(theirs.images(), ours.images())
        labels = theirs.truth if part == "public" else theirs.labels
        assert torch.equal(data.table[labels], ours.truth if part == "public" else ours.labels)
    assert data.public.labels.shape == (41, 10)
    assert bool((data.public.labels == -1).all())
    assert data.private_groups is None
    image, label = data.test[3]
    assert (image.shape, label.shape) == ((1, 28, 28), (10,))


def test_choice_of_attributes_and_groups(folder):
    data = FashionMNISTAttributesDataModule(
        folder, attributes=["bag", "legs"], num_private=150, records_per_group=4
    )
    data.setup("fit")
    assert data.attribute_names == ("bag", "legs")
    assert data.private.labels.shape == (150, 2)
    sizes = torch.bincount(data.private_groups)
    assert sizes.tolist() == [4] * 37 + [2]
    assert data.private_groups.tolist() != sorted(data.private_groups.tolist())
    with pytest.raises(ValueError, match="attributes: 'hat'"):
        FashionMNISTAttributesDataModule(attributes=["bag", "hat"])
    with pytest.raises(ValueError, match="records_per_group"):
        FashionMNISTAttributesDataModule(records_per_group=0)


def test_labels_of_the_loader_follow_releases(folder):
    data = FashionMNISTAttributesDataModule(folder, batch_size=8, unlabeled_batch_size=8)
    data.setup("fit")
    rows = torch.tensor([4, 9, 30])
    released = torch.zeros(3, 10, dtype=torch.int64)
    released[0, 1] = 1
    released[2] = -1  # refused
    data.public.set_labels(rows, released)
    assert data.public.labeled_indices.tolist() == [4, 9]
    batch, *_ = next(iter(data.train_dataloader()))
    x, y = batch["labeled"]
    assert (x.shape, y.shape, y.dtype) == ((8, 1, 28, 28), (8, 10), torch.int64)
    assert {tuple(row) for row in y.tolist()} == {tuple(row) for row in released[:2].tolist()}
    soft = torch.full((3, 10), 0.25)
    data.public.set_labels(rows, released, soft)
    batch, *_ = next(iter(data.train_dataloader()))
    assert batch["labeled"][1].unique().tolist() == [0.25]
    data.public.clear_labels()
    assert len(data.public.labeled_indices) == 0
    for bad, message in (
        (released[:2], "labels"), (released[:, :4], "labels"), (released + 2, "neither 0 nor 1"), (rows, "labels"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            data.public.set_labels(rows, bad)
    with pytest.raises(ValueError, match="soft"):
        data.public.set_labels(rows, released, soft + 1)


def test_damaged_and_missing_files_are_named(folder, tmp_path):
    broken = tmp_path / "FashionMNIST" / "raw"
    broken.mkdir(parents=True)
    for file in (folder / "FashionMNIST" / "raw").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    damaged = broken / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    with pytest.raises(DamagedFileError, match="t10k-images-idx3-ubyte"):
        FashionMNISTAttributesDataModule(tmp_path).setup("fit")
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match="t10k-images-idx3-ubyte"):
        FashionMNISTAttributesDataModule(tmp_path).setup("fit")


SMALL = [
    "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
    "--labeling.progress", "false",
]  # fmt: skip
KNN = ["--labeling.queries_per_round", "20", "--labeling.labeler.init_args.k", "20"]
PATE = [
    "--labeling.queries_per_round", "20", "--labeling.labeler.init_args.num_teachers", "8",
    "--labeling.labeler.init_args.teachers.init_args.steps", "20",
]  # fmt: skip

# Seeded, since a query with a noisy number of records below zero is refused.
REVERSE = [
    "--labeling.queries_per_round", "20", "--labeling.labeler.init_args.noise_source", "SeededNoise",
    "--labeling.labeler.init_args.noise_source.seed", "0",
]  # fmt: skip


@pytest.mark.long("pate-words1", "nonprivate-words3")
@pytest.mark.parametrize(
    ("config", "words"), [("knn", KNN), ("pate", PATE), ("reverse_knn", REVERSE), ("nonprivate", [])]
)
def test_config_runs_on_small_files(config, words, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = CONFIGS / f"fashion_mnist_attributes_{config}.yaml"
    arguments = ["fit", "--config", str(path), "--data.root", str(folder), "--run_dir", "run", *SMALL, *words]
    assert main(arguments) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    metrics = Path("run/metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"test/accuracy_{name}" for name in FASHION_ATTRIBUTES} <= set(metrics)
    assert 0 < summary["test_accuracy"] < 1
    if config == "nonprivate":
        assert summary["epsilon"] is None
    else:
        assert summary["epsilon"] > 0
        seeded = any("seed" in word for word in words)
        assert summary["guarantee"] == ("none" if seeded else "unconditional")
        # Clusters may share their central image, which is then asked about once.
        assert 10 <= summary["answered"] <= 20 if config == "reverse_knn" else summary["answered"] == 20
        assert 0 < summary["label_accuracy"] <= 1
