"""Sums of clipped per-record gradients of a module's ``training_step``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import InputError, check_positive
from pl_privknn._lightning import rank_zero_info
from pl_privknn._tracing import UntraceableError
from pl_privknn.features.private_records import keeps_apart
from pl_privknn.neighbors.search import full_precision
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.privacy.mechanisms.base import PREDICTS_ALONE
from pl_privknn.privacy.redaction import shows_private_errors
from pl_privknn.training.records import PrivateData, tensors_of
from pl_privknn.training.requirements import check_layers, trained_parameters
from pl_privknn.training.traced_step import PrivateRandomness, RecordStep, TracedStep
from pl_privknn.training.training_run import TrainingOptions
from pl_privknn.training.ways import CopyWay, GraphWay, LayerWay, add_one, silently

# Bytes that the gradients of one chunk may take, or the share of a GPU's free memory, and those of the few records
# that make a chunk worth its while.
_BYTES, _SHARE_OF_GPU, _FEW, _BYTES_OF_FEW = 1 << 25, 8, 8, 1 << 28
# Relative differences of gradients that should be the same.
_NO_GRADIENT = 1e-10
_CLOSE, _CLOSE_IN_16_BITS = 1e-3, 0.1


class RecordGradients:
    """Clipped gradients of ``training_step``, computed for one record at a time.

    The step is traced (:mod:`~pl_privknn.training.traced_step`) and the graph runs on chunks of records by ``vmap``,
    or on one after another, whichever is faster on made-up records. A step that can't be traced runs on batches of
    one and fresh copies of the module. A record whose step fails, or whose gradient is not finite, counts as zero.

    Args:
        module: a LightningModule.
        data: its private records.
        max_grad_norm: L2 bound of each record's gradient.
        options: settings of the training.
        layers: a network whose records share a forward pass, and what makes its inputs; see
            :func:`~pl_privknn.networks.layer_gradients.separable`.
        expected_batch_size: public; chunks are small compared with it.
        trainer: of the fit, or None.
        datamodule: whose batch hooks run, or None.
        seed: gives the seeds of what is drawn in steps; the operating system's generator by default.

    Attributes:
        parameters: what is trained.
        condition: what keeps records apart only if it is true; None where they are by construction.
        traced: the graph of a made-up record; None where there is none.
        seconds: time that it took to trace it.
    """

    def __init__(
        self,
        module: Any,
        data: PrivateData,
        max_grad_norm: float,
        *,
        options: TrainingOptions = TrainingOptions(),
        layers: tuple[nn.Module, Callable[[Tensor], Tensor]] | None = None,
        expected_batch_size: int = 512,
        trainer: Any = None,
        datamodule: Any = None,
        seed: Callable[[], int] | None = None,
    ) -> None:
        self.module, self.data, self.max_grad_norm = module, data, max_grad_norm
        self._options, self._layers, self._expected = options, layers, expected_batch_size
        self._precision = str(getattr(trainer, "precision", ""))
        self._step = RecordStep(module, datamodule, trainer, data.dataset, options.augment, options.views)
        #: Context of secretly seeded generators.
        self.randomness = PrivateRandomness(seed, next(module.parameters()).device)
        self.condition: str | None = None
        self.traced: TracedStep | None = None
        self.seconds = 0.0
        self._predicts_by_copies = False
        #: Number of outputs of a prediction, one for each class.
        self.num_outputs = 2
        device = next(module.parameters()).device
        self._room = torch.cuda.mem_get_info(device)[0] // _SHARE_OF_GPU if device.type == "cuda" else _BYTES
        self._take_parameters()
        self._graphs, self._copies = GraphWay(self._step, self.device), CopyWay(self._step)
        #: Computation of the gradients of records.
        self.way: LayerWay | GraphWay | CopyWay = self._graphs

    def _take_parameters(self) -> None:
        self.parameters = trained_parameters(self.module)
        self.device = self.parameters[0].device
        self._sizes = [parameter.numel() for parameter in self.parameters]
        bytes_of_one = 4 * sum(self._sizes)
        held = max(self._room // bytes_of_one, min(_FEW, _BYTES_OF_FEW // bytes_of_one), 1)
        self._chunk = self._options.physical_batch_size or min(max(16, min(128, self._expected // 8)), held)

    def sum(self, places: Sequence[int], batch_idx: int = 0, persons: Sequence[int] | None = None) -> Tensor:
        """The sum of the clipped gradients of some records, float64 ``(size,)``; private.

        Args:
            places: of the records among this process's.
            batch_idx: number of the step.
            persons: the person of each, person by person: the mean of a person's gradients is clipped then.
        """
        if batch_idx != self._graphs.number:
            self._graphs.number = self._copies.number = batch_idx
            if self.traced is not None and self.traced.changing:
                self._graphs.forget()
        total = ClippedSum(self._sizes, self.max_grad_norm, self.device)
        with self._apart():
            if persons is None and not isinstance(self.way, CopyWay):
                for batch, stack in self._chunks(places):
                    self.way.add(total, batch, stack)
            else:
                owners = range(len(places)) if persons is None else persons
                pairs = zip(places, owners, strict=True)
                for _, own in itertools.groupby(pairs, key=operator.itemgetter(1)):
                    add_one(total, functools.partial(self._mean_gradient, [place for place, _ in own]))
            return total.finish()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Context of secret random numbers and full float32 precision for code that sees private records."""
        with full_precision(self.device, autocast=True), self.randomness():
            yield

    @property
    def logged(self) -> frozenset[str]:
        """Names logged by the step, where it was traced."""
        return frozenset() if self.traced is None else self.traced.logged

    def in_words(self) -> str:
        """Description of how gradients are computed, for the log."""
        if self.condition is not None:
            return f"the guarantee is conditional: {self.condition}"
        if self.traced is None:
            return "gradients of its layers"
        constants = [f"{name} {shape}" for name, shape in self.traced.constants.items()]
        holds = f"; its graph holds {', '.join(constants)}" if constants else ""
        changing = ", ".join(self.traced.changing)
        often = (
            f"; it is traced at every step ({self.seconds:.1f} s) because of {changing}" if changing else ""
        )
        alone = ", ".join(self.traced.outside)
        alone = f"; it runs record by record because of {alone}" if alone else ""
        return f"training_step sees no private value: log in validation_step, on public data{holds}{often}{alone}"

    def replayable(self, places: Sequence[int]) -> Tensor:
        """Like :meth:`sum`, with random numbers that follow from a record's index alone; for tests of modules."""
        self.randomness.drew = False
        total = self.sum(places)
        if self.randomness.drew:
            kept, total = self.randomness.seed, torch.zeros_like(total)
            for place in places:
                self.randomness.seed = lambda place=place: 1 + place  # type: ignore[misc]
                total += self.sum([place])
            self.randomness.seed = kept
        self.randomness.drew = None
        return total

    def try_predictions(self) -> None:
        """Choose how held-out records are predicted; adds a condition where the prediction can't be traced.

        Raises:
            ValueError: for a module or data whose predictions can't be judged.
        """
        name = type(self.module).__name__
        if self._predicts_apart:
            self.num_outputs = self.module.num_classes
            return
        for batch in self.data.made_up()[:1]:
            with self._apart():
                try:
                    outputs, _ = self._step.predicted(batch)
                except Exception as error:
                    raise InputError(
                        f"evaluate: {name} gives no outputs for a made-up batch (x, y) of one record "
                        f"({type(error).__name__}); let forward(x) return logits, or evaluate=None"
                    ) from None
                if outputs.numel() < 2:
                    raise InputError(
                        f"evaluate: {name} has one output, and accuracy is of classes; let forward(x) return a logit "
                        "for each class, or evaluate=None"
                    )
                self.num_outputs = outputs.numel()
                try:
                    traced, _ = self._predicted(batch, {})
                    same = self._close([traced], [outputs])
                except Exception:
                    same = False
                if not same:
                    self._check_own_code("evaluate: forward", "its graph has other outputs")
                    self._predicts_by_copies = True
                    said = PREDICTS_ALONE.format(name)
                    self.condition = said if self.condition is None else f"{self.condition}; {said}"

    @property
    def _predicts_apart(self) -> bool:
        """Whether the module is known to keep records apart, so that its own forward pass may see private records."""
        return keeps_apart(self.module)

    @torch.no_grad()
    def _predicted(self, batch: Any, graphs: dict[Any, TracedStep]) -> tuple[Tensor, Tensor]:
        """Outputs for a batch of one record, and its class."""
        if self._predicts_apart:
            return self.module.eval()(batch[0].to(self.device)), batch[1]
        if self._predicts_by_copies:
            return self._step.predicted(batch)
        tensors, key = tensors_of(batch, self.device)
        if key not in graphs:
            graphs[key] = self._step.trace(batch, predicts=True)
        outputs: tuple[Tensor, Tensor] = graphs[key].graph(graphs[key].trained, graphs[key].other, tensors)
        return outputs

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """**Private.** Indices of the held-out records, and class and predicted class of each, int64 ``(n, 2)``.

        A prediction that fails is -1.
        """
        was_training, graphs = self.module.training, dict[Any, TracedStep]()
        found: list[tuple[int, int, int]] = []
        with self._apart():
            for row, batch in self.data.held_batches():
                found.append((row, -1, -1))
                with silently():
                    found[-1] = row, int(batch[1]), -1
                    outputs, label = self._predicted(batch, graphs)
                    known = not bool(outputs.isnan().any()) and outputs.numel() == self.num_outputs
                    found[-1] = row, int(label), int(outputs.argmax()) if known else -1
        self.module.train(was_training)
        every = torch.tensor(found, dtype=torch.int64).view(-1, 3)
        return every[:, 0], every[:, 1:]

    def made_up_sum(self, count: int) -> Tensor:
        """Sum of the clipped gradients of ``count`` made-up records, for a trial without private records.

        Args:
            count: of records.
        """
        total = ClippedSum(self._sizes, self.max_grad_norm, self.device)
        with self._apart():
            for batch in self.data.made_up()[:1] * count:
                total.add_one(self._gradient(batch))
        return total.finish()

    # ------------------------------------------------------------------ the choice

    def choose(self, timed: bool = True) -> None:
        """Trace the step, try it on made-up records and choose the fastest way, before any charge.

        Args:
            timed: whether the clock decides; else ``vmap`` where it gives the same.

        Raises:
            ValueError: where the step fails on made-up records, or keeps something of one, with its reason.
        """
        self.randomness.drew = False
        with self._apart():
            batches = self.data.made_up()
            if batches and self._layers is not None and not self._step.has_hooks:
                self.way = self._layer_way()
            elif batches:
                self._try(batches, timed)
                self._check_moves(batches)
        self.randomness.drew = None

    def check_epochs(self, epochs: int) -> None:
        """Trace the step for every epoch, where it reads the epoch's number.

        Args:
            epochs: how many there are.

        Raises:
            ValueError: where the step can't be traced in one of them.
        """
        if self.traced is None or not self.traced.reads_epoch:
            return
        batch = self.data.made_up()[0]
        with self._apart():
            for self._step.epoch in range(1, epochs):
                try:
                    self._step.trace(batch)
                except UntraceableError as error:
                    raise InputError(
                        f"training_step: can be traced in epoch 0 and can't in epoch {self._step.epoch} ({error}); "
                        "change it so that it can in every epoch"
                    ) from None
        self._step.epoch = None

    def refresh(self) -> None:
        """Trace the step again, for the parameters that require gradients now.

        Raises:
            ValueError: where the step can't be traced any more.
        """
        self._graphs.forget()
        self._take_parameters()
        self._graphs.chunk = self._chunk
        if isinstance(self.way, LayerWay):
            self.way = self._layer_way()
        if self.traced is None or not (batches := self.data.made_up()):
            return
        with self._apart():
            self.traced = self._graphs.trace(batches[0])

    def _layer_way(self) -> LayerWay:
        assert self._layers is not None
        network, inputs = self._layers
        inputs = nn.Identity() if self.data.has_vectors else inputs
        return LayerWay(network, inputs, self.parameters, self._chunk)

    def _try(self, batches: list[Any], timed: bool) -> None:
        reason = None
        for batch in batches:
            try:
                start = time.perf_counter()
                traced = self._graphs.trace(batch)
                self.seconds = time.perf_counter() - start
                differs = self._differs(traced, batch)
            except UntraceableError as error:
                reason = reason or str(error)
                continue
            if not differs:
                self.traced = traced
                while not self._try_chunk(tensors_of(batch, self.device)[0], timed):
                    self._chunk //= 2
                    rank_zero_info(f"no memory for more than {self._chunk} records at once")
                return
            reason = "its graph has another gradient than the step"
        batch = self._first_working(batches)
        if self._options.step == "traced":
            raise InputError(
                f"training_step: can't be traced ({reason}); change it so, or use step='auto', whose guarantee is "
                "conditional"
            )
        self._check_own_code("training_step", reason)
        self.way = self._copies
        self.condition = (
            f"training_step can't be traced ({reason}), and keeps nothing of a record outside of its module"
        )
        self._check_keeps_nothing(batch)

    def _check_own_code(self, name: str, reason: str | None) -> None:
        """Refuse to run a module's own code outside the CPU: only in a graph are ids kept within their tables."""
        if self.device.type != "cpu":
            raise InputError(
                f"{name}: can't be traced ({reason}), and an id out of range would end the training on a GPU, which "
                "reveals that its record was drawn; use accelerator='cpu', or change it so that it can be traced"
            )

    def _try_chunk(self, tensors: list[Tensor], timed: bool) -> bool:
        """Choose between ``vmap`` and a loop, on equal records; False where memory does not suffice."""
        assert self.traced is not None
        self._graphs.chunk, traced = self._chunk, self.traced
        self.randomness.begin()
        try:
            stack = [torch.stack([part] * self._chunk) for part in tensors]
            rows = traced.rows(stack)
            alone = traced.gradient([part[0] for part in stack])
            same = self.randomness.drawn() or self._close([row[0] for row in rows], alone)
            del rows
            if same and not traced.outside:
                self._graphs.by_vmap = not timed or self._is_faster(traced, stack)
        except torch.OutOfMemoryError:
            return self._chunk == 1
        except Exception:
            self._graphs.by_vmap = False
        return True

    def _differs(self, traced: TracedStep, batch: Any) -> bool:
        """Whether the gradients of graph and step differ, where neither draws random numbers."""
        self.randomness.begin()
        tensors, _ = tensors_of(batch, self.device)
        try:
            found = traced.gradient(tensors)
        except Exception as error:
            raise UntraceableError(f"its graph fails: {type(error).__name__}") from None
        finite = all(bool(part.isfinite().all()) for part in found)
        draws = bool(traced.changing) or self.randomness.drawn()
        if finite and draws:
            return False
        try:
            wanted = self._step.run(batch)
        except Exception as error:
            if finite:
                return False  # a step that made-up values fail is judged by its graph
            raise UntraceableError(f"it fails: {type(error).__name__}") from None
        return not draws and not self._close(found, wanted)

    def _close(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
        """Whether results are equal up to the rounding of the training's precision."""
        return _close(found, wanted, _CLOSE_IN_16_BITS if "16" in self._precision else _CLOSE)

    def _first_working(self, batches: list[Any]) -> Any:
        first: Exception | None = None
        for batch in batches:
            try:
                self._step.run(batch)
            except Exception as error:
                first = first or error
            else:
                return batch
        assert first is not None
        if shows_private_errors():
            raise first
        raise InputError(
            f"{type(self.module).__name__}.training_step: fails on a made-up record of the private ones' shapes "
            f"({type(first).__name__}: {' '.join(str(first).split())[:300]}); let it take batches of a single record"
        )

    def _check_keeps_nothing(self, batch: Any) -> None:
        """Refuse a step that keeps state of other records: its gradient of a record changes after them."""
        found: list[list[Tensor]] = []
        for one in (batch, *self.data.made_up(), batch):
            self.randomness.begin(7)
            with contextlib.suppress(Exception):
                found.append(self._step.run(one))
        if not _close(found[0], found[-1], 1e-6):
            raise InputError(
                f"{type(self.module).__name__}.training_step: can't be traced, and keeps something of a record "
                "outside of the module: a made-up record has another gradient after a second one; keep it in the "
                "module, or leave it out"
            )

    def _check_moves(self, batches: list[Any]) -> None:
        """Refuse a step whose gradient is zero for every made-up record: all of ε would be spent on noise."""
        largest: list[float] = []
        for batch in batches:
            self.randomness.begin()
            with contextlib.suppress(Exception):
                largest.append(max(float(part.abs().max()) for part in self._gradient(batch) if part.numel()))
        known = [value for value in largest if math.isfinite(value)]
        if known and max(known) <= _NO_GRADIENT:
            raise InputError(
                f"{type(self.module).__name__}.training_step: the loss of one record alone does not depend on the "
                "parameters (made-up records have gradients of zero), as that of pairs within a batch; use a loss of "
                "single records"
            )

    def _is_faster(self, traced: TracedStep, stack: list[Tensor]) -> bool:
        """Whether ``vmap`` on a chunk takes less time than its records one by one, by the minimum of several runs."""
        total = ClippedSum(self._sizes, self.max_grad_norm, self.device)
        many = self._clocked(lambda: total.add(traced.rows(stack)))
        one = self._clocked(lambda: total.add_one(traced.gradient([part[0] for part in stack])))
        return many < one * self._chunk

    def _clocked(self, work: Callable[[], Any]) -> float:
        def clock() -> float:
            if self.device.type == "cpu":
                return time.process_time()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter()

        times: list[float] = []
        while len(times) < 5 or (len(times) < 30 and sum(times) < 0.2):
            start = clock()
            work()
            times.append(clock() - start)
        return min(times)

    # ------------------------------------------------------------------ records

    def _read(self, place: int) -> Any:
        self.randomness.begin()
        batch = self.data.batch(place)
        self.randomness.begin()
        return batch

    def _gradient(self, batch: Any) -> list[Tensor]:
        """Gradient of a batch of one, one tensor per trained parameter."""
        return (self._copies if self.way is self._copies else self._graphs).gradient(batch)

    def _chunks(self, places: Sequence[int]) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yield chunks: a batch of one record, and the stacked tensors ``(b, 1, …)`` of such batches."""
        if self.data.has_rows:
            for part in torch.tensor(places, dtype=torch.int64).split(self._chunk) if places else ():
                if (rows := self._rows(part)) is None:
                    continue
                stack = [tensor.to(self.device) for tensor in rows]
                self.randomness.begin()
                yield [tensor[0] for tensor in stack], stack
            return
        waiting: dict[Any, list[Any]] = {}
        for place in places:
            full = None
            with silently():
                batch = self._read(place)
                tensors, key = tensors_of(batch, self.device)
                waiting.setdefault(key, []).append((batch, tensors))
                if len(waiting[key]) == self._chunk:
                    full = waiting.pop(key)
            if full is not None:
                yield _stacked(full)
        for some in waiting.values():
            yield _stacked(some)

    def _rows(self, places: Tensor) -> Any:
        """Tensors of a chunk of records, without unreadable records; None where no record can be read."""
        with silently():
            return self.data.rows(places)
        found = []
        for place in places:
            with silently():
                found.append(self.data.rows(place[None]))
        return [torch.cat(parts) for parts in zip(*found, strict=True)] or None

    def _mean_gradient(self, places: Sequence[int]) -> list[Tensor]:
        """Mean gradient of some records; raises where the gradient of one of them does."""
        found = [self._gradient(self._read(place)) for place in places]
        if len(found) == 1:
            return found[0]
        return [torch.stack(parts).double().mean(0) for parts in zip(*found, strict=True)]


def surrogate(parameters: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Loss of value 0 whose gradient is ``gradient``.

    Args:
        parameters: the trained ones.
        gradient: noisy, shape ``(size,)``.
    """
    pieces = gradient.split([parameter.numel() for parameter in parameters])
    with torch.autocast(parameters[0].device.type, enabled=False):
        terms = [
            (parameter * piece.view_as(parameter).to(parameter)).sum().float()
            for parameter, piece in zip(parameters, pieces, strict=True)
        ]
        loss = torch.stack(terms).sum()
        return loss - loss.detach()


def _stacked(some: list[tuple[Any, list[Tensor]]]) -> tuple[Any, list[Tensor]]:
    return some[0][0], [torch.stack(parts) for parts in zip(*(tensors for _, tensors in some), strict=True)]


def _close(found: Sequence[Tensor], wanted: Sequence[Tensor], close: float) -> bool:
    scale = max(float(part.norm()) for part in wanted) + 1e-12
    return all(float((a - b).norm()) <= close * scale for a, b in zip(found, wanted, strict=True))


def clipped_sum(module: Any, data: Any, records: Sequence[int], max_grad_norm: float = 1.0) -> Tensor:
    """Sum of clipped gradients of some records, as in private training but without noise.

    For tests of one's own modules: whatever a module does, one record more or less moves the sum by at most
    ``max_grad_norm``. Random numbers that a record draws follow from its index here, where training draws them anew.

    Args:
        module: a LightningModule.
        data: a LightningDataModule, a DataLoader or a map-style dataset.
        records: indices of records.
        max_grad_norm: L2 bound of each record's gradient.

    Returns:
        float64 ``(size,)``: of all trained parameters, one after another.

    Raises:
        ValueError: where the module's step fails on made-up records, or the data holds no single records.

    Example:
        >>> import pytorch_lightning as pl, torch
        >>> from pl_privknn.testing import clipped_sum
        >>> class Line(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return (self.layer(batch[0]) - batch[1]).square().mean()
        >>> data = torch.utils.data.TensorDataset(torch.rand(9, 2), torch.rand(9, 1))
        >>> module = Line()
        >>> moved = clipped_sum(module, data, [0, 1, 2], 0.5) - clipped_sum(module, data, [0, 2], 0.5)
        >>> bool(moved.norm() <= 0.5 * (1 + 1e-6))
        True
    """
    datamodule = data if hasattr(data, "train_dataloader") else None
    if datamodule is not None:
        datamodule.setup("fit")
    own = datamodule is None or hasattr(data, "private_in_shards")
    source = data if own else data.train_dataloader()
    check_layers(module, "replace_batch_norm=True in PrivateTraining")
    norm = check_positive("max_grad_norm", max_grad_norm)
    gradients = RecordGradients(module, PrivateData(source), norm, datamodule=datamodule, seed=lambda: 0)
    gradients.choose(timed=False)
    return gradients.replayable([int(place) for place in records])
