"""The papers' data sets in use: rounds from the command line, features of a first stage, embeddings."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from paper_data import (
    CELEBA_SMALL,
    CIFAR_SMALL,
    MARKET_SMALL,
    SVHN_SMALL,
    published,
    sizes,
    write_mnist,
    write_papers,
)

from pl_privknn.cli.main import main
from pl_privknn.datamodules.mnist import FASHION_ATTRIBUTES


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    contents = write_papers(root)
    with published(root):
        yield root, contents


def gaussian(sigma):
    return {"class_path": "Gaussian", "init_args": {"sigma": sigma}}


CLASSES = {
    "class_path": "PrivateKNN", "init_args": {"k": 5, "sampling_rate": 0.8, "noise": gaussian(1.0)}
}  # fmt: skip
ATTRIBUTES = {
    "class_path": "PrivateKNN",
    "init_args": {"k": 5, "sampling_rate": 0.8, "attributes": {"tau": 10}, "noise": gaussian(2.0)},
}  # fmt: skip
BY_PERSON = {
    "class_path": "PATE",
    "init_args": {
        "num_teachers": 4, "attributes": {"tau": 10}, "progress": False,
        "teachers": {"class_path": "LinearTeachers", "init_args": {"steps": 5}},
    },
}  # fmt: skip


@pytest.mark.long("svhn", "market_by_person")
@pytest.mark.parametrize(
    ("data", "arguments", "labeler"),
    [
        ("SVHNDataModule", SVHN_SMALL, CLASSES),
        ("CIFAR10DataModule", CIFAR_SMALL, CLASSES),
        ("CelebADataModule", CELEBA_SMALL, ATTRIBUTES),
        ("Market1501DataModule", MARKET_SMALL, ATTRIBUTES),
        ("Market1501DataModule", MARKET_SMALL, BY_PERSON),
    ],
    ids=["svhn", "cifar10", "celeba", "market", "market_by_person"],
)
def test_a_round_from_the_command_line(written, tmp_path, monkeypatch, data, arguments, labeler):
    root, _ = written
    monkeypatch.chdir(tmp_path)
    config = {
        "seed_everything": 0,
        "data": {"class_path": data, "init_args": {"root": str(root), "batch_size": 8, **arguments}},
        "model": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
        "labeling": {
            "labeler": labeler, "rounds": 1, "queries_per_round": 12, "budget": {"delta": 1e-3}, "progress": False,
            "features": {"class_path": "HOG"},
        },
        "trainer": {
            "max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
            "log_every_n_steps": 1,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml", "--run_dir", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] > 0
    assert summary["queried"] == 12
    assert summary["answered"] == 12
    assert 0 <= summary["test_accuracy"] <= 1


CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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


@pytest.mark.long("pate", "nonprivate")
@pytest.mark.parametrize(
    ("config", "words"),
    [("knn", KNN), ("pate", PATE), ("reverse_knn", REVERSE), ("nonprivate", [])],
    ids=["knn", "pate", "reverse_knn", "nonprivate"],
)
def test_attributes_of_fashion_mnist_are_learnt_from_answers(config, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path, 200, 81, "FashionMNIST")
    path = CONFIGS / f"fashion_mnist_attributes_{config}.yaml"
    arguments = ["fit", "--config", str(path), "--data.root", str(tmp_path), "--run_dir", "run", *SMALL]
    assert main([*arguments, *words]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    metrics = Path("run/metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"test/accuracy_{name}" for name in FASHION_ATTRIBUTES} <= set(metrics)
    assert 0 < summary["test_accuracy"] < 1
    if config == "nonprivate":
        assert summary["epsilon"] is None
        return
    assert summary["epsilon"] > 0
    assert summary["guarantee"] == ("none" if config == "reverse_knn" else "unconditional")
    # Clusters may share their central image, which is then asked about once.
    assert 10 <= summary["answered"] <= 20 if config == "reverse_knn" else summary["answered"] == 20
    assert 0 < summary["label_accuracy"] <= 1


def test_embeddings_are_made_as_the_documentation_says(written, tmp_path, monkeypatch):
    import timm

    from pl_privknn.datamodules import EmbeddingsDataModule

    root, _ = written
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "datasets.md").read_text(
        encoding="utf-8"
    )
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.safetensors.pth")
    shutil.copytree(root / "cifar-10-batches-py", tmp_path / "data" / "cifar-10-batches-py")
    for old, new in (
        ("vit_base_patch16_224.augreg_in21k", "test_vit"),
        ("vit.safetensors", "vit.safetensors.pth"),
        ('split="train_test"', 'split="train_test", num_public=15, num_test=5'),
    ):
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    folder = tmp_path / "data" / "cifar10_vit"
    parts = ("private_embeddings", "private_labels", "public_embeddings", "public_truth", "test_embeddings")
    table = EmbeddingsDataModule(
        **{name: folder / f"{name}.npy" for name in (*parts, "test_labels")}, num_classes=10
    )
    table.setup("fit")
    assert sizes(table) == [60, 15, 5]
