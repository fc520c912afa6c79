"""Features of a student's network, or of one in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn._checks import check_int, shape_text
from pl_privknn.features.base import Extractor
from pl_privknn.networks import build_network


class BackboneFeatures(Extractor):
    """Extractor that calls a module's ``features`` method and restores the module's mode.

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
        >>> from pl_privknn import VATStudent
        >>> from pl_privknn.features import BackboneFeatures
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
        check_running_statistics(self.module)
        module: Any = self.module
        device = self.device or next((p.device for p in module.parameters()), torch.device("cpu"))
        vectors: Tensor | None = None
        with undisturbed(module, device):
            for start in range(0, max(1, len(images)), self.batch_size):
                with torch.inference_mode():
                    part = module.features(images[start : start + self.batch_size].to(device))
                    if part.ndim != 2:
                        raise ValueError(
                            f"{type(module).__name__}.features returned shape {shape_text(part.shape)}; expected (n, "
                            "d): flatten or pool it"
                        )
                # Filled outside inference mode: the result is an ordinary tensor, usable in training.
                if vectors is None:
                    vectors = torch.empty((len(images), part.shape[1]), dtype=torch.float32)
                vectors[start : start + len(part)] = part
        assert vectors is not None  # at least one batch, if only an empty one
        return nn.functional.normalize(vectors, dim=1) if self.normalize else vectors


@contextlib.contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in evaluation mode; modes of all submodules and random generators are restored afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            module.eval()
            yield
        finally:
            for submodule, training in modes:
                submodule.training = training


def check_running_statistics(module: nn.Module) -> None:
    """Raise ``ValueError`` for a layer that normalises by the statistics of the batch in evaluation mode."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has no running statistics and would mix the images of "
                "a batch: build it with track_running_stats=True, or use GroupNorm"
            )


class CheckpointFeatures(Extractor):
    """Backbone of a student in a checkpoint, such as one of a first stage on public data.

    For instance a student of CIFAR-100 for CIFAR-10, as in Private-kNN (Zhu et al. 2020, section 4.2). The checkpoint
    is read when the first image comes, so that a configuration can be planned without it. The averaged weights are
    taken where it has them. It must come from public data, or from a run whose ε counts in the same ledger.

    Args:
        path: the checkpoint, for instance ``runs/NAME/0/checkpoints/last.ckpt``; its network must be one by name.
        batch_size: images at once.
        device: where the network runs; that of the labelling by default, and the CPU without one.
        normalize: scale each vector to unit length, by itself.

    Raises:
        FileNotFoundError: at the first image, if there is no such file.
        ValueError: at the first image, if it is no student's checkpoint.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int = 512,
        device: torch.device | str | None = None,
        normalize: bool = False,
    ) -> None:
        self.path = Path(path)
        self.batch_size, self.device, self.normalize = batch_size, device, normalize
        self._features: BackboneFeatures | None = None

    def follow(self, device: torch.device) -> None:
        """See :meth:`Extractor.follow`."""
        if self.device is None:
            self.read().module.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 on the CPU, shape ``(n, d)``."""
        return self.read()(images)

    def read(self) -> BackboneFeatures:
        """The backbone, whose file is read once."""
        if self._features is None:
            module = _read(self.path).to(self.device or "cpu")
            self._features = BackboneFeatures(module, self.batch_size, self.device, self.normalize)
        return self._features


class Normalized(nn.Module):
    """Frozen network with the normalisation of its inputs by public constants."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.network: Any = network.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(mean or [0.0]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std or [1.0]).view(-1, 1, 1))

    def features(self, images: Tensor) -> Tensor:
        """Vectors of the network's own ``features``."""
        return self.network.features((images - self.mean) / self.std)


def _read(path: Path) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(
            f"path={str(path)!r}: no such checkpoint; train the public first stage and name its "
            "checkpoints/last.ckpt here"
        )
    try:
        # weights_only: a checkpoint must not be able to run code.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        settings, state = checkpoint["hyper_parameters"], checkpoint["state_dict"]
        arguments = [settings[name] for name in ("num_classes", "in_channels", "image_size")]
        network = build_network(str(settings["network"]).partition("@")[0], *arguments)
        prefix = "ema.network." if any(name.startswith("ema.network.") for name in state) else "network."
        network.load_state_dict(
            {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        )
        return Normalized(network, **settings["normalization"])
    # torch's unpickler, missing entries and weights that don't fit raise different things.
    except Exception as error:
        raise ValueError(
            f"path={str(path)!r} is not a checkpoint of a student with a named network ({type(error).__name__}: "
            f"{error}); name the last.ckpt of such a run"
        ) from error
