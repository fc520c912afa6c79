"""Reverse kNN without a curator: messages, shuffle protocols, and the labelers that simulate them."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_open_unit, check_positive
from pl_privknn.labelers.base import PayingRun, PrivateRecords, Release
from pl_privknn.labelers.reverse_knn import CountTable, RecordVotes, decide, true_counts
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.pld import bisect
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.base import Charge, Mechanism
from pl_privknn.privacy.mechanisms.local import NegativeBinomial, RandomizedResponse, ShuffleAmplification
from pl_privknn.privacy.mechanisms.stated import PureDP
from pl_privknn.privacy.noise import NoiseSource

_KEYS = 1 << 62
# Least ε for each place in which two messages differ: below it float64 hardly distinguishes e^ε from 1.
_LEAST = 1e-9


class Bloom:
    """Message of the Collision mechanism: a public hash key and one hashed value (Wang et al. 2021).

    m ones of a table are hashed to [0, l). With Ω = m·e^ε + l − m, each value that a one is hashed to is sent with
    probability e^ε/Ω, and the others share what is left. If t ≤ m values are hit, each of the others has
    ((m−t)e^ε + l − m)/((l−t)Ω), which lies between 1/Ω and e^ε/Ω: the message is ε-private for every hash. A one
    is "hit" (hashed to the sent value) with probability p = e^ε/Ω, a zero with 1/l, since its hash is independent.

    Args:
        epsilon: ε of the message.
        ones: m.
        length: l; by default the one with the least variance where counts are small.
    """

    def __init__(self, epsilon: float, ones: int, length: int | None = None) -> None:
        self.ones = check_int("ones", ones)
        self.gain = math.exp(check_positive("epsilon", epsilon))
        self.length = (
            _best_length(self.gain, ones) if length is None else check_int("length", length, ones + 1)
        )
        self.total = self.ones * self.gain + self.length - self.ones

    @property
    def hit(self) -> float:
        """Probability p that a one is hit."""
        return self.gain / self.total

    @property
    def bounds(self) -> tuple[int, int]:
        """Bound below which a message's hash key and value lie."""
        return _KEYS, self.length

    def choose(self, hashed: Tensor, noise: NoiseSource) -> Tensor:
        """Choose the value to send for each row of hashed ones: int64 ``(n, m)`` below l to int64 ``(n,)``."""
        rows = torch.arange(len(hashed))
        uniform = noise.uniform((len(hashed),))
        marked = torch.zeros(len(hashed), self.length, dtype=torch.bool)
        marked[rows[:, None], hashed] = True
        hit = marked.sum(dim=1)
        # Whether a marked value is sent, then which one, uniformly among the marked (or the other) values.
        sends_marked = uniform < hit * self.hit
        among = torch.where(sends_marked, hit, self.length - hit)
        place = (noise.uniform((len(hashed),)) * among).long().clamp_(max=self.length - 1)
        eligible = marked == sends_marked[:, None]
        return (eligible.cumsum(dim=1) == (place + 1)[:, None]).long().argmax(dim=1)

    def messages(self, ones: Tensor, noise: NoiseSource) -> Tensor:
        """(hash key, value), int64 ``(n, 2)``."""
        keys = noise.integers((len(ones),), _KEYS)
        hashed = hash_cells(keys, ones, self.length)
        return torch.stack([keys, self.choose(hashed, noise)], dim=1)

    def hits_of(self, messages: Tensor, domain: int) -> Tensor:
        """Mask of the cells that each message hits, bool ``(n, domain)``."""
        cells = torch.arange(domain).expand(len(messages), domain)
        return hash_cells(messages[:, 0], cells, self.length) == messages[:, 1:2]


def hash_cells(keys: Tensor, cells: Tensor, length: int) -> Tensor:
    """Public hash of each cell under its row's key: int64 ``(n,)`` and ``(n, m)`` to ``(n, m)`` below ``length``.

    Two rounds of the splitmix64 finaliser. Privacy holds for every hash function; that of the estimates' variance
    needs values that look independent.
    """
    with np.errstate(over="ignore"):
        mixed = keys.numpy().astype(np.uint64)[:, None] + cells.numpy().astype(np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        for _ in range(2):
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed % np.uint64(length)).astype(np.int64))


