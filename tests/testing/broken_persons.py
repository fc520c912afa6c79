"""Labelers that claim to protect persons and protect records alone."""

import torch

from pl_privknn.labelers import PreconditionedGradients, PrivateKNN, ReverseKNN, SufficientStatistics


class EachRecordCounts(ReverseKNN):
    """It draws none of a person's records."""

    def drawn_records(self, num_records, most=1):
        return torch.arange(num_records)


class EachRecordAdds(SufficientStatistics):
    """It draws none of a person's records."""

    def drawn_records(self, num_records, most=1):
        return torch.arange(num_records)


class EachRecordIsClipped(PreconditionedGradients):
    """It clips records, and not what they add together."""

    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._persons = None


class EachRecordVotes(PrivateKNN):
    """Its neighbours are records."""

    def _find(self, *table):
        self._owners = None
        return super()._find(*table)
