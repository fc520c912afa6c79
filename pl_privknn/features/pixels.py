"""Images, or tables that stand in their place, as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_switch
from pl_privknn.features.base import Extractor


class Pixels(Extractor):
    """The values of an image as one vector: for tables of embeddings, and for teachers that take images.

    Args:
        normalize: scale each vector to unit length, by itself.
    """

    def __init__(self, normalize: bool = False) -> None:
        self.normalize = check_switch("normalize", normalize)

    def __call__(self, images: Tensor) -> Tensor:
        """Vectors, float32 ``(n, channels · height · width)``; a vector of zeros stays one."""
        vectors = images.detach().flatten(1).to("cpu", torch.float32)
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
