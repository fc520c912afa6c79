"""How clients' answers reach the server where there is no curator."""

from __future__ import annotations

import dataclasses

from pl_privknn._checks import check_choice, check_int, check_open_unit, check_positive
from pl_privknn.labelers.reverse_knn.local import RANDOMIZERS, LocalRandomizer, Table, make_randomizer
from pl_privknn.labelers.reverse_knn.shuffle import (
    MultiMessage,
    SingleMessage,
    amplified_epsilon,
    calibrated_shares,
)
from pl_privknn.privacy.mechanisms import NegativeBinomial


@dataclasses.dataclass
class Channel:
    """How clients' answers reach the server where there is no curator; made once the table's shape is known."""

    trust: str
    randomizer: str
    epsilon: float
    delta: float
    num_clients: int | None

    def __post_init__(self) -> None:
        known = (*RANDOMIZERS, "shares") if self.trust == "shuffle" else tuple(RANDOMIZERS)
        check_choice("randomizer", self.randomizer, known)
        self.epsilon = check_positive("epsilon", self.epsilon)
        if self.trust == "shuffle":
            check_int("num_clients", self.num_clients, 2)
            check_open_unit("delta", self.delta)
        self._local: float | None = None
        self._shares: dict[int, NegativeBinomial] = {}

    def protocol(self, table: Table) -> LocalRandomizer | SingleMessage | MultiMessage:
        """What charges, and what stands for all messages."""
        if self.trust == "local":
            return make_randomizer(self.randomizer, self.epsilon, table)
        clients = check_int("num_clients", self.num_clients, 2)
        if self.randomizer == "shares":
            if table.ones not in self._shares:
                self._shares[table.ones] = calibrated_shares(self.epsilon, self.delta, table.ones)
            return MultiMessage(self._shares[table.ones], table, clients)
        if self._local is None:
            self._local = amplified_epsilon(self.epsilon, self.delta, clients)
        return SingleMessage(self.randomizer, self._local, table, clients)

    def check_clients(self, found: int) -> None:
        """Refuse a round with fewer clients than the guarantee counts on."""
        if self.trust == "shuffle" and found < check_int("num_clients", self.num_clients, 2):
            raise ValueError(
                f"num_clients={self.num_clients} is more than take part; the noise of fewer clients does not keep ε. "
                "State a number that is surely reached"
            )
