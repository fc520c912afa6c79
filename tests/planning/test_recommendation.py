"""What ``privknn init`` recommends, trained: on real digits, and on those that scikit-learn brings."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from npm_digits import save_parts

from pl_privknn.cli.main import main
from pl_privknn.config import read_document, write_yaml
from pl_privknn.datamodules import DigitsDataModule


def accuracy(teacher, records, data="."):
    """Test accuracy of the recommended run at ε 1, with noise from a seed, so that it can be repeated."""
    words = ["init", "--data", data, "--epsilon", "1", "--private-records", str(records)]
    assert main([*words, "--teacher", teacher]) == 0
    config = read_document("private_run.yaml")
    source = {"class_path": "pl_privknn.privacy.noise.SeededNoise", "init_args": {"seed": 0}}
    config["labeling"]["labeler"]["init_args"]["noise_source"] = source
    Path("seeded.yaml").write_text(write_yaml(config), encoding="utf-8")
    quiet = ["--trainer.enable_progress_bar", "false", "--labeling.progress", "false"]
    assert main(["fit", "--config", "seeded.yaml", "--seed_everything", "0", "--run_dir", "run", *quiet]) == 0
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert summary["epsilon"] <= 1
    return summary["test_accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(("teacher", "least"), [("reverse-knn", 0.95), ("private-knn", 0.85)])
def test_recommendations_on_real_digits(teacher, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_parts(tmp_path)
    assert accuracy(teacher, 8000) >= least


@pytest.mark.long
@pytest.mark.parametrize(("teacher", "least"), [("reverse-knn", 0.85), ("private-knn", 0.5)])
def test_recommendations_on_the_digits_of_scikit_learn(teacher, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = DigitsDataModule()
    parts = {"private": data.load_private(), "public": data.load_public(), "test": data.load_test()}
    for name, part in parts.items():
        np.save(f"{name}_images.npy", part.store.read(torch.arange(len(part))).numpy())
        if name != "public":
            np.save(f"{name}_labels.npy", part.labels.numpy())
    assert accuracy(teacher, len(parts["private"])) >= least
