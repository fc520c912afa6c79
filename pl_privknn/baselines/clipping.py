"""Sums of per-example gradients, each clipped, by Opacus' hooks on an unwrapped network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.baselines.network_checks import ValueCheck, check_network, squared_losses
from pl_privknn.privacy.noisy_steps import clip_factors

CLIPPING = ("flat", "ghost")

_TOGETHER = {"cpu": 64}

#: Maps logits ``(b, c)`` and targets to one loss an example, ``(b,)``.
Loss = Callable[[Tensor, Tensor], Tensor]


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
            without them and then the sum by a second backward pass (Li et al. 2022; Opacus' fast gradient
            clipping), which needs less memory and is faster for wide linear layers.
        physical_batch_size: examples at once; a batch of any size is worked off in such parts. By default 64 on
            a CPU, whose caches larger parts leave (a third of the speed at 1,024), and 512 elsewhere.

    Raises:
        ValueError: for a network with layers that mix examples or that Opacus can't handle.
    """

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
        check_network(network)
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
            twin = ClippedGradients(made_up.network, bound, self.method)
            twin.attach()
            pieces, norms = twin._part(made_up.inputs, made_up.targets, squared_losses)
            return norms, torch.cat([piece.flatten() for piece in pieces])

        made_up.compare(self._names, self.method, clipped)
        self._checked.add(tuple(shape))
        if was_attached:
            self.attach()

    @property
    def size(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters)

    def attach(self) -> None:
        """Put the hooks on; a second call changes nothing."""
        if self._hooks is not None:
            return
        from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping

        kind = GradSampleHooks if self.method == "flat" else GradSampleHooksFastGradientClipping
        try:
            self._hooks = kind(self.network, batch_first=True, loss_reduction="sum")
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
        device = self.parameters[0].device
        total = torch.zeros(self.size, dtype=torch.float64, device=device)
        together = self.physical_batch_size or _TOGETHER.get(device.type, 512)
        for start in range(0, len(inputs), together):
            chosen = slice(start, start + together)
            x, y = inputs[chosen].to(device), targets[chosen].to(device)
            # Opacus' convolutions read other memory layouts, such as channels_last, as if they were this one.
            x = (x if prepare is None else prepare(x)).contiguous()
            self.check(x.shape[1:])
            total += torch.cat([piece.flatten() for piece in self._part(x, y, loss)[0]])
        return total

    def assign(self, vector: Tensor) -> None:
        """Set ``.grad`` of the parameters from a vector as :meth:`sum` returns it."""
        pieces = vector.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)

    def _part(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[list[Tensor], Tensor]:
        """Clipped sums, one a parameter, and the norms ``(parameters, b)`` that they were clipped by."""
        with torch.enable_grad(), warnings.catch_warnings():
            # The first layer's inputs need no gradient, which is just as it should be.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            return self._flat(x, y, loss) if self.method == "flat" else self._ghost(x, y, loss)

    def _flat(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[list[Tensor], Tensor]:
        loss(self.network(x), y).sum().backward()
        gradients = []
        for name, parameter in zip(self._names, self.parameters, strict=True):
            gradient: Any = parameter.grad_sample  # type: ignore[attr-defined]
            if gradient is None and parameter.grad is not None:
                raise ValueError(
                    f"network: Opacus gave no per-example gradients for {name!r}; freeze it (requires_grad=False) "
                    "or use layers that Opacus supports"
                )
            if gradient is None:  # took no part in the forward pass
                gradient = torch.zeros(len(x), *parameter.shape, device=x.device)
            gradients.append(_of_batch(name, gradient, len(x)).flatten(1))
            parameter.grad_sample = parameter.grad = None  # type: ignore[attr-defined]
        by_parameter = torch.stack([gradient.norm(dim=1) for gradient in gradients])
        norms = by_parameter.norm(dim=0)
        factors = clip_factors(norms, self.clip_norm)
        broken = ~torch.isfinite(norms)
        if bool(broken.any()):
            gradients = [gradient.masked_fill(broken[:, None], 0.0) for gradient in gradients]
        return [factors @ gradient for gradient in gradients], by_parameter

    def _ghost(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[list[Tensor], Tensor]:
        losses = loss(self.network(x), y)
        losses.sum().backward(retain_graph=True)
        missing = [
            n for n, p in zip(self._names, self.parameters, strict=True) if not hasattr(p, "_norm_sample")
        ]
        if missing:
            raise ValueError(
                f'network: clipping="ghost" finds no gradient norms for {missing[0]!r}; use clipping="flat"'
            )
        by_parameter = torch.stack(
            [
                _of_batch(name, parameter._norm_sample, len(x))  # type: ignore[attr-defined]
                for name, parameter in zip(self._names, self.parameters, strict=True)
            ]
        )
        norms = by_parameter.norm(dim=0)
        for parameter in self.parameters:
            parameter.grad = None
        usable = torch.isfinite(norms)
        self._hooks.disable_hooks()
        try:
            if not bool(usable.all()):  # a factor of 0 would still bring NaN into the sum
                losses = loss(self.network(x[usable]), y[usable])
            (losses * clip_factors(norms, self.clip_norm)[usable]).sum().backward()
        finally:
            self._hooks.enable_hooks()
        pieces = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        for parameter in self.parameters:
            parameter.grad = None
        return pieces, by_parameter


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """One cross-entropy an example: the loss of classifiers."""
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def _of_batch(name: str, values: Any, count: int) -> Tensor:
    if not isinstance(values, Tensor) or len(values) != count:
        raise ValueError(
            f"network: the gradients of {name!r} don't come one an example; every layer must keep examples in "
            "its first dimension and see each batch once"
        )
    return values
