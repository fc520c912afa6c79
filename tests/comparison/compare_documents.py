"""A comparison that tests of its parts change."""

import copy

SIGMA = "labeling.labeler.init_args.noise.init_args.sigma"
KNN = {
    "name": "knn",
    "labeling": {
        "labeler": {
            "class_path": "PrivateKNN",
            "init_args": {"k": 30, "sampling_rate": 0.5, "noise": {"class_path": "Gaussian"}},
        },
        "queries_per_round": 20,
    },
    "find": SIGMA,
    "settings": {"inf": {SIGMA: 0.5, "labeling.labeler.init_args.sampling_rate": 1.0}},
}
REVERSE = {
    "name": "reverse",
    "labeling": {"labeler": {"class_path": "ReverseKNN"}, "queries_per_round": 20},
}
SGD = {
    "name": "sgd",
    "model": {
        "class_path": "NoisySGD",
        "init_args": {"network": "tanh_cnn", "expected_batch_size": 200, "private_records": 1000},
    },
    "trainer": {"max_epochs": 3},
    "settings": {2: {"model.init_args.optimization.lr": 0.25}},
}
TRUE = {"name": "supervised", "true_labels": True}


def document(**changes):
    whole = {
        "name": "small",
        "base": {
            "data": {"class_path": "DigitsDataModule", "init_args": {"batch_size": 32}},
            "student": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
            "trainer": {"max_epochs": 2},
            "labeling": {"rounds": 1},
        },
        "delta": 1e-4,
        "seeds": [0, 1],
        "epsilons": [0.5, 2, "inf"],
        "methods": [KNN, REVERSE, SGD, TRUE],
    }
    return copy.deepcopy({**whole, **changes})
