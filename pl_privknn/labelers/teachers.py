"""PATE's teachers: small networks of one architecture, each trained on its own part of the records."""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from pl_privknn._checks import (
    InputError,
    check_int,
    check_non_negative,
    check_positive,
)

#: Called with the fraction of the training that is done, in [0, 1].
TrainingProgress = Callable[[float], None]

# Steps whose batches are drawn together: few enough to hold, enough to make the drawing cheap.
_STEPS_DRAWN_AT_ONCE = 64
# Queries of one block of predictions: 16 convolutional teachers' activations then take some 100 MB.
_QUERIES_AT_ONCE = 512


class TrainedTeachers(abc.ABC):
    """Trained ensemble; private, because each teacher may memorise its records.

    Attributes:
        num_teachers: how many teachers there are, silent ones included.
        empty: bool, shape ``(t,)``; teachers whose part held no record. They abstain.
        failed: bool, shape ``(t,)``; teachers whose training broke. They abstain.
        failures: kinds of failure (exception types, ``"not finite"``), never with values from the records.
    """

    def __init__(self, empty: Tensor, failed: Tensor, failures: frozenset[str] = frozenset()) -> None:
        self.num_teachers = len(empty)
        self.empty = empty
        self.failed = failed
        self.failures = failures

    @abc.abstractmethod
    def predict(self, queries: Tensor) -> Tensor:
        """Each teacher's class for each query.

        Args:
            queries: float32, shape ``(m, d)``.

        Returns:
            int64, shape ``(m, t)``; -1 where a teacher abstains. Of attributes int8 ``(m, t, a)``, 0 or 1, rows of
            -1 where it abstains.
        """


class Teachers(abc.ABC):
    """Base class of settings of teachers, without data.

    Every teacher has to be a function of its part, its number and public settings alone: nothing about
    *another* part may reach it, not even that part's size. That is what makes one record change one vote.
    """

    @abc.abstractmethod
    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: TrainingProgress,
    ) -> TrainedTeachers:
        """Train one teacher per part.

        Args:
            features: float32, shape ``(n, d)``.
            labels: int64, shape ``(n,)``; attributes, 0 or 1, ``(n, num_classes)``.
            parts: int64, shape ``(n,)``; the teacher of each record.
            num_classes: number of classes; a part need not hold all of them.
            num_teachers: number of teachers.
            progress: called with the fraction that is done.
        """


# ------------------------------------------------------------------ stacked networks


