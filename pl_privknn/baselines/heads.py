"""Small networks on frozen features."""

from __future__ import annotations

from torch import nn

from pl_privknn._checks import check_choice, check_int

HEADS = ("linear", "mlp")


def build_head(kind: str, in_features: int, num_classes: int, hidden_size: int = 128) -> nn.Module:
    """A linear or a two-layer classifier.

    Args:
        kind: ``"linear"``, whose weights start at 0, or ``"mlp"``, with one hidden layer of tanh (bounded
            activations suffer less from clipping and noise: Papernot et al. 2021).
        in_features: width of the features.
        num_classes: number of classes.
        hidden_size: width of the hidden layer.

    Raises:
        ValueError: for an unknown kind or sizes out of range.
    """
    check_choice("head", kind, HEADS)
    if kind == "mlp":
        hidden = check_int("hidden_size", hidden_size)
        return nn.Sequential(nn.Linear(in_features, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))
    head = nn.Linear(in_features, num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
