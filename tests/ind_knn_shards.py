"""Ind-KNN in shards that one process plays: teachers that answer together, as the processes of a run do."""

import numpy as np
import torch
from ind_knn_stream import QUERIES, C

from pl_privknn._processes import Shard
from pl_privknn.testing import FreeLedger
from pl_privknn.testing.tables import PlayedEnd, PlayedExchange

OPEN = {}  # who has a folder


class Together:
    """Teachers that hold a shard each, as the processes of a run use them."""

    def __init__(self, make, shards, rows, labels, run=None, folder=None, end=PlayedEnd):
        exchange = PlayedExchange(len(shards))
        self.members = [make() for _ in shards]
        for rank, (first, stride, _) in enumerate(shards):
            self.members[rank].shard = Shard(end(exchange, rank), first, stride, len(labels))
        exchange.serve = [member.serve for member in self.members[1:]]
        self.shards, self.rows, self.labels, self.run = shards, rows, labels, run
        if folder is not None:
            if folder in OPEN:
                OPEN[folder].close()
            OPEN[folder] = self
            self.members[0].join_run(folder, run)

    def fit(self, numbers=None):
        for member, (_, _, places) in zip(self.members, self.shards, strict=True):
            member.private_ids = None if numbers is None else torch.as_tensor(numbers[places])
            member.private_digests = member.record_digests(self.rows[places], self.labels[places])
            member.fit(self.rows[places], self.labels[places], C)
        return self

    def ask(self, queries=QUERIES):
        return self.members[0].label(queries, self.run if self.run is not None else FreeLedger())

    def left(self):
        """What every record has left, in the table's order."""
        left = np.empty(len(self.labels))
        for member, (_, _, places) in zip(self.members, self.shards, strict=True):
            left[places] = member.remaining()
        return left

    def close(self):
        for member in self.members:
            member.close()