def _best_length(gain: float, ones: int) -> int:
    def spread(length: int) -> float:
        rest = 1 / length
        contrast = gain / (ones * gain + length - ones) - rest
        return rest * (1 - rest) / contrast**2

    about = 2 * ones - 1 + ones * gain
    near = range(max(ones + 1, int(about / 2) - 1), int(about * 2) + 3)
    if len(near) > 4096:
        return max(ones + 1, round(about))
    return min(near, key=spread)


def binomial(trials: Tensor, p: float, noise: NoiseSource) -> Tensor:
    """Binomial draws by inverse distribution function of 53-bit uniforms, int64, the shape of ``trials``."""
    from scipy.stats import binom

    drawn = binom.ppf(noise.uniform(tuple(trials.shape)).numpy(), trials.numpy(), p)
    return torch.from_numpy(np.asarray(drawn)).long()


Floats = NDArray[np.float64]
_ROWS_AT_A_TIME = 1 << 15


class Protocol(abc.ABC):
    """Base class of protocols in which each client randomises its answer.

    Attributes:
        table: shape of an answer.
    """

    table: CountTable

    @property
    @abc.abstractmethod
    def mechanism(self) -> Mechanism:
        """Cost of one round of messages; all clients together cost this."""

    def draw(
        self,
        nearest: Tensor,
        labels: Tensor,
        noise: NoiseSource,
        by: Callable[[Tensor, Tensor, NoiseSource], Tensor],
    ) -> Tensor:
        """Pass clients' answers through the mechanism's :meth:`~pl_privknn.privacy.mechanisms.Mechanism.draw`."""
        return self.mechanism.draw(
            (nearest, labels),
            noise,
            lambda sent, noise: by(sent[0], sent[1], noise),
            lambda sent: self.compared(*sent),
        )

    def compared(self, nearest: Tensor, labels: Tensor) -> Tensor:
        """**Private.** Cells that clients vote for, int64 ``(n, k·r)``, in order; for tests that compare tables.

        Raises:
            ValueError: where a client votes for a cell twice, which no message covers.
        """
        cells = self.table.cells_of(nearest, labels).sort(dim=1).values
        if bool((cells.diff(dim=1) == 0).any()):
            raise ValueError("a record's message names a cell twice; the randomizer covers different cells")
        return cells

    def simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Draw the estimate from clients' messages in distribution; without the messages where that is faster.

        Args:
            nearest: int64 ``(n, k)``, each record's queries, different from one another.
            labels: int64 ``(n, r)``, each record's labels, different from one another.
            noise: the clients' randomness.

        Returns:
            Unbiased counts, float64 ``(s, c)``.
        """
        return self.draw(nearest, labels, noise, self._simulate)

    @abc.abstractmethod
    def _simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """See :meth:`simulate`."""


class LocalRandomizer(Protocol):
    """Base class of local randomisers: one client's message, and the server's estimate; see the module.

    Args:
        epsilon: ε of the whole message.
        table: shape of an answer.

    Raises:
        ValueError: for an ε that is not positive, or too small to be computed with.
    """

    def __init__(self, epsilon: float, table: CountTable) -> None:
        self.epsilon = check_positive("epsilon", epsilon)
        self.table = table
        if self.epsilon < (least := 2 * table.ones * _LEAST):
            raise ValueError(
                f"epsilon={epsilon!r} of a message with {table.ones} votes must be at least {least:g}; below it "
                "a message carries no information. Use a larger ε, or a smaller k"
            )

    @property
    def mechanism(self) -> Mechanism:
        """Cost of one round of messages; each record is in one message, so all clients together cost this."""
        return PureDP(self.epsilon)

    def randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Messages of clients, each a function of the client's record and coins.

        Args:
            nearest: int64 ``(n, k)``, each record's queries, different from one another; one row for one client.
            labels: int64 ``(n, r)``, each record's labels, different from one another.
            noise: the clients' randomness.

        Returns:
            int64 ``(n, w)``, a message a row.
        """
        return self.draw(nearest, labels, noise, self._randomize)

    @abc.abstractmethod
    def _randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """See :meth:`randomize`."""

    @property
    @abc.abstractmethod
    def bounds(self) -> tuple[int, ...]:
        """Bounds below which each of the w numbers of a message lies; none is negative."""

    @abc.abstractmethod
    def aggregate(self, messages: Tensor) -> Tensor:
        """Unbiased estimates of the counts, float64 ``(s, c)``, from messages in any order."""

    @property
    @abc.abstractmethod
    def rates(self) -> tuple[float, float]:
        """Probability q that a message counts for a cell without a vote, and the increase p − q by a vote."""

    def deviation(self, num_clients: int) -> float:
        """√(n·q(1 − q))/(p − q), the standard deviation of an estimate where the true count is zero."""
        rest, contrast = self.rates
        return math.sqrt(num_clients * rest * (1 - rest)) / contrast

    def _estimate(self, sums: Tensor, clients: int) -> Tensor:
        """Unbiased counts (sums − n·q)/(p − q), float64 ``(s, c)``."""
        rest, contrast = self.rates
        return ((sums.double() - clients * rest) / contrast).view(self.table.queries, self.table.classes)


