"""Noise sources that play back given random words, or have no noise."""

import numpy as np
import torch

from pl_privknn.privacy.noise import NoiseSource


class Scripted(NoiseSource):
    """Plays back given words, and fails when asked for more."""

    def __init__(self, words):
        self.words = list(words)

    def random_words(self, count):
        assert count <= len(self.words), "the script ran out"
        taken, self.words = self.words[:count], self.words[count:]
        return np.array(taken, np.uint64)

    def stream(self, *key):
        return self


class Quiet(Scripted):
    """No noise, and coins that all fall alike: what is left is the computation itself."""

    def __init__(self):
        super().__init__([])

    def normal(self, shape, scale):
        return torch.zeros(shape, dtype=torch.float64)

    def rounded_normal(self, shape, sigma):
        return torch.zeros(shape, dtype=torch.int64)

    def normal_at_least(self, thresholds, scale):
        return thresholds <= 0

    def bernoulli(self, shape, p):
        return torch.ones(shape, dtype=torch.bool)
