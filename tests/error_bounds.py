"""Error control of the exact worst case: figures from below and above, on a coarse and a fine grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pl_privknn.privacy.accounting import exact
from pl_privknn.privacy.accounting.lower_bound import epsilon_lower
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge


@dataclasses.dataclass(frozen=True)
class Bracket:
    """Bounds on ε of the worst adaptive adversary.

    Attributes:
        lower: what an adversary reaches who always picks the same pair of one family.
        upper: upper bound on the fine grid; what :func:`pl_privknn.privacy.accounting.exact.exact_epsilon` returns.
        coarse: upper bound on a grid of twice the spacing. Errors fall with the square of the spacing, so
            the grid's part of the error of ``upper`` is about ``(coarse − upper) / 3``.
    """

    lower: float
    upper: float
    coarse: float


def exact_bracket(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    work: float = exact.WORK,
) -> Bracket | None:
    """Bracket the exact worst case; None where no charge has a family of pairs.

    Args:
        charges: as in :func:`pl_privknn.privacy.accounting.exact.exact_epsilon`.
        delta: target δ.
        adjacency: neighbouring relation of every charge.
        work: as there.

    Raises:
        ValueError: as there.
    """

    def upper(coarsen: float) -> float | None:
        return exact.exact_epsilon(charges, delta=delta, adjacency=adjacency, work=work, coarsen=coarsen)

    fine, coarse = upper(1.0), upper(2.0)
    if fine is None or coarse is None:
        return None
    return Bracket(epsilon_lower(charges, delta=delta, adjacency=adjacency), fine, coarse)
