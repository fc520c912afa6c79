"""Networks for small images: one for demos and tests on the CPU, and a wider one.

Arguments are those of :func:`~pl_privknn.networks.build_network`.
"""

from __future__ import annotations

from torch import nn

from pl_privknn.networks.base import FeatureNetwork, image_shape


def small_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Three 3×3 convolutions (32, 64, 64) with batch normalisation, and 128 features.

    Meant for images of 8×8 to 32×32; the pooling before the dense layer adapts to any size of 4×4 and more.
    At 28×28 one image costs 5.7 million multiply-adds, a seventh of ``mnist_cnn``.

    Raises:
        ValueError: if a side is shorter than 4 pixels.
    """
    channels = _channels("small_cnn", in_channels, image_size)
    encoder = nn.Sequential(
        *_block(channels, 32),
        nn.MaxPool2d(2),
        *_block(32, 64),
        nn.MaxPool2d(2),
        *_block(64, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4, 128),
        nn.ReLU(),
    )
    return FeatureNetwork(encoder, 128, num_classes)


def wide_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Four 3×3 convolutions (32, 96, 96, 192) with batch normalisation, and 256 features.

    Eight times the weights of ``small_cnn``: a student that does not fall behind a good teacher. At 28×28 one image
    costs 30 million multiply-adds.

    Raises:
        ValueError: if a side is shorter than 4 pixels.
    """
    channels = _channels("wide_cnn", in_channels, image_size)
    encoder = nn.Sequential(
        *_block(channels, 32),
        nn.MaxPool2d(2),
        *_block(32, 96),
        *_block(96, 96),
        nn.MaxPool2d(2),
        *_block(96, 192),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(192 * 9, 256),
        nn.ReLU(),
    )
    return FeatureNetwork(encoder, 256, num_classes)


def _channels(name: str, in_channels: int, image_size: int | tuple[int, int]) -> int:
    channels, height, width = image_shape(in_channels, image_size)
    if min(height, width) < 4:
        raise ValueError(f"image_size={(height, width)} does not fit network={name!r}; it needs 4×4 or more")
    return channels


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    # No bias: batch normalisation takes any constant out again.
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
