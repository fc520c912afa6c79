"""Reverse kNN without a curator: each record's owner randomises a message, under local or shuffle privacy."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from pl_privknn._checks import check_choice, check_int
from pl_privknn.labelers.base import ChargesLedger, PrivateRecords, Release
from pl_privknn.labelers.reverse_knn import RecordVotes, decide
from pl_privknn.labelers.reverse_knn_local import (
    RANDOMIZERS,
    LocalRandomizer,
    MultiMessage,
    SingleMessage,
    Table,
    amplified_epsilon,
    calibrated_shares,
    make_randomizer,
)
from pl_privknn.privacy.mechanisms import Charge, NegativeBinomial
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.settings import Budget


class ClientReverseKNN(RecordVotes):
    """Base class of reverse kNN without a curator: each record's owner sends one randomised answer per round.

    The messages of one table are simulated here in distribution; :mod:`pl_privknn.federated` sends real ones. The
    guarantee holds under ``replace_one``, since senders are visible. Where the unit of privacy is a person, one
    record of each, drawn by a private coin, makes the person's message.
    """

    trust: ClassVar[str]
    randomizers: ClassVar[tuple[str, ...]] = tuple(RANDOMIZERS)
    adjacencies = ("replace_one",)

    def __init__(
        self,
        k: int = 1,
        *,
        budget: Budget | None = None,
        randomizer: str = "collision",
        soft: bool = True,
        abstain: float = 0.0,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(k, soft, abstain, budget, None, noise_source)
        self.randomizer = check_choice("randomizer", randomizer, self.randomizers)
        self._round: tuple[float, float] | None = None  # its ε and δ
        self._begin()

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set ε and δ of each round: those of the budget over ``rounds``; see the base.

        Raises:
            ValueError: for another adjacency than ``"replace_one"``.
        """
        if budget.adjacency != "replace_one":
            raise ValueError(
                f"budget.adjacency={budget.adjacency!r}: senders of messages are visible; use "
                "Budget(epsilon=…, adjacency='replace_one')"
            )
        assert budget.epsilon is not None
        self._round = budget.epsilon / rounds, budget.delta / rounds

    @property
    def epsilon(self) -> float:
        """ε of one round.

        Raises:
            ValueError: before a budget has set it.
        """
        return self.set_by_budget(self._round)[0]

    @abc.abstractmethod
    def protocol(self, num_queries: int, num_classes: int) -> LocalRandomizer | SingleMessage | MultiMessage:
        """Protocol of clients' messages for a table of this shape."""

    def check_clients(self, count: int) -> None:
        """Raise ``ValueError`` for fewer clients than the guarantee assumes."""

    def fit(self, records: PrivateRecords) -> None:
        """Take the private records; see :meth:`Labeler.fit`."""
        super().fit(records)
        self.check_clients(len(records) if self._drawn is None else int(self._drawn.sum()))

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One round of messages per round; see :meth:`Labeler.plan`."""
        return [Charge(self.protocol(num_queries, num_classes).mechanism, rounds)]

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Simulate all messages of a round and decide; see :meth:`Labeler.label`.

        Raises:
            RuntimeError: before :meth:`fit`.
            ValueError: for fewer queries than ``k``.
        """
        nearest, labels = self.votes(queries)
        self.check_clients(len(labels))
        protocol = self.protocol(len(queries), self._num_classes)
        noise = self.charge_and_draw(ledger, protocol.mechanism, 1, "messages")
        noisy = protocol.simulate(nearest, labels, noise)
        return decide(noisy, protocol.deviation(len(labels)), self.abstain, self.soft, max_answers)

    def release_messages(
        self,
        fetch: Callable[[], Tensor],
        num_queries: int,
        num_classes: int,
        ledger: ChargesLedger,
        max_answers: int | None = None,
    ) -> Release:
        """Charge one round, fetch its messages and decide: the server's part.

        Args:
            fetch: asks the clients, once the round is paid, and returns messages of :meth:`protocol`, ``(n, w)``.
            num_queries: s.
            num_classes: c.
            ledger: pays; see :class:`~pl_privknn.labelers.base.ChargesLedger`.
            max_answers: as for :meth:`label`.
        """
        protocol = self.protocol(num_queries, num_classes)
        self.charge_and_draw(ledger, protocol.mechanism, 1, "messages")
        messages = fetch()
        self.check_clients(len(messages))
        noisy, deviation = protocol.aggregate(messages), protocol.deviation(len(messages))
        return decide(noisy, deviation, self.abstain, self.soft, max_answers)


