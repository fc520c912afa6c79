"""Ind-KNN's Algorithm 3 as the paper prints it: one record after another, in plain float64."""

import math

import numpy as np


class Literal:
    """Budgets z_i per record; ``cost`` adds up what each record's part in the releases truly cost."""

    def __init__(self, parameters, num_classes, reuse=False):
        self.p, self.c, self.reuse = parameters, num_classes, reuse
        self.x, self.y, self.z, self.cost, self.public = {}, {}, {}, {}, []
        self.clipped = self.unclipped = 0

    def add(self, ids, features, labels):
        for number, row, label in zip(ids, np.asarray(features, np.float64), labels, strict=True):
            self.x[int(number)], self.y[int(number)] = row / np.linalg.norm(row), int(label)
            self.z.setdefault(int(number), self.p.rho)
            self.cost.setdefault(int(number), 0.0)

    def remove(self, ids):
        for number in ids:
            del self.x[int(number)], self.y[int(number)]

    def kernel(self, x, q):
        if self.p.kernel == "cosine":
            return float(x @ q)
        return math.exp(-float(((x - q) ** 2).sum()) / self.p.bandwidth**2)

    def predict(self, query, draws, candidates=None, threshold=None):
        p, tau = self.p, self.p.threshold if threshold is None else threshold
        q = np.asarray(query, np.float64)
        q = q / np.linalg.norm(q)
        active = [i for i in self.x if self.z[i] >= 1 / (2 * p.count_sigma**2)]
        if candidates is not None:
            active = [i for i in active if i in candidates]
        near = {i: self.kernel(self.x[i], q) for i in active}
        near = {i: kappa for i, kappa in near.items() if kappa >= tau}
        around = [(self.kernel(x, q), y) for x, y in self.public]
        around = [(kappa, y) for kappa, y in around if kappa >= tau]
        count = max(len(near) + len(around) + p.count_sigma * draws[0], p.min_count)
        votes = np.zeros(self.c)
        for i, kappa in near.items():
            self.z[i] -= 1 / (2 * p.count_sigma**2)
            clip = p.vote_sigma * math.sqrt(2 * count * max(self.z[i], 0.0))
            f = min(kappa, clip)
            self.clipped, self.unclipped = self.clipped + (clip < kappa), self.unclipped + (clip >= kappa)
            self.z[i] -= f**2 / (2 * p.vote_sigma**2 * count)
            self.cost[i] += 1 / (2 * p.count_sigma**2) + f**2 / (2 * p.vote_sigma**2 * count)
            votes[self.y[i]] += f
        for kappa, label in around:
            votes[label] += kappa
        noisy = votes + p.vote_sigma * math.sqrt(count) * np.asarray(draws[1:])
        answer = int(np.argmax(noisy))
        if self.reuse:
            self.public.append((q, answer))
        return answer, noisy, count
