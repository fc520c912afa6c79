"""Default features of images and tables of embeddings: the available ones, joined and whitened by public data."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_int, check_non_negative, check_switch
from pl_privknn.features.base import Extractor, PublicTables, check_images
from pl_privknn.features.hog import HOG
from pl_privknn.features.joined import JoinedFeatures
from pl_privknn.features.kernel_pca import PublicPCA
from pl_privknn.features.patches import PatchDictionary
from pl_privknn.features.pixels import Pixels
from pl_privknn.features.pretrained import WEIGHT_PACKAGES, TimmFeatures

#: The network of the extra ``[imagenet]``.
PRETRAINED = "tf_efficientnet_lite0"
# Sides in pixels between which HOG, pixels and patches are computed.
_SMALLEST, _LARGEST = 20, 32
# Components that are computed, so that narrower features need not be computed anew.
_WIDEST = 300
# Weight of the pretrained network relative to the other three together: small images suit it less.
_WEIGHT, _WEIGHT_OF_LARGE = 0.4, 0.7


def has_pretrained() -> bool:
    """Whether timm and the weights of :data:`PRETRAINED` are installed."""
    return None not in map(importlib.util.find_spec, ("timm", WEIGHT_PACKAGES[PRETRAINED][0]))


class Resized(Extractor):
    """Another extractor's features of images resized to one size.

    Args:
        extractor: one that learns nothing, or a learned one.
        image_size: side of the square images that it sees, in pixels.
    """

    def __init__(self, extractor: Extractor, image_size: int) -> None:
        self.extractor, self.learns = extractor, extractor.learns
        self.image_size = check_int("image_size", image_size)

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        self.extractor.fit_public(self.resized(images))

    def learn_from_all(self, public: PublicTables) -> None:
        """See :meth:`Extractor.learn_from_all`."""
        if self.learns:
            self.extractor.fit_public(public.extracted(self.resized))

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        return self.extractor.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self.extractor.load_state_dict(state)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """See :meth:`Extractor.feature_size`."""
        return self.extractor.feature_size((image_shape[0], self.image_size, self.image_size))

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, d)``."""
        return self.extractor(self.resized(images))

    def resized(self, images: Tensor) -> Tensor:
        """Images as the extractor sees them."""
        check_images(images)
        size = (self.image_size, self.image_size)
        return functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)


