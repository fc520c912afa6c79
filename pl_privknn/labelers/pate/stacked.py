"""Neural teachers with stacked parameters: one batched loop trains hundreds of them at once."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from pl_privknn._checks import check_int, check_non_negative, check_positive
from pl_privknn.labelers.pate.teachers import (
    Teachers,
    TrainedTeachers,
    TrainingProgress,
    rows_of_parts,
    teacher_seed,
)

# Steps whose batches are drawn together: few enough to hold, enough to make the drawing cheap.
_STEPS_DRAWN_AT_ONCE = 64
# Queries of one block of predictions: 16 convolutional teachers' activations then take some 100 MB.
_QUERIES_AT_ONCE = 512


class StackedTeachers(Teachers):
    """Base of teachers that are small torch modules of one architecture.

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
        device: where teachers train, for instance ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: for arguments out of range.
    """

    cacheable = True

    def __init__(
        self,
        steps: int = 300,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        weight_decay: float = 0.0,
        seed: int = 0,
        teachers_at_once: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.steps = check_int("steps", steps)
        self.batch_size = check_int("batch_size", batch_size)
        self.learning_rate = check_positive("learning_rate", learning_rate)
        self.weight_decay = check_non_negative("weight_decay", weight_decay)
        self.seed = check_int("seed", seed, minimum=0)
        self.teachers_at_once = (
            None if teachers_at_once is None else check_int("teachers_at_once", teachers_at_once)
        )
        self.device = torch.device(device)

    @abc.abstractmethod
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A fresh teacher, mapping ``(b, num_features)`` to logits ``(b, num_classes)``."""

    def initial(self, teacher: int, num_features: int, num_classes: int) -> nn.Module:
        """Teacher ``teacher`` before its training; leaves the global random state alone."""
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed every device as well, and note a traceback each time.
            torch.default_generator.manual_seed(teacher_seed(self.seed, teacher, "weights"))
            module = self.build(num_features, num_classes)
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
            raise ValueError(
                f"{type(self).__name__}: batch normalisation keeps running statistics, which stacked "
                "teachers can't; use GroupNorm or LayerNorm"
            )
        return module

    def batch_generator(self, teacher: int) -> torch.Generator:
        """Source of the uniform numbers u that choose teacher's records: row ⌊u·(size of its part)⌋."""
        return torch.Generator().manual_seed(teacher_seed(self.seed, teacher, "batches"))

    def rate(self, step: int) -> float:
        """Learning rate at ``step``."""
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Sum of the losses of all examples of all teachers.

        Args:
            scores: logits, ``(t, b, c)``.
            labels: int64, ``(t, b)``.
        """
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")

    def known(self, labels: Tensor, parts: Tensor, num_classes: int, num_teachers: int) -> Tensor:
        """Which classes each part holds, bool ``(t, c)``; a row of False is an empty part."""
        known = torch.zeros(num_teachers, num_classes, dtype=torch.bool)
        known[parts, labels] = True
        return known

    def ensemble(self, num_features: int, known: Tensor) -> StackedEnsemble:
        """An ensemble without parameters yet; see :class:`StackedEnsemble`."""
        return StackedEnsemble(self, num_features, known)

    def settings(self) -> str:
        """See :meth:`Teachers.settings`."""
        shown = {name: value for name, value in sorted(vars(self).items()) if name != "teachers_at_once"}
        return f"{type(self).__name__}({shown})"

    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: TrainingProgress,
    ) -> TrainedTeachers:
        """See :meth:`Teachers.train`.

        Raises:
            ValueError: if the module does not fit the features, or holds batch normalisation.
        """
        rows = rows_of_parts(parts, num_teachers)
        ensemble = self.ensemble(features.shape[1], self.known(labels, parts, num_classes, num_teachers))
        at_once = min(num_teachers, self.teachers_at_once or _teachers_at_once(ensemble.template))
        for start in range(0, num_teachers, at_once):
            chosen = range(start, min(start + at_once, num_teachers))

            def report(fraction: float, chosen: range = chosen) -> None:
                progress((chosen.start + fraction * len(chosen)) / num_teachers)

            ensemble.blocks.append(self._train_block(features, labels, rows, chosen, num_classes, report))
        ensemble.find_failures()
        return ensemble

    def restore(self, state: dict[str, Tensor], num_features: int, num_classes: int) -> TrainedTeachers:
        """See :meth:`Teachers.restore`."""
        if state["known"].shape[1] != num_classes:
            raise ValueError(f"state: of {state['known'].shape[1]} classes, not num_classes={num_classes}")
        ensemble = self.ensemble(num_features, state["known"])
        ensemble.blocks.append(
            {name[7:]: value for name, value in state.items() if name.startswith("params/")}
        )
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
                loss = self.loss(scores, labels[index].to(self.device))
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
        known: bool ``(t, c)``, which classes each part holds.
    """

    def __init__(self, teachers: StackedTeachers, num_features: int, known: Tensor) -> None:
        empty = ~known.any(dim=1)
        super().__init__(empty, torch.zeros_like(empty))
        self.known = known
        self.template = teachers.initial(0, num_features, known.shape[1]).to(teachers.device).eval()
        self.device = teachers.device
        self.blocks: list[dict[str, Tensor]] = []

    def find_failures(self) -> None:
        """Note teachers with a weight that is not finite."""
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

    def state(self) -> dict[str, Tensor]:
        """See :meth:`TrainedTeachers.state`."""
        names = self.blocks[0]
        params = {f"params/{name}": torch.cat([block[name].cpu() for block in self.blocks]) for name in names}
        return {"known": self.known, **params}

    @torch.no_grad()
    def predict(self, queries: Tensor) -> Tensor:
        """See :meth:`TrainedTeachers.predict`."""
        votes = torch.full((len(queries), self.num_teachers), -1, dtype=torch.int64)
        for start, scores in self.scores(queries):
            # A NaN would win the arg-max: such a teacher abstains on this query.
            finite = scores.isfinite().all(dim=2)
            scores.masked_fill_(~self.known[:, None, :], -torch.inf)
            votes[start : start + scores.shape[1]] = torch.where(finite, scores.argmax(dim=2), -1).T
        votes[:, self.empty | self.failed] = -1
        return votes

    @torch.no_grad()
    def scores(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits of all teachers for block after block of queries: where the block begins, ``(t, b, c)``."""
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
    """Convolutions run best with all activations in the cache, linear layers with many teachers a call."""
    return 16 if any(isinstance(layer, nn.Conv2d) for layer in template.modules()) else 64
