"""Nearest neighbours over feature tables. Everything here handles private data and releases nothing."""

from pl_privknn.neighbors.assignment import assign
from pl_privknn.neighbors.cells import CellNeighbors, Cells
from pl_privknn.neighbors.poisson import Coins, PoissonNeighbors, PoissonSums, RankedLists
from pl_privknn.neighbors.radius import RadiusNeighbors
from pl_privknn.neighbors.search import nearest, top_k, within_radius

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
    "top_k",
    "within_radius",
]
