"""Values of images, or of tables in the place of images, as features."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_switch
from pl_privknn.features.base import Extractor


class Pixels(Extractor):
    """Values of an image as one vector: for tables of embeddings, and for teachers that take images.

    Args:
        normalize: scale each vector to unit length, by itself.
        transform_sqrt: take the square root of each pixel first; images must not be negative.
    """

    def __init__(self, normalize: bool = False, transform_sqrt: bool = False) -> None:
        self.normalize = check_switch("normalize", normalize)
        self.transform_sqrt = check_switch("transform_sqrt", transform_sqrt)

    def __call__(self, images: Tensor) -> Tensor:
        """Vectors, float32 ``(n, channels · height · width)``; a vector of zeros stays one.

        Raises:
            ValueError: if ``images`` is negative where ``transform_sqrt`` is set.
        """
        vectors = images.detach().flatten(1).to("cpu", torch.float32)
        if self.transform_sqrt:
            if not torch.compiler.is_compiling() and bool((vectors < 0).any()):
                raise ValueError(
                    "images: some values are negative, transform_sqrt=True needs values in [0, 1]"
                )
            vectors = vectors.sqrt()
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
