"""Nearest neighbours over feature tables. Everything here handles private data and releases nothing."""

from pl_privknn.neighbors.poisson import Coins, PoissonNeighbors, RankedLists
from pl_privknn.neighbors.search import top_k, within_radius

__all__ = ["Coins", "PoissonNeighbors", "RankedLists", "top_k", "within_radius"]