class StackedTeachers(Teachers):
    """Base class of teachers that are small torch modules of one architecture.

    The parameters of all teachers are stacked (:func:`torch.func.stack_module_state`) and one vectorised
    loop (:func:`torch.func.vmap`, Adam, cosine decay to 0) trains them together. Each step takes, for each
    teacher, ``batch_size`` records drawn with replacement from its own part. The number of steps and the
    batch size are public constants and no part is padded, so neither the amount of training nor the shape
    of any computation depends on the sizes of parts: a teacher's weights are, bit for bit, a function of its
    own part, its number and the settings. A teacher never votes for a class that its part lacks.

    Args:
        steps: optimiser steps of every teacher.
        batch_size: records a step.
        learning_rate: of Adam at the start.
        weight_decay: decoupled (AdamW), times the learning rate, each step.
        seed: for initial weights and the drawing of batches. May be published: no guarantee rests on it.
        teachers_at_once: how many teachers one vectorised loop holds; None chooses by the module's size.
        device: where teachers train, for instance ``"cpu"`` or ``"cuda"``; where PATE's labelling runs by default.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        steps: int = 300,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        weight_decay: float = 0.0,
        seed: int = 0,
        teachers_at_once: int | None = None,
        device: str | None = None,
    ) -> None:
        self.steps = check_int("steps", steps)
        self.batch_size = check_int("batch_size", batch_size)
        self.learning_rate = check_positive("learning_rate", learning_rate)
        self.weight_decay = check_non_negative("weight_decay", weight_decay)
        self.seed = check_int("seed", seed, minimum=0)
        self.teachers_at_once = (
            None if teachers_at_once is None else check_int("teachers_at_once", teachers_at_once)
        )
        self.device, self._follows = torch.device(device or "cpu"), device is None

    def follow(self, device: torch.device) -> None:
        """Train on a device, unless another one was stated."""
        if self._follows:
            self.device = device

    @abc.abstractmethod
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """New teacher, a map of ``(b, num_features)`` to logits ``(b, num_classes)``."""

    def initial(self, teacher: int, num_features: int, num_classes: int) -> nn.Module:
        """Teacher ``teacher`` before its training; leaves the global random state alone."""
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed every device as well, and note a traceback each time.
            torch.default_generator.manual_seed(teacher_seed(self.seed, teacher, "weights"))
            module = self.build(num_features, num_classes)
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
            raise InputError(
                f"{type(self).__name__}: batch normalisation keeps running statistics, which stacked "
                "teachers can't; use GroupNorm or LayerNorm"
            )
        return module

    def batch_generator(self, teacher: int) -> torch.Generator:
        """Source of the uniform numbers u that choose a teacher's records: row ⌊u·(size of its part)⌋."""
        return torch.Generator().manual_seed(teacher_seed(self.seed, teacher, "batches"))

    def rate(self, step: int) -> float:
        """Learning rate at ``step``."""
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: TrainingProgress,
    ) -> StackedEnsemble:
        """See :meth:`Teachers.train`.

        Raises:
            ValueError: if the module does not fit the features, or holds batch normalisation.
        """
        rows = rows_of_parts(parts, num_teachers)
        known = torch.zeros(num_teachers, num_classes, dtype=torch.bool)
        if labels.ndim == 1:
            known[parts, labels] = True
        else:  # a teacher may say yes and no to every attribute
            known[parts] = True
        ensemble = StackedEnsemble(self, features.shape[1], known, attributes=labels.ndim == 2)
        at_once = min(num_teachers, self.teachers_at_once or _teachers_at_once(ensemble.template))
        for start in range(0, num_teachers, at_once):
            chosen = range(start, min(start + at_once, num_teachers))

            def report(fraction: float, chosen: range = chosen) -> None:
                progress((chosen.start + fraction * len(chosen)) / num_teachers)

            ensemble.blocks.append(self._train_block(features, labels, rows, chosen, num_classes, report))
        ensemble.find_failures()
        return ensemble

    def _train_block(
        self,
        features: Tensor,
        labels: Tensor,
        rows: Sequence[Tensor],
        chosen: range,
        num_classes: int,
        progress: TrainingProgress,
    ) -> dict[str, Tensor]:
        modules = [
            self.initial(teacher, features.shape[1], num_classes).to(self.device) for teacher in chosen
        ]
        template = modules[0].train()
        stacked, buffers = stack_module_state(modules)
        params = {name: value.detach().requires_grad_() for name, value in stacked.items()}

        def logits(own: dict[str, Tensor], own_buffers: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(template, (own, own_buffers), (batch,))

        forward = torch.vmap(logits, randomness="different")
        optimizer = torch.optim.AdamW(
            list(params.values()), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        generators = [self.batch_generator(teacher) for teacher in chosen]
        rows_of_batch = torch.empty(len(chosen) * self.batch_size, features.shape[1], dtype=features.dtype)
        for first in range(0, self.steps, _STEPS_DRAWN_AT_ONCE):
            count = min(_STEPS_DRAWN_AT_ONCE, self.steps - first)
            batches = torch.stack(
                [
                    _batches(rows[teacher], count, self.batch_size, generator)
                    for teacher, generator in zip(chosen, generators, strict=True)
                ]
            )
            for step in range(count):
                index = batches[:, step]
                optimizer.param_groups[0]["lr"] = self.rate(first + step)
                # Three times as fast as features[index], and no fresh pages for every batch.
                torch.index_select(features, 0, index.flatten(), out=rows_of_batch)
                batch = rows_of_batch.view(*index.shape, -1)
                scores = forward(params, buffers, batch.to(self.device))
                # The sum over teachers of each one's mean: every teacher gets its own gradient.
                loss = _summed_loss(scores, labels[index].to(self.device))
                optimizer.zero_grad(set_to_none=True)
                (loss / self.batch_size).backward()
                optimizer.step()
            progress((first + count) / self.steps)
        return {name: value.detach() for name, value in {**params, **buffers}.items()}


class StackedEnsemble(TrainedTeachers):
    """Trained parameters in blocks, each ``{name: (teachers of the block, …)}``.

    Args:
        teachers: how they were made.
        num_features: width of the queries.
        known: bool ``(t, c)``, which classes each part holds; a row of False is an empty part.
        attributes: teachers answer with a row of attributes each.
    """

    def __init__(
        self, teachers: StackedTeachers, num_features: int, known: Tensor, attributes: bool = False
    ) -> None:
        empty = ~known.any(dim=1)
        super().__init__(empty, torch.zeros_like(empty))
        self.known, self.attributes = known, attributes
        self.template = teachers.initial(0, num_features, known.shape[1]).to(teachers.device).eval()
        self.device = teachers.device
        self.blocks: list[dict[str, Tensor]] = []

    def find_failures(self) -> None:
        """Mark teachers that have a weight that is not finite."""
        finite = torch.cat(
            [
                torch.stack([value.flatten(1).isfinite().all(dim=1) for value in block.values()])
                .all(dim=0)
                .cpu()
                for block in self.blocks
            ]
        )
        self.failed = ~finite & ~self.empty
        self.failures = frozenset({"not finite"} if bool(self.failed.any()) else ())

    def params(self, name: str) -> Tensor:
        """**Private.** A parameter of all teachers, ``(t, …)``."""
        return torch.cat([block[name].cpu() for block in self.blocks])

    @torch.no_grad()
    def predict(self, queries: Tensor) -> Tensor:
        """See :meth:`TrainedTeachers.predict`."""
        shape, dtype = (
            (self.known.shape, torch.int8) if self.attributes else (self.known.shape[:1], torch.int64)
        )
        votes = torch.full((len(queries), *shape), -1, dtype=dtype)
        for start, scores in self.scores(queries):
            # A NaN would win the arg-max: such a teacher abstains on this query.
            broken = ~scores.isfinite().all(dim=2)
            if self.attributes:
                said = (scores > 0).to(dtype)
            else:
                said = scores.masked_fill_(~self.known[:, None, :], -torch.inf).argmax(dim=2)
            said[broken] = -1
            votes[start : start + scores.shape[1]] = said.transpose(0, 1)
        votes[:, self.empty | self.failed] = -1
        return votes

    @torch.no_grad()
    def scores(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield, for each block of queries, its first position and the logits of all teachers ``(t, b, c)``."""
        forward = torch.vmap(
            lambda own, batch: functional_call(self.template, own, (batch,)), in_dims=(0, None)
        )
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            batch = queries[start : start + _QUERIES_AT_ONCE].to(self.device)
            yield start, torch.cat([forward(block, batch) for block in self.blocks]).cpu()


def _batches(own: Tensor, steps: int, batch_size: int, generator: torch.Generator) -> Tensor:
    """Rows of ``steps`` batches drawn with replacement from ``own``, int64 ``(steps, batch_size)``."""
    draws = torch.rand(steps, batch_size, generator=generator, dtype=torch.float64)
    if len(own) == 0:
        return torch.zeros(steps, batch_size, dtype=torch.int64)  # its teacher trains on noise and abstains
    return own[(draws * len(own)).long().clamp_(max=len(own) - 1)]


def _teachers_at_once(template: nn.Module) -> int:
    """Number of teachers per call: convolutions are fastest with activations in cache, linear layers with many."""
    return 16 if any(isinstance(layer, nn.Conv2d) for layer in template.modules()) else 64


def _summed_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses of all examples of all teachers; logits ``(t, b, c)``, labels ``(t, b)`` or ``(t, b, a)``."""
    if labels.ndim == 3:
        wanted = labels.to(scores.dtype)
        return nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


class Linear(nn.Linear):
    """``nn.Linear`` as weight·xᵀ: stacked, products of this shape (and their gradients) are twice as fast."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``(b, num_features)``."""
        return (self.weight @ x.T).T + self.bias


class LinearTeachers(StackedTeachers):
    """Teachers of multinomial logistic regression on features, trained together.

    Weights start at zero, so a teacher has no randomness but its batches.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import PATE, LinearTeachers, PrivateRecords
        >>> teachers = LinearTeachers(steps=20)
        >>> teacher = PATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(PrivateRecords.of(torch.rand(40, 4), torch.arange(40) % 2, 2))
        >>> teacher.votes(torch.rand(5, 4)).shape
        torch.Size([5, 2])
    """

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        layer = Linear(num_features, num_classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer


class CNNTeachers(StackedTeachers):
    """Teachers of two strided convolutions (5×5 and 3×3) and a linear layer, on images as flat rows.

    Strides instead of pooling: with weights of their own for every teacher the convolutions run grouped, and
    full resolution would cost ten times as much.

    Args:
        image_shape: (channels, height, width) of what a row of features is, flattened.
        channels: of the two convolutions.
        steps: optimiser steps of every teacher.
        learning_rate: of Adam at the start.
        **kwargs: see :class:`StackedTeachers`.

    Raises:
        ValueError: if ``image_shape`` is not three whole numbers, or at training if rows don't fit it.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import PATE, CNNTeachers, PrivateRecords
        >>> teachers = CNNTeachers(image_shape=(1, 8, 8), steps=5)
        >>> teacher = PATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(PrivateRecords.of(torch.rand(40, 64), torch.arange(40) % 2, 2))
        >>> teacher.votes(torch.rand(5, 64)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        channels: tuple[int, int] = (16, 32),
        steps: int = 300,
        *,
        learning_rate: float = 3e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(steps, learning_rate=learning_rate, **kwargs)
        if len(image_shape) != 3:
            raise ValueError(f"image_shape={image_shape!r} must be (channels, height, width)")
        self.image_shape = tuple(check_int("image_shape", size) for size in image_shape)
        self.channels = tuple(check_int("channels", count) for count in channels)

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        if num_features != math.prod(self.image_shape):
            raise InputError(
                f"image_shape={self.image_shape} has {math.prod(self.image_shape)} values, the features have "
                f"{num_features}; give flattened images (not HOG or backbone features) and their own shape"
            )
        first, second = self.channels
        _, height, width = self.image_shape
        cells = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2)
        return nn.Sequential(
            nn.Unflatten(1, self.image_shape),
            nn.Conv2d(self.image_shape[0], first, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            Linear(second * cells, num_classes),
        )


class ModuleTeachers(StackedTeachers):
    """Teachers of a user's own architecture.

    Args:
        factory: called with (num_features, num_classes), returns a fresh ``nn.Module`` that maps
            ``(b, num_features)`` to logits. Any module that :func:`torch.func.vmap` can run; no batch
            normalisation.
        steps: optimiser steps of every teacher.
        learning_rate: of Adam at the start.
        **kwargs: see :class:`StackedTeachers`.
    """

    def __init__(
        self,
        factory: Callable[[int, int], nn.Module],
        steps: int = 300,
        *,
        learning_rate: float = 3e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(steps, learning_rate=learning_rate, **kwargs)
        self.factory = factory

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        return self.factory(num_features, num_classes)


def rows_of_parts(parts: Tensor, num_parts: int) -> list[Tensor]:
    """Row numbers of each part in ascending order: ``num_parts`` tensors, int64."""
    order = parts.argsort(stable=True)
    sizes = torch.bincount(parts, minlength=num_parts).tolist()
    return list(order.split(sizes))


def teacher_seed(seed: int, teacher: int, purpose: str = "") -> int:
    """A 63-bit seed for one teacher, a function of (seed, teacher, purpose) alone."""
    digest = hashlib.sha256(f"pl_privknn.pate/{seed}/{teacher}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
