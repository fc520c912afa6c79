"""Lightning modules that train on frozen features; apart from extractors, which need no Lightning."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn.features.base import Extractor, learn_publicly
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.networks.base import image_shape

_IMAGES_AT_ONCE = 1024


class OnFrozenFeatures(pl.LightningModule):
    """Turns images into unit vectors of frozen features, if there is an extractor.

    Attributes:
        extractor: frozen; None where the network sees the images. Checkpoints hold what it learned from public
            images, no more.
        whitening: what its features go through; learned from public images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extractor: Extractor | None = None
        self.whitening: PublicWhitening | None = None

    def stand_on(
        self,
        extractor: Extractor,
        in_channels: int,
        image_size: int | tuple[int, int],
        components: int | None = None,
        power: float = 0.5,
    ) -> int:
        """Take an extractor; returns the width of its vectors.

        Args:
            extractor: any; it must not have been trained on private records.
            in_channels: colour channels of the images.
            image_size: side of square images, or (height, width).
            components: see :class:`~pl_privknn.features.whitening.PublicWhitening`.
            power: see there.

        Raises:
            ValueError: for an extractor that returns no vectors.
        """
        width = _feature_size(extractor, image_shape(in_channels, image_size))
        self.extractor, self.whitening = extractor, PublicWhitening(width, components, power)
        return self.whitening.out_features

    def vectors(self, images: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, d)``, each of its own image alone; the images where there is no extractor."""
        if self.extractor is None or self.whitening is None:
            return images
        device = images.device.type
        # Not entered without need: an exported file can't have it.
        mixed = torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, enabled=False) if mixed else contextlib.nullcontext():
            return self.whitening(self.extractor(images))

    def fit_public(self, public: Any) -> None:
        """Let extractor and whitening learn from a public dataset, where they have not done so."""
        if self.extractor is None or self.whitening is None:
            return
        learn_publicly(self.extractor, public.images)
        if not bool(self.whitening.fitted):
            parts = torch.arange(len(public)).split(_IMAGES_AT_ONCE)
            self.whitening.fit(torch.cat([self.extractor(public.images(part)).cpu() for part in parts]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the extractor learned."""
        if isinstance(self.extractor, Extractor) and self.extractor.learns:
            checkpoint["extractor"] = self.extractor.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give the extractor what it had learned."""
        if self.extractor is not None and "extractor" in checkpoint:
            self.extractor.load_state_dict(checkpoint["extractor"])


def _feature_size(extractor: Extractor, shape: tuple[int, int, int]) -> int:
    if getattr(extractor, "learns", False):
        return extractor.feature_size(shape)
    features = extractor(torch.zeros(1, *shape))
    if features.ndim != 2:
        raise ValueError(
            f"extractor: {type(extractor).__name__} returned shape {tuple(features.shape)} for one image; want "
            "(1, d)"
        )
    return int(features.shape[1])
