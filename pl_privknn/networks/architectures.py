"""Networks by name: small ones, those of the papers, and dense layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pl_privknn.networks.base import FeatureNetwork, image_shape, output_size


def linear_probe(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Logistic regression on the values themselves, which are its features."""
    channels, height, width = image_shape(in_channels, image_size)
    return FeatureNetwork(nn.Flatten(), channels * height * width, num_classes)


def mlp(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """One hidden layer of 256 rectified units, which are its features."""
    channels, height, width = image_shape(in_channels, image_size)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 256), nn.ReLU())
    return FeatureNetwork(encoder, 256, num_classes)


def small_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Three 3×3 convolutions (32, 64, 64) with batch normalisation, and 128 features.

    Meant for images of 8×8 to 32×32; the pooling before the dense layer adapts to any size of 4×4 and more.
    At 28×28 one image costs 5.7 million multiply-adds, a seventh of ``mnist_cnn``.

    Raises:
        ValueError: if a side is shorter than 4 pixels.
    """
    channels = _channels("small_cnn", in_channels, image_size)
    encoder = nn.Sequential(
        *_convolutions(channels, 32, "pool", 64, "pool", 64),
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
        *_convolutions(channels, 32, "pool", 96, 96, "pool", 192),
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


def _convolutions(channels: int, *layers: int | tuple[int, int, int] | str) -> list[nn.Module]:
    """Convolutions with batch normalisation and rectified units.

    Args:
        channels: of the images.
        *layers: filters of a 3×3 convolution; filters, kernel and stride of another one; or ``"pool"``, which halves
            both sides.
    """
    made: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, str):
            made.append(nn.MaxPool2d(2))
            continue
        filters, kernel, stride = (layer, 3, 1) if isinstance(layer, int) else layer
        # No bias: batch normalisation takes any constant out again.
        made += [
            nn.Conv2d(channels, filters, kernel, stride=stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
        ]
        channels = filters
    return made


def mnist_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Private-kNN's MNIST network: conv64-5×5, pool, conv128-5×5, pool, dense 384, 192, ``num_classes``.

    Convolutions keep the image size, as in the PATE networks that the paper builds on, so that every image of
    at least 4×4 pixels fits. The 192 activations before the last layer are the features.

    Raises:
        ValueError: if the image is too small for two poolings.
    """
    shape = image_shape(in_channels, image_size)
    convolutions = nn.Sequential(
        nn.Conv2d(shape[0], 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    flat = output_size(convolutions, shape, "mnist_cnn")
    encoder = nn.Sequential(convolutions, nn.Linear(flat, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU())
    return FeatureNetwork(encoder, 192, num_classes)


def svhn_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Private-kNN's SVHN network: 3×3 convolutions 96, 96, 96, 192, 192, 192, one of 5×5, dense 192, 192.

    The paper's table gives filters only. Batch normalisation, a stride of 2 at the third and the sixth
    convolution and the average over what remains of the image follow the classifier of Salimans et al.
    (2016), which the semi-supervised students of PATE come from.
    """
    channels, _, _ = image_shape(in_channels, image_size)
    stages = (96, 96, (96, 3, 2), 192, 192, (192, 3, 2), (192, 5, 1))
    encoder = nn.Sequential(
        *_convolutions(channels, *stages),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU()),
    )
    return FeatureNetwork(encoder, 192, num_classes)


def cifar_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """Private-kNN's CIFAR-10 network: three convolutions of 32, 64 and 128 filters.

    The paper gives the filter counts only. Here each convolution is 3×3, batch-normalised and followed by a
    2×2 pooling, and a dense layer of 128 gives the features.

    Raises:
        ValueError: if the image is too small for three poolings.
    """
    shape = image_shape(in_channels, image_size)
    layers = _convolutions(shape[0], 32, "pool", 64, "pool", 128, "pool")
    convolutions = nn.Sequential(*layers, nn.Flatten())
    flat = output_size(convolutions, shape, "cifar_cnn")
    return FeatureNetwork(nn.Sequential(convolutions, nn.Linear(flat, 128), nn.ReLU()), 128, num_classes)


Builder = Callable[[int, int, "int | tuple[int, int]"], nn.Module]

_BUILDERS: dict[str, Builder] = {}


def register_network(name: str, builder: Builder) -> None:
    """Make ``builder(num_classes, in_channels, image_size)`` available to :func:`build_network` as ``name``.

    Args:
        name: new name, without a colon.
        builder: returns a module with ``forward(images) -> logits``, ``features(images) -> (n, d)`` and
            ``feature_size``.

    Raises:
        ValueError: if the name is taken or holds a colon.
    """
    if name in _BUILDERS or ":" in name:
        raise ValueError(f"name={name!r} is taken or holds a colon; choose another")
    _BUILDERS[name] = builder


for _builder in (small_cnn, wide_cnn, mnist_cnn, svhn_cnn, cifar_cnn, linear_probe, mlp):
    register_network(_builder.__name__, _builder)


def available_networks() -> list[str]:
    """Names that :func:`build_network` knows, in addition to ``"timm:NAME"``."""
    return sorted(_BUILDERS)


def build_network(
    name: str, num_classes: int = 10, in_channels: int = 1, image_size: int | tuple[int, int] = 28
) -> nn.Module:
    """Build a network with fresh weights.

    Args:
        name: one of :func:`available_networks`, or ``"timm:NAME"`` for any timm model (``"timm:NAME@FILE"``
            and ``"timm:NAME@cache"`` load pretrained weights from this computer).
        num_classes: number of classes.
        in_channels: number of colour channels, or the length of an embedding.
        image_size: side of square images, or (height, width); 1 for embeddings.

    Returns:
        A module with ``forward(images) -> logits (n, num_classes)``, ``features(images) -> (n, d)`` and
        ``feature_size == d``.

    Raises:
        ValueError: for an unknown name, or image sizes that do not fit.

    Example:
        >>> network = build_network("small_cnn", num_classes=10, in_channels=1, image_size=8)
        >>> network.feature_size
        128
    """
    if name.startswith("timm:"):
        from pl_privknn.networks.timm_models import timm_network

        return timm_network(name.removeprefix("timm:"), num_classes, in_channels, image_size)
    if name not in _BUILDERS:
        raise ValueError(
            f"network={name!r} is unknown; known are {', '.join(available_networks())} and 'timm:NAME'"
        )
    return _BUILDERS[name](num_classes, in_channels, image_size)
