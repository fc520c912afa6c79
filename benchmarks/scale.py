"""What a round costs a process that holds a shard, for every teacher that takes shards; and what 10⁹ records cost.

A round of one process is measured at two sizes of its shard, in processor seconds of one thread; a straight line
through them gives seconds a round and seconds a record. Bytes are counted at the collectives of two shards. Features
are drawn at random: extracting them is not part of it, nor is waiting for the network.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.record import Measured, entries
from pl_privknn import Gaussian
from pl_privknn._processes import Shard
from pl_privknn.labelers import (
    PATE,
    ClassSums,
    IndKNN,
    Labeler,
    LinearTeachers,
    NoisySGDTeacher,
    PrivateKNN,
    PublicCurvature,
    ReverseKNN,
    Screening,
)
from pl_privknn.labelers.base import UsesPublicFeatures
from pl_privknn.neighbors import ShardedNeighbors
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from pl_privknn.testing.shards import InShards

CLASSES, K, RATE, COMPONENTS, STEPS = 10, 300, 0.15, 200, 200
RECORDS, PROCESSES = 10**9, 1000
#: About 4 records of 1,000 are as near to a query, where features of 1,296 dimensions are drawn at random.
THRESHOLD = 0.075
#: Shards whose candidates are merged, and queries at a time, where merging is measured.
MERGED, AT_ONCE = 200, 10


class Scaled(NamedTuple):
    """A teacher.

    Attributes:
        make: with few processes, and one or two teachers of PATE in each.
        settings: in words.
        products: multiplications and additions of matrix products a record, from dimensions and queries; 0 where
            they don't grow with the records.
        table: numbers of four bytes a record that lie in memory, from dimensions.
    """

    make: Callable[[], Labeler]
    settings: str
    products: Callable[[int, int], float]
    table: Callable[[int], float] = lambda dimensions: dimensions


SUMS = {"noise_multiplier": 1.0}
#: All queries pass the screening here, which is most work.
TEACHERS = {
    "PrivateKNN": Scaled(
        lambda: PrivateKNN(K, RATE, Screening(1, 0.1), Gaussian(25.0)),
        f"k {K}, γ {RATE}, screening",
        lambda d, m: 2 * d * m,
    ),
    "ReverseKNN": Scaled(lambda: ReverseKNN(1, 1.0), "k 1", lambda d, m: 2 * d * m, lambda d: 0),
    "ClassSums": Scaled(lambda: ClassSums(**SUMS), "least squares", lambda d, m: 2 * d * CLASSES),
    "PublicCurvature": Scaled(
        lambda: PublicCurvature(**SUMS), "6 releases", lambda d, m: 6 * 4 * d * CLASSES
    ),
    "IndKNN": Scaled(
        lambda: IndKNN(THRESHOLD, 0.8, epsilon=1.0),
        f"τ {THRESHOLD}",
        lambda d, m: 2 * d * m,
    ),
    "NoisySGDTeacher": Scaled(
        lambda: NoisySGDTeacher(0.1, steps=STEPS, components=COMPONENTS, **SUMS),
        f"{STEPS} steps at rate 0.1, {COMPONENTS} components",
        lambda d, m: 2 * d * COMPONENTS + 0.1 * STEPS * 4 * COMPONENTS * CLASSES,
        lambda d: d + COMPONENTS,
    ),
    "PATE": Scaled(
        lambda: PATE(2, LinearTeachers(STEPS), progress=False),
        f"two `LinearTeachers` a process, {STEPS} steps",
        lambda d, m: 0,
    ),
}  # fmt: skip


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One measurement a teacher, and one of merging the candidates of Private-kNN's shards."""
    torch.set_num_threads(1)
    sizes = sorted(options.records)
    features = torch.randn(sizes[-1], options.dimensions, generator=torch.Generator().manual_seed(0))
    queries = torch.randn(options.queries, options.dimensions, generator=torch.Generator().manual_seed(1))
    settings = {name: getattr(options, name) for name in ("records", "dimensions", "queries", "repeat")}
    for name, teacher in TEACHERS.items():
        if name not in options.only:
            continue
        shared = InShards([teacher.make() for _ in range(2)])
        _round(
            shared, features[: min(sizes[0], 2000)], queries
        )  # what is done once in a process is done then
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(options.repeat):
            for size in sizes:
                seconds[size].append(
                    _spent(functools.partial(_round, teacher.make(), features[:size], queries))
                )
        least = {size: min(found) for size, found in seconds.items()}
        slope = max(0.0, (least[sizes[-1]] - least[sizes[0]]) / (sizes[-1] - sizes[0]))
        sent = [member.shard.exchange.sent for member in shared.members if member.shard is not None]
        yield Measured(
            {
                "seconds_a_record": slope,
                "seconds_a_round": max(0.0, least[sizes[0]] - slope * sizes[0]),
                "bytes_sent_a_round": max(sent),
                "processor_seconds": seconds,
            },
            [0],
            name,
            settings,
        )
    if "PrivateKNN" not in options.only:
        return
    one, many = (_merge(features[:1000], queries[:AT_ONCE], shards) for shards in (1, MERGED))
    yield Measured(
        {"seconds_a_query_and_shard": (many - one) / (MERGED - 1) / AT_ONCE, "shards": MERGED},
        [0],
        "merging",
        settings,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--records", type=int, nargs=2, default=[10_000, 40_000], help="of a process")
    parser.add_argument("--dimensions", type=int, default=1296)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(TEACHERS), default=list(TEACHERS), metavar="NAME")


