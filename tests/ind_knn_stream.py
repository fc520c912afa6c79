"""A labeler with a table of few records, as several processes use it one after another."""

import numpy as np
import torch
from grouped import grouped

from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise

C, D = 3, 5
SETTINGS = {"threshold": 0.4, "sigma2": 0.5, "budget": 2.0, "sigma1": 6.0, "min_count": 2.0}
UNKNOWN = "are not those that the budgets belong to"
NUMBERS = np.array([50, -7, 13, 2**40, 4, 5, 6, 99, 1, 0, 22, 23])


class Silent(SeededNoise):
    """Draws zeros, so that a stream is known beforehand."""

    def stream(self, *key):
        return self

    def normal(self, shape, scale):
        return torch.zeros(shape, dtype=torch.float64)


def records(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % C
    return torch.eye(D)[labels] + 0.4 * torch.randn(count, D, generator=generator), labels


ROWS, LABELS = records()
ROWS[7], LABELS[7] = ROWS[4], LABELS[4]  # two equal records
QUERIES = records(9, seed=8)[0]


class Stream:
    """A labeler, its folder and its ledger."""

    def __init__(self, folder, kind="digests", **settings):
        self.folder, self.kind = folder, kind
        self.settings = {**SETTINGS, "state_dir": folder / "state", "noise_source": Silent(0), **settings}
        ledger = Ledger(folder / "ledger.sqlite")
        self.run = ledger.run("run", [])
        self.labeler = None

    def fit(self, rows, labels, numbers):
        """One process: a labeler with a table, given as the kind of identities wants it."""
        self.close()
        self.labeler = IndKNN(**grouped(IndKNN, **self.settings))
        self.refit(rows, labels, numbers)

    def refit(self, rows, labels, numbers, features=None):
        if self.kind == "numbers":
            self.labeler.ids = numbers
        if self.kind == "digests of the data module":
            self.labeler.private_digests = self.labeler.record_digests(rows, labels)
        self.labeler.fit(rows if features is None else features, labels, C)

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


ALL = list(range(12))
