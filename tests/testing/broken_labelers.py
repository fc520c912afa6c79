"""Labelers that pay or draw wrongly, one fault each, and the honest one that they are made from."""

import math

import torch

from pl_privknn.labelers.base import Labeler, Release, check_table
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SystemNoise


class Honest(Labeler):
    """Noisy votes of the k nearest records of a Poisson sample; each query has a sample of its own."""

    k = 5
    rate = 1.0
    sensitivity = math.sqrt(2.0)

    def __init__(self, noise_source=None):
        super().__init__(noise_source)
        self.mechanism = Gaussian(2.0, self.sensitivity, self.rate)

    def fit(self, features, labels, num_classes):
        check_table(features, labels, num_classes)
        self._table, self._labels, self.num_classes = features, labels, num_classes

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

    def label(self, queries, ledger, max_answers=None):
        labels = torch.full((len(queries),), -1)
        asked = queries[:max_answers]
        if len(asked):
            noise = self.charge_and_draw(ledger, self.mechanism, len(asked), "votes")
            labels[: len(asked)] = self.decide(asked, noise)
        return Release(labels)

    def decide(self, asked, noise):
        return self.mechanism.add_noise(self.votes(asked, noise), noise).argmax(dim=1)


class Sampled(Honest):
    rate = 0.5


# ---------------------------------------------------------------------------- payment


class DrawsFirst(Honest):
    def label(self, queries, ledger, max_answers=None):
        queries = queries[:max_answers]
        labels = self.decide(queries, self.noise_source.stream("votes"))
        self.charge_and_draw(ledger, self.mechanism, len(queries), "votes")
        return Release(labels)


class ChargesOneForAll(Honest):
    def label(self, queries, ledger, max_answers=None):
        labels = torch.full((len(queries),), -1)
        asked = queries[:max_answers]
        noise = self.charge_and_draw(ledger, self.mechanism, 1, "votes")
        labels[: len(asked)] = self.decide(asked, noise)
        return Release(labels)

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, 2 * rounds)]


class DrawsOneByOne(Honest):
    """A release a query, and one is paid for."""

    def label(self, queries, ledger, max_answers=None):
        labels = torch.full((len(queries),), -1)
        noise = self.charge_and_draw(ledger, self.mechanism, 1, "votes")
        for place, query in enumerate(queries[:max_answers]):
            labels[place] = self.decide(query[None], noise)[0]
        return Release(labels)


class PlansTooLittle(Honest):
    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.mechanism, max(1, min(num_queries, max_answers) // 2))]


class PlansNothing(Honest):
    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return []


class ChargesNothing(Honest):
    def label(self, queries, ledger, max_answers=None):
        return Release(torch.zeros(len(queries), dtype=torch.int64))


class StatesNoAdjacency(Honest):
    def charge_and_draw(self, ledger, mechanism, count, key):
        return self.noise_source.stream(key, ledger.charge(mechanism, count, noise=self.noise_source))


class StatesAnotherAdjacency(Honest):
    def charge_and_draw(self, ledger, mechanism, count, key):
        row = ledger.charge(mechanism, count, noise=self.noise_source, adjacencies=("replace_one",))
        return self.noise_source.stream(key, row)


class StatesNoSource(Honest):
    def charge_and_draw(self, ledger, mechanism, count, key):
        return self.noise_source.stream(key, ledger.charge(mechanism, count, adjacencies=self.adjacencies))


class HoldsUnderNoAdjacency(Sampled):
    adjacencies = ("add_remove", "replace_one")


class AnswersAfterRefusal(Honest):
    def label(self, queries, ledger, max_answers=None):
        try:
            return super().label(queries, ledger, max_answers)
        except BudgetExceeded:
            return Release(torch.full((len(queries),), -1))


class DrawsAfterRefusal(Honest):
    def label(self, queries, ledger, max_answers=None):
        try:
            return super().label(queries, ledger, max_answers)
        except BudgetExceeded:
            self.decide(queries, self.noise_source.stream("votes", 0))
            raise


class ThinksItPaid(Honest):
    """Goes without paying once a charge was refused."""

    began = False

    def label(self, queries, ledger, max_answers=None):
        if self.began:
            return Release(self.decide(queries, self.noise_source.stream("free", self.calls)))
        self.began, self.calls = True, 7
        release = super().label(queries, ledger, max_answers)
        self.began = False
        return release


# ---------------------------------------------------------------------------- noise


class ReusesNoise(Honest):
    def charge_and_draw(self, ledger, mechanism, count, key):
        super().charge_and_draw(ledger, mechanism, count, key)
        return self.noise_source.stream(key)


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
