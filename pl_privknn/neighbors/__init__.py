"""Nearest neighbours over feature tables. Everything here handles private data and releases nothing."""

from pl_privknn.neighbors.assignment import assign
from pl_privknn.neighbors.cells import CellNeighbors, Cells
from pl_privknn.neighbors.poisson import PoissonNeighbors, RankedLists
from pl_privknn.neighbors.search import nearest, top_k, within_radius
from pl_privknn.neighbors.sums import PoissonSums
from pl_privknn.neighbors.votes import Coins, RadiusNeighbors, radius_votes

__all__ = [
    "CellNeighbors",
    "Cells",
    "Coins",
    "PoissonNeighbors",
    "PoissonSums",
    "RadiusNeighbors",
    "RankedLists",
    "assign",
    "nearest",
    "radius_votes",
    "top_k",
    "within_radius",
]
