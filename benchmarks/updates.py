"""Answering while records come and go: Ind-KNN against linear NoisySGD that is retrained after every change.

    python benchmarks/updates.py run --data DIR [--features hog] [--cache DIR]
    python benchmarks/updates.py report

The setting of Table 1 and Figure 3 of the Ind-KNN paper, on Fashion-MNIST: 2,000 queries are answered; after
every Q of them some records ask to be removed and others arrive. Ind-KNN follows at once, in a folder that
survives a crash. A linear classifier on the same features, trained with per-example clipping and noise (Opacus),
is trained anew from the start, since the old one carries the removed records; each training adds to the cost of
the records that stay. Its totals are the project's own (the smaller of RDP and PLD), its learning rate is the
best of a grid in hindsight, and it answers with one product.

Two tables for each Q: what ε NoisySGD needs to be as accurate as Ind-KNN, and how accurate it is at Ind-KNN's ε.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ind_knn import CLASSES, DELTA, DOCS, RECORDS, RESULTS, _features, _write
from rich.console import Console
from torch import Tensor, nn

from pl_privknn.labelers.ind_knn_core import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn_engine import IndKNNSwitches
from pl_privknn.labelers.ind_knn_predictor import IndKNNPredictor
from pl_privknn.labelers.ind_knn_search import search_ind_knn
from pl_privknn.privacy.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise

LEAVING = 25  # records that leave, and as many that arrive, at every change
BATCH, STEPS, CLIP = 4096, 150, 0.1
RATES = (2.0, 5.0, 10.0, 20.0, 40.0)
SIGMAS = tuple(round(2 ** (step / 2), 3) for step in range(13))
_LOG = Console(stderr=True)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    tables = _features(options)
    order = torch.randperm(len(tables["pool"]), generator=torch.Generator().manual_seed(0))[: options.queries]
    queries, truth = tables["pool"][order], tables["pool_labels"][order]
    changing = LEAVING * max(options.queries // period for period in options.periods)
    present = len(tables["private"]) - changing
    table, labels = tables["private"], tables["private_labels"]

    found = search_ind_knn(
        tables["tuning"],
        tables["tuning_labels"],
        CLASSES,
        epsilon=options.epsilon,
        delta=DELTA,
        num_queries=options.queries,
        num_records=RECORDS,
        by_density=True,
        repeats=2,
    )[0].settings
    rows: list[dict[str, Any]] = []
    for period in options.periods:
        runs = [_ind_knn(options, found, tables, queries, truth, period, seed) for seed in range(3)]
        row: dict[str, Any] = {"period": period, "retrainings": options.queries // period}
        row["ind_knn"] = {
            "epsilon": options.epsilon,
            "accuracies": [run["accuracy"] for run in runs],
            "seconds_per_query": statistics.median(run["seconds"] for run in runs) / options.queries,
            "seconds_per_change": statistics.median(run["change"] for run in runs),
        }
        rows.append(row)
        _LOG.print(row)
    target = statistics.mean(score for row in rows for score in row["ind_knn"]["accuracies"])

    curve = _accuracy_by_noise(table[:present], labels[:present], queries, truth)
    for row in rows:
        trainings = row["retrainings"]
        enough = [sigma for sigma in SIGMAS if curve[sigma]["mean"] >= target]
        aligned = max(enough) if enough else min(SIGMAS)
        affordable = _least_sigma(present, trainings, options.epsilon)
        # The next noise level of the grid that the budget pays for.
        paid = min((sigma for sigma in SIGMAS if sigma >= affordable), default=max(SIGMAS))
        row["noisy_sgd"] = {
            "aligned_sigma": aligned,
            "aligned_accuracy": curve[aligned]["mean"],
            "aligned_epsilon": _epsilon(aligned, present, trainings),
            "sigma_at_same_epsilon": paid,
            "accuracy_at_same_epsilon": curve[paid]["mean"],
            "seconds_per_training": curve[aligned]["seconds"],
            "seconds_per_query": trainings * curve[aligned]["seconds"] / options.queries,
        }
        _LOG.print(row)
    noise_free = max(
        _score(_train(table[:present], labels[:present], 0.0, rate, 0), queries, truth) for rate in RATES
    )
    content = {"rows": rows, "target": target, "noise_free_linear": noise_free, "settings": found}
    _write(f"ind_knn_updates_{options.features}", options, content | {"curve": curve})


# ---------------------------------------------------------------- Ind-KNN


def _ind_knn(
    options: argparse.Namespace,
    found: dict[str, Any],
    tables: dict[str, Tensor],
    queries: Tensor,
    truth: Tensor,
    period: int,
    seed: int,
) -> dict[str, float]:
    """One life of a predictor: ``period`` queries, a change, and so on."""
    density = PublicDensity(**found["density"])
    parameters = IndKNNParameters.for_epsilon(
        options.epsilon,
        DELTA,
        threshold=found["threshold"],
        sigma2=found["sigma2"],
        num_queries=options.queries,
        min_count=float(density.neighbors),
    )
    table, labels = tables["private"], tables["private_labels"]
    changes = options.queries // period
    present = len(table) - LEAVING * changes
    switches = IndKNNSwitches(density=density)
    predictor = IndKNNPredictor(parameters, CLASSES, table.shape[1], switches, noise_source=SeededNoise(seed))
    predictor.use_public(tables["tuning"])
    predictor.add(np.arange(present), table[:present], labels[:present])
    right, change_seconds = 0, []
    with tempfile.TemporaryDirectory() as folder:
        predictor.save(Path(folder) / "predictor")
        started = time.perf_counter()
        for change in range(changes):
            part = slice(change * period, (change + 1) * period)
            right += int((predictor.predict(queries[part]).labels == truth[part]).sum())
            changed = time.perf_counter()
            predictor.remove(np.arange(LEAVING) + LEAVING * change)
            fresh = present + LEAVING * change + torch.arange(LEAVING)
            predictor.add(fresh.numpy(), table[fresh], labels[fresh])
            change_seconds.append(time.perf_counter() - changed)
        seconds = time.perf_counter() - started
        predictor.close()
    return {
        "accuracy": right / (changes * period),
        "seconds": seconds,
        "change": statistics.median(change_seconds),
    }


# ---------------------------------------------------------------- linear NoisySGD


def _train(table: Tensor, labels: Tensor, sigma: float, rate: float, seed: int) -> nn.Linear:
    """A linear classifier on unit vectors: Poisson batches, clipped gradients, noise on their sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    torch.manual_seed(seed)
    module = nn.Linear(table.shape[1], CLASSES)
    nn.init.zeros_(module.weight)
    # Ghost clipping: the same clipped sums without a gradient for each example, some ten times faster here.
    wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=CLIP, use_ghost_clipping=True)
    sampling = BATCH / len(table)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=rate / CLIP, momentum=0.9),
        noise_multiplier=sigma,
        max_grad_norm=CLIP,
        expected_batch_size=BATCH,
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean")
    vectors = nn.functional.normalize(table, dim=1)
    for _ in range(STEPS):
        chosen = torch.nonzero(torch.rand(len(vectors)) < sampling).flatten()
        optimizer.zero_grad()
        criterion(wrapped(vectors[chosen]), labels[chosen]).backward()
        optimizer.step()
    return module