class UnaryRandomizer(LocalRandomizer):
    """Randomised response on every bit of the table, flipped with probability 1/(e^{ε/2kr} + 1) (Warner 1965)."""

    @property
    def mechanism(self) -> RandomizedResponse:
        """Randomised response on bits, of which two answers differ in at most 2·k·r."""
        return RandomizedResponse.for_epsilon(self.epsilon, 2, 2 * self.table.ones)

    def compared(self, nearest: Tensor, labels: Tensor) -> Tensor:
        """**Private.** Bits, int64 ``(n, s·c)``: one for each cell that a client votes for."""
        return self._bits(super().compared(nearest, labels))

    def _bits(self, cells: Tensor) -> Tensor:
        return torch.zeros(len(cells), self.table.cells, dtype=torch.int64).scatter_(1, cells, 1)

    def _randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Bits, int64 ``(n, s·c)``."""
        return self.mechanism.randomize(self._bits(self.table.cells_of(nearest, labels)), noise)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bound of each bit, 2."""
        return (2,) * self.table.cells

    def aggregate(self, messages: Tensor) -> Tensor:
        """See :meth:`LocalRandomizer.aggregate`."""
        return self._estimate(messages.sum(dim=0), len(messages))

    def _simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Draw two binomials per cell: bits are independent."""
        true = true_counts(self.table, nearest, labels)
        flip = self.mechanism.flip_probability
        kept = binomial(true, 1 - flip, noise)
        return self._estimate(kept + binomial(len(nearest) - true, flip, noise), len(nearest))

    @property
    def rates(self) -> tuple[float, float]:
        """Probability q = f of a flip, and p − q = 1 − 2f."""
        flip = self.mechanism.flip_probability
        return flip, 1 - 2 * flip


class CollisionRandomizer(LocalRandomizer):
    """The Collision mechanism on the whole table (Wang et al. 2021); see :class:`Bloom`."""

    def __init__(self, epsilon: float, table: CountTable) -> None:
        super().__init__(epsilon, table)
        self.bloom = Bloom(epsilon, table.ones)

    def _randomize(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Hash key and value, int64 ``(n, 2)``."""
        return self.bloom.messages(self.table.cells_of(nearest, labels), noise)

    @property
    def bounds(self) -> tuple[int, ...]:
        """See :attr:`Bloom.bounds`."""
        return self.bloom.bounds

    def aggregate(self, messages: Tensor) -> Tensor:
        """See :meth:`LocalRandomizer.aggregate`."""
        parts = (
            self.bloom.hits_of(part, self.table.cells).sum(dim=0) for part in messages.split(_ROWS_AT_A_TIME)
        )
        return self._estimate(sum(parts, torch.zeros(self.table.cells)), len(messages))

    def _simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Simulate hits of ones by their hashes, and hits of zeros as independent binomials."""
        true = true_counts(self.table, nearest, labels)
        hits = binomial(len(nearest) - true, 1 / self.bloom.length, noise)
        cells = self.table.cells_of(nearest, labels)
        hashed = noise.integers(tuple(cells.shape), self.bloom.length)
        hit = hashed == self.bloom.choose(hashed, noise)[:, None]
        hits += torch.bincount(cells[hit], minlength=self.table.cells)
        return self._estimate(hits, len(nearest))

    @property
    def rates(self) -> tuple[float, float]:
        """Probability q = 1/l, and p − q."""
        return 1 / self.bloom.length, self.bloom.hit - 1 / self.bloom.length


RANDOMIZERS: dict[str, type[LocalRandomizer]] = {
    "randomized_response": UnaryRandomizer,
    "collision": CollisionRandomizer,
}


def make_randomizer(name: str, epsilon: float, table: CountTable) -> LocalRandomizer:
    """The randomiser called ``name``, one of :data:`RANDOMIZERS`."""
    return RANDOMIZERS[check_choice("randomizer", name, tuple(RANDOMIZERS))](epsilon, table)


_RATIOS = (0.3, 0.5, 0.7)
# Logarithms of sizes of the negative binomial noise, among which the search begins.
_LOG_SIZES = (math.log(1e-3), *(power * math.log(2) for power in range(20)))


def amplified_epsilon(epsilon: float, delta: float, clients: int) -> float:
    """Largest ε₀ of one local message at which the shuffled messages of one round cost ``epsilon``.

    By bisection on the accountant with the clone pair of Feldman, McMillan and Talwar (2021), which is tighter than
    their closed form. Never below ``epsilon``, which needs no shuffler.

    Args:
        epsilon: ε of the whole.
        delta: δ of the whole.
        clients: messages shuffled together; a public number that is surely reached.
    """
    check_positive("epsilon", epsilon)
    check_open_unit("delta", delta)

    def cost(local: float) -> float:
        charge = Charge(ShuffleAmplification(local, clients))
        return account([charge], delta=delta, adjacency="replace_one", exact=False).epsilon

    room = math.log(max(clients, 2)) + 1
    return bisect(lambda local: cost(local) <= epsilon, epsilon, epsilon + room, absolute=1.01 * room / 2**24)


def calibrated_shares(epsilon: float, delta: float, moved: int) -> NegativeBinomial:
    """The negative binomial noise of least variance, among some ratios, that keeps (ε, δ) in one round.

    Args:
        epsilon: ε of the whole.
        delta: δ of the whole.
        moved: cells that a record votes for.
    """
    check_positive("epsilon", epsilon)
    check_open_unit("delta", delta)
    found: list[NegativeBinomial] = []
    for part in _RATIOS:
        ratio = math.exp(-part * epsilon / (2 * moved))

        def keeps(log_size: float, ratio: float = ratio) -> bool:
            charge = Charge(NegativeBinomial(math.exp(log_size), ratio, moved))
            return account([charge], delta=delta, adjacency="replace_one", exact=False).epsilon <= epsilon

        for low, high in itertools.pairwise(_LOG_SIZES):
            if keeps(high):
                size = math.exp(bisect(keeps, high, low, absolute=math.log(1.01)))
                found.append(NegativeBinomial(size, ratio, moved))
                break
    if not found:
        raise ValueError(f"epsilon={epsilon!r}: no noise keeps it at delta={delta!r}; use a larger one")
    return min(found, key=lambda mechanism: mechanism.variance)


class Shuffled(Protocol):
    """Base class of both shuffle protocols; ``num_clients`` is the public number of clients certain to send."""

    def __init__(self, table: CountTable, num_clients: int) -> None:
        self.table, self.num_clients = table, check_int("num_clients", num_clients, 2)

    @staticmethod
    def shuffle(messages: Tensor, noise: NoiseSource) -> Tensor:
        """Messages in random order, independent of their senders; rows are messages."""
        return messages[noise.uniform((len(messages),)).argsort()]


class SingleMessage(Shuffled):
    """One locally private message per client, amplified by shuffling (Feldman, McMillan, Talwar 2021).

    Args:
        name: randomiser of the message; see :data:`~pl_privknn.labelers.local.RANDOMIZERS`.
        local_epsilon: ε₀ of each message, for instance of :func:`amplified_epsilon`.
        table: shape of an answer.
        num_clients: see the base.
    """

    def __init__(self, name: str, local_epsilon: float, table: CountTable, num_clients: int) -> None:
        super().__init__(table, num_clients)
        self.randomizer: LocalRandomizer = make_randomizer(name, local_epsilon, table)

    @property
    def mechanism(self) -> Mechanism:
        """Cost of one round."""
        return ShuffleAmplification(self.randomizer.epsilon, self.num_clients)

    def messages(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """Every client's message, shuffled."""
        sent = self.randomizer.randomize(nearest, labels, noise.stream("clients"))
        return self.shuffle(sent, noise.stream("shuffler"))

    def aggregate(self, messages: Tensor) -> Tensor:
        """Unbiased counts, float64 ``(s, c)``."""
        return self.randomizer.aggregate(messages)

    def _simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        return self.randomizer.simulate(nearest, labels, noise)

    def deviation(self, num_clients: int) -> float:
        """Standard deviation of an estimate whose true count is zero."""
        return self.randomizer.deviation(num_clients)


