"""Broken labelers, one fault each, and the honest ones that they are made from."""

import math

import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import Attributes, LinearTeachers, LocalReverseKNN, PrivateKNN, ReverseKNN
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.labelers.partitions import Partitioner
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy import Budget
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from pl_privknn.privacy.noise import SeededNoise, SystemNoise


class Honest(Labeler):
    """Noisy votes of the k nearest records of a Poisson sample; each query has a sample of its own."""

    k = 5
    rate = 1.0
    sensitivity = math.sqrt(2.0)

    def __init__(self, noise_source=None):
        super().__init__(noise_source)
        self.mechanism = Gaussian(2.0, self.sensitivity, self.rate)

    def learn(self, records):
        self._table, self._labels, self.num_classes = records.table(), records.labels, records.num_classes

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        answers = min(num_queries, max_answers)
        return [Charge(self.mechanism, answers)] if answers else []

    def coins(self, queries, noise):
        if self.rate == 1.0:
            return torch.ones(len(queries), len(self._table), dtype=torch.bool)
        return noise.bernoulli((len(queries), len(self._table)), self.rate)

    def votes(self, queries, noise):
        distances = torch.cdist(queries.double(), self._table.double())
        distances[~self.coins(queries, noise)] = math.inf
        found = distances.sort(dim=1, stable=True)
        near, counted = found.indices[:, : self.k], found.values[:, : self.k].isfinite()
        votes = torch.zeros(len(queries), self.num_classes, dtype=torch.int64)
        return votes.scatter_add_(1, self._labels[near], counted.long())

    def answer(self, queries, run, max_answers):
        labels = torch.full((len(queries),), -1)
        asked = queries[:max_answers]
        if len(asked):
            noise = run.pay(self.mechanism, len(asked), "votes")
            labels[: len(asked)] = self.decide(asked, noise)
        return Release(labels)

    def decide(self, asked, noise):
        return self.mechanism.add_noise(self.votes(asked, noise), noise).argmax(dim=1)


class Sampled(Honest):
    rate = 0.5


class Counts(ReverseKNN):
    """Noisy numbers of records of each class whose nearest query a query is."""

    def __init__(self, **given):
        super().__init__(k=1, **{"budget": Budget(epsilon=1.0), **given})


# ---------------------------------------------------------------------------- payment


class DrawsFirst(Honest):
    def answer(self, queries, run, max_answers):
        queries = queries[:max_answers]
        labels = self.decide(queries, self.noise_source.stream("votes"))
        run.pay(self.mechanism, len(queries), "votes")
        return Release(labels)


class ChargesOneForAll(Honest):
    def answer(self, queries, run, max_answers):
        labels = torch.full((len(queries),), -1)
        asked = queries[:max_answers]
        noise = run.pay(self.mechanism, 1, "votes")
        labels[: len(asked)] = self.decide(asked, noise)
        return Release(labels)

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, 2 * rounds)]


class DrawsOneByOne(Honest):
    """A release a query, and one is paid for."""

    def answer(self, queries, run, max_answers):
        labels = torch.full((len(queries),), -1)
        noise = run.pay(self.mechanism, 1, "votes")
        for place, query in enumerate(queries[:max_answers]):
            labels[place] = self.decide(query[None], noise)[0]
        return Release(labels)


