"""Features of a student that was trained before, on public data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn.features.backbone import BackboneFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.networks import build_network


class CheckpointFeatures(Extractor):
    """The backbone of a student in a checkpoint: a first stage on public data gives the features of the second.

    For instance a student of CIFAR-100 for CIFAR-10, as in Private-kNN (Zhu et al. 2020, section 4.2). The checkpoint
    is read when the first image comes, so that a configuration can be planned without it. The averaged weights are
    taken where it has them. It must come from public data, or from a run whose ε counts in the same ledger.

    Args:
        path: the checkpoint, for instance ``runs/NAME/0/checkpoints/last.ckpt``; its network must be one by name.
        batch_size: images at once.
        device: where the network runs; the CPU by default.
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

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 on the CPU, shape ``(n, d)``."""
        if self._features is None:
            module = _read(self.path).to(self.device or "cpu")
            self._features = BackboneFeatures(module, self.batch_size, self.device, self.normalize)
        return self._features(images)


class _Normalized(nn.Module):
    """A network behind the normalisation that its student did."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.network: Any = network.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(mean or [0.0]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std or [1.0]).view(-1, 1, 1))

    def features(self, images: Tensor) -> Tensor:
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
        constants = settings.get("normalization", settings)  # by themselves in checkpoints of version 0.1
        return _Normalized(network, constants.get("mean"), constants.get("std"))
    # torch's unpickler, missing entries and weights that don't fit raise different things.
    except Exception as error:
        raise ValueError(
            f"path={str(path)!r} is no checkpoint of a student whose network has a name ({type(error).__name__}: "
            f"{error}); name the last.ckpt of such a run"
        ) from error
