"""Privacy budget."""

from __future__ import annotations

import dataclasses

from pl_privknn._checks import check_open_unit, check_positive
from pl_privknn.privacy.mechanisms.base import Adjacency, Unit, check_adjacency, check_unit


@dataclasses.dataclass(frozen=True)
class Budget:
    """Privacy budget: ε and δ, for a neighbouring relation and a unit of privacy.

    Args:
        epsilon: the most ε. What would cost more raises ``BudgetExceeded`` before anything is drawn; a teacher or a
            training without noise of its own uses the least noise that stays within it. None: no limit, ε is only
            stated.
        delta: δ of the guarantee.
        adjacency: neighbouring relation of the guarantee, ``"add_remove"`` or ``"replace_one"``.
        unit: unit of privacy: ``"record"``, or ``"person"`` with all records that the data module's
            ``private_groups`` ascribe to them.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import Budget
        >>> Budget(epsilon=1.0, delta=1e-6)
        Budget(epsilon=1.0, delta=1e-06, adjacency='add_remove', unit='record')
    """

    epsilon: float | None = None
    delta: float = 1e-5
    adjacency: Adjacency = "add_remove"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            check_positive("epsilon", self.epsilon)
        check_open_unit("delta", self.delta)
        check_adjacency(self.adjacency)
        check_unit(self.unit)
