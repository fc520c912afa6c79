"""Base of Lightning modules that train on frozen features."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn.features.base import Extractor, PublicTables
from pl_privknn.features.public import PublicWhitening
from pl_privknn.networks.base import image_shape


class OnFrozenFeatures(pl.LightningModule):
    """Mixin that converts images into unit vectors of frozen features, if there is an extractor.

    Attributes:
        extractor: frozen; None where the network sees the images. Checkpoints hold what it learned from public
            images, no more.
        whitening: what its features go through; learned from public images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extractor: Extractor | None = None
        self.whitening: PublicWhitening | None = None
        self._public_rows: Tensor | None = None

    @property
    def trains_on_rows(self) -> bool:
        """Whether training uses the vector of each image, and not views of the image."""
        return False

    def stand_on(
        self,
        extractor: Extractor,
        in_channels: int,
        image_size: int | tuple[int, int],
        components: int | None = None,
        power: float = 0.5,
    ) -> int:
        """Set the extractor; returns the width of its vectors.

        Args:
            extractor: any; it must not have been trained on private records.
            in_channels: colour channels of the images, or the length of vectors.
            image_size: side of square images, or (height, width); 1 of vectors.
            components: see :class:`~pl_privknn.features.public.PublicWhitening`.
            power: see there.

        Raises:
            ValueError: for an extractor that returns no vectors.
        """
        shape = image_shape(in_channels, image_size)
        width = _feature_size(extractor, shape[:1] if shape[1:] == (1, 1) else shape)
        self.extractor, self.whitening = extractor, PublicWhitening(width, components, power)
        return self.whitening.out_features

    def vectors(self, images: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, d)``, each of one image alone; the images where there is no extractor.

        Args:
            images: ``(n, channels, height, width)``, examples that are vectors, ``(n, d)``, or rows of
                :meth:`inputs_of`, ``(n, 1, d)``, whose unit vectors are at hand.
        """
        if self.extractor is None or self.whitening is None:
            return images
        if images.ndim == 3:
            return images[:, 0]
        device = images.device.type
        # Not entered without need: an exported file can't have it.
        mixed = torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, enabled=False) if mixed else contextlib.nullcontext():
            return self.whitening(self.extractor(images))

    def fit_public(self, public: Any) -> None:
        """Fit extractor and whitening to a public data set, where they are not fitted."""
        if self.extractor is None or self.whitening is None:
            return
        place = self.device if self._trainer is None else self.trainer.strategy.root_device
        features = PublicTables(public, place).features(self.extractor)
        if not bool(self.whitening.fitted):
            self.whitening.fit(features)
        with torch.no_grad():
            self._public_rows = self.whitening(features.to(self.whitening.mean.device)).cpu()

    def inputs_of(self, part: Any, *, public: bool, training: bool) -> Any:
        """Inputs of the loaders of a fit: unit vectors, float32 ``(n, 1, d)``, of a part's examples, or its store.

        Args:
            part: a data set with ``images(indices)`` and ``store``.
            public: whether it is the one that :meth:`fit_public` learned from.
            training: whether for training, where some modules want views of the images.
        """
        if self.extractor is None or self.trainer.state.fn != "fit" or (training and not self.trains_on_rows):
            return part.store
        if not public:
            return PublicTables(part, self.device).extracted(self.vectors)[:, None]
        if self._public_rows is None:  # a checkpoint may hold what was learned elsewhere
            self._public_rows = PublicTables(part, self.device).extracted(self.vectors)
        return self._public_rows[:, None]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the extractor's learned state."""
        if isinstance(self.extractor, Extractor) and self.extractor.learns:
            checkpoint["extractor"] = self.extractor.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the extractor's learned state."""
        if self.extractor is not None and "extractor" in checkpoint:
            self.extractor.load_state_dict(checkpoint["extractor"])
        self._public_rows = None


def _feature_size(extractor: Extractor, shape: tuple[int, ...]) -> int:
    if getattr(extractor, "learns", False):
        return extractor.feature_size(shape)
    features = extractor(torch.zeros(1, *shape))
    if features.ndim != 2:
        raise ValueError(
            f"extractor: {type(extractor).__name__} returned shape {tuple(features.shape)} for one image; expected "
            "(1, d)"
        )
    return int(features.shape[1])
