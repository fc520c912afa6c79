"""Does a LightningModule's own training_step give every example a gradient of its own? Made-up batches tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from pl_privknn.training.network_checks import EXAMPLES, RefusedError, ValueCheck, made_up


def step_loss(module: pl.LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """The loss that ``training_step`` gives for a batch, a scalar.

    Raises:
        RefusedError: where it returns something else.
    """
    given = (
        [batch, batch_idx]
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        else [batch]
    )
    made: Any = module.training_step(*given)
    loss = made.get("loss") if isinstance(made, Mapping) else made
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RefusedError(
            "training_step: it returns no loss to train with; let it return the mean loss of the batch, one number, "
            'or a mapping that has it as "loss"'
        )
    return loss.reshape(())


@contextlib.contextmanager
def without_loggers(trainer: pl.Trainer) -> Iterator[None]:
    """Hide the trainer's loggers, to which a training_step could write figures of private records."""
    options: Any = trainer
    kept = options.loggers
    options.loggers = []
    try:
        yield
    finally:
        options.loggers = kept


class StepCheck(ValueCheck):
    """A module beside itself: ``training_step`` on a batch of made-up examples, and on each of them alone.

    Works as :class:`~pl_privknn.training.network_checks.ValueCheck` does, on a copy.

    Args:
        module: in a trainer, without hooks.
        shape: of one image.
        targets: labels of the made-up examples, of all kinds that there are.

    Attributes:
        logged: names that ``training_step`` logs.

    Raises:
        CannotRunError: if ``training_step`` takes no such batches.
        ValueError: for a loss that is not finite, or none at all.
    """

    subject, made = "training_step", "losses"

    def __init__(self, module: pl.LightningModule, shape: tuple[int, ...], targets: Tensor) -> None:
        self._original = module
        self.targets = targets
        self.logged: set[str] = set()
        self._single: list[Tensor] = []
        self.outputs = self._first(
            lambda dtype: made_up((EXAMPLES, *shape), dtype),
            f"no batch of images {(EXAMPLES, *shape)} and labels {tuple(targets.shape)}",
            "a private batch is the tuple (images, labels)",
        )
        if not bool(torch.isfinite(self.outputs).all()):
            raise ValueError(
                "training_step: its loss of made-up images with values from 0 to 1 is not finite, so that it can't "
                "be checked; scale its inputs"
            )

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        twin: Any = super()._copy(dtype)
        twin._trainer = self._original._trainer
        twin.log = lambda name, *_, **__: self.logged.add(name)
        return twin

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """What the copy's ``training_step`` gives for images and labels, with the module's own transfer hooks."""
        twin: Any = self.network
        batch = twin.on_after_batch_transfer(twin.on_before_batch_transfer((inputs, targets), 0), 0)
        with without_loggers(twin.trainer):
            return step_loss(twin, batch, 0)

    def _made(self, inputs: Tensor, targets: Any) -> Tensor:
        before = _state(self.network)
        made = self.loss_of(inputs, targets)
        if changed := [name for name, value in _state(self.network).items() if before.get(name, ()) != value]:
            raise RefusedError(
                f"training_step: it keeps something of a batch as {changed[0]!r} on the module, where something of "
                "private records would stay; keep nothing, and log what validation shows"
            )
        return made.reshape(1)

    def _loss(self, made: Tensor, targets: Any) -> Tensor:
        return made.sum()

    def _check_one(self, place: int, made: Tensor) -> None:
        self._single.append(made.detach())
        if place + 1 < EXAMPLES:
            return
        alone = torch.cat(self._single)
        if self._same(self.outputs, alone.mean().reshape(1)):
            return
        if self._same(self.outputs, alone.sum().reshape(1)):
            raise ValueError(
                "training_step: its loss adds up the losses of a batch; return their mean, for instance by "
                'reduction="mean", so that a batch in parts has the gradients of the whole'
            )
        where = self._where()
        if where != "its forward()":
            raise ValueError(
                f"training_step: {where} mixes the examples of a batch, so that no gradient belongs to one example; "
                "let each example be computed by itself"
            )
        raise ValueError(
            "training_step: its loss of a batch is not the mean of its examples' losses, so that no gradient belongs "
            "to one example; leave out weights of classes, contrasts and whatever else looks at several examples"
        )


def _state(module: nn.Module) -> dict[str, Any]:
    """What a module and its layers keep beside parameters and buffers, so that a change of it is seen."""
    found: dict[str, Any] = {}
    for place, layer in module.named_modules():
        if isinstance(layer, Metric) or any(isinstance(above, Metric) for above in _above(module, place)):
            continue  # emptied after every step
        for name, value in vars(layer).items():
            if name in _OF_TORCH or name.startswith(
                ("_forward_", "_backward_", "_state_dict", "_load_state")
            ):
                continue
            plain = isinstance(value, bool | int | float | str | None)
            found[f"{place}.{name}".lstrip(".")] = (
                value if plain else id(value),
                len(value) if isinstance(value, Sized) and not isinstance(value, Tensor) else None,
            )
    return found


def _above(module: nn.Module, place: str) -> Iterator[nn.Module]:
    parts = place.split(".") if place else []
    for depth in range(1, len(parts)):
        yield module.get_submodule(".".join(parts[:depth]))


_OF_TORCH = {*vars(nn.Module()), "_trainer", "_current_fx_name", "_metric_attributes"}


def made_up_labels(data: Any, count: int) -> Tensor:
    """Labels of made-up examples, of all kinds that there are."""
    if data.task == "multilabel":
        places = torch.arange(count)[:, None] + torch.arange(data.num_classes)
        return places % 2
    return torch.arange(count) % int(data.num_classes)
