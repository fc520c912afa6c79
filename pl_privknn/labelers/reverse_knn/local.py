"""Local randomisers for reverse kNN: what one client sends, and what the server makes of all messages.

A record's answer is the set of cells (query, class) of its k nearest queries and its r labels, k·r ones in a table of
s·c zeros. Every randomiser here is ε-locally private: any two answers give any message with probabilities within
e^ε of each other. So the guarantee is that of a replaced record, trusts nobody, and is pure.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_choice, check_positive
from pl_privknn.labelers.reverse_knn.collision import Bloom, binomial
from pl_privknn.privacy.mechanisms import Mechanism, PureDP, RandomizedResponse
from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]
_ROWS_AT_A_TIME = 1 << 15


@dataclasses.dataclass(frozen=True)
class Table:
    """Shape of an answer.

    Attributes:
        queries: s.
        classes: c.
        k: queries that a record votes for.
        labels: r, labels of a record.
    """

    queries: int
    classes: int
    k: int = 1
    labels: int = 1

    @property
    def cells(self) -> int:
        """s·c."""
        return self.queries * self.classes

    @property
    def ones(self) -> int:
        """k·r."""
        return self.k * self.labels

    def cells_of(self, nearest: Tensor, labels: Tensor) -> Tensor:
        """Cell numbers ``query·c + class``, int64 ``(n, k·r)``, of queries ``(n, k)`` and labels ``(n, r)``."""
        return (nearest[:, :, None] * self.classes + labels[:, None, :]).flatten(1)


class LocalRandomizer(abc.ABC):
    """One client's message and the server's estimate; see the module.

    Args:
        epsilon: ε of the whole message.
        table: shape of an answer.
    """

    def __init__(self, epsilon: float, table: Table) -> None:
        self.epsilon = check_positive("epsilon", epsilon)
        self.table = table

    @property
    def mechanism(self) -> Mechanism:
        """What one round of messages costs; each record is in one message, so all clients together cost this."""
        return PureDP(self.epsilon)

    @abc.abstractmethod
    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """The messages of clients, each a function of its own record and its own coins.

        Args:
            nearest: int64 ``(n, k)``, each record's queries, different from one another; one row for one client.
            labels: int64 ``(n, r)``, each record's labels, different from one another.
            noise: the clients' randomness.

        Returns:
            int64 ``(n, w)``, a message a row.
        """

    @property
    @abc.abstractmethod
    def bounds(self) -> tuple[int, ...]:
        """What each of the w numbers of a message is below; none is negative."""

    @abc.abstractmethod
    def aggregate(self, messages: Tensor) -> Tensor:
        """Unbiased estimates of the counts, float64 ``(s, c)``, from messages in any order."""

    @abc.abstractmethod
    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """What :meth:`aggregate` makes of :meth:`randomize`, in distribution, without the messages; fast."""

    @abc.abstractmethod
    def deviation(self, num_clients: int) -> float:
        """Standard deviation of an estimate where the true count is zero, for so many clients."""


class UnaryRandomizer(LocalRandomizer):
    """Randomised response on every bit of the table, flipped with probability 1/(e^{ε/2kr} + 1) (Warner 1965)."""

    @property
    def mechanism(self) -> RandomizedResponse:
        """The bits that two answers can differ in are 2·k·r."""
        return RandomizedResponse.for_epsilon(self.epsilon, 2, 2 * self.table.ones)

    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Bits, int64 ``(n, s·c)``."""
        bits = torch.zeros(len(nearest), self.table.cells, dtype=torch.int64)
        bits.scatter_(1, self.table.cells_of(nearest, labels), 1)
        return self.mechanism.randomize(bits, noise)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bits."""
        return (2,) * self.table.cells

    def aggregate(self, messages: Tensor) -> Tensor:
        """(sum − n·f)/(1 − 2f)."""
        return self._estimate(messages.sum(dim=0).double(), len(messages))

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Two binomials a cell: bits are independent."""
        true = true_counts(self.table, nearest, labels)
        flip = self.mechanism.flip_probability
        kept = binomial(true, 1 - flip, noise)
        return self._estimate((kept + binomial(len(nearest) - true, flip, noise)).double(), len(nearest))

    def deviation(self, num_clients: int) -> float:
        """√(n·f(1−f))/(1−2f), whatever the true count."""
        flip = self.mechanism.flip_probability
        return math.sqrt(num_clients * flip * (1 - flip)) / (1 - 2 * flip)

    def _estimate(self, sums: Tensor, clients: int) -> Tensor:
        flip = self.mechanism.flip_probability
        estimate = (sums - clients * flip) / (1 - 2 * flip)
        return estimate.view(self.table.queries, self.table.classes)


