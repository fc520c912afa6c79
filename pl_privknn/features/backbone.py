"""Features of a network's backbone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn._checks import check_int, shape_text
from pl_privknn.features.base import Extractor


class BackboneFeatures(Extractor):
    """An extractor over a module's ``features`` method, which leaves the module as it was.

    The module runs in evaluation mode and without gradients, so batch-norm statistics do not move (they
    would carry private images into the student) and dropout is off; afterwards every submodule's mode and the
    state of torch's random generators are as before.

    Args:
        module: has ``features(images) -> (n, d)``.
        batch_size: images at once.
        device: where images are sent; where the module's parameters are by default.
        normalize: scale each vector to unit length, by itself.

    Raises:
        TypeError: if the module has no ``features`` method.

    Example:
        >>> import torch
        >>> from pl_privknn import BackboneFeatures, VATStudent
        >>> extract = BackboneFeatures(VATStudent(in_channels=1, image_size=8))
        >>> extract(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 128])
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

        Raises:
            ValueError: if a layer normalises by the statistics of the batch even in evaluation mode, so that
                one image's features would depend on the others, or if ``features`` returns another shape.
        """
        _check_layers(self.module)
        module: Any = self.module
        device = self.device or next((p.device for p in module.parameters()), torch.device("cpu"))
        vectors: Tensor | None = None
        with _undisturbed(module, device):
            for start in range(0, max(1, len(images)), self.batch_size):
                with torch.inference_mode():
                    part = module.features(images[start : start + self.batch_size].to(device))
                    if part.ndim != 2:
                        raise ValueError(
                            f"{type(module).__name__}.features returned shape {shape_text(part.shape)}; want (n, d): "
                            "flatten or pool it"
                        )
                # Filled outside inference mode: the result is an ordinary tensor, usable in training.
                if vectors is None:
                    vectors = torch.empty((len(images), part.shape[1]), dtype=torch.float32)
                vectors[start : start + len(part)] = part
        assert vectors is not None  # at least one batch, if only an empty one
        return nn.functional.normalize(vectors, dim=1) if self.normalize else vectors


@contextlib.contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside; every submodule's mode and the random generators as they were afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            module.eval()
            yield
        finally:
            for submodule, training in modes:
                submodule.training = training


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has no running statistics and would mix the images of "
                "a batch: build it with track_running_stats=True, or use GroupNorm"
            )
