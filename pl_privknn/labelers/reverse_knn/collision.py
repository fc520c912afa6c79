"""The Collision message of local reverse kNN: cells hashed to a few values, of which one is sent."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive
from pl_privknn.privacy.noise import NoiseSource

_KEYS = 1 << 62


class Bloom:
    """The message of Collision: a public hash of its own, and one hashed value (Wang et al. 2021).

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
        """p, probability that a one is hit."""
        return self.gain / self.total

    @property
    def bounds(self) -> tuple[int, int]:
        """What a message's hash key and value are below."""
        return _KEYS, self.length

    @property
    def contrast(self) -> float:
        """How much likelier a one is hit than a zero: p − 1/l."""
        return self.hit - 1 / self.length

    def choose(self, hashed: Tensor, noise: NoiseSource) -> Tensor:
        """The value to send for each row of hashed ones: int64 ``(n, m)`` below l to int64 ``(n,)``."""
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

    def hits(self, ones: Tensor, domain: int, noise: NoiseSource) -> Tensor:
        """Which cells of a domain are hit, bool ``(n, domain)``, drawn without messages; ones int64 ``(n, m)``."""
        hashed = noise.integers(tuple(ones.shape), self.length)
        sent = self.choose(hashed, noise)
        found = noise.bernoulli((len(ones), domain), 1 / self.length)
        return found.scatter_(1, ones, hashed == sent[:, None])

    def messages(self, ones: Tensor, noise: NoiseSource) -> Tensor:
        """(hash key, value), int64 ``(n, 2)``."""
        keys = noise.integers((len(ones),), _KEYS)
        hashed = hash_cells(keys, ones, self.length)
        return torch.stack([keys, self.choose(hashed, noise)], dim=1)

    def hits_of(self, messages: Tensor, domain: int) -> Tensor:
        """Which cells each message hits, bool ``(n, domain)``."""
        cells = torch.arange(domain).expand(len(messages), domain)
        return hash_cells(messages[:, 0], cells, self.length) == messages[:, 1:2]


def hash_cells(keys: Tensor, cells: Tensor, length: int) -> Tensor:
    """A public hash of each cell under its row's key: int64 ``(n,)`` and ``(n, m)`` to ``(n, m)`` below ``length``.

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
