"""Balanced connections of records and queries as printed, for comparison: their sensitivity is not bounded.

Appendix C of the paper on reverse kNN gives each query the score ``Σ sim(q, x)`` over the records connected to it,
and chooses all edges together, at most ``k`` a record, so that the arithmetic mean, the minimum or the harmonic
mean of the scores is largest. Only the arithmetic mean separates into records (it is reverse kNN itself). Under the
other two the edges of one record depend on all other records, so a record more or less can move edges of others,
and the counts change by more than ``k``: noise of scale ``k/ε`` then gives **no** ε-differential privacy. A release
that uses these edges is conditional at best, and :func:`pl_privknn.neighbors.prices.learn_prices` is the sound form.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, shape_text
from pl_privknn._compiled import compiled

OBJECTIVES = ("arithmetic", "minimum", "harmonic")

#: Why a release over these edges is not differentially private as accounted.
REASON = (
    "balanced connections as printed: the edges of one record depend on the other records, so the sensitivity "
    "of reverse kNN does not bound the change of the counts"
)

#: ``Σ score^-p`` is what local search lowers: p = 1 is the harmonic mean, a large p is close to the minimum.
_POWERS = {"harmonic": 1.0, "minimum": 8.0}


def balanced_connections(
    similarity: Tensor, k: int = 1, objective: str = "harmonic", *, passes: int = 20
) -> Tensor:
    """Edges that make the mean or the least of the queries' scores large, as in the paper's appendix C.

    ``"arithmetic"`` is exact: the ``k`` most similar queries of each record. ``"harmonic"`` starts there and gives
    one record after the other its ``k`` best queries given all others' edges, until a pass changes nothing; each
    change lowers ``Σ 1/score``, so it ends in a local optimum. ``"minimum"`` does the same for ``Σ score^-8``,
    since the largest minimum itself is NP-hard (it is max-min allocation, Bansal and Sviridenko 2006).

    Conditional, except for ``"arithmetic"``: see :data:`REASON`.

    Args:
        similarity: float, above zero, shape ``(n, s)``.
        k: edges of a record.
        objective: ``"arithmetic"``, ``"minimum"`` or ``"harmonic"``.
        passes: passes over all records at most.

    Returns:
        int64, shape ``(n, k)``; ascending.

    Raises:
        ValueError: for similarities that are not positive, or more edges than queries.
    """
    check_choice("objective", objective, OBJECTIVES)
    k, passes = check_int("k", k), check_int("passes", passes)
    if similarity.ndim != 2 or not bool(((similarity > 0) & torch.isfinite(similarity)).all()):
        raise ValueError(
            f"similarity: shape {shape_text(similarity.shape)}; want finite numbers above 0 of shape (n, s)"
        )
    if similarity.shape[1] < k:
        raise ValueError(f"k={k} is more than the {similarity.shape[1]} queries; lower k")
    edges = similarity.topk(k, dim=1).indices.sort(dim=1).values
    if objective == "arithmetic" or not len(edges):
        return edges
    chosen = edges.numpy()
    weights = similarity.double().numpy()
    scores = np.zeros(weights.shape[1])
    np.add.at(scores, chosen, np.take_along_axis(weights, chosen, axis=1))
    for _ in range(passes):
        if not _improve(weights, chosen, scores, _POWERS[objective]):
            break
    return torch.from_numpy(np.sort(chosen, axis=1))


def scores(similarity: Tensor, edges: Tensor) -> Tensor:
    """Sum of similarities over each query's edges, float64 ``(s,)``.

    Args:
        similarity: float, shape ``(n, s)``.
        edges: int64, shape ``(n, k)``.
    """
    totals = torch.zeros(similarity.shape[1], dtype=torch.float64)
    return totals.index_add_(0, edges.flatten(), similarity.gather(1, edges).double().flatten())


@compiled()
def _improve(weights, chosen, scores, power):  # type: ignore[no-untyped-def]
    """One pass; changes ``chosen`` and ``scores`` and says whether it changed anything."""
    queries, k = weights.shape[1], chosen.shape[1]
    # A query without records costs a large finite sum, so that the first to get one is worth most.
    floor = 1e-3 * weights.mean()
    changed = False
    best = np.empty(k, dtype=np.int64)
    gains = np.empty(k, dtype=np.float64)
    for record in range(len(weights)):
        own = weights[record]
        before = 0.0
        for edge in range(k):
            query = chosen[record, edge]
            scores[query] -= own[query]
            before += (max(scores[query], 0.0) + floor) ** -power - (
                scores[query] + own[query] + floor
            ) ** -power
        gains[:] = -1.0
        for query in range(queries):
            base = max(scores[query], 0.0) + floor
            gain = base**-power - (base + own[query]) ** -power
            place = k
            while place > 0 and gain > gains[place - 1]:
                place -= 1
            if place < k:
                for later in range(k - 1, place, -1):
                    gains[later], best[later] = gains[later - 1], best[later - 1]
                gains[place], best[place] = gain, query
        # Only a gain beyond rounding counts, or passes would never end.
        if gains.sum() > before * (1.0 + 1e-9):
            chosen[record] = best
            changed = True
        for edge in range(k):
            scores[chosen[record, edge]] += own[chosen[record, edge]]
    return changed
