"""How far noisy counts can stray: (η, β) accuracy of reverse kNN (the paper's Proposition 1, Theorems 1 and 2).

A protocol is (η, β)-accurate if, for any one query, all its c estimated counts are within η of the true ones with
probability 1 − β. A label is then right wherever the largest count leads by more than 2η.
"""

from __future__ import annotations

import math

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.labelers.reverse_knn.local import CollisionRandomizer, Table, UnaryRandomizer


def central_error(
    epsilon: float, beta: float, classes: int, votes: int = 1, adjacency: str = "replace_one"
) -> float:
    """η of Laplace noise: scale·log(c/β), by a union bound over the c counts (Proposition 1).

    Args:
        epsilon: ε of the release.
        beta: probability of an error beyond η.
        classes: c.
        votes: k·r, votes of a record.
        adjacency: ``replace_one`` doubles the noise, as printed.
    """
    scale = (
        check_int("votes", votes)
        * (2 if adjacency == "replace_one" else 1)
        / check_positive("epsilon", epsilon)
    )
    return scale * math.log(check_int("classes", classes, 2) / check_open_unit("beta", beta))


def randomized_response_error(
    epsilon: float, beta: float, clients: int, classes: int, votes: int = 1
) -> float:
    """η of randomised response: Bernstein's inequality for sums of n bits of variance f(1 − f).

    Theorem 1 prints (g+1)/(g−1)·√(3n·log(c/β)/(g+1)) with g = e^{ε/2kr}, a Chernoff bound for the flipped bits
    alone; this one holds for both tails, of zeros and of ones, and is of the same order.

    Args:
        epsilon: ε of the message.
        beta: probability of an error beyond η.
        clients: n.
        classes: c.
        votes: k·r.
    """
    randomizer = UnaryRandomizer(epsilon, Table(1, check_int("classes", classes, 2), 1, votes))
    flip = randomizer.mechanism.flip_probability
    return _bernstein(clients, flip * (1 - flip), classes, beta) / (1 - 2 * flip)


def collision_error(epsilon: float, beta: float, clients: int, classes: int, votes: int = 1) -> float:
    """η of Collision: Bernstein's inequality for hits, of variance at most ¼ each (Theorem 2 gives the order).

    Args:
        epsilon: ε of the message.
        beta: probability of an error beyond η.
        clients: n.
        classes: c.
        votes: k·r.
    """
    bloom = CollisionRandomizer(epsilon, Table(1, check_int("classes", classes, 2), 1, votes)).bloom
    rest = 1 / bloom.length
    variance = max(rest * (1 - rest), bloom.hit * (1 - bloom.hit))
    return _bernstein(clients, variance, classes, beta) / bloom.contrast


def _bernstein(clients: int, variance: float, classes: int, beta: float) -> float:
    """The t with P[|sum of n centred bits| > t] ≤ β/c: 2nvL = t² − 2tL/3 solved for t, L = log(2c/β)."""
    log_term = math.log(2 * classes / check_open_unit("beta", beta))
    third = log_term / 3
    return third + math.sqrt(third**2 + 2 * check_int("clients", clients) * variance * log_term)
