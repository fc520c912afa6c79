"""Networks without convolutions, for tables of embeddings.

Arguments are those of :func:`~pl_privknn.networks.build_network`.
"""

from __future__ import annotations

from torch import nn

from pl_privknn.networks.base import FeatureNetwork, image_shape


def linear_probe(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Logistic regression on the values themselves, which are its features."""
    channels, height, width = image_shape(in_channels, image_size)
    return FeatureNetwork(nn.Flatten(), channels * height * width, num_classes)


def mlp(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """One hidden layer of 256 rectified units, which are its features."""
    channels, height, width = image_shape(in_channels, image_size)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 256), nn.ReLU())
    return FeatureNetwork(encoder, 256, num_classes)
