"""Nearest neighbours over feature tables. Everything here handles private data and releases nothing."""

from pl_privknn.neighbors.assignment import assign
from pl_privknn.neighbors.poisson import (
    Coins,
    PoissonNeighbors,
    PoissonSums,
    RankedLists,
    ShardedNeighbors,
)
from pl_privknn.neighbors.search import nearest

__all__ = [
    "Coins",
    "PoissonNeighbors",
    "PoissonSums",
    "RankedLists",
    "ShardedNeighbors",
    "assign",
    "nearest",
]
