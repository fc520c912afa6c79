"""Features of tables of numbers and categories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.features.base import LearnedExtractor

# Numbers are compared with so many public quantiles; ranks of the lowest and highest.
_KNOTS, _LOWEST = 64, 0.005
# Length of the vector of a text: it counts as four columns of numbers.
_TEXT_LENGTH = 2.0
# Public rows whose distances are looked at.
_COMPARED = 1000


class TableFeatures(LearnedExtractor):
    """Normal scores of numbers and one-hot categories, an Extractor for rows of a table.

    A number becomes Φ⁻¹ of its rank among the public rows (of equal ones the middle rank), between public numbers by
    interpolation; a missing number is 0, and a second coordinate says so where public rows miss it too. All is scaled
    so that the median distance of public rows is 1.

    Args:
        sizes: of each column the number of its categories, 0 for numbers, or −1 for a coordinate of a text's vector,
            which is taken as it is.

    Raises:
        ValueError: for sizes out of range.

    Example:
        >>> import torch
        >>> extractor = TableFeatures([0, 3])  # a column of numbers and one of three categories
        >>> extractor.fit_public(torch.tensor([[0.1, 0.0], [0.5, 2.0], [0.7, 1.0]]))
        >>> extractor(torch.tensor([[0.5, 1.0]])).shape
        torch.Size([1, 5])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = [check_int("sizes", size, -1) for size in sizes]

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """Number of coordinates: two per column of numbers, one per category and per coordinate of a text."""
        return sum(abs(size) or 2 for size in self.sizes)

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Knots and scores of numbers, and the scale."""
        rows = images.double()
        found: dict[str, Tensor] = {}
        for place, size in enumerate(self.sizes):
            if not size:
                found[f"knots{place}"], found[f"scores{place}"] = _knots(rows[:, place])
        self._learned = found
        scaled = self._encoded(images)[:_COMPARED]
        distances = torch.pdist(scaled)
        distances = distances[distances > 0]
        return {**found, "scale": distances.median() if len(distances) else torch.tensor(1.0)}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, D)``."""
        return self._encoded(images) / self.learned("scale", images.device)

    def _encoded(self, images: Tensor) -> Tensor:
        rows, found = images, []
        for place, size in enumerate(self.sizes):
            values = rows[:, place]
            if size < 0:
                found.append(torch.where(values < 0, 0.0, (values - 0.5) * _TEXT_LENGTH)[:, None])
                continue
            if size:
                found.append(torch.nn.functional.one_hot(values.long().clamp(0, size - 1), size).float())
                continue
            knots, scores = (self.learned(f"{name}{place}", images.device) for name in ("knots", "scores"))
            missing = (values < 0).float()
            found.append(torch.stack([_between(values, knots, scores) * (1 - missing), missing], dim=1))
        return torch.cat(found, dim=1)


def _knots(values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct values (all or some) in ascending order, and the normal scores of their middle ranks."""
    values = values[values >= 0]
    if not len(values):
        return torch.zeros(1), torch.zeros(1)
    different, counts = values.unique(return_counts=True)
    ranks = (counts.cumsum(0) - counts / 2) / len(values)
    chosen = torch.arange(len(different))
    if len(different) > _KNOTS:
        wanted = torch.linspace(0, 1, _KNOTS, dtype=ranks.dtype)
        chosen = torch.searchsorted(ranks.contiguous(), wanted).clamp(max=len(different) - 1).unique()
    scores = torch.special.ndtri(ranks[chosen].double().clamp(_LOWEST, 1 - _LOWEST))
    return different[chosen].float(), scores.float()


def _between(values: Tensor, knots: Tensor, scores: Tensor) -> Tensor:
    """Linear interpolation, constant beyond the first and last knot."""
    if len(knots) == 1:
        return scores.expand(len(values))
    # By comparisons, which an exported file can have.
    upper = (values[:, None] > knots).sum(dim=1).clamp(1, len(knots) - 1)
    low, high = knots[upper - 1], knots[upper]
    share = ((values - low) / (high - low)).clamp(0, 1)
    return scores[upper - 1] + share * (scores[upper] - scores[upper - 1])
