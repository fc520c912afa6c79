"""Networks by name, as configurations and checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pl_privknn.networks.architectures import (
    cifar_cnn,
    linear_probe,
    mlp,
    mnist_cnn,
    small_cnn,
    svhn_cnn,
    wide_cnn,
)

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
