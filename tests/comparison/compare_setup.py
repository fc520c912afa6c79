"""What the tests of comparisons share: three methods, a small configuration, its results."""

import json
import math
from pathlib import Path

import pytest
import yaml

from pl_privknn.cli import main
from pl_privknn.comparison import Result

LABELER = "labeling.labeler"
SIGMA = f"{LABELER}.init_args.noise.init_args.sigma"
TRUE = {"set": {"data.init_args.train_on_truth": True}}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def knn(class_path="PrivateKNN", **noise):
    arguments = {"k": 30, "sampling_rate": 0.5, "noise": {"class_path": "Gaussian", "init_args": noise}}
    return {
        "set": {
            LABELER: {"class_path": class_path, "init_args": arguments},
            "labeling.queries_per_round": 30,
            "labeling.options.query_batch_size": 10,
        }
    }


def sgd():
    arguments = {
        "extractor": {"class_path": "HOG"},
        "expected_batch_size": 200,
        "private_records": 1000,
        "feature_head": {"components": 10},
        "options": {"steps_per_charge": 1},
    }
    trainer = {"trainer.max_epochs": 2, "trainer.limit_train_batches": 1.0}
    return {"set": {"model": {"class_path": "NoisySGD", "init_args": arguments}, **trainer}}


def document(methods, **changes):
    whole = {
        "config": {
            "data": {
                "class_path": "DigitsDataModule",
                "init_args": {"batch_size": 32, "public_examples": 100},
            },
            "model": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
            "trainer": {
                "max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", "limit_val_batches": 1,
            },
            "labeling": {"features": {"class_path": "pl_privknn.features.hog.HOG"}},
        },
        "budget": {"delta": 1e-4},
        "seeds": [0],
        "epsilons": [1, 4],
        "methods": methods,
    }  # fmt: skip
    return {**whole, **changes}


def write(methods, **changes):
    path = Path("tiny.yaml")
    path.write_text(yaml.safe_dump(document(methods, **changes), allow_unicode=True, sort_keys=False))
    return str(path)


def compare(config, *words):
    return main(["compare", config, "--workers", "0", *words])


def folder(method, epsilon, seed=0):
    return Path(f"runs/compare/tiny/{method}/eps_{epsilon}/seed_{seed}")


def result(method, epsilon, seed=0):
    return json.loads((folder(method, epsilon, seed) / "summary.json").read_text())


def store(output, results):
    """Write a comparison's folder with these results."""
    private = {one.method for one in results if one.target < math.inf}
    methods = {one.method: knn() if one.method in private else TRUE for one in results}
    unlimited = {one.method for one in results if one.target == math.inf}
    methods = {
        name: {**method, "title": name.upper(), "at": {math.inf: {}} if name in unlimited else {}}
        for name, method in methods.items()
    }
    seeds = sorted({one.seed for one in results})
    epsilons = sorted({one.target for one in results if one.target < math.inf})
    output.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(document(methods, seeds=seeds, epsilons=epsilons), sort_keys=False)
    (output / "comparison.yaml").write_text(text)
    for one in results:
        place = output / one.method / f"eps_{one.target:g}" / f"seed_{one.seed}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "summary.json").write_text(json.dumps(one.values))


def made(method, target, accuracy, seed=0, guarantee="unconditional", reason=None, **values):
    summary = {
        "delta": 1e-5, "epsilon": None if target == math.inf else 0.98 * target, "adjacency": "add_remove",
        "unit": "record", "guarantee": "none" if target == math.inf else guarantee, "test_accuracy": accuracy,
        "reason": reason or {"unconditional": "", "conditional": "if C", "none": "no noise"}[guarantee],
    }  # fmt: skip
    return Result(method, method.upper(), target, seed, {**summary, **values})
