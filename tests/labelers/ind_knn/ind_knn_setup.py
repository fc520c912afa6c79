"""What the tests of Ind-KNN share: teachers as several processes use them one after another, and shards."""

import functools

import numpy as np
import torch

from pl_privknn._processes import Shard
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import IndKNN, IndKNNPredictor
from pl_privknn.labelers.ind_knn import IndKNNParameters, IndKNNSwitches
from pl_privknn.labelers.ind_knn.algorithm import IndKNNEngine, unit_rows
from pl_privknn.privacy import Gaussian
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.private_state import FILE_NAME
from pl_privknn.privacy.record_budgets import BudgetTable
from pl_privknn.testing import FreeLedger
from tests.neighbors.shard_setup import paying
from tests.setup.threads import Threads

C, D = 3, 6
PARAMETERS = IndKNNParameters(0.4, 4.0, 0.5, 0.2)
GROUPS = {
    "similarity": ("kernel", "bandwidth", "min_count"),
    "budget": ("epsilon", "delta"),
    "record_budgets": ("rho", "count_noise", "conversion"),
    "switches": ("density", "reuse", "hashing", "abstain"),
    "identities": ("ids", "state_dir"),
}


def teacher(threshold=0.4, vote_sigma=0.5, count_sigma=None, **given):
    """An IndKNN whose arguments are named without their groups."""
    if count_sigma is not None:
        given["count_noise"] = Gaussian(count_sigma)
    groups = {
        group: {name: given.pop(name) for name in names if name in given} for group, names in GROUPS.items()
    }
    named = {group: values for group, values in groups.items() if values}
    return IndKNN(threshold, Gaussian(vote_sigma), **{"noise_source": SeededNoise(0), **given}, **named)


def rows(count, seed=0, dimension=D):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % C
    return torch.eye(dimension)[labels] + 0.3 * torch.randn(count, dimension, generator=generator), labels


def engine_of(parameters, dimension, ids=(), features=None, labels=None, num_classes=C, **switches):
    """An engine with a table, all of whose records have a budget, in memory."""
    budgets = BudgetTable(None, parameters.rho, parameters.quantum)
    engine = IndKNNEngine(parameters, IndKNNSwitches(**switches), num_classes, dimension, budgets)
    if len(ids):
        ids = np.asarray(ids, np.int64)
        features = torch.as_tensor(features, dtype=torch.float32)
        budgets.recognise(ids, None, (features, torch.as_tensor(labels)))
        engine.add(ids, unit_rows(features), np.asarray(labels, np.int64), ids)
    return engine


class Draws(SeededNoise):
    """Gives every stream the very numbers of its seed."""

    def stream(self, *key):
        return self


def draws_of(source, queries, classes):
    """Standard normal draws of the algorithm from ``source``: of the count and then of the votes of each query."""
    return np.stack(
        [np.concatenate([source.normal(size, 1.0) for size in (1, classes)]) for _ in range(queries)]
    )


class Silent(Draws):
    """Draws zeros, so that a stream is known beforehand."""

    def normal(self, shape, scale):
        return torch.zeros(shape, dtype=torch.float64)


# ---------------------------------------------------------------- a predictor

QUERIES = rows(9, seed=8)[0]


def new(parameters=PARAMETERS, **settings):
    return IndKNNPredictor(parameters, C, D, **{"noise_source": SeededNoise(0), **settings})


def filled(count=40, **settings):
    predictor = new(**settings)
    predictor.add(np.arange(count), *rows(count))
    return predictor


def left_of(predictor):
    return dict(zip(*predictor.remaining(), strict=True))


# ---------------------------------------------------------------- a stream of a labeler in a folder

ALL = list(range(12))
ROWS, LABELS = rows(12, seed=1)
ROWS[7], LABELS[7] = ROWS[4], LABELS[4]  # two equal records
NUMBERS = np.array([50, -7, 13, 2**40, 4, 5, 6, 99, 1, 0, 22, 23])
UNKNOWN = "are not those that the budgets belong to"
SETTINGS = {"rho": 2.0, "count_sigma": 6.0, "min_count": 2.0, "noise_source": Silent(0)}


class Stream:
    """A labeler, its folder and its ledger."""

    def __init__(self, folder, kind="digests", **settings):
        self.kind, self.state = kind, folder / "state"
        self.settings = {**SETTINGS, "state_dir": self.state, **settings}
        self.run = Ledger(folder / "ledger.sqlite").run("run", [])
        self.labeler = None

    def fit(self, rows, labels, numbers=None):
        """One process: a labeler with a table, given as the kind of identities wants it."""
        self.close()
        self.labeler = teacher(**self.settings)
        self.refit(rows, labels, numbers)

    def refit(self, rows, labels, numbers=None, features=None):
        if self.kind == "numbers":
            self.labeler.ids = numbers
        examples = rows if self.kind == "digests of the data module" else None
        features = rows if features is None else features
        self.labeler.fit(PrivateRecords.of(features, labels, C, examples=examples))

    def fit_places(self, places):
        places = np.asarray(places)
        self.fit(ROWS[places], LABELS[places], NUMBERS[places])

    def left(self, places):
        return dict(zip(places, self.labeler.remaining().tolist(), strict=True))

    def ask(self, queries=QUERIES):
        return self.labeler.label(queries, self.run)

    def close(self):
        if self.labeler is not None:
            self.labeler.close()


def amounts(folder, parameters):
    """What the file in a folder says that its records have left."""
    budgets = BudgetTable(folder / FILE_NAME, parameters.rho, parameters.quantum)
    try:
        found = budgets.read("SELECT id, allowed - spent FROM budgets ORDER BY id").fetchall()
        return {number: left * parameters.quantum for number, left in found}
    finally:
        budgets.close()


# ---------------------------------------------------------------- shards in threads

_OPEN = {}  # who has a folder


class Together:
    """Teachers that hold a shard each, as the processes of a run use them."""

    def __init__(self, make, shards, rows, labels, run=None, folder=None):
        self.threads = Threads(len(shards))
        self.members = [make() for _ in shards]
        self.held = [
            Shard(group, first, stride, len(labels))
            for group, (first, stride, _) in zip(self.threads.groups, shards, strict=True)
        ]
        self.shards, self.rows, self.labels, self.run = shards, rows, labels, run
        if folder is not None:
            if folder in _OPEN:
                _OPEN[folder].close()
            _OPEN[folder] = self
            self.each(lambda member: member.join_run(folder, self.paying(member, run)))

    def each(self, work):
        return self.threads.run([functools.partial(work, member) for member in self.members])

    def paying(self, member, run):
        return paying(member, run, self.held[self.members.index(member)])

    def fit(self, numbers=None):
        for member, shard, (_, _, places) in zip(self.members, self.held, self.shards, strict=True):
            records = PrivateRecords.of(
                self.rows[places],
                self.labels[places],
                C,
                ids=None if numbers is None else torch.as_tensor(numbers[places]),
                shard=shard,
                examples=self.rows[places],
            )
            member.fit(records)
        return self

    def ask(self, queries=QUERIES):
        ledger = self.run if self.run is not None else FreeLedger()
        return self.each(lambda member: member.label(queries, self.paying(member, ledger)))[0]

    def left(self):
        """What every record has left, in the table's order."""
        left = np.empty(len(self.labels))
        for member, (_, _, places) in zip(self.members, self.shards, strict=True):
            left[places] = member.remaining()
        return left

    def close(self):
        for member in self.members:
            member.close()
