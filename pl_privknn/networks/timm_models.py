"""Any timm model as a student network; nothing is downloaded without being requested."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_installed, check_int
from pl_privknn.networks.base import image_shape


class TimmNetwork(nn.Module):
    """A timm classifier with the package's ``features`` and ``feature_size``.

    Args:
        model: what ``timm.create_model`` returned, with a classifier of the wanted size.

    Attributes:
        feature_size: width of the pre-logits activations that :meth:`features` returns.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        timm_model: Any = model
        self.feature_size = int(getattr(timm_model, "head_hidden_size", None) or timm_model.num_features)

    def features(self, images: Tensor) -> Tensor:
        """Pooled pre-logits activations, shape ``(n, feature_size)``."""
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape ``(n, num_classes)``."""
        return self.model(images)


def timm_network(
    name: str, num_classes: int, in_channels: int, image_size: int | tuple[int, int]
) -> TimmNetwork:
    """Build a timm model.

    Args:
        name: ``"resnet18"`` for random weights, ``"resnet18@cache"`` for pretrained ones that an earlier
            download left in the user's Hugging Face or torch cache, ``"resnet18@weights.safetensors"`` for
            a local file. Nothing is ever downloaded here.
        num_classes: size of the new classifier.
        in_channels: colour channels; timm adapts pretrained first layers to it.
        image_size: side of square images, or (height, width); used by models of fixed input size.

    Raises:
        ImportError: where timm is not installed.
        ValueError: if timm knows no model of that name.
        FileNotFoundError: if the pretrained weights are not on this computer.
    """
    check_installed(f"network='timm:{name}'", "imagenet", "timm")
    import timm

    architecture, _, weights = name.partition("@")
    if not timm.is_model(architecture):
        close = timm.list_models(f"*{architecture[:6]}*")[:5]
        hint = f"; similar: {', '.join(close)}" if close else ""
        raise ValueError(f"network='timm:{name}': timm has no model {architecture!r}{hint}")
    channels, height, width = image_shape(in_channels, image_size)
    options: dict[str, Any] = {"num_classes": check_int("num_classes", num_classes, 2), "in_chans": channels}
    config = timm.models.get_pretrained_cfg(architecture)
    if config is not None and config.fixed_input_size:
        options["img_size"] = (height, width)
    if weights:
        path = _cached_weights(config) if weights == "cache" else Path(weights).expanduser()
        if path is None or not path.is_file():
            where = "in the Hugging Face or torch cache" if weights == "cache" else f"at {weights}"
            raise FileNotFoundError(
                f"network='timm:{name}': no pretrained weights {where}; fetch them once with "
                f"timm.create_model({architecture!r}, pretrained=True), or name a local file after '@'"
            )
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
    return TimmNetwork(timm.create_model(architecture, **options))


def _cached_weights(config: Any) -> Path | None:
    if config is None:
        return None
    if config.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        for filename in ("model.safetensors", "pytorch_model.bin"):
            found = try_to_load_from_cache(config.hf_hub_id, filename)
            if isinstance(found, str):
                return Path(found)
    if config.url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(config.url)
        if path.is_file():
            return path
    return None
