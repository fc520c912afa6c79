"""Reverse kNN in the shuffle model: anonymous messages, noised by the clients, mixed by a trusted shuffler."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.labelers.reverse_knn.local import LocalRandomizer, Table, make_randomizer, true_counts
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Mechanism, NegativeBinomial, ShuffleAmplification
from pl_privknn.privacy.noise import NoiseSource

_RATIOS = (0.3, 0.5, 0.7)


def amplified_epsilon(epsilon: float, delta: float, clients: int, rounds: int = 1) -> float:
    """The largest ε₀ of one local message such that the shuffled messages of ``rounds`` rounds have ``epsilon``.

    By bisection on the accountant with the clone pair of Feldman, McMillan and Talwar (2021), which is tighter than
    their closed form. Never below ``epsilon / rounds``, which needs no shuffler.

    Args:
        epsilon: ε of the whole.
        delta: δ of the whole.
        clients: messages shuffled together; a public number that is surely reached.
        rounds: how often every client sends.
    """
    check_positive("epsilon", epsilon)
    check_open_unit("delta", delta)

    def cost(local: float) -> float:
        charge = Charge(ShuffleAmplification(local, clients), check_int("rounds", rounds))
        return account([charge], delta=delta, adjacency="replace_one", exact=False).epsilon

    low, high = epsilon / rounds, epsilon / rounds + math.log(max(clients, 2)) + 1
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= epsilon else (low, middle)
    return low


def calibrated_shares(epsilon: float, delta: float, moved: int, rounds: int = 1) -> NegativeBinomial:
    """The negative binomial noise of least variance, among some ratios, that keeps (ε, δ) over ``rounds`` rounds.

    Args:
        epsilon: ε of the whole.
        delta: δ of the whole.
        moved: cells that a record votes for.
        rounds: how often every client sends.
    """
    check_positive("epsilon", epsilon)
    check_open_unit("delta", delta)
    found: list[NegativeBinomial] = []
    for part in _RATIOS:
        ratio = math.exp(-part * epsilon / (2 * moved * rounds))
        low, high = 1e-3, 1.0
        while not _keeps(NegativeBinomial(high, ratio, moved), epsilon, delta, rounds):
            low, high = high, 2 * high
            if high > 1e6:
                break
        else:
            while high > 1.01 * low:
                middle = math.sqrt(low * high)
                kept = _keeps(NegativeBinomial(middle, ratio, moved), epsilon, delta, rounds)
                low, high = (low, middle) if kept else (middle, high)
            found.append(NegativeBinomial(high, ratio, moved))
    if not found:
        raise ValueError(f"epsilon={epsilon!r}: no noise keeps it at delta={delta!r}; use a larger one")
    return min(found, key=lambda mechanism: mechanism.variance)


def _keeps(mechanism: NegativeBinomial, epsilon: float, delta: float, rounds: int) -> bool:
    charge = Charge(mechanism, rounds)
    return account([charge], delta=delta, adjacency="replace_one", exact=False).epsilon <= epsilon


class Shuffled:
    """Base of both protocols; ``num_clients`` is the public number of clients that are sure to send."""

    def __init__(self, table: Table, num_clients: int) -> None:
        self.table, self.num_clients = table, check_int("num_clients", num_clients, 2)

    @staticmethod
    def shuffle(messages: Tensor, noise: NoiseSource) -> Tensor:
        """The messages in an order that tells nothing of who sent them; rows are messages."""
        return messages[noise.uniform((len(messages),)).argsort()]


class SingleMessage(Shuffled):
    """One locally private message a client, amplified by shuffling (Feldman, McMillan, Talwar 2021).

    Args:
        name: randomiser of the message; see :data:`~pl_privknn.labelers.reverse_knn.local.RANDOMIZERS`.
        local_epsilon: ε₀ of each message, for instance of :func:`amplified_epsilon`.
        table: shape of an answer.
        num_clients: see the base.
    """

    def __init__(self, name: str, local_epsilon: float, table: Table, num_clients: int) -> None:
        super().__init__(table, num_clients)
        self.randomizer: LocalRandomizer = make_randomizer(name, local_epsilon, table)

    @property
    def mechanism(self) -> Mechanism:
        """What one round costs."""
        return ShuffleAmplification(self.randomizer.epsilon, self.num_clients)

    def messages(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Every client's message, shuffled."""
        sent = self.randomizer.randomize(nearest, labels, noise.stream("clients"))
        return self.shuffle(sent, noise.stream("shuffler"))

    def aggregate(self, messages: Tensor) -> Tensor:
        """Unbiased counts, float64 ``(s, c)``."""
        return self.randomizer.aggregate(messages)

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """The same in distribution, without messages."""
        return self.randomizer.simulate(nearest, labels, noise)

    def deviation(self, num_clients: int) -> float:
        """Of an estimate whose true count is zero."""
        return self.randomizer.deviation(num_clients)


class MultiMessage(Shuffled):
    """A message for each vote, and each client's share of the noise of every cell; see :class:`NegativeBinomial`.

    Args:
        noise: the whole noise of one cell, for instance of :func:`calibrated_shares`.
        table: shape of an answer.
        num_clients: see the base.
    """

    def __init__(self, noise: NegativeBinomial, table: Table, num_clients: int) -> None:
        super().__init__(table, num_clients)
        if noise.moved != table.ones:
            raise ValueError(f"noise.moved={noise.moved} must be k·r = {table.ones}, the votes of a record")
        self.mechanism = noise

    def client(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """One client's messages, cell numbers, int64 ``(w, 1)``: its votes, and its share of the noise.

        Args:
            nearest: int64 ``(k,)``.
            labels: int64 ``(r,)``.
            noise: the client's own randomness.
        """
        votes = self.table.cells_of(nearest[None], labels[None])[0]
        extra = self.mechanism.share(self.table.cells, self.num_clients, noise)
        return torch.cat([votes, torch.arange(self.table.cells).repeat_interleave(extra)])[:, None]

    def messages(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Every client's messages, shuffled."""
        source = noise.stream("clients")
        sent = [self.client(*record, source) for record in zip(nearest, labels, strict=True)]
        return self.shuffle(torch.cat(sent), noise.stream("shuffler"))

    def aggregate(self, messages: Tensor) -> Tensor:
        """Number of messages for each cell less the noise's mean, float64 ``(s, c)``.

        Unbiased where exactly ``num_clients`` send; each further client adds a share of noise.
        """
        counts = torch.bincount(messages.flatten(), minlength=self.table.cells).double()
        return (counts - self.mechanism.mean).view(self.table.queries, self.table.classes)

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """The same in distribution for ``num_clients`` clients: the shares of a cell add up to the whole noise."""
        counts = true_counts(self.table, nearest, labels) + self.mechanism.draw(self.table.cells, noise)
        return (counts.double() - self.mechanism.mean).view(self.table.queries, self.table.classes)

    def deviation(self, num_clients: int) -> float:
        """Of every estimate."""
        return math.sqrt(self.mechanism.variance)
