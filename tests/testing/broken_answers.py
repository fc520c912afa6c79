"""Labelers that answer, measure or sample wrongly, one fault each."""

import torch

from pl_privknn.labelers import Attributes, PrivateKNN
from pl_privknn.labelers.base import Release, check_table
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from tests.testing.broken_labelers import Honest, Sampled

# ---------------------------------------------------------------------------- answers


class IgnoresMaxAnswers(Honest):
    def label(self, queries, ledger, max_answers=None):
        return super().label(queries, ledger)


class TakesNoneForAll(Honest):
    def label(self, queries, ledger, max_answers=None):
        return super().label(queries, ledger, max_answers or None)


class WrongShape(Honest):
    def label(self, queries, ledger, max_answers=None):
        return Release(super().label(queries, ledger, max_answers).labels[:, None])


class WrongDtype(Honest):
    def label(self, queries, ledger, max_answers=None):
        return Release(super().label(queries, ledger, max_answers).labels.to(torch.int32))


class WrongClasses(Honest):
    def label(self, queries, ledger, max_answers=None):
        labels = super().label(queries, ledger, max_answers).labels
        return Release(torch.where(labels >= 0, labels + 1, labels))


class ProbabilitiesOfNothing(Honest):
    def label(self, queries, ledger, max_answers=None):
        labels = super().label(queries, ledger, max_answers).labels
        return Release(labels, soft=torch.ones(len(queries), self.num_classes))


class RemembersTheFirstTable(Honest):
    def fit(self, features, labels, num_classes):
        if hasattr(self, "_table"):
            features, labels = torch.cat([self._table, features]), torch.cat([self._labels, labels])
        super().fit(features, labels, num_classes)


# ---------------------------------------------------------------------------- sensitivity


class SensitivityOne(Honest):
    sensitivity = 1.0


class NearMajority(Honest):
    """Labels of records are smoothed over their private neighbours first."""

    def fit(self, features, labels, num_classes):
        check_table(features, labels, num_classes)
        near = torch.cdist(features, features).topk(min(3, len(labels)), largest=False).indices
        super().fit(features, labels[near].mode(dim=1).values, num_classes)


class OneMoreNeighbor(ReverseKNN):
    def __init__(self):
        super().__init__(k=1, budget=Budget(epsilon=1.0))

    def counts(self, queries):
        self.k = 2
        counts = super().counts(queries)
        self.k = 1
        return counts


class OnlyTheFirst(ReverseKNN):
    """It uses so many records of a table and no others: the next one comes in where one of them goes."""

    most = 50

    def __init__(self):
        super().__init__(k=1, budget=Budget(epsilon=1.0))

    def fit(self, features, labels, num_classes):
        check_table(features, labels, num_classes)
        super().fit(features[: self.most], labels[: self.most], num_classes)


class OnlyTheFirstThousand(OnlyTheFirst):
    most = 1000


class NoRareClasses(ReverseKNN):
    """It leaves out classes of fewer than ten records."""

    fewest = 10

    def __init__(self):
        super().__init__(k=1, budget=Budget(epsilon=1.0))

    def fit(self, features, labels, num_classes):
        check_table(features, labels, num_classes)
        kept = torch.bincount(labels, minlength=num_classes)[labels] >= self.fewest
        super().fit(features[kept], labels[kept], num_classes)


class NoRareClassesOfReplaced(NoRareClasses):
    def __init__(self):
        ReverseKNN.__init__(self, k=1, noise=Gaussian(3.0), budget=Budget(adjacency="replace_one"))


class NoClassesAtAll(NoRareClasses):
    """Its tables are all too small."""

    fewest = 10**4


class AddsUnderReplacement(ReverseKNN):
    def __init__(self):
        super().__init__(k=1, budget=Budget(epsilon=1.0))
        self.adjacencies = ("add_remove", "replace_one")


class UnclippedVotes(PrivateKNN):
    def __init__(self):
        super().__init__(
            k=5, sampling_rate=1.0, noise=Gaussian(2.0), task="multilabel", attributes=Attributes(2.0)
        )

    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._neighbors = PoissonSums(features, labels.double(), self.k, 1.0)


class ScreensTheSum(Honest):
    """Compares twice the largest count with a threshold, at the price of once."""

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        screening = Charge(self.screening(num_classes), num_queries)
        return [screening, *super().plan(num_queries, max_answers, num_classes, rounds)]

    def screening(self, num_classes):
        return NoisyScreening(2 * self.k, 3.0, 1.0, num_classes)

    def label(self, queries, ledger, max_answers=None):
        mechanism = self.screening(self.num_classes)
        noise = self.charge_and_draw(ledger, mechanism, len(queries), "screening")
        passed = mechanism.passes(2 * self.votes(queries, noise).max(dim=1).values, noise)
        labels = torch.full((len(queries),), -1)
        chosen = passed.nonzero().flatten()[:max_answers]
        if len(chosen):
            noise = self.charge_and_draw(ledger, self.mechanism, len(chosen), "votes")
            labels[chosen] = self.decide(queries[chosen], noise)
        return Release(labels)


# ---------------------------------------------------------------------------- nothing but noise


class RawProbabilities(Honest):
    def label(self, queries, ledger, max_answers=None):
        labels = super().label(queries, ledger, max_answers).labels
        votes = self.votes(queries, None).float()
        return Release(labels, soft=votes / votes.sum(dim=1, keepdim=True))


class AsksWhatIsSure(Honest):
    def label(self, queries, ledger, max_answers=None):
        labels = torch.full((len(queries),), -1)
        sure = (self.votes(queries, None).max(dim=1).values >= 4).nonzero().flatten()[:max_answers]
        if len(sure):
            noise = self.charge_and_draw(ledger, self.mechanism, len(sure), "votes")
            labels[sure] = self.decide(queries[sure], noise)
        return Release(labels)


class TellsTheSize(Honest):
    def label(self, queries, ledger, max_answers=None):
        release = super().label(queries, ledger, max_answers)
        return Release(release.labels, score_deviation=1.0 / len(self._table))


# ---------------------------------------------------------------------------- samples


class CoinsAtAHigherRate(Sampled):
    def coins(self, queries, noise):
        return noise.bernoulli((len(queries), len(self._table)), 0.8)


class OneSampleForAll(Sampled):
    def coins(self, queries, noise):
        return noise.bernoulli((len(self._table),), self.rate).expand(len(queries), -1)


class SampleOfFixedSize(Sampled):
    def coins(self, queries, noise):
        keys = noise.integers((len(queries), len(self._table)), 1 << 40)
        return keys.argsort(dim=1).argsort(dim=1) < self.rate * len(self._table)


class FillsUp(Sampled):
    """Where the sample is too small, records whose coin showed tails vote as well."""

    def coins(self, queries, noise):
        coins = super().coins(queries, noise)
        return coins | (coins.sum(dim=1, keepdim=True) < self.k)


class DividesByTheSample(Sampled):
    """Votes are shares of the sample, whose size is private."""

    def votes(self, queries, noise):
        votes = super().votes(queries, noise)
        return 3.0 * self.k * votes / votes.sum(dim=1, keepdim=True).clamp(min=1)


class CoinsOfOthers(Sampled):
    """A record's coin falls by the number of records before it: it is another one where a record is missing."""

    def coins(self, queries, noise):
        coins = super().coins(queries, noise)
        return coins.roll(len(self._table) // 2, 1) if len(self._table) % 2 else coins