def _score(module: nn.Linear, queries: Tensor, truth: Tensor) -> float:
    with torch.no_grad():
        predicted = module(nn.functional.normalize(queries, dim=1)).argmax(dim=1)
    return float((predicted == truth).double().mean())


def _accuracy_by_noise(
    table: Tensor, labels: Tensor, queries: Tensor, truth: Tensor
) -> dict[float, dict[str, float]]:
    """Accuracy of one training at each noise level, mean of two, with the best learning rate in hindsight."""
    curve = {}
    for sigma in SIGMAS:
        best = {"mean": 0.0}
        for rate in RATES:
            scores, seconds = [], []
            for seed in range(2):
                started = time.perf_counter()
                module = _train(table, labels, sigma, rate, seed)
                seconds.append(time.perf_counter() - started)
                scores.append(_score(module, queries, truth))
            if statistics.mean(scores) > best["mean"]:
                best = {
                    "mean": statistics.mean(scores),
                    "spread": statistics.stdev(scores),
                    "rate": rate,
                    "seconds": statistics.median(seconds),
                }
        curve[sigma] = best
        _LOG.print(f"NoisySGD, noise multiplier {sigma}: {best}")
    return curve


def _epsilon(sigma: float, records: int, trainings: int) -> float:
    """ε of a record that stays through all trainings; clipping norm and noise are both in units of the norm."""
    mechanism = Gaussian(sigma, 1.0, min(1.0, BATCH / records))
    return account([Charge(mechanism, STEPS * trainings)], delta=DELTA, exact=False).epsilon


def _least_sigma(records: int, trainings: int, epsilon: float) -> float:
    low, high = 0.3, 1e4
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _epsilon(middle, records, trainings) <= epsilon else (middle, high)
    return high


# ---------------------------------------------------------------- report


def report(options: argparse.Namespace) -> None:
    """The table between the markers of docs/ind_knn.md."""
    stored = json.loads((RESULTS / f"ind_knn_updates_{options.features}.json").read_text())
    lines = [
        "| a change after every | trainings | ε of NoisySGD, as accurate | its accuracy at the same ε | s/query "
        "| ε of Ind-KNN | accuracy | s/query | s/change |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in stored["rows"]:
        ours, theirs = row["ind_knn"], row["noisy_sgd"]
        lines.append(
            f"| {row['period']:,} queries | {row['retrainings']} | {theirs['aligned_epsilon']:.2f} "
            f"| {100 * theirs['accuracy_at_same_epsilon']:.1f} | {theirs['seconds_per_query']:.4f} "
            f"| {ours['epsilon']:g} | {100 * statistics.mean(ours['accuracies']):.1f} "
            f"| {ours['seconds_per_query']:.4f} | {ours['seconds_per_change']:.3f} |"
        )
    page = DOCS / "ind_knn.md"
    before, rest = page.read_text().split("<!-- updates -->\n")
    page.write_text(
        before
        + "<!-- updates -->\n"
        + "\n".join(lines)
        + "\n<!-- end updates -->"
        + rest.split("<!-- end updates -->")[1]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="measure")
    one.add_argument("--features", choices=("hog", "pretrained"), default="hog")
    one.add_argument("--data", default="data", help="folder of Fashion-MNIST's four files")
    one.add_argument("--weights", default=None, help="file of EfficientNet-Lite0's weights")
    one.add_argument("--image-size", type=int, default=96, help="side to which images are resized for it")
    one.add_argument("--cache", type=Path, default=None, help="folder for features, private")
    one.add_argument("--queries", type=int, default=2000)
    one.add_argument("--periods", type=int, nargs="+", default=[2000, 500, 200, 100, 50, 20])
    one.add_argument("--epsilon", type=float, default=1.0)
    one.add_argument("--threads", type=int, default=2)
    one.add_argument("--output", type=Path, default=None)
    one.set_defaults(run=run)
    two = commands.add_parser("report", help="write the table into docs")
    two.add_argument("--features", choices=("hog", "pretrained"), default="hog")
    two.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
