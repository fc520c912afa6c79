"""Sums of per-example gradients, each clipped, by Opacus' hooks on an unwrapped network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.privacy.noisy_steps import clip_factors
from pl_privknn.training.layer_checks import check_network
from pl_privknn.training.network_checks import ValueCheck, squared_losses

CLIPPING = ("flat", "ghost", "per_layer")

_TOGETHER = {"cpu": 64}

#: Maps logits ``(b, c)`` and targets to one loss an example, ``(b,)``.
Loss = Callable[[Tensor, Tensor], Tensor]

#: Losses of a part of a batch, of all its examples or of those at some places: one each, ``(b,)``, or their
#: mean, ``()``.
Losses = Callable[[Tensor | None], Tensor]


class ClippedGradients:
    """Clips each example's gradient over all trainable parameters together and adds them up.

    The network stays an ordinary module with an ordinary ``state_dict``. Noise, sampling and accounting are
    not Opacus' here, see :class:`~pl_privknn.privacy.noisy_steps.PaidSteps`. A record whose gradient is not
    finite contributes nothing. Before the first batch the clipped gradients of made-up examples are compared with
    those of each example alone (:meth:`check`).

    Args:
        network: maps inputs ``(b, …)`` to logits, each example by itself.
        clip_norm: the bound ``C``.
        method: ``"flat"`` keeps the gradients of a physical batch in memory; ``"ghost"`` computes their norms
            without them and then the sum from what each layer saw (Li et al. 2022, and Bu et al. 2023), which needs
            less memory and is faster for wide linear layers; ``"per_layer"`` clips each of
            ``L`` layers' parts to ``clip_norm / √L`` (McMahan et al. 2018).
        physical_batch_size: examples at once; a batch of any size is worked off in such parts. By default 64 on
            a CPU, whose caches larger parts leave (a third of the speed at 1,024), and 512 elsewhere.

    Raises:
        ValueError: for a network with layers that mix examples or that Opacus can't handle.
    """

    #: Rows of a batch that one example has, one after another; its gradient is their mean, clipped as one.
    views = 1
    #: Is given the norms of each part's gradients before they are clipped, ``(b,)``; they are private.
    observe: Callable[[Tensor], None] | None = None
    #: Whether losses come as the mean over a part of a batch, and not one an example.
    of_means = False
    #: The setting by which batch normalisation is replaced, for messages.
    replace_batch_norm = 'batch_norm="group_norm"'

    def __init__(
        self,
        network: nn.Module,
        clip_norm: float,
        method: str = "flat",
        physical_batch_size: int | None = None,
    ) -> None:
        self.network = network
        self.clip_norm = check_positive("clip_norm", clip_norm)
        self.method = check_choice("clipping", method, CLIPPING)
        if physical_batch_size is not None:
            check_int("physical_batch_size", physical_batch_size)
        self.physical_batch_size = physical_batch_size
        check_network(network, self.replace_batch_norm)
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        if not named:
            raise ValueError("network: no parameter requires a gradient, so there is nothing to train")
        self._hooks: Any = None
        self._checked: set[tuple[int, ...]] = set()

    def check(self, shape: Sequence[int]) -> None:
        """Compare a batch of made-up inputs with its examples one by one, in value; once for each shape.

        Args:
            shape: of one input of the network.

        Raises:
            CannotRunError: if the network takes no such inputs.
            ValueError: where the outputs, the norms by which this method clips, or its clipped sum differ: then
                one record could move the sum by more than ``clip_norm``.
        """
        if tuple(shape) in self._checked:
            return
        was_attached = self._hooks is not None
        self.detach()  # a copy has no use for hooks
        made_up = ValueCheck(self.network, shape)

        def clipped(bound: float) -> tuple[Tensor, Tensor]:
            twin = ClippedGradients(made_up.network, bound, self._checked_as)
            x, y = made_up.inputs, made_up.targets
            return twin.clipped_by(len(x), lambda _: squared_losses(made_up.network(x), y))

        made_up.compare(self._names, self._checked_as, clipped)
        self._checked.add(tuple(shape))
        if was_attached:
            self.attach()

    @property
    def _checked_as(self) -> str:
        """The clipping with the same gradients one by one, by whose sum they are checked."""
        return "flat" if self.method == "per_layer" else self.method

    @property
    def size(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters)

    def attach(self) -> None:
        """Put the hooks on; a second call changes nothing."""
        if self._hooks is not None:
            return
        from pl_privknn.training.hooks import FlatHooks, GhostHooks

        options: dict[str, Any] = {"batch_first": True, "loss_reduction": "sum"}
        try:
            if self.method == "ghost":
                self._hooks = GhostHooks(self.network, **options)
            else:
                self._hooks = FlatHooks(self.network, **options)
        except NotImplementedError as error:
            raise ValueError(f"network: Opacus can't give per-example gradients of it ({error})") from error

    def detach(self) -> None:
        """Take the hooks and everything that they left on the parameters away."""
        if self._hooks is not None:
            self._hooks.cleanup()
            self._hooks = None
        for module in self.network.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for parameter in self.parameters:
            parameter.grad = None

    def sum(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Sum of clipped gradients of a batch, which may be empty.

        Args:
            inputs: shape ``(b, …)``, on any device.
            targets: shape ``(b, …)``.
            loss: one loss an example.
            prepare: makes the network's inputs of ``inputs``, each by itself, on the network's device.

        Returns:
            float64 on the network's device, shape ``(size,)``: all parameters, flattened one after another.
        """
        if not self.network.training:
            raise RuntimeError(
                "the network must be in training mode, or Opacus' hooks see nothing: call train()"
            )

        def part(chosen: slice) -> tuple[int, Losses]:
            x, y = inputs[chosen].to(self.device), targets[chosen].to(self.device)
            # Opacus' convolutions read other memory layouts, such as channels_last, as if they were this one.
            x = (x if prepare is None else prepare(x)).contiguous()
            self.check(x.shape[1:])
            return len(x), lambda kept: loss(
                self.network(x if kept is None else x[kept]), y if kept is None else y[kept]
            )

        return self._sum(len(inputs), part)

    def _sum(self, count: int, part: Callable[[slice], tuple[int, Losses]]) -> Tensor:
        """Sum of clipped gradients of ``count`` examples, worked off in parts of them."""
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        together = self.physical_batch_size or _TOGETHER.get(self.device.type, 512)
        # Parts of almost one size: each size that a network has not seen yet takes memory of its own.
        parts = -(-count // together)
        for number in range(parts):
            chosen = slice(number * count // parts, (number + 1) * count // parts)
            pieces, norms = self._part(*part(chosen))
            total += torch.cat([piece.flatten() for piece in pieces])
            if self.observe is not None:
                self.observe(norms.norm(dim=0))
        return total

    def clipped_by(self, count: int, losses: Losses) -> tuple[Tensor, Tensor]:
        """For checks: norms ``(parameters, count)`` of the examples' gradients, and the clipped sum, flattened."""
        self.attach()
        try:
            pieces, norms = self._part(count, losses)
            return norms, torch.cat([piece.flatten() for piece in pieces])
        finally:
            self.detach()

    def assign(self, vector: Tensor) -> None:
        """Set ``.grad`` of the parameters from a vector as :meth:`sum` returns it."""
        pieces = vector.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.parameters[0].device

    def _part(self, count: int, losses: Losses) -> tuple[list[Tensor], Tensor]:
        """Clipped sums, one a parameter, and the norms ``(parameters, b)`` that they were clipped by."""
        with torch.enable_grad():
            return self._ghost(count, losses) if self.method == "ghost" else self._flat(count, losses)

    def _flat(self, count: int, losses: Losses) -> tuple[list[Tensor], Tensor]:
        gradients = self._of_each(count, losses)
        with torch.autocast(self.device.type, enabled=False):
            by_parameter = torch.stack([gradient.norm(dim=1) for gradient in gradients])
            norms = by_parameter.norm(dim=0)
            broken = ~torch.isfinite(norms)
            if bool(broken.any()):
                gradients = [gradient.masked_fill(broken[:, None], 0.0) for gradient in gradients]
            if self.method == "per_layer":
                return self._by_layer(gradients, by_parameter.masked_fill(broken, 0.0)), by_parameter
            factors = clip_factors(norms, self.clip_norm)
            return [factors @ gradient for gradient in gradients], by_parameter

    def _of_each(self, count: int, losses: Losses) -> list[Tensor]:
        """Each example's gradient before it is clipped, ``(count, size)`` for each parameter."""
        self._hooks.backward(
            _total(losses(None), count * self.views), zip(self._names, self.parameters, strict=True)
        )
        gradients: list[Tensor] = []
        for name, parameter in zip(self._names, self.parameters, strict=True):
            gradient: Any = parameter.grad_sample  # type: ignore[attr-defined]
            if gradient is None:  # took no part in the forward pass
                gradient = torch.zeros(count * self.views, *parameter.shape, device=parameter.device)
            rows = _in_full(_of_batch(name, gradient, count * self.views).flatten(1))
            gradients.append(rows if self.views == 1 else rows.view(count, self.views, -1).mean(dim=1))
            parameter.grad_sample = None  # type: ignore[attr-defined]
        return gradients

    def _by_layer(self, gradients: list[Tensor], norms: Tensor) -> list[Tensor]:
        """Sums of gradients, each layer's part clipped to an equal share: √layers such shares make ``clip_norm``."""
        layers = [name.rpartition(".")[0] for name in self._names]
        share = self.clip_norm / len(set(layers)) ** 0.5
        factors = {
            layer: clip_factors(norms[[own == layer for own in layers]].norm(dim=0), share)
            for layer in set(layers)
        }
        return [factors[layer] @ gradient for layer, gradient in zip(layers, gradients, strict=True)]

    def _ghost(self, count: int, losses: Losses) -> tuple[list[Tensor], Tensor]:
        self._hooks.backward(_total(losses(None), count), zip(self._names, self.parameters, strict=True))
        missing = [
            n for n, p in zip(self._names, self.parameters, strict=True) if not hasattr(p, "_norm_sample")
        ]
        if missing:
            raise ValueError(
                f'network: clipping="ghost" finds no gradient norms for {missing[0]!r}; use clipping="flat"'
            )
        by_parameter = torch.stack(
            [
                _of_batch(name, parameter._norm_sample, count)  # type: ignore[attr-defined]
                for name, parameter in zip(self._names, self.parameters, strict=True)
            ]
        )
        norms = by_parameter.norm(dim=0)
        sums = {id(parameter): torch.zeros_like(parameter) for parameter in self.parameters}
        self._hooks.disable_hooks()
        try:
            for parameter, piece in self._hooks.weighted(
                clip_factors(norms, self.clip_norm), torch.isfinite(norms)
            ):
                sums[id(parameter)] += piece
        finally:
            self._hooks.enable_hooks()
        return list(sums.values()), by_parameter


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """One cross-entropy an example: the loss of classifiers."""
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def _total(losses: Tensor, count: int) -> Tensor:
    """Sum of the losses of ``count`` examples, of which there is one each or their mean."""
    return losses.sum() if losses.ndim else losses * count


def _in_full(gradients: Tensor) -> Tensor:
    """Gradients in 32 bits at least: a norm rounded to 16 bits would let them pass the bound by a part in 256."""
    return gradients.float() if gradients.dtype in (torch.float16, torch.bfloat16) else gradients


def _of_batch(name: str, values: Any, count: int) -> Tensor:
    if not isinstance(values, Tensor) or len(values) != count:
        raise ValueError(
            f"network: the gradients of {name!r} don't come one an example; every layer must keep examples in "
            "its first dimension and see each batch once"
        )
    return values
