"""The interface of everything that turns images into vectors."""

from __future__ import annotations

import abc

from torch import Tensor


class Extractor(abc.ABC):
    """Maps images of shape ``(n, channels, height, width)``, float32 in [0, 1], to ``(n, d)`` float32.

    An extractor learns nothing from the images that it is given: its output for one image never depends on
    another image, private or public. (Statistics of private images in a feature would be an uncharged
    release.)
    """

    @abc.abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Return features of ``images``."""
