"""Runs of teachers of attributes with and without a record, held against the ε that they state."""

import numpy as np
import pytest
import torch

from pl_privknn.auditing import audit
from pl_privknn.labelers import PreconditionedGradients
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.statistics.statistics_setup import ATTRIBUTES, MADE, table

ROWS, CLASSES = table(30)
# Far from the others, and with the attributes of none of them.
RECORD, ATTRIBUTES_OF_IT = -20 * torch.ones(1, 5), torch.tensor([[0, 1, 0]])
DELTA = 1e-3


class Scaled:
    """Noise that is smaller than what was charged."""

    def __init__(self, noise, part):
        self.noise, self.part = noise, part

    def rounded_normal(self, shape, scale):
        return self.noise.rounded_normal(shape, self.part * scale)


def outcomes(teacher, present, runs, noise):
    """A score a run: how much the releases look like what the record adds, in deviations of their noise."""
    labels, scores = ATTRIBUTES[CLASSES], []
    known = teacher.with_table(ROWS, labels, 3)
    alone = teacher.with_table(RECORD, ATTRIBUTES_OF_IT, 3)
    if present:
        teacher = teacher.with_table(torch.cat([ROWS, RECORD]), torch.cat([labels, ATTRIBUTES_OF_IT]), 3)
    else:
        teacher = known
    for run in range(runs):
        teacher.noise_source, score = noise.stream(run), 0.0
        teacher.label(ROWS[:1], FreeLedger())
        for number, taken in teacher.noisy_sums.items():
            own = alone.exact_sum(number, taken.weights)
            rest = taken.noisy - known.exact_sum(number, taken.weights)
            score += float((rest * own).sum()) / teacher.mechanism(number).sigma ** 2
        scores.append(score)
    return np.array(scores).round(9)


TEACHERS = {
    "class sums": lambda: MADE["class sums of attributes"](noise_multiplier=0.4),
    "curvature": lambda: PreconditionedGradients(
        noise_multiplier=0.4, releases=2, private_records=30, task="multilabel"
    ),
}


@pytest.mark.long("curvature-1")
@pytest.mark.parametrize(("name", "part"), [("class sums", 1), ("class sums", 0.4), ("curvature", 1)])
def test_what_is_stated_holds_and_is_nearly_met(name, part):
    """With a part of the noise it does not. Seed 0; a true claim is called violated by one seed in a thousand."""
    teacher = TEACHERS[name]()
    teacher.fit_public(table(40, seed=7)[0])
    paid = teacher.charge_and_draw
    teacher.charge_and_draw = lambda *charge: Scaled(paid(*charge), part)

    def experiment(present, runs, noise):
        return outcomes(teacher, present, runs, noise)

    given = {"delta": DELTA, "trials": 200 if name == "curvature" else 300, "noise": SeededNoise(0)}
    result = audit(teacher.plan(1, 1, 3), experiment, **given)
    assert result.violated == (part < 1), result
    assert result.epsilon_estimate > 0.3 * result.epsilon
