"""Nearest neighbours within cells of the feature space that public data alone decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.neighbors.assignment import assign
from pl_privknn.neighbors.poisson import Coins, RankedLists


@dataclasses.dataclass(frozen=True)
class Cells:
    """A switch of the neighbour search: search for each query in the cells around it, and not in the whole table.

    Public features are clustered (k-means, by faiss). A record belongs to the cell of the centroid that it is nearest
    to, and a query in cell c is compared with the records of the ``probes`` cells whose centroids are nearest to c's.
    So whether a record is a candidate depends on that record and on public data alone: one record more or less still
    moves the votes of the k nearest candidates by √2 at most, and the price of a release is the same. (An index that
    is trained on private records, or one that stops after so many candidates, has no such guarantee.)

    What is found is exact within the cells; a near record just outside is missed. It pays where hundreds of queries
    share a cell; ``docs/methods/private_knn.md`` has the recall and the speed that were measured.

    Args:
        number: cells; at most as many as there are public examples.
        probes: cells that a query looks into, its own included.
        seed: of the clustering; public.

    Raises:
        ValueError: for numbers below 1, or more probes than cells.
    """

    number: int = 16
    probes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("cells.number", self.number)
        check_int("cells.seed", self.seed, minimum=0)
        if check_int("cells.probes", self.probes) > self.number:
            raise ValueError(
                f"cells.probes={self.probes} is above cells.number={self.number}; look into fewer cells"
            )

    def centroids(self, features: Tensor) -> Tensor:
        """Centres of clusters of public features.

        Args:
            features: floating point, shape ``(n, d)``, public.

        Returns:
            float32, shape ``(number, d)``.

        Raises:
            ValueError: for fewer public examples than cells.
        """
        import faiss

        if len(features) < self.number:
            raise ValueError(
                f"cells.number={self.number} is above the {len(features)} public examples; use fewer cells"
            )
        values = features.detach().to("cpu", torch.float32).contiguous().numpy()
        clustering = faiss.Kmeans(
            values.shape[1], self.number, seed=self.seed, niter=20, min_points_per_centroid=1
        )
        clustering.train(values)
        return torch.from_numpy(clustering.centroids)


class Voters(Protocol):
    """Neighbours that rank queries and vote about them."""

    def rank(self, queries: Tensor) -> RankedLists:
        """Search for the nearest records of each query."""

    def votes(self, ranked: RankedLists, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query."""


@dataclasses.dataclass(frozen=True, repr=False)
class CellLists:
    """Ranked lists of queries, cell by cell. **Private.**.

    Attributes:
        count: number of queries.
        parts: for each cell that holds any of them: their positions, int64, the neighbours that vote, their lists.
    """

    count: int
    parts: tuple[tuple[Tensor, Voters, RankedLists], ...]

    def __getitem__(self, rows: Tensor) -> CellLists:
        place = torch.full((self.count,), -1, dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        parts = []
        for positions, voters, lists in self.parts:
            kept = place[positions] >= 0
            if bool(kept.any()):
                parts.append((place[positions[kept]], voters, lists[kept]))
        return CellLists(len(rows), tuple(parts))


class CellNeighbors:
    """Votes of the nearest records within public cells, with the methods of ``PoissonNeighbors``.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        centroids: float32, shape ``(s, d)``, public.
        probes: cells that a query looks into.
        among: makes the neighbours that vote, from the positions of the records among which they search.
        device: as in :func:`~pl_privknn.neighbors.assignment.assign`.
    """

    def __init__(
        self,
        table: Tensor,
        centroids: Tensor,
        probes: int,
        among: Callable[[Tensor], Voters],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._centroids, self._among = centroids, among
        self._cells = assign(table, centroids, device=device)[:, 0]
        self._looked_into = assign(centroids, centroids, probes)

    def rank(self, queries: Tensor) -> CellLists:
        """Search around each query; see :meth:`PoissonNeighbors.rank`."""
        own = assign(queries, self._centroids)[:, 0]
        parts = []
        for cell in own.unique().tolist():
            positions = (own == cell).nonzero()[:, 0]
            rows = torch.isin(self._cells, self._looked_into[cell]).nonzero()[:, 0]
            voters = self._among(rows)
            parts.append((positions, voters, voters.rank(queries[positions])))
        return CellLists(len(queries), tuple(parts))

    def votes(self, ranked: CellLists, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query; see :meth:`PoissonNeighbors.votes`."""
        votes = [voters.votes(lists, coins) for _, voters, lists in ranked.parts]
        together = torch.cat(votes)
        result = torch.empty_like(together)
        result[torch.cat([positions for positions, _, _ in ranked.parts])] = together
        return result
