"""A noise source that plays back given random words."""

import numpy as np

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
