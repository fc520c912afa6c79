"""Sums of clipped per-example gradients of a LightningModule's own training_step."""

from __future__ import annotations

from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch import Tensor

from pl_privknn.training.clipping import ClippedGradients, Losses
from pl_privknn.training.step_checks import StepCheck

#: Gives the loss of one physical batch of images and labels: the mean over its examples.
Step = Callable[[Tensor, Tensor], Tensor]


class StepGradients(ClippedGradients):
    """Clipped gradients of the loss that ``training_step`` returns; see the base class.

    The loss of a physical batch is the mean over its ``b`` examples, which :meth:`check_step` finds out before the
    first record is read, so that ``b`` times the loss has the examples' gradients in it one by one.
    """

    of_means = True
    #: Makes the views ``(views, …)`` of one image, given as so many copies.
    augment: Callable[[Tensor], Tensor] | None = None
    replace_batch_norm = "replace_batch_norm=True"

    def check_step(self, module: pl.LightningModule, shape: tuple[int, ...], targets: Tensor) -> set[str]:
        """Compare ``training_step`` of a made-up batch with that of its examples alone, in value.

        Args:
            module: in its trainer.
            shape: of one image.
            targets: labels of the made-up examples.

        Returns:
            Names of what ``training_step`` logs.

        Raises:
            ValueError: where the loss is not the mean over examples, where examples meet, where the norms by which
                this method clips or its clipped sum are others than those of the examples one by one, and where
                something of a batch would stay on the module.
        """
        self.detach()  # a copy has no use for hooks
        check = StepCheck(module, shape, targets)

        def clipped(bound: float) -> tuple[Tensor, Tensor]:
            twin = StepGradients(check.network, bound, self._checked_as)
            return twin.clipped_by(len(targets), _losses(check.loss_of, check.inputs, targets))

        check.compare(self._names, self._checked_as, clipped)
        return check.logged

    def sum_of(self, images: Tensor, labels: Tensor, step: Step) -> Tensor:
        """Sum of the clipped gradients of a batch, which may be empty; see :meth:`ClippedGradients.sum`.

        Args:
            images: shape ``(b, …)``, on the CPU.
            labels: shape ``(b, …)``.
            step: gives the loss of a part of them.
        """

        def part(chosen: slice) -> tuple[int, Losses]:
            x, y = images[chosen].contiguous(), labels[chosen]
            count = len(x)
            if self.augment is not None:
                # One example at a time, so that no augmentation can mix examples.
                x = torch.cat([self._views_of(image) for image in x])
                y = y.repeat_interleave(self.views, dim=0)
            return count, _losses(step, x, y)

        return self._sum(len(images), part)

    def _views_of(self, image: Tensor) -> Tensor:
        assert self.augment is not None
        made = self.augment(image.expand(self.views, *image.shape).clone())
        if made.shape != (self.views, *image.shape):
            raise ValueError(
                f"augment: of {(self.views, *image.shape)} it makes {tuple(made.shape)}; let it keep the shape of "
                "the views of one image"
            )
        return made

    def check_same(self, module: pl.LightningModule) -> None:
        """Raise ``ValueError`` where other parameters are trained now than at the start."""
        if [id(p) for p in module.parameters() if p.requires_grad] != [id(p) for p in self.parameters]:
            raise ValueError(
                "requires_grad: other parameters are trained now than when the fit began; freeze before trainer.fit, "
                "and leave callbacks out that unfreeze"
            )

    def surrogate(self, gradient: Tensor) -> Tensor:
        """A loss whose gradient is ``gradient`` exactly, made of it and of the weights: nothing private is in it.

        Args:
            gradient: noisy, shape ``(size,)``.
        """
        pieces = gradient.split([parameter.numel() for parameter in self.parameters])
        with torch.autocast(self.device.type, enabled=False):
            products = [
                (parameter * piece.view_as(parameter).to(parameter.dtype)).sum().float()
                for parameter, piece in zip(self.parameters, pieces, strict=True)
            ]
            return torch.stack(products).sum()


def _losses(step: Step, x: Tensor, y: Tensor) -> Losses:
    return lambda kept: step(x, y) if kept is None else step(x[kept], y[kept])
