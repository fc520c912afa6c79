"""Scales of released models' scores: probabilities as certain as they are right, whatever the noise."""

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PreconditionedGradients, SufficientStatistics
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def part(count, seed, width=40):
    """Records of four classes around their means, spread alike in all directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    return 3 * torch.eye(width)[labels] + torch.randn(count, width, generator=generator), labels


@pytest.mark.parametrize("public", [True, False])
def test_mean_probability_is_the_accuracy_before_and_after_a_head_is_saved(public):
    (features, classes), (asked, truth) = part(2000, 0), part(2000, 1)
    rows = part(500, 2)[0] if public else torch.zeros(1, 40)
    given = {"budget": Budget(1.0), "private_records": 2000, "noise_source": SeededNoise(0)}
    teacher = (PreconditionedGradients if public else SufficientStatistics)(**given)
    teacher.fit(PrivateRecords.of(features, classes, 4, public=rows))
    answers = teacher.label(asked, FreeLedger())
    certain = float(answers.probabilities.max(dim=1).values.mean())
    right = float((answers.labels == truth).double().mean())
    assert 0.7 < right < 0.97
    assert abs(certain - right) < 0.05
    unscaled = teacher.probabilities(teacher.inputs(asked) @ teacher._model()[0].T)
    if not public:
        unscaled = teacher.targets.probabilities_of(teacher.inputs(asked) @ teacher._model()[0].T)
    assert torch.equal(unscaled.argmax(dim=1), answers.labels)
    assert abs(float(unscaled.max(dim=1).values.mean()) - right) > 2 * abs(certain - right)
    # Another process, by the state alone.
    head = type(teacher)(**given).head(teacher.head_state())
    torch.testing.assert_close(head(asked).float(), answers.probabilities)