class CollisionRandomizer(LocalRandomizer):
    """The Collision mechanism on the whole table (Wang et al. 2021); see :class:`Bloom`."""

    def __init__(self, epsilon: float, table: Table, length: int | None = None) -> None:
        super().__init__(epsilon, table)
        self.bloom = Bloom(epsilon, table.ones, length)

    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Hash key and value, int64 ``(n, 2)``."""
        return self.bloom.messages(self.table.cells_of(nearest, labels), noise)

    @property
    def bounds(self) -> tuple[int, ...]:
        """See :attr:`Bloom.bounds`."""
        return self.bloom.bounds

    def aggregate(self, messages: Tensor) -> Tensor:
        """(hits − n/l)/(p − 1/l)."""
        parts = (
            self.bloom.hits_of(part, self.table.cells).sum(dim=0) for part in messages.split(_ROWS_AT_A_TIME)
        )
        return self._estimate(sum(parts, torch.zeros(self.table.cells)).double(), len(messages))

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Ones by their own hashes; zeros are hit independently, so their hits are binomial."""
        true = true_counts(self.table, nearest, labels)
        hits = binomial(len(nearest) - true, 1 / self.bloom.length, noise)
        cells = self.table.cells_of(nearest, labels)
        hashed = noise.integers(tuple(cells.shape), self.bloom.length)
        hit = hashed == self.bloom.choose(hashed, noise)[:, None]
        hits += torch.bincount(cells[hit], minlength=self.table.cells)
        return self._estimate(hits.double(), len(nearest))

    def deviation(self, num_clients: int) -> float:
        """√(n·(1/l)(1 − 1/l))/(p − 1/l)."""
        rest = 1 / self.bloom.length
        return math.sqrt(num_clients * rest * (1 - rest)) / self.bloom.contrast

    def _estimate(self, hits: Tensor, clients: int) -> Tensor:
        estimate = (hits - clients / self.bloom.length) / self.bloom.contrast
        return estimate.view(self.table.queries, self.table.classes)


