"""The rival of benchmarks/updates.py: a linear classifier by NoisySGD, trained anew after every change.

It is the project's :class:`~pl_privknn.labelers.noisy_sgd.NoisySGDTeacher`, whose clipped sums take two matrix
products a step. Learning rates, numbers of steps and of principal components are chosen in hindsight on the scored
queries.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.ind_knn_features import CLASSES, DELTA, Part
from pl_privknn.labelers.noisy_sgd import NoisySGDTeacher
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.noisy_steps import noise_for_steps, step_mechanism
from pl_privknn.testing import FreeLedger

SAMPLING_RATE = 0.1
COMPONENTS = (64, 256)
STEPS = (50, 100, 200)
RATES = (8.0, 16.0, 32.0, 64.0, 128.0)
#: Noise multipliers at which accuracy is measured; between them it is interpolated.
SIGMAS = tuple(0.8 * 1.6**step for step in range(11))
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """The best training in hindsight with one noise multiplier and number of steps.

    Attributes:
        sigma: noise multiplier.
        accuracy: mean over seeds.
        seconds: of one training and the answers to all queries, median over seeds.
    """

    sigma: float
    steps: int
    components: int
    rate: float
    accuracy: float
    spread: float
    seconds: float


@functools.cache
def epsilon(sigma: float, steps: int, trainings: int) -> float:
    """ε of a record that stays through all trainings, the smaller of the RDP and PLD totals (add/remove)."""
    charge = Charge(step_mechanism(sigma, 1.0, SAMPLING_RATE), steps * trainings)
    return account([charge], delta=DELTA, exact=False).epsilon


@functools.cache
def least_sigma(target: float, steps: int, trainings: int) -> float:
    """The least noise multiplier with which all trainings together cost at most ``target``."""
    return noise_for_steps(target, DELTA, SAMPLING_RATE, steps * trainings)


def best_training(views: dict[int, tuple[Part, Part]], sigma: float, steps: int) -> Training:
    """The best view and learning rate for one noise multiplier.

    Args:
        views: number of components -> private table and queries, both unit vectors.
        sigma: noise multiplier.
        steps: of each training.
    """
    found: list[Training] = []
    for (components, (table, queries)), rate in itertools.product(views.items(), RATES):
        scores, seconds = [], []
        for seed in range(SEEDS):
            teacher = NoisySGDTeacher(
                SAMPLING_RATE,
                batch_size=round(SAMPLING_RATE * len(table)),
                steps=steps,
                noise_multiplier=sigma,
                lr=rate,
                noise_limit=None,
                components=None,  # the views have their components already, and only once
                noise_source=SeededNoise(seed),
            )
            started = time.perf_counter()
            teacher.fit(table.features, table.labels, CLASSES)
            released = teacher.label(queries.features, FreeLedger()).labels
            seconds.append(time.perf_counter() - started)
            scores.append(float((released == queries.labels).double().mean()))
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        found.append(Training(sigma, steps, components, rate, mean, spread, statistics.median(seconds)))
    return max(found, key=lambda training: training.accuracy)


def accuracy_at(trainings: Sequence[Training], sigma: float) -> float:
    """Accuracy at a noise multiplier, between those measured with one number of steps (linear in log σ)."""
    logs = [math.log(training.sigma) for training in trainings]
    return float(np.interp(math.log(sigma), logs, [training.accuracy for training in trainings]))


def most_noise(trainings: Sequence[Training], target: float) -> float | None:
    """The largest noise multiplier that still gives an accuracy of ``target``; None if none does."""
    enough = [place for place, training in enumerate(trainings) if training.accuracy >= target]
    if not enough:
        return None
    less = trainings[enough[-1]]
    if less is trainings[-1]:
        return less.sigma
    more = trainings[enough[-1] + 1]
    share = (less.accuracy - target) / (less.accuracy - more.accuracy)
    return less.sigma * (more.sigma / less.sigma) ** share
