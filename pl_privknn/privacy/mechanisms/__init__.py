"""Mechanisms: frozen public parameters that draw noise and state the privacy cost of a release."""

from pl_privknn.privacy.mechanisms.argmax import ExponentialArgmax
from pl_privknn.privacy.mechanisms.base import (
    AdditiveNoise,
    Adjacency,
    Charge,
    Mechanism,
    VoteNoise,
)
from pl_privknn.privacy.mechanisms.gaussian import Gaussian
from pl_privknn.privacy.mechanisms.laplace import Laplace
from pl_privknn.privacy.mechanisms.negative_binomial import NegativeBinomial
from pl_privknn.privacy.mechanisms.randomized_response import RandomizedResponse
from pl_privknn.privacy.mechanisms.screening import NoisyScreening
from pl_privknn.privacy.mechanisms.shuffle import ShuffleAmplification
from pl_privknn.privacy.mechanisms.stated import Conditional, GaussianDPStream, NoNoise, PureDP

__all__ = [
    "AdditiveNoise",
    "Adjacency",
    "Charge",
    "Conditional",
    "ExponentialArgmax",
    "Gaussian",
    "GaussianDPStream",
    "Laplace",
    "Mechanism",
    "NegativeBinomial",
    "NoNoise",
    "NoisyScreening",
    "PureDP",
    "RandomizedResponse",
    "ShuffleAmplification",
    "VoteNoise",
]
