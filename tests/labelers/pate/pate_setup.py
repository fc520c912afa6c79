"""What the tests of PATE share."""

import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.pate_training import LinearTeachers
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise


class FixedVotes(PATE):
    """PATE whose teachers vote as they are told."""

    def __init__(self, histograms, **arguments):
        self.histograms = torch.as_tensor(histograms)
        super().__init__(num_teachers=int(self.histograms.sum(dim=1).max()), **arguments)

    def votes(self, queries):
        return self.histograms[: len(queries)]


def table(n=300, d=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    return centres[labels] + torch.randn(n, d, generator=generator), labels


def fitted(n=300, given=None, **arguments):
    arguments = {
        "num_teachers": 12, "teachers": LinearTeachers(steps=20, batch_size=8), "noise": Gaussian(2.0),
        "noise_source": SeededNoise(0), **arguments,
    }  # fmt: skip
    pate = PATE(**arguments)
    pate.fit(PrivateRecords.of(*(table(n) if given is None else given), 3))
    return pate
