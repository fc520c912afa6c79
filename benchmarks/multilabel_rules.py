"""Which rule turns noisy sums of clipped votes into attributes best: Fashion-MNIST, HOG features, k 300.

Mean attribute accuracy of the released labels, over seeds, for each τ, noise multiplier (σ over the sensitivity) and
rule, and what so many answers cost. Two minutes on one core. The tables of docs/methods/multilabel.md are made
of this, and of the runs ``fashion_mnist_attributes_*``.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.record import DOCS, Measured, results
from benchmarks.render import epsilon_of, explained, guarantee, runs
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool
from pl_privknn.comparison.marks import SEEDED, guarantee_of, mark, stated
from pl_privknn.datamodules import FashionMNISTAttributesDataModule
from pl_privknn.features.hog import HOG
from pl_privknn.labelers import Attributes, FixedThresholds, LearnedThresholds, ReverseKNN
from pl_privknn.labelers.attributes import clip_attributes, swapped_vote_norms
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

PAGE = DOCS / "methods" / "multilabel.md"
#: Runs by the rest of their names.
RUNS = {
    "knn": "Private-kNN, τ = 3, 1,000 answers",
    "pate": "PATE, 500 linear teachers, τ = 3, 200 answers",
    "reverse_knn": "reverse kNN, r = 5, 200 clusters, one release",
    "statistics": "released gradients, six releases, all images",
    "nonprivate": "none: true attributes of 5,000 images",
}
REVERSE_CLUSTERS, REVERSE_TAUS, REVERSE_EPSILONS = 200, (1.0, 3.0, 5.0, None), (0.05, 0.1, 0.5, 1.0)
K, RATE, ANSWERS, DELTA, SEEDS = 300, 0.15, (1000, 250), 1e-5, (0, 1, 2)
TAUS = (1.0, 2.0, 3.0, 5.0)
MULTIPLIERS = (17.7, 30.0, 50.0, 100.0)
#: 2.8 attributes a record on average: what an owner would put down as a public guess.
RULES = {
    "half of k": FixedThresholds(),
    "half of k, denoised": FixedThresholds(denoise=True),
    "half of k·min(τ/2.8, 1)": FixedThresholds(expected_positives=2.8),
    "half of k·min(τ/2.8, 1), denoised": FixedThresholds(expected_positives=2.8, denoise=True),
    "learned, not denoised": LearnedThresholds(denoise=False),
    "learned, denoised": LearnedThresholds(denoise=True),
    "learned (default)": LearnedThresholds(),
    "learned, 2.8 expected": LearnedThresholds(expected_positives=2.8),
}


def table(result: dict[str, Any], answers: int = 1000) -> str:
    """The accuracies of one number of answers as a Markdown table; the best of each line is bold."""
    whole = guarantee_of(result)
    lines = [
        f"| τ | σ / sensitivity | ε of {answers:,} answers | " + " | ".join(RULES) + " |",
        "|---|---|---|" + "---|" * len(RULES),
    ]
    for row in result["rows"]:
        if row["answers"] == answers:
            best = max(row["accuracy"].values())
            each = [
                f"**{value:.3f}**" if value == best else f"{value:.3f}" for value in row["accuracy"].values()
            ]
            head = [f"{row['tau']:g}", f"{row['noise_multiplier']:g}", f"{row['epsilon']:.2f}{mark(whole)}"]
            lines.append("| " + " | ".join(head + each) + " |")
    return explained("\n".join(lines), [("", whole)])


def reverse_table(result: dict[str, Any]) -> str:
    """Accuracies of reverse kNN by r and ε as a Markdown table."""
    whole = guarantee_of(result)
    lines = [
        "| r | " + " | ".join(f"ε = {epsilon:g}{mark(whole)}" for epsilon in REVERSE_EPSILONS) + " |",
        "|---|" + "---|" * len(REVERSE_EPSILONS),
    ]
    for tau in REVERSE_TAUS:
        found = {row["epsilon"]: row["accuracy"] for row in result["reverse"] if row["tau"] == tau}
        each = [f"{found[epsilon]:.3f}" for epsilon in REVERSE_EPSILONS]
        lines.append("| " + " | ".join(["no clipping" if tau is None else f"{tau:g}", *each]) + " |")
    return explained("\n".join(lines), [("", whole)])


def measure_reverse(
    features: Tensor, labels: Tensor, public: Tensor, truth: Tensor
) -> list[dict[str, float | None]]:
    """Accuracy of the labels that reverse kNN gives all public images through the centres of their clusters."""
    unknown = torch.full((len(public),), -1, dtype=torch.int64)
    pool = PublicPool(unknown, torch.zeros(len(public), dtype=torch.bool), lambda: public)
    chosen = ClusterSelection()(pool, REVERSE_CLUSTERS, torch.Generator().manual_seed(0))
    assert chosen.assignment is not None
    queries, rows = public[chosen.examples], []
    for tau in REVERSE_TAUS:
        for epsilon in REVERSE_EPSILONS:
            right = []
            for seed in SEEDS:
                teacher = ReverseKNN(
                    epsilon=epsilon, attributes=Attributes(tau), noise_source=SeededNoise(seed)
                )
                teacher.fit(features, labels, labels.shape[1])
                released = teacher.label(queries, FreeLedger()).labels[chosen.assignment]
                right.append(float((released == truth).double().mean()))
            rows.append({"tau": tau, "epsilon": epsilon, "accuracy": round(sum(right) / len(right), 4)})
            Console().print(rows[-1])
    return rows


def runs_table() -> str:
    """What whole runs of the configs gave: ε of the ledger, accuracy of labels and of the student on test images."""
    lines = [
        "| teacher | ε | mean attribute accuracy of labels | of the student, on test images | seeds |",
        "|---|---|---|---|---|",
    ]
    named, found = [], runs()
    for name, what in RUNS.items():
        if seeds := found.get(f"fashion_mnist_attributes_{name}"):
            named.append((what, guarantee(seeds)))
            figures = [
                _spread([seed.get(key) for seed in seeds]) for key in ("label_accuracy", "test_accuracy")
            ]
            lines.append("| " + " | ".join([what, epsilon_of(seeds), *figures, str(len(seeds))]) + " |")
    return explained("\n".join(lines), named)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    deviation = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{deviation}"


def rendered(page: str) -> str:
    """The page with both tables as the stored results say."""
    result = results("multilabel_rules")
    tables = {"rules": table(result), "reverse": reverse_table(result), "runs": runs_table()}
    for name, text in tables.items():
        start, end = f"<!-- {name}: rendered by benchmarks/multilabel_rules.py -->", f"<!-- end of {name} -->"
        page = re.sub(
            f"{start}\n.*?{end}", lambda _, new=f"{start}\n{text}\n{end}": new, page, flags=re.DOTALL
        )
    return page


def fresh() -> dict[Path, str]:
    """The page as the stored results say."""
    return {PAGE: rendered(PAGE.read_text(encoding="utf-8"))}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """All combinations."""
    data = FashionMNISTAttributesDataModule(options.root)
    data.setup("fit")
    extractor = HOG()
    features = torch.cat([extractor(images) for images, _ in data.private_batches()])
    public = extractor(data.public.images())
    queries = public[: max(ANSWERS)]
    truth = data.public.truth
    assert truth is not None
    attributes = data.num_classes
    rows: list[dict[str, Any]] = []
    exact = PoissonSums(features, data.private.labels.double(), K, RATE)
    ranked = exact.rank(queries)

    def accuracy(decided: Tensor) -> float:
        return float(((decided > 0.5).long() == truth[: len(decided)]).double().mean())

    majority = exact.sums(ranked, SeededNoise(0).bernoulli) / K
    for tau in TAUS:
        neighbors = PoissonSums(features, clip_attributes(data.private.labels, tau), K, RATE)
        sensitivity = swapped_vote_norms(tau, attributes)[1]
        for multiplier in MULTIPLIERS:
            sigma = multiplier * sensitivity
            mechanism = Gaussian(sigma, sensitivity, RATE)
            for answers in ANSWERS:
                found: dict[str, list[float]] = {name: [] for name in RULES}
                for seed in SEEDS:
                    noise = SeededNoise(seed)
                    sums = neighbors.votes(ranked[:answers], noise.bernoulli)
                    noisy = mechanism.add_noise(sums, noise)
                    for name, rule in RULES.items():
                        found[name].append(accuracy(rule(noisy, K, tau, sigma)))
                rows.append(
                    {
                        "tau": tau,
                        "noise_multiplier": multiplier,
                        "sigma": round(sigma, 3),
                        "answers": answers,
                        "epsilon": account([Charge(mechanism, answers)], delta=DELTA, exact=False).epsilon,
                        "accuracy": {name: round(sum(each) / len(each), 4) for name, each in found.items()},
                    }
                )
                Console().print(rows[-1])
    result = {
        **stated(SEEDED),
        "majority_without_noise": round(accuracy(majority), 4),
        "rows": rows,
        "reverse": measure_reverse(features, data.private.labels, public, truth),
    }
    yield Measured(result, list(SEEDS), settings={"k": K, "sampling_rate": RATE, "delta": DELTA})
