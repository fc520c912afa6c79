"""What the tests of teachers that release statistics share: tables, and the teachers."""

import torch

from pl_privknn.labelers import ClassSums, PublicCurvature, SoftVotes


def table(count=60, dimension=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = 2 * torch.randn(3, dimension, generator=torch.Generator().manual_seed(9))
    return centres[labels] + torch.randn(count, dimension, generator=generator), labels


def fitted(teacher, features=None, labels=None):
    public, _ = table(40, seed=7)
    teacher.fit_public(public)
    teacher.fit(*(table() if features is None else (features, labels)), 3)
    return teacher


MADE = {
    "class sums": lambda **given: ClassSums(expected_records=60, **given),
    "likelihood": lambda **given: ClassSums(
        expected_records=60, fit="maximum_likelihood", components=3, **given
    ),
    "soft votes": lambda **given: SoftVotes(expected_records=60, gamma=2.0, centers=9, **given),
    "curvature": lambda **given: PublicCurvature(expected_records=60, releases=4, **given),
}
