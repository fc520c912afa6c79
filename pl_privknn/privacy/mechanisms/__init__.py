"""Mechanisms: frozen public parameters that draw noise and state the privacy cost of a release."""

from pl_privknn.privacy.mechanisms.base import (
    AdditiveNoise,
    Adjacency,
    Charge,
    Mechanism,
    VoteNoise,
)
from pl_privknn.privacy.mechanisms.local import NegativeBinomial, RandomizedResponse, ShuffleAmplification
from pl_privknn.privacy.mechanisms.noisy_votes import ExponentialArgmax, Gaussian, Laplace
from pl_privknn.privacy.mechanisms.screening import NoisyScreening
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
