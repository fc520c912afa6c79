"""Small networks on frozen features."""

from __future__ import annotations

import dataclasses

from torch import nn

from pl_privknn._checks import check_choice, check_int, check_non_negative, check_switch

HEADS = ("linear", "mlp")


@dataclasses.dataclass(frozen=True)
class FeatureHead:
    """The classifier of frozen features, and what they go through before it.

    Args:
        head: ``"linear"`` or ``"mlp"`` (two layers).
        hidden_size: width of the hidden layer of ``"mlp"``.
        components: keep this many principal directions of the public features; all if None.
        whitening: divide each direction by its public standard deviation to this power.
        bias: whether the ``"linear"`` head has one. It takes as much of the clipping norm as the features do,
            and bears no large learning rate; without it few large steps learn more.

    Raises:
        ValueError: for an argument out of its range.
    """

    head: str = "linear"
    hidden_size: int = 128
    components: int | None = None
    whitening: float = 0.5
    bias: bool = True

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        check_int("hidden_size", self.hidden_size)
        if self.components is not None:
            check_int("components", self.components)
        check_non_negative("whitening", self.whitening)
        if not check_switch("bias", self.bias) and self.head != "linear":
            raise ValueError(
                f'bias=False: head="{self.head}" has biases; leave bias out, or take head="linear"'
            )


def build_head(
    kind: str, in_features: int, num_classes: int, hidden_size: int = 128, bias: bool = True
) -> nn.Module:
    """A linear or a two-layer classifier.

    Args:
        kind: ``"linear"``, whose weights start at 0, or ``"mlp"``, with one hidden layer of tanh (bounded
            activations suffer less from clipping and noise: Papernot et al. 2021).
        in_features: width of the features.
        num_classes: number of classes.
        hidden_size: width of the hidden layer.
        bias: of a linear classifier.

    Raises:
        ValueError: for an unknown kind or sizes out of range.
    """
    check_choice("head", kind, HEADS)
    if kind == "mlp":
        hidden = check_int("hidden_size", hidden_size)
        return nn.Sequential(nn.Linear(in_features, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))
    head = nn.Linear(in_features, num_classes, bias=bias)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head