class MultiMessage(Shuffled):
    """One message per vote and each client's share of the noise of every cell; see :class:`NegativeBinomial`.

    Args:
        noise: the whole noise of one cell, for instance of :func:`calibrated_shares`.
        table: shape of an answer.
        num_clients: see the base.
    """

    def __init__(self, noise: NegativeBinomial, table: CountTable, num_clients: int) -> None:
        super().__init__(table, num_clients)
        if noise.moved != table.ones:
            raise ValueError(f"noise.moved={noise.moved} must be k·r = {table.ones}, the votes of a record")
        self._noise = noise

    @property
    def mechanism(self) -> NegativeBinomial:
        """Mechanism of the noise in every cell."""
        return self._noise

    def compared(self, nearest: Tensor, labels: Tensor) -> Tensor:
        """**Private.** Counts, int64 ``(s·c,)``, of different cells of each client."""
        super().compared(nearest, labels)
        return true_counts(self.table, nearest, labels)

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

    def _simulate(self, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Tensor:
        """For ``num_clients`` clients: the shares of a cell add up to the whole noise."""
        counts = self.mechanism.draw(true_counts(self.table, nearest, labels), noise)
        return (counts.double() - self.mechanism.mean).view(self.table.queries, self.table.classes)

    def deviation(self, num_clients: int) -> float:
        """Standard deviation of every estimate."""
        return math.sqrt(self.mechanism.variance)


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
        """Set ε and δ of each round: the budget's, divided by ``rounds``; see the base.

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

    def learn(self, records: PrivateRecords) -> None:
        """Draw a record of each person, and check the number of clients."""
        super().learn(records)
        self.check_clients(len(records) if self._drawn is None else int(self._drawn.sum()))

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One round of messages per round; see :meth:`Labeler.plan`."""
        return [Charge(self.protocol(num_queries, num_classes).mechanism, rounds)]

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Simulate all messages of a round and decide; see :meth:`Labeler.answer`.

        Raises:
            ValueError: for fewer queries than ``k``.
        """
        nearest, labels = self.votes(queries)
        self.check_clients(len(labels))
        protocol = self.protocol(len(queries), self.records.num_classes)
        noise = run.pay(protocol.mechanism, 1, "messages")
        noisy = protocol.simulate(nearest, labels, noise)
        return decide(noisy, protocol.deviation(len(labels)), self.abstain, self.soft, max_answers)

    def release_messages(
        self,
        fetch: Callable[[], Tensor],
        num_queries: int,
        num_classes: int,
        run: PayingRun,
        max_answers: int | None = None,
    ) -> Release:
        """Charge one round, fetch its messages and decide: the server's part.

        Args:
            fetch: asks the clients, once the round is paid, and returns messages of :meth:`protocol`, ``(n, w)``.
            num_queries: s.
            num_classes: c.
            run: see :meth:`~pl_privknn.labelers.base.Labeler.paying`.
            max_answers: as for :meth:`label`.
        """
        protocol = self.protocol(num_queries, num_classes)
        run.pay(protocol.mechanism, 1, "messages")
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
        return make_randomizer(self.randomizer, self.epsilon, CountTable(num_queries, num_classes, self.k))


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
        table, (epsilon, delta) = (
            CountTable(num_queries, num_classes, self.k),
            self.set_by_budget(self._round),
        )
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
