"""Two tables that differ in one record, queries about it, and settings at which the record shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pl_privknn.labelers.attributes import Attributes, FixedThresholds
from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.pate import GNMAX, PATE, ConfidentGNMAX
from pl_privknn.labelers.pate_training import SklearnTeachers
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace

#: Noise beside which a query's other release tells next to nothing.
_SILENT = 1000.0


@dataclasses.dataclass(frozen=True)
class Scene:
    """One record, in a direction of its own, beside some others that all say the same.

    Several runs go into one call of ``label``: either as further queries about the same record, where every answer
    has its own noise and nothing else is left to chance (``copies``), or each with a record and queries of its own,
    at right angles to all others, where records answer to the queries near them (``places``).

    Attributes:
        name: what is looked at.
        settings: of the labeler.
        repeats: queries of one run about its record.
        copies: see above.
        places: likewise.
        others: number of other records; a Poisson sample at rate 1/4 holds two of 16 with probability 0.94.
        theirs: class of the other records, or their attributes.
        own: class of the record, or its attributes.
    """

    name: str
    settings: Mapping[str, Any]
    repeats: int = 1
    copies: int = 1
    places: int = 1
    others: int = 16
    theirs: int | tuple[int, ...] = 0
    own: int | tuple[int, ...] = 1

    @property
    def num_classes(self) -> int:
        """Classes, or attributes."""
        return 2 if isinstance(self.own, int) else len(self.own)

    @property
    def at_once(self) -> int:
        """Runs of one call."""
        return self.places * self.copies

    def queries(self) -> Tensor:
        """Queries of one call, run by run, shape ``(at_once · repeats, places + 1)``."""
        return torch.eye(self.places + 1)[:-1].repeat_interleave(self.copies * self.repeats, dim=0)

    def table(self, present: bool) -> tuple[Tensor, Tensor]:
        """Features and labels, with the record (of each place) or without it."""
        directions, records = torch.eye(self.places + 1), self.places * present
        away = directions[-1] * torch.linspace(1.0, 1.5, self.others)[:, None]
        features = torch.cat([away, directions[:records]])
        return features, torch.tensor([self.theirs] * self.others + [self.own] * records)


_ONE_BY_ONE: dict[str, Any] = {"repeats": 8, "copies": 1000}
_SIDE_BY_SIDE: dict[str, Any] = {"places": 128, "others": 1}
_SAMPLED = {"k": 1, "sampling_rate": 0.25}
_NEAREST = SklearnTeachers("sklearn.neighbors.KNeighborsClassifier", {"n_neighbors": 1})
_TEACHERS = {"num_teachers": 2, "teachers": _NEAREST, "progress": False}
_SCREENING = {"k": 2, "sampling_rate": 0.25, "screening": Screening(1.5, 0.5), "noise": Gaussian(_SILENT)}
_ATTRIBUTES = {"attributes": Attributes(2.0, FixedThresholds())}
#: Attributes that differ by as much as clipping allows, and so many that they must be clipped.
_SWAPPED: dict[str, Any] = {"theirs": (1, 1, 0, 0), "own": (0, 0, 1, 1)}
_CLIPPED: dict[str, Any] = {"theirs": (0,) * 48, "own": (1,) * 48}

#: What every class is run as.
SCENES: dict[type[Labeler], list[Scene]] = {
    PrivateKNN: [
        Scene("counts", {**_SAMPLED, "noise": Gaussian(1.0), "release_counts": True}, **_ONE_BY_ONE),
        Scene("winners", {**_SAMPLED, "noise": ExponentialArgmax(0.5)}, **_ONE_BY_ONE),
        Scene("screening", _SCREENING, **_ONE_BY_ONE),
        Scene("attributes", {**_ATTRIBUTES, **_SAMPLED, "noise": Gaussian(1.5)}, **_ONE_BY_ONE, **_SWAPPED),
        Scene("clipping", {**_ATTRIBUTES, **_SAMPLED, "noise": Gaussian(1.5)}, **_ONE_BY_ONE, **_CLIPPED),
    ],
    PATE: [
        Scene("counts", {**_TEACHERS, "aggregator": GNMAX(4.0, release_counts=True)}, **_ONE_BY_ONE),
        Scene("screening", {**_TEACHERS, "aggregator": ConfidentGNMAX(1.5, 1.5, _SILENT)}, **_ONE_BY_ONE),
    ],
    ReverseKNN: [
        Scene("counts", {"noise": Laplace(1.0)}, **_SIDE_BY_SIDE),
        Scene("attributes", {**_ATTRIBUTES, "noise": Gaussian(1.5)}, **_SIDE_BY_SIDE, **_SWAPPED),
        Scene("clipping", {**_ATTRIBUTES, "noise": Gaussian(1.5)}, **_SIDE_BY_SIDE, **_CLIPPED),
    ],
    IndKNN: [
        # The record's budget lasts for about four queries about it alone; it must have no part in the others.
        Scene(
            "stream",
            {
                "threshold": 0.5, "sigma1": 14.0, "sigma2": 2.0, "budget": 0.5, "min_count": 1.0,
                "release_counts": True,
            },
            repeats=10,
            places=64,
        ),
    ],
}  # fmt: skip


def scenes_of(kind: type[Labeler]) -> list[Scene]:
    """The scenes of a class, or of the nearest one that it is derived from.

    Raises:
        ValueError: for a class that has none.
    """
    for known in kind.__mro__:
        if known in SCENES:
            return SCENES[known]
    names = ", ".join(known.__name__ for known in SCENES)
    raise ValueError(
        f"kind={kind.__name__} has no scenes; it must be one of {names}, or derived from one. "
        "pl_privknn.testing.check_labeler looks into any labeler"
    )
