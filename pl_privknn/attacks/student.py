"""Small students, many at once: what an attacker has who sees nothing but a model trained on released labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_WIDTH, _HIDDEN, _STEPS, _RATE = 30, 32, 60, 0.03


def train_students(
    public: Tensor, queries: Tensor, labels: Tensor, num_classes: int
) -> Callable[[Tensor], Tensor]:
    """Train a network with one hidden layer on each row of labels, all of them from the same start.

    Features are brought down to 30 principal directions of the public ones and scaled to deviation 1.

    Args:
        public: float32 ``(p, d)``.
        queries: float32 ``(q, d)``, what the labels are of.
        labels: int64 ``(r, q)``, one row a student; -1 where there is no answer.
        num_classes: number of classes.

    Returns:
        Function from features ``(n, d)`` to log-probabilities ``(r, n, c)``.
    """
    mean = public.mean(dim=0)
    _, scales, axes = torch.linalg.svd(public - mean, full_matrices=False)
    kept = min(_WIDTH, int((scales > 1e-5 * scales[0]).sum()))
    change = axes[:kept].T / scales[:kept] * len(public) ** 0.5

    def inputs(features: Tensor) -> Tensor:
        return ((features - mean) @ change).clamp(-5.0, 5.0)

    told = train_networks(inputs(queries), labels, num_classes)
    return lambda features: told(inputs(features))


def train_networks(
    vectors: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    hidden: int = _HIDDEN,
    steps: int = _STEPS,
    rate: float = _RATE,
) -> Callable[[Tensor], Tensor]:
    """Train networks with one hidden layer on the same vectors, each on its own row of labels.

    Args:
        vectors: float32 ``(q, d)``.
        labels: int64 ``(r, q)``; -1 where a network does not see the vector.
        num_classes: number of classes.
        hidden: width of the hidden layer.
        steps: of Adam, each on all vectors.
        rate: learning rate.

    Returns:
        Function from vectors ``(n, d)`` to log-probabilities ``(r, n, c)``.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [(vectors.shape[1], hidden), (hidden, num_classes)]
    start = [torch.randn(*size, generator=generator) / size[0] ** 0.5 for size in sizes]
    # All start alike: what differs between networks are their labels.
    parameters = [weights.repeat(len(labels), 1, 1).requires_grad_() for weights in start]
    optimizer = torch.optim.Adam(parameters, lr=rate)

    def told(rows: Tensor) -> Tensor:
        return (rows @ parameters[0]).relu() @ parameters[1]

    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                told(vectors).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"
            )
            (loss / len(vectors)).backward()
            optimizer.step()
    return lambda rows: told(rows).detach().log_softmax(dim=2)
