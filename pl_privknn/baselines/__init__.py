"""Private training to compare the labelling teachers with: noisy SGD on the private records themselves."""

from pl_privknn.baselines.networks import tanh_cnn
from pl_privknn.baselines.noisy_sgd import NoisySGD

__all__ = ["NoisySGD", "tanh_cnn"]
