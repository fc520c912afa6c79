"""What the tests of mechanisms share."""

import math

import numpy as np
from scipy import special

from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace, NoisyScreening

ADD_REMOVE = "add_remove"
ORDERS = np.array([1.1, 1.5, 2.0, 2.7, 5.0, 16.0, 33.3, 128.0])
FEW_ORDERS = np.array([1.2, 2.0, 5.5, 32.0])
ALL = [
    Gaussian(sigma=3.0, l2_sensitivity=math.sqrt(2), sampling_rate=0.2),
    Gaussian(sigma=3.0),
    Laplace(scale=4.0, l1_sensitivity=2.0),
    Laplace(scale=4.0, sampling_rate=0.3),
    NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4),
    NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4, sampling_rate=0.2),
    ExponentialArgmax(scale=3.0, votes="add", sampling_rate=0.2),
    ExponentialArgmax(scale=3.0, votes="swap"),
]


def literal_rdp(p, q, orders=ORDERS):
    """Larger Rényi divergence of both directions, straight from the definition; outcomes in the last axis."""
    log_p, log_q = np.log(p), np.log(q)
    moments = [
        special.logsumexp(np.multiply.outer(orders, upper) + np.multiply.outer(1 - orders, lower), axis=-1)
        for upper, lower in ((log_p, log_q), (log_q, log_p))
    ]
    return np.maximum(*moments).T / (orders - 1)


def deltas_of(distribution, epsilons):
    """δ at each ε, one by one: dp-accounting takes many at once in a loop over the grid's points."""
    return np.array([distribution.get_delta_for_epsilon(float(epsilon)) for epsilon in epsilons])


def argmax_pairs(rng, scale, votes, rate, count):
    """Distributions of the winner with a sampled record and without it, for random counts of votes."""
    for _ in range(count):
        base = rng.uniform(0, 6 * scale, size=rng.integers(2, 6))
        moved = base.copy()
        moved[0] += 1
        if votes == "swap":
            moved[1] -= 1
        q, p = (special.softmax(counts / scale) for counts in (base, moved))
        yield (1 - rate) * q + rate * p, q
