"""The interface of everything that turns images into vectors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pl_privknn.init_arguments import HasInitArguments


class Extractor(HasInitArguments, abc.ABC):
    """Maps images of shape ``(n, channels, height, width)``, float32 in [0, 1], to ``(n, d)`` float32.

    An extractor learns nothing from the images that it is given: its output for one image never depends on
    another image, private or public. (Statistics of private images in a feature would be an uncharged
    release.) One that :attr:`learns` does so in :meth:`fit_public`, from public images alone.
    """

    #: Whether :meth:`fit_public` must come before the first image.
    learns: bool = False

    def fit_public(self, images: Tensor) -> None:
        """Learn from all public images, shape ``(m, channels, height, width)``; most extractors learn nothing.

        The same images give the same extractor, so a resumed run learns again what it had.
        """

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """Number of values per image of shape ``(channels, height, width)``; known before :meth:`fit_public`."""
        return int(self(torch.zeros(1, *image_shape)).shape[1])

    def state_dict(self) -> dict[str, Tensor]:
        """What :meth:`fit_public` learned; empty for extractors that learn nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state_dict` gave, in the place of :meth:`fit_public`."""

    @abc.abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Return features of ``images``."""


def extract_on(extractor: Callable[[Tensor], Tensor], images: Tensor, device: torch.device) -> Tensor:
    """Features of images that are looked at on ``device``, or where the extractor's own parameters are; on the CPU.

    Args:
        extractor: an :class:`Extractor`, or any module that maps images to vectors.
        images: float32, shape ``(n, channels, height, width)``, wherever they are.
        device: for extractors that follow their images.

    Returns:
        Shape ``(n, d)``, on the CPU.
    """
    parameter = next(extractor.parameters(), None) if isinstance(extractor, nn.Module) else None
    return extractor(images.to(device if parameter is None else parameter.device)).cpu()