class _PairRandomizer(LocalRandomizer):
    """Base for messages about queries and labels apart; the server joins them for each client."""

    @abc.abstractmethod
    def joined(self, queries: Tensor, labels: Tensor) -> Tensor:
        """Sum over clients of estimates of "query and label", ``(s, c)``, from hits ``(n, s)`` and ``(n, c)``."""

    @abc.abstractmethod
    def hits(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> tuple[Tensor, Tensor]:
        """Hits of queries and of labels, bool, drawn without messages."""

    @abc.abstractmethod
    def hits_of(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Hits of queries and of labels in messages."""

    def aggregate(self, messages: Tensor) -> Tensor:
        """Estimates of every client, added up."""
        parts = [self.joined(*self.hits_of(part)) for part in messages.split(_ROWS_AT_A_TIME)]
        return torch.stack(parts).sum(dim=0)

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """The same from hits that are drawn without hashes."""
        rows = zip(nearest.split(_ROWS_AT_A_TIME), labels.split(_ROWS_AT_A_TIME), strict=True)
        return torch.stack([self.joined(*self.hits(*part, noise)) for part in rows]).sum(dim=0)


class SeparationRandomizer(_PairRandomizer):
    """Queries and labels in two Collision messages with half the budget each; estimates are multiplied."""

    def __init__(self, epsilon: float, table: Table) -> None:
        super().__init__(epsilon, table)
        self.query_bloom = Bloom(epsilon / 2, table.k)
        self.label_bloom = Bloom(epsilon / 2, table.labels)

    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Two hash keys and values, int64 ``(n, 4)``."""
        return torch.cat(
            [self.query_bloom.messages(nearest, noise), self.label_bloom.messages(labels, noise)], dim=1
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """Of both messages."""
        return self.query_bloom.bounds + self.label_bloom.bounds

    def hits(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> tuple[Tensor, Tensor]:
        """See the base."""
        return (
            self.query_bloom.hits(nearest, self.table.queries, noise),
            self.label_bloom.hits(labels, self.table.classes, noise),
        )

    def hits_of(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """See the base."""
        return (
            self.query_bloom.hits_of(messages[:, :2], self.table.queries),
            self.label_bloom.hits_of(messages[:, 2:], self.table.classes),
        )

    def joined(self, queries: Tensor, labels: Tensor) -> Tensor:
        """Products of independent unbiased estimates are unbiased."""
        left = (queries.double() - 1 / self.query_bloom.length) / self.query_bloom.contrast
        right = (labels.double() - 1 / self.label_bloom.length) / self.label_bloom.contrast
        return left.T @ right

    def deviation(self, num_clients: int) -> float:
        """√n times the product of both single deviations at zero."""
        spreads = [
            (1 / bloom.length) * (1 - 1 / bloom.length) / bloom.contrast**2
            for bloom in (self.query_bloom, self.label_bloom)
        ]
        return math.sqrt(num_clients * spreads[0] * spreads[1])


class ConcatenationRandomizer(_PairRandomizer):
    """Queries and labels side by side in one Collision message of k + r ones.

    The two estimates of one message depend on each other, so their product, as the paper has it, is biased. With
    I and J the hits of a query and of a label, E[I·J] is p/l where either is a one and 1/l² where none is; so
    "both" = "query" + "label" − "either" has the unbiased estimate
    ((I − 1/l) + (J − 1/l) − l·(I·J − 1/l²))/(p − 1/l), which is used here. Its last term wants a short hash: l has
    the least variance where the query is voted for and the label is not.
    """

    def __init__(self, epsilon: float, table: Table) -> None:
        super().__init__(epsilon, table)
        ones, gain = table.k + table.labels, math.exp(self.epsilon)

        def spread(length: int) -> float:
            # Of a cell whose query is voted for and whose label is not: E[I·J] is p/l, so l·I·J weighs most.
            rest, hit = 1 / length, gain / (ones * gain + length - ones)
            second = hit + rest + length * hit + 2 * hit * rest - 4 * hit
            return (second - hit * hit) / (hit - rest) ** 2

        self.bloom = Bloom(epsilon, ones, min(range(ones + 1, 16 * ones + 2), key=spread))

    def _ones(self, nearest: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([nearest, labels + self.table.queries], dim=1)

    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Hash key and value, int64 ``(n, 2)``."""
        return self.bloom.messages(self._ones(nearest, labels), noise)

    @property
    def bounds(self) -> tuple[int, ...]:
        """See :attr:`Bloom.bounds`."""
        return self.bloom.bounds

    def hits(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> tuple[Tensor, Tensor]:
        """See the base."""
        found = self.bloom.hits(self._ones(nearest, labels), self.table.queries + self.table.classes, noise)
        return found[:, : self.table.queries], found[:, self.table.queries :]

    def hits_of(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """See the base."""
        found = self.bloom.hits_of(messages, self.table.queries + self.table.classes)
        return found[:, : self.table.queries], found[:, self.table.queries :]

    def joined(self, queries: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        length, clients = self.bloom.length, len(queries)
        single = queries.double().sum(dim=0)[:, None] + labels.double().sum(dim=0)[None, :]
        both = queries.double().T @ labels.double()
        return (single - 2 * clients / length - length * both + clients / length) / self.bloom.contrast

    def deviation(self, num_clients: int) -> float:
        """From the second moment of I + J − l·I·J with independent hits of 1/l each."""
        q = 1 / self.bloom.length
        # I + J − l·I·J is 0, 1 or 2 − l with probabilities (1−q)², 2q(1−q) and q²; its mean is 2q − q.
        second = 2 * q * (1 - q) + q * q * (2 - self.bloom.length) ** 2
        return math.sqrt(num_clients * (second - q * q)) / self.bloom.contrast


RANDOMIZERS: dict[str, type[LocalRandomizer]] = {
    "randomized_response": UnaryRandomizer,
    "collision": CollisionRandomizer,
    "separation": SeparationRandomizer,
    "concatenation": ConcatenationRandomizer,
}


def make_randomizer(name: str, epsilon: float, table: Table) -> LocalRandomizer:
    """The randomiser called ``name``, one of :data:`RANDOMIZERS`."""
    return RANDOMIZERS[check_choice("randomizer", name, tuple(RANDOMIZERS))](epsilon, table)


def true_counts(table: Table, nearest: Tensor, labels: Tensor) -> Tensor:
    """Exact counts, int64 ``(s·c,)``: **private**."""
    return torch.bincount(table.cells_of(nearest, labels).flatten(), minlength=table.cells)
