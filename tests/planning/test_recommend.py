"""Settings found on stand-in data, against the labelers themselves; and a configuration for one's own arrays."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from npm_digits import save_parts

from pl_privknn.callbacks.selection import ClusterSelection, PublicPool, label_by_spread
from pl_privknn.cli.main import main
from pl_privknn.cli.publish import usual_delta
from pl_privknn.config import read_document, write_yaml
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.labelers import PrivateKNN
from pl_privknn.planning import plan_of_config
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.recommend import digits, nearest_votes, search_settings
from pl_privknn.testing import FreeLedger


@pytest.fixture(scope="module")
def found():
    """For as many records as scikit-learn's digits have."""
    return search_settings("private-knn", epsilon=1.0, delta=1e-5, records=1000, public=500)


def test_the_best_setting_does_with_the_labeler_what_the_search_says(found):
    best, data = found[0], digits()
    assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)
    section = best.labeling
    stated = plan_of_config({"labeling": {**section, "budget": {"delta": 1e-5}}}, "here", num_classes=10)
    assert 0.99 < account(stated.charges, delta=1e-5, exact=False).epsilon <= 1.0
    asked, silent = section["queries_per_round"]
    assert silent == 0
    # The labeler that the configuration names, on all records of the stand-in, and the labels that a run would store.
    o = section["labeler"]["init_args"]
    sigma = o["noise"]["init_args"]["sigma"]
    teacher = PrivateKNN(
        o["k"],
        sampling_rate=o["sampling_rate"],
        noise=Gaussian(sigma),
        release_counts=o["release_counts"],
        noise_source=SeededNoise(1),
    )
    teacher.fit(data.private, data.private_labels, 10)
    nothing = torch.full((len(data.public),), -1)
    pool = PublicPool(nothing, nothing >= 0, lambda: data.public)
    choose = ClusterSelection(**section["selection"]["init_args"])
    selection = choose(pool, round(asked * len(data.public) / 500), torch.Generator().manual_seed(7))
    scores = teacher.label(selection.query_features(data.public), FreeLedger()).scores
    labels, _ = label_by_spread(selection.spread, scores, sigma)
    right = float((labels == data.public_labels).double().mean())
    # Clusters and noise of one seed: they differ by some hundredths from seed to seed.
    assert right == pytest.approx(best.labels, abs=0.1)


def test_votes_of_the_stand_in_are_those_of_its_neighbours():
    torch.manual_seed(0)
    private, labels = torch.randn(40, 3), torch.randint(0, 3, (40,))
    queries = torch.randn(5, 3)
    votes = nearest_votes(queries, private, labels)
    for query in range(5):
        nearest = (private - queries[query]).norm(dim=1).sort().indices[:7]
        assert votes[query, 6].tolist() == torch.bincount(labels[nearest], minlength=3).tolist()


def test_more_records_help_and_the_table_of_counts_wins_at_small_ones():
    few, many = (
        search_settings("reverse-knn", epsilon=0.1, delta=1e-6, records=records, public=500)[0]
        for records in (1_000, 50_000)
    )
    assert many.labels > few.labels
    assert few.labeling["queries_per_round"] <= many.labeling["queries_per_round"]


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    parts = {"private": 60, "public": 80, "test": 20}
    members = {
        f"{part}_images": draw.integers(0, 255, (n, 12, 12), dtype=np.uint8) for part, n in parts.items()
    }
    members |= {f"{part}_labels": np.arange(parts[part]) % 10 for part in ("private", "test")}
    np.savez("own.npz", **members)
    Path("own").mkdir()
    for name, array in members.items():
        np.save(f"own/{name}.npy", array)
    return members


@pytest.mark.long("own.npz")
@pytest.mark.parametrize("path", ["own.npz", "own"])
def test_init_writes_a_configuration_that_runs(path, arrays, capsys):
    words = ["init", "--data", path, "--epsilon", "1", "--private-records", "60"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "80 public examples, 10 classes, images 1×12×12" in printed
    assert "labels right" in printed
    text = Path("private_run.yaml").read_text(encoding="utf-8")
    assert text.startswith("# 80 public examples")
    config = yaml.safe_load(text)
    stated = plan_of_config(config, "private_run.yaml")
    assert stated.delta == usual_delta(60) == 1e-3
    assert account(stated.charges, delta=1e-3, adjacency="add_remove", exact=False).epsilon <= 1.0
    # Private records are not looked at: it says the same with files of other contents.
    if path == "own":
        np.save("own/private_images.npy", np.full_like(arrays["private_images"], 7))
        np.save("own/private_labels.npy", arrays["private_labels"][::-1])
        assert main([*words, "--output", "again.yaml"]) == 0
        assert Path("again.yaml").read_text(encoding="utf-8") == text
        return
    assert main(["fit", "--config", "private_run.yaml", "--trainer.fast_dev_run", "true"]) == 0
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err


def test_init_says_what_is_missing(arrays, tmp_path, capsys):
    words = ["init", "--epsilon", "1", "--private-records", "60", "--data"]
    assert main([*words, "nowhere"]) == 2
    assert "there is no private_images" in capsys.readouterr().err
    (tmp_path / "own" / "test_labels.npy").unlink()
    assert main([*words, "own"]) == 2
    assert "--num-classes" in capsys.readouterr().err
    (tmp_path / "folder" / "public").mkdir(parents=True)
    assert main([*words, "folder"]) == 2
    assert "no images in public/" in capsys.readouterr().err


@pytest.mark.parametrize(("records", "delta"), [(8000, 1e-5), (1000, 1e-4), (10_000, 1e-5), (60_000, 1e-6)])
def test_delta_is_at_most_a_tenth_of_one_over_the_records(records, delta):
    assert usual_delta(records) == pytest.approx(delta)
    assert usual_delta(records) * records <= 0.1 + 1e-12


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