class PlansTooLittle(Honest):
    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, max(1, min(num_queries, max_answers) // 2))]


class ChargesNothing(Honest):
    def answer(self, queries, run, max_answers):
        return Release(torch.zeros(len(queries), dtype=torch.int64))


class HoldsUnderNoAdjacency(Sampled):
    adjacencies = ("add_remove", "replace_one")


class AnswersAfterRefusal(Honest):
    def answer(self, queries, run, max_answers):
        try:
            return super().answer(queries, run, max_answers)
        except BudgetExceeded:
            return Release(torch.full((len(queries),), -1))


class DrawsAfterRefusal(Honest):
    def answer(self, queries, run, max_answers):
        try:
            return super().answer(queries, run, max_answers)
        except BudgetExceeded:
            self.decide(queries, self.noise_source.stream("votes", 0))
            raise


class ThinksItPaid(Honest):
    """Goes without paying once a charge was refused."""

    began = False

    def answer(self, queries, run, max_answers):
        if self.began:
            return Release(self.decide(queries, self.noise_source.stream("free", self.calls)))
        self.began, self.calls = True, 7
        release = super().answer(queries, run, max_answers)
        self.began = False
        return release


# ---------------------------------------------------------------------------- noise


class ReusesNoise(Honest):
    def decide(self, asked, noise):
        return super().decide(asked, self.noise_source.stream("votes"))


class NoiseByHand(Honest):
    def decide(self, asked, noise):
        votes = self.votes(asked, noise)
        return (votes + noise.normal(tuple(votes.shape), self.mechanism.sigma)).argmax(dim=1)


class AnotherGenerator(Honest):
    def decide(self, asked, noise):
        return super().decide(asked, SystemNoise())


class GlobalGenerator(Honest):
    def votes(self, queries, noise):
        votes = super().votes(queries, noise)
        return votes + 100 * (torch.rand(votes.shape) < 0.2)


class SeededByDefault(Honest):
    def __init__(self):
        super().__init__(SeededNoise(0))


class ChargesAnother(Honest):
    """It draws with half the σ that it charges."""

    def decide(self, asked, noise):
        return Gaussian(1.0, self.sensitivity).add_noise(self.votes(asked, noise), noise).argmax(dim=1)


class DrawsTwice(Honest):
    """It averages two draws, and pays for one."""

    def decide(self, asked, noise):
        votes = self.votes(asked, noise)
        return (self.mechanism.add_noise(votes, noise) + self.mechanism.add_noise(votes, noise)).argmax(dim=1)


class HalvesTheNoise(Honest):
    def decide(self, asked, noise):
        votes = self.votes(asked, noise)
        return (votes + self.mechanism.add_noise(torch.zeros_like(votes), noise) / 2).argmax(dim=1)


class PlansByTheTable(Honest):
    def learn(self, records):
        super().learn(records)
        self.mechanism = Gaussian(max(1.0, len(records) / 10), self.sensitivity)


# ---------------------------------------------------------------------------- answers


class IgnoresMaxAnswers(Honest):
    def answer(self, queries, run, max_answers):
        return super().answer(queries, run, None)


class TakesNoneForAll(Honest):
    def answer(self, queries, run, max_answers):
        return super().answer(queries, run, max_answers or None)


class RemembersTheFirstTable(Honest):
    def fit(self, records):
        features, labels = records.table(), records.labels
        if hasattr(self, "_table"):
            features, labels = torch.cat([self._table, features]), torch.cat([self._labels, labels])
        super().fit(PrivateRecords.of(features, labels, records.num_classes))


# ---------------------------------------------------------------------------- sensitivity


class SensitivityOne(Honest):
    sensitivity = 1.0


class NearMajority(Honest):
    """Labels of records are smoothed over their private neighbours first."""

    def fit(self, records):
        features, labels = records.table(), records.labels
        near = torch.cdist(features, features).topk(min(3, len(labels)), largest=False).indices
        super().fit(PrivateRecords.of(features, labels[near].mode(dim=1).values, records.num_classes))


class UnclippedVotes(PrivateKNN):
    def __init__(self):
        super().__init__(
            k=5, sampling_rate=1.0, noise=Gaussian(2.0), task="multilabel", attributes=Attributes(2.0)
        )

    def learn(self, records):
        super().learn(records)
        self._neighbors = PoissonSums(records.table(), records.labels.double(), self.k, 1.0)


class ScreensTheSum(Honest):
    """Compares twice the largest count with a threshold, at the price of once."""

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        screening = Charge(self.screening(num_classes), num_queries)
        return [screening, *super().plan(num_queries, max_answers, num_classes, rounds)]

    def screening(self, num_classes):
        return NoisyScreening(2 * self.k, 3.0, 1.0, num_classes)

    def answer(self, queries, run, max_answers):
        mechanism = self.screening(self.num_classes)
        noise = run.pay(mechanism, len(queries), "screening")
        passed = mechanism.passes(2 * self.votes(queries, noise).max(dim=1).values, noise)
        labels = torch.full((len(queries),), -1)
        chosen = passed.nonzero().flatten()[:max_answers]
        if len(chosen):
            noise = run.pay(self.mechanism, len(chosen), "votes")
            labels[chosen] = self.decide(queries[chosen], noise)
        return Release(labels)


# ---------------------------------------------------------------------------- nothing but noise


class RawProbabilities(Honest):
    def answer(self, queries, run, max_answers):
        labels = super().answer(queries, run, max_answers).labels
        votes = self.votes(queries, None).float()
        return Release(labels, probabilities=votes / votes.sum(dim=1, keepdim=True))


class AsksWhatIsSure(Honest):
    def answer(self, queries, run, max_answers):
        labels = torch.full((len(queries),), -1)
        sure = (self.votes(queries, None).max(dim=1).values >= 4).nonzero().flatten()[:max_answers]
        if len(sure):
            noise = run.pay(self.mechanism, len(sure), "votes")
            labels[sure] = self.decide(queries[sure], noise)
        return Release(labels)


class TellsTheSize(Honest):
    def answer(self, queries, run, max_answers):
        release = super().answer(queries, run, max_answers)
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


# ---------------------------------------------------------------------------- the table


class OneMoreNeighbor(Counts):
    def counts(self, queries):
        self.k = 2
        counts = super().counts(queries)
        self.k = 1
        return counts


class OnlyTheFirst(Counts):
    """It uses so many records of a table and no others: the next one comes in where one of them goes."""

    most = 50

    def fit(self, records):
        features, labels = records.table()[: self.most], records.labels[: self.most]
        super().fit(PrivateRecords.of(features, labels, records.num_classes))


class OnlyTheFirstThousand(OnlyTheFirst):
    most = 1000


class NoRareClasses(Counts):
    """It leaves out classes of fewer than ten records."""

    fewest = 10

    def fit(self, records):
        labels, classes = records.labels, records.num_classes
        kept = torch.bincount(labels, minlength=classes)[labels] >= self.fewest
        super().fit(PrivateRecords.of(records.table()[kept], labels[kept], classes))


class NoRareClassesOfReplaced(NoRareClasses):
    def __init__(self):
        super().__init__(noise=Gaussian(3.0), budget=Budget(adjacency="replace_one"))


class NoClassesAtAll(NoRareClasses):
    """Its tables are all too small."""

    fewest = 10**4


class AddsUnderReplacement(Counts):
    def __init__(self):
        super().__init__()
        self.adjacencies = ("add_remove", "replace_one")


class ScaledByTheTable(Counts):
    """It divides features by their largest private values."""

    def fit(self, records):
        features = records.table()
        self._scale = features.abs().amax(dim=0).clamp(min=1e-6)
        super().fit(PrivateRecords.of(features / self._scale, records.labels, records.num_classes))

    def counts(self, queries):
        return super().counts(queries / self._scale)


class ClassesOfTheTable(Counts):
    """It counts the classes that occur, and no others."""

    def learn(self, records):
        super().learn(records)
        self._there = records.labels.unique()

    def counts(self, queries):
        return super().counts(queries)[:, self._there]


class WeightsByNorm(Honest):
    def learn(self, records):
        super().learn(records)
        self._weights = records.table().norm(dim=1)

    def votes(self, queries, noise):
        return super().votes(queries, noise) * self._weights.amax()


class RaisesOnRareClasses(Honest):
    """It refuses, after it was fitted, a table in which a class has one record."""

    def answer(self, queries, run, max_answers):
        if bool((torch.bincount(self._labels) == 1).any()):
            raise ValueError("a class has one record")
        return super().answer(queries, run, max_answers)


class Memorises(Honest):
    def answer(self, queries, run, max_answers):
        release = super().answer(queries, run, max_answers)
        same = (queries[:, None] == self._table).all(dim=2)
        known = same.any(dim=1) & (release.labels >= 0)
        release.labels[known] = self._labels[same.int().argmax(dim=1)][known]
        return release


class MajorityOfManyRecords(Honest):
    def answer(self, queries, run, max_answers):
        release = super().answer(queries, run, max_answers)
        if len(self._labels) > 500:
            release.labels[:] = torch.bincount(self._labels).argmax()
        return release


# ---------------------------------------------------------------------------- faults in parts of the package's own


class PartsByRow(Partitioner):
    """A record's part is its position: without one record, all later ones move."""

    def _deal(self, features, labels, num_classes, num_parts, noise):
        return torch.arange(len(labels)) % num_parts


class TeachersOnTwoParts(LinearTeachers):
    """Every teacher trains on the next one's part as well."""

    def train(self, features, labels, parts, num_classes, num_teachers, progress):
        both = torch.cat([parts, (parts + 1) % num_teachers])
        return super().train(
            features.repeat(2, 1), labels.repeat(2), both, num_classes, num_teachers, progress
        )


class LabelsOfOthers(LocalReverseKNN):
    """A client sends the label that most clients have."""

    def votes(self, queries):
        nearest, labels = super().votes(queries)
        return nearest, labels.mode(dim=0).values.expand_as(labels)


class NamesOneCellTwice(LocalReverseKNN):
    def votes(self, queries):
        nearest, labels = super().votes(queries)
        return nearest[:, :1].expand(-1, self.k), labels
