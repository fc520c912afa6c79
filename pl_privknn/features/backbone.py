"""Features of a network's backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_int
from pl_privknn.features.base import Extractor


class BackboneFeatures(Extractor):
    """An extractor over a module's ``features`` method, which leaves the module as it was.

    The module runs in evaluation mode and without gradients, so batch-norm statistics do not move (they
    would carry private images into the student) and dropout is off; afterwards every submodule's mode is as
    before.

    Args:
        module: has ``features(images) -> (n, d)``.
        batch_size: images at once.
        device: where to run; the module's own device by default.
        normalize: scale each vector to unit length, by itself.

    Raises:
        TypeError: if the module has no ``features`` method.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_size: int = 512,
        device: torch.device | str | None = None,
        normalize: bool = False,
    ) -> None:
        if not callable(getattr(module, "features", None)):
            raise TypeError(
                f"{type(module).__name__} has no features(images) method; give it one that returns the vectors "
                "before its last layer, or use another extractor such as HOG"
            )
        self.module = module
        self.batch_size = check_int("batch_size", batch_size)
        self.device = None if device is None else torch.device(device)
        self.normalize = normalize

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images.

        Args:
            images: float32, shape ``(n, channels, height, width)``, in [0, 1].

        Returns:
            float32 on the CPU, shape ``(n, d)``.
        """
        modes = {name: submodule.training for name, submodule in self.module.named_modules()}
        device = self.device or next((p.device for p in self.module.parameters()), torch.device("cpu"))
        self.module.eval()
        try:
            with torch.inference_mode():
                parts = [
                    self.module.features(part.to(device)).float().cpu()  # type: ignore[operator]
                    for part in images.split(self.batch_size)
                ]
        finally:
            for name, submodule in self.module.named_modules():
                submodule.training = modes[name]
        # A copy made outside inference mode is an ordinary tensor.
        vectors = torch.cat(parts).clone()
        return nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
