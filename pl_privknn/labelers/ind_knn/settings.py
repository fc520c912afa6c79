"""Groups of arguments of Ind-KNN: its kernel, the budgets of records, and whose they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pl_privknn.labelers.ind_knn.algorithm import PAPER_BANDWIDTH, Kernel
from pl_privknn.privacy.per_record.budgets import Conversion
from pl_privknn.privacy.record_groups import RecordGroups


@dataclasses.dataclass(frozen=True)
class Similarity:
    """How near a record must be to vote, and how much its vote weighs.

    Args:
        kernel: ``"cosine"``, or ``"rbf"`` for exp(−‖x − q‖² / ν²).
        bandwidth: ν of the RBF kernel.
        min_count: floor under the noisy number of neighbours; 30 as in the paper, or with ``density`` the number
            of neighbours that it aims at, unless given.
    """

    kernel: Kernel = "cosine"
    bandwidth: float = PAPER_BANDWIDTH
    min_count: float | None = None


@dataclasses.dataclass(frozen=True)
class RecordBudgets:
    """How ε becomes the budget of every record, and what they pay for being counted.

    Args:
        budget: B of every record, instead of ``epsilon``.
        sigma1: noise of the number of neighbours, instead of √(T / (6B)).
        conversion: how ε becomes B: ``"gdp"``, the tightest, or for comparison with the paper ``"rdp"`` or
            ``"rdp_classic"``.
        groups: groups of records with an ε of their own, instead of ``epsilon``. A record stops when it has spent
            the budget of its group; the stream as a whole costs the largest.
    """

    budget: float | None = None
    sigma1: float | None = None
    conversion: Conversion = "gdp"
    groups: RecordGroups | None = None


@dataclasses.dataclass(frozen=True)
class Records:
    """Which record is which, and where their budgets are kept.

    Args:
        ids: lasting whole numbers of the private records, in the data module's order, or the path of a
            ``.npy`` file with them; by default the data module's, if it has any, or else digests. A record must
            always come under the same number, for a second number would give it a second budget.
        state_dir: folder of the budgets, **private**, for this labeler and this data set alone; None keeps them
            beside the run's folder, and in memory where there is none.
    """

    ids: Any = dataclasses.field(default=None, repr=False)  # numbers of people may be private
    state_dir: str | Path | None = None