def _spent(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _round(teacher: Labeler, features: Tensor, queries: Tensor) -> None:
    teacher.noise_source = SeededNoise(0)
    labels = torch.arange(len(features)) % CLASSES
    if isinstance(teacher, UsesPublicFeatures):
        teacher.fit_public(queries)
    teacher.fit(features, labels, CLASSES)
    teacher.label(queries, FreeLedger())


class _Alike:
    """As if all shards had sent what the first one has."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def tell(self, order: Any = None) -> Any:
        return order

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part] * self.size

    def sum(self, part: Tensor) -> Tensor:
        return self.size * part


def _merge(features: Tensor, queries: Tensor, shards: int) -> float:
    """Processor seconds of one release about all queries, after the search; the least of three."""
    shard = Shard(_Alike(shards), 0, 1, shards * len(features))
    labels = torch.arange(len(features)) % CLASSES
    found = ShardedNeighbors(
        features, labels, CLASSES, K, 1.0, shard, lambda number: SeededNoise(0).bernoulli
    )
    ranked = found.rank(queries)
    return min(_spent(functools.partial(found.votes, ranked)) for _ in range(3))


def table() -> str:
    """What a round takes at 10⁹ records in so many processes, as Markdown; an extrapolation."""
    stored = entries("scale")
    settings = next(iter(stored.values()))["settings"]
    d, m, share = settings["dimensions"], settings["queries"], RECORDS // PROCESSES
    lines = [
        f"| teacher | settings | table, GB | products, TFLOP | sent a round | processor hours of a process "
        f"| µs a record, s a round |\n|{' --- |' * 7}"
    ]
    for name, teacher in TEACHERS.items():
        found = stored[name]["results"]
        seconds = found["seconds_a_round"] + share * found["seconds_a_record"]
        cells = [
            f"`{name}`",
            teacher.settings,
            f"{4 * share * teacher.table(d) / 1e9:.1f}",
            f"{share * products / 1e12:.3g}" if (products := teacher.products(d, m)) else "–",
            _bytes(found["bytes_sent_a_round"]),
            f"{seconds / 3600:.2g}",
            f"{1e6 * found['seconds_a_record']:.3g}, {found['seconds_a_round']:.2g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    merging = stored["merging"]["results"]["seconds_a_query_and_shard"]
    first = (
        f"Beside that global rank 0 merges the candidates of `PrivateKNN`: {16 * K * PROCESSES / 1e6:.1f} MB and "
        f"{merging * PROCESSES:.2g} processor seconds a query and release."
    )
    return "\n".join([*lines, "", first])


def _bytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"
