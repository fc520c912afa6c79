"""A network for noisy SGD, known to :func:`~pl_privknn.networks.build_network` by its name."""

from __future__ import annotations

from torch import nn

from pl_privknn.networks import FeatureNetwork, register_network
from pl_privknn.networks.base import image_shape, output_size


def tanh_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """The small network of Papernot et al. (2021, "Tempered sigmoid activations for deep learning with DP").

    Convolutions of 16 filters (8×8, stride 2) and 32 filters (4×4, stride 2), each with tanh and a 2×2 pooling of
    stride 1, and a dense layer of 32. 26,010 weights at 28×28: noise grows with their number. No normalisation.

    Args:
        num_classes: number of classes.
        in_channels: colour channels of the images.
        image_size: side of square images, or (height, width).

    Raises:
        ValueError: if the image is too small.
    """
    shape = image_shape(in_channels, image_size)
    convolutions = nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    flat = output_size(convolutions, shape, "tanh_cnn")
    return FeatureNetwork(nn.Sequential(convolutions, nn.Linear(flat, 32), nn.Tanh()), 32, num_classes)


register_network("tanh_cnn", tanh_cnn)
