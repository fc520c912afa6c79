"""Every draw of a mechanism passes ``Mechanism.draw``, where it can be observed."""

import pytest
import torch

from pl_privknn.privacy.mechanisms import (
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NegativeBinomial,
    NoisyScreening,
    NoNoise,
    PureDP,
    RandomizedResponse,
)
from pl_privknn.privacy.mechanisms.base import observing
from pl_privknn.privacy.noise import SeededNoise

VALUES = torch.tensor([3, 1, 4])
DRAWS = {
    "gaussian": (Gaussian(1.0), lambda m, noise: m.add_noise(VALUES, noise)),
    "winner by laplace noise": (Laplace(1.0), lambda m, noise: m.argmax(VALUES, noise)),
    "winner by gumbel noise": (ExponentialArgmax(1.0), lambda m, noise: m.argmax(VALUES, noise)),
    "screening": (NoisyScreening(5, 3.0, 1.0, 2), lambda m, noise: m.passes(VALUES, noise)),
    "randomised response": (RandomizedResponse(0.1, 5), lambda m, noise: m.randomize(VALUES, noise)),
    "negative binomial": (NegativeBinomial(2.0, 0.5), lambda m, noise: m.draw(VALUES, noise)),
    "no noise": (NoNoise(), lambda m, noise: m.add_noise(VALUES, noise)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_observed_with_its_mechanism_values_and_noise(name):
    (mechanism, release), noise, seen = DRAWS[name], SeededNoise(0), []

    def observer(*draw):
        seen.append(draw[:-1])
        return draw[-1]()

    with observing(observer):
        observed = release(mechanism, noise)
    assert seen == [(mechanism, VALUES, noise)]
    assert torch.equal(observed, release(mechanism, SeededNoise(0)))
    release(mechanism, noise)
    assert len(seen) == 1


def test_noise_on_multiples_is_observed_in_the_units_of_its_sensitivity():
    with observing(lambda mechanism, values, noise, draw: values):
        assert Gaussian(1.0).add_noise_to_multiples(VALUES, 0.5, SeededNoise(0)).tolist() == [1.5, 0.5, 2.0]


def test_a_mechanism_without_a_draw_wants_a_function():
    with pytest.raises(TypeError, match="PureDP defines no draw"):
        PureDP(1.0).draw(VALUES, SeededNoise(0))
    assert PureDP(1.0).draw(VALUES, SeededNoise(0), lambda values, noise: -values).tolist() == [-3, -1, -4]