class PublicFeatures(Extractor):
    """HOG, pixels, a patch dictionary and a pretrained network, joined, whitened and compressed by public images.

    Of a table of embeddings (images of one pixel) it takes the embeddings alone. Each kind is scaled to unit length
    and weighted, the pretrained network (the extra ``[imagenet]``) by 0.4, and by 0.7 where images are larger than 32
    pixels; HOG, pixels and patches see those at 32 pixels. :class:`~pl_privknn.features.PublicPCA` compresses them.
    Which width suits follows from the number of private records and ε, see :func:`pl_privknn.recommend`.

    Args:
        components: width; fewer where there are fewer public images.
        power: of the whitening.
        pretrained: whether to take the pretrained network; None takes it where its weights are installed.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> import torch
        >>> from pl_privknn.features import PublicFeatures
        >>> extractor = PublicFeatures(components=2)
        >>> extractor.fit_public(torch.rand(20, 64, 1, 1))  # twenty embeddings of 64 numbers
        >>> extractor(torch.rand(3, 64, 1, 1)).shape
        torch.Size([3, 2])
    """

    learns = True

    def __init__(self, components: int = 100, power: float = 0.4, pretrained: bool | None = None) -> None:
        self.components = check_int("components", components)
        self.power = check_non_negative("power", power)
        self.pretrained = pretrained if pretrained is None else check_switch("pretrained", pretrained)
        self._made: Extractor | None = None
        self._shape: tuple[int, ...] = ()

    def kinds(self, image_shape: Sequence[int]) -> tuple[list[Extractor], list[float]]:
        """Extractors for images of ``(channels, height, width)``, and their weights.

        Raises:
            FileNotFoundError: for ``pretrained=True`` where its weights are not installed.
        """
        channels, height, width = image_shape
        if height == width == 1:
            return [Pixels(normalize=True)], [1.0]
        kinds: list[Extractor] = [HOG(), Pixels(transform_sqrt=True), PatchDictionary()]
        weight = 0.0
        if not _SMALLEST <= min(height, width) <= max(height, width) <= _LARGEST:
            size = min(max(_SMALLEST, height, width), _LARGEST)
            kinds = [Resized(kind, size) for kind in kinds]
        if channels in (1, 3) and (has_pretrained() if self.pretrained is None else self.pretrained):
            weight = _WEIGHT if max(height, width) <= _LARGEST else _WEIGHT_OF_LARGE
            kinds.append(TimmFeatures(PRETRAINED))
        weights = [(1 - weight) / 3] * 3 + ([weight] if weight else [])
        return kinds, weights

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        check_images(images)
        self._extractor(tuple(images.shape[1:])).fit_public(images)

    def of_public(self, public: PublicTables) -> Tensor:
        """See :meth:`Extractor.of_public`; all widths share one table."""
        table = public.features(self._extractor(tuple(public.images(torch.arange(1)).shape[1:])))
        return functional.normalize(table[:, : self.components], dim=1)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """``components``, where there are as many public images, and values, at least."""
        channels, height, width = image_shape
        return min(self.components, channels) if height == width == 1 else self.components

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        if self._made is None:
            return {}
        return {"image_shape": torch.tensor(self._shape), **self._made.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        if "image_shape" in state:
            learned = {name: value for name, value in state.items() if name != "image_shape"}
            self._extractor(tuple(state["image_shape"].tolist())).load_state_dict(learned)

    def __call__(self, images: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``.

        Raises:
            RuntimeError: before :meth:`fit_public`.
            ValueError: for images of another shape than the public ones.
        """
        if self._made is None:
            raise RuntimeError(
                "PublicFeatures must learn from public examples first: call fit_public(images)"
            )
        if not torch.compiler.is_compiling() and tuple(images.shape[1:]) != self._shape:
            raise ValueError(
                f"images: shape {tuple(images.shape)}; the public ones were {self._shape} each, which all must be"
            )
        return functional.normalize(self._made(images)[:, : self.components], dim=1)

    def _extractor(self, shape: tuple[int, ...]) -> Extractor:
        if self._made is None or shape != self._shape:
            kinds, weights = self.kinds(shape)
            joined: Any = kinds[0] if len(kinds) == 1 else JoinedFeatures(kinds, weights)
            # The leading components of a wider projection are those of a narrower one, so that all widths share it.
            self._made = PublicPCA(joined, max(self.components, _WIDEST), self.power)
            self._shape = shape
        return self._made


#: Longest side of the grey images that :class:`DefaultFeatures` takes HOG of, in pixels.
_SMALL_GREY = 32


class DefaultFeatures(Extractor):
    """Features by default: HOG of small grey images, :class:`~pl_privknn.features.PublicFeatures` of all others.

    On digits HOG and then the student's features served Private-kNN and Ind-KNN at least as well, in less time;
    HOG describes colours, textures and objects poorly.
    """

    learns = True

    def __init__(self) -> None:
        self._hog = HOG()
        self._chosen: Extractor | None = None

    def _for(self, image_shape: Sequence[int]) -> Extractor:
        channels, height, width = image_shape
        grey = channels == 1 and 1 < max(height, width) <= _SMALL_GREY
        return self._hog if grey else PublicFeatures()

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        check_images(images)
        self._chosen = self._for(images.shape[1:])
        if self._chosen.learns:
            self._chosen.fit_public(images)

    def of_public(self, public: PublicTables) -> Tensor:
        """See :meth:`Extractor.of_public`."""
        self._chosen = self._for(public.images(torch.arange(1)).shape[1:])
        return public.features(self._chosen)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """See :meth:`Extractor.feature_size`."""
        return self._for(image_shape).feature_size(image_shape)

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        return {} if self._chosen is None else self._chosen.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self._chosen = self._for((3, 1, 1) if state else (1, _SMALL_GREY, _SMALL_GREY))
        self._chosen.load_state_dict(state)

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, d)``."""
        if self._chosen is None:
            check_images(images)
            self._chosen = self._for(images.shape[1:])
        return self._chosen(images)