class LocalReverseKNN(ClientReverseKNN):
    """Reverse kNN under local differential privacy: each record's owner randomises its own message.

    Args:
        k: number of nearest queries that a record votes for.
        budget: its ε over the number of rounds is that of each message; ``adjacency="replace_one"``, since senders
            are visible. By default the budget of the run.
        randomizer: of a message: ``"collision"`` or ``"randomized_response"``.
        soft: see :class:`~pl_privknn.labelers.reverse_knn.RecordVotes`.
        abstain: likewise.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> from pl_privknn.labelers import LocalReverseKNN
        >>> from pl_privknn.privacy import Budget
        >>> teacher = LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one"))
        >>> teacher.plan(30, 30, 10)[0].mechanism.epsilon
        2.0
    """

    trust = "local"

    def protocol(self, num_queries: int, num_classes: int) -> LocalRandomizer:
        """Randomiser of one client's message for a table of this shape."""
        return make_randomizer(self.randomizer, self.epsilon, Table(num_queries, num_classes, self.k))


class ShuffledReverseKNN(ClientReverseKNN):
    """Reverse kNN under shuffle privacy: owners trust a shuffler to mix their messages.

    Args:
        k: number of nearest queries that a record votes for.
        num_clients: public number of records that are certain to take part.
        budget: its ε and δ over the number of rounds are those of each; ``adjacency="replace_one"``, since senders
            are visible. By default the budget of the run.
        randomizer: of a message: ``"collision"`` or ``"randomized_response"``, amplified by shuffling; or
            ``"shares"``, several messages per client.
        soft: see :class:`~pl_privknn.labelers.reverse_knn.RecordVotes`.
        abstain: likewise.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> from pl_privknn.labelers import ShuffledReverseKNN
        >>> from pl_privknn.privacy import Budget, epsilon_for_delta
        >>> budget = Budget(epsilon=1.0, adjacency="replace_one")
        >>> teacher = ShuffledReverseKNN(num_clients=1000, budget=budget, randomizer="shares")
        >>> epsilon_for_delta(teacher.plan(30, 30, 10), 1e-5, "replace_one") <= 1.0
        True
    """

    trust = "shuffle"
    randomizers = (*RANDOMIZERS, "shares")

    def __init__(
        self,
        k: int = 1,
        *,
        num_clients: int,
        budget: Budget | None = None,
        randomizer: str = "collision",
        soft: bool = True,
        abstain: float = 0.0,
        noise_source: NoiseSource | None = None,
    ) -> None:
        self.num_clients = check_int("num_clients", num_clients, 2)
        super().__init__(
            k, budget=budget, randomizer=randomizer, soft=soft, abstain=abstain, noise_source=noise_source
        )

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """See :meth:`ClientReverseKNN.set_noise`."""
        super().set_noise(budget, rounds)
        self._local: float | None = None
        self._shares: dict[int, NegativeBinomial] = {}

    def protocol(self, num_queries: int, num_classes: int) -> SingleMessage | MultiMessage:
        """Shuffle protocol for a table of this shape."""
        table, (epsilon, delta) = Table(num_queries, num_classes, self.k), self.set_by_budget(self._round)
        if self.randomizer == "shares":
            if table.ones not in self._shares:
                self._shares[table.ones] = calibrated_shares(epsilon, delta, table.ones)
            return MultiMessage(self._shares[table.ones], table, self.num_clients)
        if self._local is None:
            self._local = amplified_epsilon(epsilon, delta, self.num_clients)
        return SingleMessage(self.randomizer, self._local, table, self.num_clients)

    def check_clients(self, count: int) -> None:
        """Raise ``ValueError`` for fewer clients than the guarantee assumes."""
        if count < self.num_clients:
            raise ValueError(
                f"num_clients={self.num_clients} is more than take part; the noise of fewer clients does not keep ε. "
                "State a number that is surely reached"
            )
