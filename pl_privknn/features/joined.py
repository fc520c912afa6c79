"""Several kinds of features side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_positive
from pl_privknn.features.base import Extractor, extract_on
from pl_privknn.features.learned import LearnedExtractor


class JoinedFeatures(LearnedExtractor):
    """Vectors of several extractors, each scaled to unit length by itself and weighted, one after another.

    The squared distance of two images is then the weighted sum of their squared distances under each extractor.
    An image's vector depends on that image alone, as for every extractor.

    Args:
        extractors: at least one.
        weights: one a kind of features, above 0; all equal by default.

    Raises:
        ValueError: for no extractor, or weights that do not fit.
    """

    def __init__(self, extractors: list[Extractor], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if not extractors:
            raise ValueError("extractors=[] must name at least one extractor")
        chosen = [1.0] * len(extractors) if weights is None else list(weights)
        if len(chosen) != len(extractors):
            raise ValueError(f"weights={chosen!r}: want one for each of {len(extractors)} extractors")
        self.extractors = list(extractors)
        self.weights = [check_positive("weights", weight) for weight in chosen]
        # Whatever is callable will do, for instance torch.nn.Flatten().
        self.learns = any(getattr(extractor, "learns", False) for extractor in extractors)

    def beneath(self) -> Mapping[str, Extractor]:
        """The extractors that learn, by their places."""
        places = enumerate(self.extractors)
        return {str(place): part for place, part in places if getattr(part, "learns", False)}

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Nothing of its own."""
        return {}

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32, shape ``(n, d)`` with d the sum of the extractors' widths."""
        parts = [
            functional.normalize(extract_on(extractor, images, images.device).float(), dim=1) * weight**0.5
            for extractor, weight in zip(self.extractors, self.weights, strict=True)
        ]
        return torch.cat(parts, dim=1).to(images.device)
