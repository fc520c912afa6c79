"""What the tests of comparisons share: three methods, a small configuration, its results."""

import json
import math
from pathlib import Path

import pytest
import yaml

from pl_privknn.cli.main import main
from pl_privknn.comparison.results import Result

SMOKE = {"max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", "limit_val_batches": 1}
SIGMA = "labeling.labeler.init_args.noise.init_args.sigma"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def knn(name="knn", class_path="PrivateKNN"):
    return {
        "name": name,
        "labeling": {
            "labeler": {
                "class_path": class_path,
                "init_args": {"k": 30, "sampling_rate": 0.5, "noise": {"class_path": "Gaussian"}},
            },
            "queries_per_round": 30,
            "options": {"query_batch_size": 10},
        },
        "find": SIGMA,
    }


def guided():
    return {
        "name": "guided",
        "title": "Guided PATE",
        "labeling": {
            "labeler": {
                "class_path": "PATE",
                "init_args": {
                    "num_teachers": 20,
                    "teachers": {"class_path": "LinearTeachers", "init_args": {"steps": 5}},
                    "partitioner": {
                        "class_path": "GuidedPartition", "init_args": {"num_clusters": 5, "sample": 200, "steps": 5},
                    },
                    "noise": {"class_path": "Gaussian"},
                },
            },
            "queries_per_round": 10,
        },
        "find": SIGMA,
    }  # fmt: skip


def sgd():
    return {
        "name": "sgd",
        "model": {
            "class_path": "NoisySGD",
            "init_args": {
                "extractor": {"class_path": "HOG"},
                "expected_batch_size": 200,
                "private_records": 1000,
                "feature_head": {"components": 10},
                "options": {"steps_per_charge": 1},
            },
        },
        "trainer": {"max_epochs": 2, "limit_train_batches": 1.0},
    }


def write(methods, **changes):
    whole = {
        "name": "tiny",
        "base": {
            "data": {
                "class_path": "DigitsDataModule",
                "init_args": {"batch_size": 32, "public_examples": 100},
            },
            "student": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
            "trainer": SMOKE,
            "labeling": {"features": {"class_path": "pl_privknn.features.hog.HOG"}},
        },
        "delta": 1e-4,
        "noise_seeded": True,
        "seeds": [0],
        "epsilons": [1, 4],
        "methods": methods,
    }
    path = Path("tiny.yaml")
    path.write_text(yaml.safe_dump({**whole, **changes}, allow_unicode=True, sort_keys=False))
    return str(path)


def compare(config, *words):
    return main(["compare", config, "--workers", "0", *words])


def folder(method, epsilon, seed=0):
    return Path(f"runs/compare/tiny/{method}/eps_{epsilon}/seed_{seed}")


def result(method, epsilon, seed=0):
    return json.loads(
        Path(f"runs/compare/tiny/results/{method}__eps_{epsilon}__seed_{seed}.json").read_text()
    )


def made(method, target, accuracy, seed=0, guarantee="unconditional", place=0, epsilon=None, reason=None):
    values = {
        "comparison": "made", "method": method, "title": method.upper(), "place": place, "kind": "labeler",
        "target_epsilon": "inf" if target == math.inf else target, "seed": seed, "delta": 1e-5,
        "epsilon": None if target == math.inf else (epsilon or 0.98 * target), "adjacency": "add_remove",
        "guarantee": "none" if target == math.inf else guarantee, "test_accuracy": accuracy, "records": [],
        "reason": reason or {"unconditional": "", "conditional": "if C", "none": "no noise"}[guarantee],
    }  # fmt: skip
    return Result(method, method.upper(), place, target, seed, accuracy, values)
