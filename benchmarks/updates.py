"""Answering while records come and go, Ind-KNN beside linear NoisySGD.

The setting of Figure 3 of the Ind-KNN paper, on Fashion-MNIST: 2,000 queries are answered; after every Q of them
some records ask to be removed and as many arrive. Ind-KNN follows at once, in a folder that survives a crash. A
linear classifier must be trained anew, since the old one carries the removed records, and a record that stays pays
for every training. It answers with one product, its totals are the smaller of RDP and PLD, and its learning rate,
steps and features are the best in hindsight on the scored queries; Ind-KNN's settings come from public images.

For each Q: what ε NoisySGD needs to be as accurate as Ind-KNN, how accurate it is at Ind-KNN's ε, and seconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ind_knn_linear as linear
from benchmarks.ind_knn_accuracy import VIEWS, Setting, search
from benchmarks.ind_knn_features import CLASSES, DELTA, LOG, RECORDS, Part, Tables, add_feature_options, load
from benchmarks.record import Measured
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.labelers.ind_knn.algorithm import PublicDensity
from pl_privknn.labelers.ind_knn.engine import IndKNNSwitches
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.record_budgets import epsilon_of_budget

#: Records that leave, and as many that arrive, at every change.
LEAVING = 25
SEEDS = 3
#: For these Q the cost is followed query by query.
FOLLOWED = (100, 200)
#: The answered queries are looked at in so many parts.
PARTS = 20


def ind_knn_life(
    options: argparse.Namespace, setting: Setting, tables: Tables, queries: Part, period: int, seed: int
) -> dict[str, Any]:
    """One life of a predictor: ``period`` queries, a change, and so on."""
    parameters = setting.parameters(options.epsilon, options.queries, "gdp")
    switches = IndKNNSwitches(
        density=None if setting.neighbors is None else PublicDensity(setting.neighbors, RECORDS)
    )
    table, labels = tables.private.features, tables.private.labels
    changes = options.queries // period
    present = len(table) - LEAVING * changes
    predictor = IndKNNPredictor(parameters, CLASSES, table.shape[1], switches, noise_source=SeededNoise(seed))
    predictor.use_public(tables.public.features)
    predictor.add(np.arange(present), table[:present], labels[:present])
    right, change_seconds, medians = 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        predictor.save(Path(folder) / "predictor")
        seconds = 0.0
        for change in range(changes):
            part = slice(change * period, (change + 1) * period)
            started = time.perf_counter()
            answers = predictor.predict(queries.features[part])
            answered = time.perf_counter()
            predictor.remove(np.arange(LEAVING) + LEAVING * change)
            fresh = present + LEAVING * change + torch.arange(LEAVING)
            predictor.add(fresh.numpy(), table[fresh], labels[fresh])
            change_seconds.append(time.perf_counter() - answered)
            seconds += time.perf_counter() - started
            right += int((answers.labels == queries.labels[part]).sum())
            if part.stop % (options.queries // PARTS) == 0:
                spent = parameters.budget - float(np.median(predictor.remaining()[1]))
                medians.append((part.stop, epsilon_of_budget(spent, DELTA) if spent > 0 else 0.0))
        predictor.close()
    return {
        "accuracy": right / (changes * period),
        "seconds_per_query": seconds / (changes * period),
        "seconds_per_change": statistics.median(change_seconds),
        "median_record": medians,
    }


def ind_knn_rows(
    options: argparse.Namespace, setting: Setting, tables: Tables, queries: Part
) -> list[dict[str, Any]]:
    """Means over draws of noise for each Q."""
    rows = []
    for period in options.periods:
        lives = [ind_knn_life(options, setting, tables, queries, period, seed) for seed in range(SEEDS)]
        accuracies = [life["accuracy"] for life in lives]
        row = {
            "epsilon": options.epsilon,
            "accuracies": accuracies,
            "mean": statistics.mean(accuracies),
            "seconds_per_query": statistics.median(life["seconds_per_query"] for life in lives),
            "seconds_per_change": statistics.median(life["seconds_per_change"] for life in lives),
        }
        if period == min(FOLLOWED):
            row["median_record"] = lives[0]["median_record"]
        rows.append({"period": period, "trainings": options.queries // period, "ind_knn": row})
        LOG.print(rows[-1])
    return rows


def noisy_sgd_row(
    options: argparse.Namespace, curves: dict[int, list[linear.Training]], target: float, trainings: int
) -> dict[str, Any]:
    """Both comparisons for one number of trainings, each with the best number of steps."""
    row: dict[str, Any] = {}
    aligned = [
        (linear.epsilon(sigma, steps, trainings), steps, sigma)
        for steps, curve in curves.items()
        if (sigma := linear.most_noise(curve, target)) is not None
    ]
    if aligned:
        epsilon, steps, sigma = min(aligned)
        row["as_accurate"] = {"epsilon": epsilon, "steps": steps, "sigma": sigma}
    at_epsilon = []
    for steps, curve in curves.items():
        sigma = linear.least_sigma(options.epsilon, steps, trainings)
        nearest = min(curve, key=lambda training, s=sigma: abs(np.log(training.sigma / s)))
        at_epsilon.append((linear.accuracy_at(curve, sigma), steps, sigma, nearest.seconds))
    accuracy, steps, sigma, seconds = max(at_epsilon)
    row["at_same_epsilon"] = {"accuracy": accuracy, "steps": steps, "sigma": sigma}
    row["seconds_per_training"] = seconds
    row["seconds_per_query"] = trainings * seconds / options.queries
    return row


def followed(options: argparse.Namespace, row: dict[str, Any]) -> list[tuple[int, float]]:
    """ε of NoisySGD after each training, where it is as accurate as Ind-KNN."""
    found = row["noisy_sgd"]["as_accurate"]
    return [
        (done * row["period"], linear.epsilon(found["sigma"], found["steps"], done))
        for done in range(1, row["trainings"] + 1)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    add_feature_options(parser)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--periods", type=int, nargs="+", default=[2000, 1000, 500, 200, 100, 50, 20])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--splits", type=int, default=3, help="of the public images, in the search")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """All lives and trainings."""
    torch.set_num_threads(options.threads)
    plain = load(options)
    order = torch.randperm(len(plain.pool), generator=torch.Generator().manual_seed(0))[: options.queries]
    views = {view: plain.seen_as(view) for view in VIEWS}
    setting = search(views, "density", options.queries, options.epsilon, options.splits)
    seen = views[setting.view]
    queries = Part(seen.pool.features[order], seen.pool.labels[order])
    rows = ind_knn_rows(options, setting, seen, queries)
    target = statistics.mean(row["ind_knn"]["mean"] for row in rows)

    present = RECORDS - LEAVING * max(row["trainings"] for row in rows)
    pairs = {}
    for components in linear.COMPONENTS:
        unit = plain.seen_as("components", components).unit()
        table = Part(unit.private.features[:present], unit.private.labels[:present])
        pairs[components] = table, Part(unit.pool.features[order], unit.pool.labels[order])
    curves: dict[int, list[linear.Training]] = {steps: [] for steps in linear.STEPS}
    for steps, sigma in itertools.product(linear.STEPS, linear.SIGMAS):
        curves[steps].append(linear.best_training(pairs, sigma, steps))
        LOG.print(curves[steps][-1])
    for row in rows:
        row["noisy_sgd"] = noisy_sgd_row(options, curves, target, row["trainings"])
        LOG.print(row)
        if row["period"] in FOLLOWED and "as_accurate" in row["noisy_sgd"]:
            row["noisy_sgd"]["followed"] = followed(options, row)
    content = {
        "delta": DELTA,
        "adjacency": "add_remove",
        **stated(SEEDED),
        "rows": rows,
        "target": target,
        "setting": vars(setting),
        "curves": {steps: [vars(training) for training in curve] for steps, curve in curves.items()},
    }
    yield Measured(content, seeds=list(range(SEEDS)))
