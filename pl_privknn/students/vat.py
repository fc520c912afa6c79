"""Virtual adversarial training (Miyato, Maeda, Koyama & Ishii, 2018)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_non_negative, check_positive
from pl_privknn.students.base import Student, deterministic, frozen_statistics
from pl_privknn.students.losses import kl_divergence


def unit_directions(values: Tensor) -> Tensor:
    """``values`` with each example scaled to L2 norm one; rows of zeros stay zero.

    Args:
        values: ``(n, …)``.
    """
    rows = values.flatten(1)
    # Squares of gradients near 1e-20 would underflow, hence the division by the largest entry first.
    rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return (rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)).view_as(values)


def adversarial_direction(
    logits_of: Callable[[Tensor], Tensor],
    images: Tensor,
    target_logits: Tensor,
    xi: float = 1e-6,
    iterations: int = 1,
    start: Tensor | None = None,
    divergence_of: Callable[[Tensor, Tensor], Tensor] = kl_divergence,
) -> Tensor:
    """Unit direction in which predictions change most: power iteration on the Hessian of the KL divergence.

    One iteration replaces ``d`` by the normalised gradient of ``KL(p(x) ‖ p(x + ξ d))`` with respect to
    ``d``, which is the Hessian at 0 times ``d`` up to scale.

    Args:
        logits_of: the network, deterministic, in the state in which it gave ``target_logits``.
        images: float32 ``(n, …)``.
        target_logits: ``(n, c)``, logits at ``images``.
        xi: step of the finite difference (an L2 norm).
        iterations: number of power iterations.
        start: where to start, ``(n, …)``; random directions if None.
        divergence_of: divergence ``(n,)`` of predictions, from two tensors of logits ``(n, c)``.

    Returns:
        float32 ``(n, …)``, each example of L2 norm one; no gradient flows through it.
    """
    direction = unit_directions(torch.randn_like(images) if start is None else start)
    target_logits = target_logits.detach()
    for _ in range(iterations):
        step = (xi * direction).requires_grad_()
        with torch.enable_grad():
            divergence = divergence_of(target_logits, logits_of(images.detach() + step)).sum()
            (gradient,) = torch.autograd.grad(divergence, step)
        found = unit_directions(gradient)
        # Where the prediction doesn't react at all, any direction is as good as another.
        reacts = found.flatten(1).abs().sum(dim=1) > 0
        direction = torch.where(reacts.view(-1, *[1] * (images.ndim - 1)), found, direction)
    return direction.detach()


class VATStudent(Student):
    """Virtual adversarial training: loss on labels, and the divergence at the worst ``x + r`` of unlabelled images.

    The loss is ``L(labels) + vat_weight · mean KL(p(x) ‖ p(x + r))`` where
    ``r = radius · d`` and ``d`` is :func:`adversarial_direction`. No gradient flows through ``p(x)`` of the
    divergence, or through ``d``. Dropout is off on unlabelled passes, and only the clean one of them moves
    the running statistics of batch normalisation. The direction is found in float32 whatever the trainer's
    precision, since a step of 1e-6 vanishes in 16 bits. Where a batch holds no unlabelled images, the
    labelled ones take their place. Of attributes, the divergence is that of Bernoulli
    distributions, means over attributes.

    Args:
        radius: L2 norm of the perturbation, for pixels in [0, 1] (before ``mean`` and ``std``). The same
            change a pixel has a norm that grows with the square root of the number of pixels; 0.5 served
            best of 0.5, 1 and 2 on Fashion-MNIST (28×28) and of 0.3, 0.5 and 1 on the digits (8×8).
        xi: step of the finite difference. In float32 the paper's 1e-6 leaves a direction with a cosine of
            0.6 or so to the exact one, and 1e-4 one of 0.99; accuracies were alike.
        power_iterations: number of power iterations.
        vat_weight: weight of the divergence.
        **kwargs: arguments of :class:`~pl_privknn.students.base.Student`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import VATStudent
        >>> student = VATStudent(radius=0.5, network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    perturbs_pixels = True

    def __init__(
        self,
        radius: float = 0.5,
        xi: float = 1e-6,
        power_iterations: int = 1,
        vat_weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        check_positive("radius", radius)
        check_positive("xi", xi)
        check_int("power_iterations", power_iterations, 0)
        check_non_negative("vat_weight", vat_weight)
        super().__init__(**kwargs)

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """Loss on labels, and the divergence."""
        # First, since autocast caches 16-bit weights: cast in a pass without gradient, they would have none.
        supervised = self.label_loss(self.logits(x), y)
        images = x if unlabeled is None else unlabeled
        clean = self.clean_logits(images, update_statistics=unlabeled is not None)
        divergence = self.divergence(images, clean)
        return {"supervised": supervised, "vat": self.hparams["vat_weight"] * divergence.mean()}

    def clean_logits(self, images: Tensor, update_statistics: bool) -> Tensor:
        """Logits at unperturbed images, without gradient."""
        # The labelled pass has updated the statistics already where labelled images are used instead.
        still = contextlib.nullcontext() if update_statistics else frozen_statistics(self.network)
        with deterministic(self.network), still, torch.no_grad():
            return self.logits(images)

    def divergence(self, images: Tensor, clean: Tensor) -> Tensor:
        """``KL(p(x) ‖ p(x + r))`` of each image, shape ``(n,)``; ``clean`` are the logits at ``images``."""
        device = images.device.type
        with deterministic(self.network), frozen_statistics(self.network):
            exact = clean = clean.detach()
            mixed = torch.is_autocast_enabled(device)
            with torch.autocast(device, enabled=False):
                if mixed:
                    with torch.no_grad():
                        exact = self.logits(images.float())
                direction = adversarial_direction(
                    self.logits,
                    images.float(),
                    exact,
                    self.hparams["xi"],
                    self.hparams["power_iterations"],
                    divergence_of=self.outputs.divergence,
                )
            return self.outputs.divergence(clean, self.logits(images + self.hparams["radius"] * direction))
