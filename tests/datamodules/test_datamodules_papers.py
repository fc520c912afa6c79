"""The papers' data sets in use: rounds from the command line, features of a first stage, embeddings."""

import json
from pathlib import Path

import pytest

from pl_privknn.cli import main
from pl_privknn.datamodules.mnist import FASHION_ATTRIBUTES
from tests.datamodules.paper_data import write_mnist

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = [
    "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--labeling.options.progress", "false",
]  # fmt: skip
LABELER = "--labeling.labeler.init_args"
QUERIES = ["--labeling.queries_per_round", "20"]
WORDS = {
    "knn": [*QUERIES, f"{LABELER}.k", "20"],
    "pate": [*QUERIES, f"{LABELER}.num_teachers", "8", f"{LABELER}.teachers.init_args.steps", "20"],
    # Seeded, since a query with a noisy number of records below zero is refused.
    "reverse_knn": [*QUERIES, f"{LABELER}.noise_source", "SeededNoise", f"{LABELER}.noise_source.seed", "0"],
    "nonprivate": [],
}


@pytest.mark.long("pate", "nonprivate", "reverse_knn")
@pytest.mark.parametrize("config", WORDS)
def test_attributes_of_fashion_mnist_are_learnt_from_answers(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path, 200, 81, "FashionMNIST")
    path = CONFIGS / f"fashion_mnist_attributes_{config}.yaml"
    arguments = ["fit", "--config", str(path), "--data.root", str(tmp_path), "--run_dir", "run", *SMALL]
    assert main([*arguments, *WORDS[config]]) == 0
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
