"""Sums of clipped per-record gradients of a module's own training_step, each record by itself."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from pl_privknn._checks import check_positive
from pl_privknn.privacy.redaction import shows_private_errors
from pl_privknn.training.clipped_sums import ClippedSum
from pl_privknn.training.fast_paths import LayerGradients, NotSupportedError, losses_of, proven_network
from pl_privknn.training.isolation import (
    Copier,
    Memo,
    PrivateRandomness,
    PublicTrainer,
    Surroundings,
    cloned,
    identity,
    in_own_context,
    moved,
    noticing_interrupts,
    telling_nobody,
    was_interrupted,
    writing_nowhere,
)
from pl_privknn.training.private_data import PrivateData, signature, stacked, unstacked, views_of

CLIPPING = ("flat", "ghost")
#: Why the guarantee of a foreign module's ghost clipping is conditional.
DECLARED = (
    "the user declares that losses are per example (clipping='ghost' runs a foreign training_step on batches)"
)

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# Bytes that the gradients of one chunk may take, and those of the few records that make a chunk worth its while.
_BYTES, _FEW, _BYTES_OF_FEW = 1 << 26, 8, 1 << 28
_CLOSE = 1e-3
# As they are outside of private steps, in which clocks stand still.
_PROCESSOR, _WALL = time.process_time, time.perf_counter


class IsolatedGradients:
    """Clipped gradients of ``training_step``, one record alone at a time.

    Each record goes through the data module's ``collate_fn`` and batch hooks and through ``training_step`` as a batch
    of one, on copies of everything it could write to (:mod:`~pl_privknn.training.isolation`): a loop over records, or
    ``vmap`` over chunks of them, whichever is faster on made-up records. A record whose step fails, or whose gradient
    is not finite, counts as zero, silently.

    Args:
        module: a LightningModule.
        data: its private records.
        max_grad_norm: bound of each record's gradient.
        clipping: ``"flat"``, or ``"ghost"``: the module's step runs on batches, and norms come without gradients.
        physical_batch_size: records at once; by what memory and ``expected_batch_size`` allow if None.
        expected_batch_size: public; chunks are small beside it.
        augment: see :class:`~pl_privknn.training.private_training.PrivateTraining`.
        views: likewise.
        trainer: of the fit, or None.
        datamodule: whose batch hooks run, or None.
        seed: gives the seeds of what is drawn in steps; the operating system's generator by default.

    Attributes:
        parameters: what is trained.
        logged: names that the step logs, which reach nobody.
        isolated: whether no record can meet another one before its gradient is clipped.
    """

    def __init__(
        self,
        module: Any,
        data: PrivateData,
        max_grad_norm: float,
        *,
        clipping: str = "flat",
        physical_batch_size: int | None = None,
        expected_batch_size: int = 512,
        augment: Callable[[Tensor], Tensor] | None = None,
        views: int = 1,
        trainer: Any = None,
        datamodule: Any = None,
        seed: Callable[[], int] | None = None,
    ) -> None:
        self.module, self.data, self.max_grad_norm = module, data, max_grad_norm
        self.names, self.parameters = trained_parameters(module)
        self.device = self.parameters[0].device
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._augment, self._views, self._trainer = augment, views, trainer
        bytes_of_one = 4 * sum(self._sizes)
        held = max(_BYTES // bytes_of_one, min(_FEW, _BYTES_OF_FEW // bytes_of_one), 1)
        self._chunk = physical_batch_size or min(
            max(16, min(128, expected_batch_size // 8)), 1 << held.bit_length() - 1
        )
        self._hooks = {name: _hook_owner(name, module, datamodule) for name in _TRANSFERS}
        self._randomness = PrivateRandomness(seed)
        self._surroundings = Surroundings(
            Copier(lambda: PublicTrainer(trainer, self.device), self._randomness.for_copy)
        )
        self._read = data.reader(self._randomness)
        self._muted = False
        self.logged: set[str] = set()
        structure = proven_network(module) if augment is None and not self._has_hooks else None
        self.isolated = clipping != "ghost" or structure is not None
        self._fast = self._way_of_layers(structure, clipping)
        self._way: Callable[[Sequence[int], int], Tensor] = self._fast or self._in_turn

    @property
    def way(self) -> str:
        """Way in which sums are formed: ``"layers"``, ``"vmap"`` or ``"loop"``."""
        if self._way == self._in_turn:
            return "loop"
        return "vmap" if self._way == self._vectorized else "layers"

    def sum(self, places: Sequence[int], batch_idx: int = 0, persons: Sequence[int] | None = None) -> Tensor:
        """The sum of the clipped gradients of some records, float64 ``(size,)``; private.

        Args:
            places: of the records among this process's.
            batch_idx: number of the step.
            persons: the person of each, person by person: the mean of a person's gradients is clipped then.
        """
        with self._private():
            if persons is not None:
                return self._by_person(places, persons, batch_idx)
            return self._way([int(place) for place in places], batch_idx)

    def replayable(self, places: Sequence[int]) -> Tensor:
        """:meth:`sum`, in which a record's random numbers follow from its place alone; for tests of modules."""
        chosen = [int(place) for place in places]
        with self._private(), self._randomness.of_the_system():
            self._randomness.watch()
            total = self._way(chosen, 0)
            if self._randomness.drew():
                total = self._in_turn(chosen, 0, by_place=True)
        return total

    def made_up_sum(self, count: int) -> Tensor:
        """The sum of as many made-up records' gradients: for a trial without private ones.

        Args:
            count: of records.
        """
        total = self._new_sum()
        if (batch := self._working()) is not None:
            with self._private():
                for _ in range(count):
                    total.add_one(self._gradient(batch, 0))
        return total.finish()

    def surrogate(self, gradient: Tensor) -> Tensor:
        """A loss of value 0 whose gradient is ``gradient``: nothing else is in it.

        Args:
            gradient: noisy, shape ``(size,)``.
        """
        pieces = gradient.split(self._sizes)
        with torch.autocast(self.device.type, enabled=False):
            loss = torch.stack(
                [
                    (parameter * piece.view_as(parameter).to(parameter)).sum().float()
                    for parameter, piece in zip(self.parameters, pieces, strict=True)
                ]
            ).sum()
            return loss - loss.detach()

    def choose_way(self, timed: bool = True) -> None:
        """Try made-up records, and take the faster way of those that give the same; before anything is paid.

        Args:
            timed: whether the clock decides; else ``vmap`` where it gives the same.

        Raises:
            ValueError: where the step fails on them, with its reason.
        """
        warm = self._new_sum()
        for dtype in (torch.float32, torch.float64):  # the compiled loops are made ready, which writes files
            warm.add_one([torch.zeros(size, dtype=dtype, device=self.device) for size in self._sizes])
            warm.finish()
        if self._fast is not None and self.isolated:
            return
        if (batch := self._working()) is None:
            return
        with self._private():
            if self._fast is not None:
                self._try_layers(batch)
            elif signature(batch) is not None:
                self._compare(batch, timed)

    # ------------------------------------------------------------------ ways

    @contextlib.contextmanager
    def _shadow(self) -> Iterator[tuple[Any, list[nn.Parameter]]]:
        """A copy of the module and its trained parameters, in a world of its own."""
        leaves = [nn.Parameter(cloned(parameter)) for parameter in self.parameters]
        memo: Memo = {identity(p): leaf for p, leaf in zip(self.parameters, leaves, strict=True)}
        self._randomness.begin()
        with self._surroundings.alone(memo, self.module) as (shadow,):
            if self._muted:
                _mute(shadow)
            yield shadow, leaves

    def _in_turn(self, places: Sequence[int], batch_idx: int, by_place: bool = False) -> Tensor:
        """A loop over records, each on copies of its own."""
        total = self._new_sum()
        for place in places:
            if by_place:
                self._randomness.seed = lambda place=place: 1 + place  # type: ignore[misc]
            self._add_alone(total, lambda place=place: self._batch(place), batch_idx)  # type: ignore[misc]
        return total.finish()

    def _by_person(self, places: Sequence[int], persons: Sequence[int], batch_idx: int) -> Tensor:
        """The mean gradient of each person's records, clipped; a person with a record that fails counts as zero."""
        total = self._new_sum()
        for _, pairs in itertools.groupby(zip(places, persons, strict=True), key=operator.itemgetter(1)):
            own = [place for place, _ in pairs]
            mean = None
            with _silently():
                found = [self._gradient(self._batch(place), batch_idx) for place in own]
                mean = [torch.stack(parts).double().mean(0) for parts in zip(*found, strict=True)]
            if mean is not None:
                total.add_one(mean)
        return total.finish()

    def _add_alone(self, total: ClippedSum, batch: Callable[[], Any], batch_idx: int) -> None:
        found = None
        with _silently():
            found = self._gradient(batch(), batch_idx)
        if found is not None:
            total.add_one(found)

    @in_own_context
    def _gradient(self, batch: Any, batch_idx: int, made_up: bool = False) -> list[Tensor]:
        """The gradient of one batch of one."""
        with self._shadow() as (shadow, leaves):
            if made_up:
                shadow.log = lambda name, *args, **kwargs: self.logged.add(name)
                shadow.log_dict = lambda names, *args, **kwargs: self.logged.update(names)
            found = torch.autograd.grad(_loss_of(shadow, batch, batch_idx), leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if part is None else part for part, leaf in zip(found, leaves, strict=True)
        ]

    def _vectorized(self, places: Sequence[int], batch_idx: int) -> Tensor:
        """Chunks of records by ``vmap``; those that don't stack, or fail so, in turn."""
        total = self._new_sum()
        alone: list[Any] = []
        for stack, count in self._chunks(places, alone):
            try:
                rows = self._rows(stack, batch_idx)
            except BaseException as error:
                if _is_from_the_user(error):
                    raise
                alone += [unstacked(stack, place) for place in range(count)]
            else:
                total.add(rows, count)
                del rows  # before the next chunk has its own
        for batch in alone:
            self._add_alone(total, lambda batch=batch: batch, batch_idx)  # type: ignore[misc]
        return total.finish()

    def _chunks(self, places: Sequence[int], alone: list[Any]) -> Iterator[tuple[Any, int]]:
        """Stacks of a chunk of batches of one signature, and how many of them count; others go to ``alone``."""
        if self.data.has_rows and not self._has_hooks and self._augment is None:
            for part in torch.tensor(places, dtype=torch.int64).split(self._chunk) if places else ():
                rows = torch.cat([part, part[-1:].expand(self._chunk - len(part))])
                yield _to(self.data.rows(rows), self.device), len(part)
            return
        waiting: dict[Any, list[Any]] = {}
        for place in places:
            full = None
            with _silently():
                batch = self._batch(place)
                if (key := signature(batch)) is None:
                    alone.append(batch)
                else:
                    waiting.setdefault(key, []).append(batch)
                    if len(waiting[key]) == self._chunk:
                        full = waiting.pop(key)
            if full is not None:
                yield stacked(full), len(full)
        for batches in waiting.values():
            yield stacked(batches + batches[-1:] * (self._chunk - len(batches))), len(batches)

    @in_own_context
    def _rows(self, batch: Any, batch_idx: int) -> list[Tensor]:
        """Gradients ``(b, …)`` of a stack of batches of one; every chunk has copies of its own."""
        with self._shadow() as (shadow, _):
            step = _Step(shadow, batch_idx)
            given = {f"shadow.{name}": cloned(p) for name, p in zip(self.names, self.parameters, strict=True)}

            def loss(parameters: dict[str, Tensor], one: Any) -> Tensor:
                return torch.func.functional_call(step, parameters, (one,))

            gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
            found = gradients(given, batch)
        return [found[name] for name in given]

    # ------------------------------------------------------------------ ways by layers

    def _way_of_layers(self, structure: Any, clipping: str) -> Callable[[Sequence[int], int], Tensor] | None:
        if structure is None and clipping != "ghost":
            return None
        if structure is not None:
            network, inputs = structure
            layers = LayerGradients(network, self.parameters)

            def of_tables(places: Sequence[int], batch_idx: int) -> Tensor:
                total = self._new_sum()
                for stack, count in self._chunks(places, []):
                    made, targets = (part.squeeze(1).contiguous() for part in stack)
                    made = made if self.data.has_vectors else inputs(made)
                    layers.add(
                        total, layers.seen(lambda x, y: losses_of(network(x), y), made, targets), count
                    )
                return total.finish()

            return of_tables

        def of_batches(places: Sequence[int], batch_idx: int) -> Tensor:
            total = self._new_sum()
            alone: list[Any] = []
            chunks = [
                (pytree.tree_map(lambda leaf: leaf[:count].flatten(0, 1), stack), count)  # noqa: B023
                for stack, count in self._chunks(places, alone)
            ]
            for joined, count in [*chunks, *((batch, 1) for batch in alone)]:
                found = None
                with _silently():
                    found = self._seen(joined, count, batch_idx)
                if found is not None:
                    found[0].add(total, found[1], count)
            return total.finish()

        return of_batches

    @in_own_context
    def _seen(self, joined: Any, count: int, batch_idx: int) -> tuple[LayerGradients, Any]:
        """Inputs of layers for a joined batch, whose loss is taken for the mean of examples'."""
        with self._shadow() as (shadow, leaves):
            layers = LayerGradients(shadow, leaves)
            return layers, layers.seen(lambda: count * _loss_of(shadow, joined, batch_idx))

    def _try_layers(self, batch: Any) -> None:
        try:
            self._seen(batch, 1, 0)
        except NotSupportedError as error:
            raise ValueError(f'clipping="ghost": {error}; use clipping="flat"') from None

    # ------------------------------------------------------------------ records

    @property
    def _has_hooks(self) -> bool:
        return any(owner is not None for owner in self._hooks.values())

    def _batch(self, place: int) -> Any:
        """Batch of one record for the step: read, transferred and augmented by itself."""
        return self._transferred(self._read(place))

    @in_own_context
    def _transferred(self, batch: Any) -> Any:
        if not self._has_hooks and self._augment is None:
            return _to(batch, self.device)
        self._randomness.begin()
        with self._surroundings.alone({}, *self._hooks.values(), self._augment) as (*owners, augment):
            for name, owner in zip(self._hooks, owners, strict=True):
                if name == "transfer_batch_to_device":
                    on_device = _to if owner is None else owner.transfer_batch_to_device
                    batch = on_device(batch, self.device, 0)
                elif owner is not None:
                    batch = getattr(owner, name)(batch, 0)
            return batch if augment is None else views_of(batch, augment, self._views)

    # ------------------------------------------------------------------ the choice

    def _working(self) -> Any:
        """The first made-up batch with which the step runs; all fail as the first does. None without records.

        The step runs twice: as anywhere, so that what is compiled is ready, and as a private step.
        """
        first: BaseException | None = None
        with self._private(writes=True):
            batches = self.data.made_up(self._randomness)
            for batch in batches:
                try:
                    ready = self._transferred(batch)
                    self._gradient(ready, 0, made_up=True)
                    with writing_nowhere():
                        self._gradient(self._transferred(batch), 0)
                except BaseException as error:
                    if _is_from_the_user(error):
                        raise
                    first = first or error
                else:
                    return ready
        if first is None or shows_private_errors():
            if first is None:
                return None
            raise first
        raise ValueError(
            f"{type(self.module).__name__}.training_step: fails on a made-up record of the private ones' shapes "
            f"({type(first).__name__}: {' '.join(str(first).split())[:300]}); let it take batches of a single record"
        )

    def _compare(self, batch: Any, timed: bool) -> None:
        self._randomness.watch()
        one = self._gradient(batch, 0)
        draws = self._randomness.drew()
        several = stacked([batch] * self._chunk)
        for muted in (False, True) if not draws and _metrics_of(self.module) else (False,):
            self._muted = muted
            try:
                rows = self._rows(several, 0)
                scale = max(float(part.norm()) for part in one) + 1e-12
                if not draws and any(
                    float((part[0] - alone).norm()) > _CLOSE * scale
                    for part, alone in zip(rows, one, strict=True)
                ):
                    continue
            except Exception:
                continue
            del rows
            if not timed or self._is_faster(several, batch):
                self._way = self._vectorized
                return
        self._muted = False

    def _is_faster(self, several: Any, batch: Any) -> bool:
        """Whether a chunk takes less of the processor than its records do one by one: the least of some turns."""
        total = self._new_sum()
        many = self._clocked(lambda: total.add(self._rows(several, 0)))
        one = self._clocked(lambda: self._add_alone(total, lambda: batch, 0))
        return many < one * self._chunk

    def _clocked(self, work: Callable[[], Any]) -> float:
        clock = _PROCESSOR if self.device.type == "cpu" else _WALL
        times: list[float] = []
        while len(times) < 5 or (len(times) < 30 and sum(times) < 0.2):
            start = clock()
            work()
            times.append(clock() - start)
        return min(times)

    # ------------------------------------------------------------------ surroundings

    def _new_sum(self) -> ClippedSum:
        return ClippedSum(self._sizes, self.max_grad_norm, self.device)

    @contextlib.contextmanager
    def _private(self, writes: bool = False) -> Iterator[None]:
        plugin = getattr(self._trainer, "precision_plugin", None)
        with (
            noticing_interrupts(),
            telling_nobody() if writes else writing_nowhere(),
            self._randomness(),
            torch.enable_grad(),
            contextlib.nullcontext() if plugin is None else plugin.train_step_context(),
        ):
            self._randomness.begin()
            yield


def clipped_sum(module: Any, data: Any, records: Sequence[int], max_grad_norm: float = 1.0) -> Tensor:
    """The sum of the clipped gradients of some records as private training forms it, without noise.

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
    gradients = IsolatedGradients(module, PrivateData(source), norm, datamodule=datamodule, seed=lambda: 0)
    gradients.choose_way(timed=False)
    return gradients.replayable(records)


class _Step(nn.Module):
    def __init__(self, shadow: Any, batch_idx: int) -> None:
        super().__init__()
        self.shadow, self.batch_idx = shadow, batch_idx

    def forward(self, batch: Any) -> Tensor:
        return _loss_of(self.shadow, batch, self.batch_idx)


def _loss_of(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """The loss that ``training_step`` returns for a batch; 0 where it skips the batch."""
    given = (batch, batch_idx) if len(arguments_of(module.training_step)) > 1 else (batch,)
    output = module.training_step(*given)
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        return torch.stack([p.sum() for p in module.parameters() if p.requires_grad]).sum() * 0.0
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "training_step must return the loss, a tensor with one value, or a dict with it as 'loss'"
        )
    return loss.reshape(())


def arguments_of(step: Callable[..., Any]) -> list[str]:
    """Names of the arguments of a module's step."""
    return list(inspect.signature(step).parameters)


def trained_parameters(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Names and parameters that need a gradient.

    Raises:
        ValueError: if there are none.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(
            f"{type(module).__name__}: no parameter requires a gradient, so there is nothing to train; set "
            "requires_grad=True for those that are to be trained"
        )
    return [name for name, _ in named], [parameter for _, parameter in named]


def check_layers(module: nn.Module, remedy: str) -> None:
    """Raise ``ValueError`` for layers that keep statistics of private records.

    Args:
        module: what is trained.
        remedy: the setting by which batch normalisation is replaced.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm | _InstanceNorm) or not layer.training:
            continue
        if isinstance(layer, _BatchNorm) or layer.track_running_stats:
            raise ValueError(
                f"{name}: {type(layer).__name__} in training mode mixes the records of a batch, or keeps statistics "
                f"of private ones; set {remedy} to have group normalisation in its place, or freeze it by "
                f"{name}.eval() in the module's train()"
            )


def replace_batch_norms(module: nn.Module) -> None:
    """Put group normalisation in the place of batch normalisation, in the module itself (Opacus' fixer of layers)."""
    from opacus.validators.batch_norm import fix

    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                made = fix(layer).train(layer.training)
                for parameter in layer.parameters():
                    made.to(parameter.device)
                setattr(parent, name, made)


def _hook_owner(name: str, module: Any, datamodule: Any) -> Any:
    """Owner of a batch hook, as Lightning selects it: the data module before the module; None for nobody."""
    for owner in (datamodule, module):
        if owner is None:
            continue
        own = getattr(type(owner), name, None)
        room = getattr(own, "__module__", "") or ""
        if name in vars(owner) or not room.startswith(("pytorch_lightning.core", "lightning.pytorch.core")):
            return owner
    return None


def _to(batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
    return batch if device.type == "cpu" else moved(batch, device)


def _metrics_of(module: nn.Module) -> list[Metric]:
    return [one for one in module.modules() if isinstance(one, Metric)]


def _mute(shadow: nn.Module) -> None:
    """Let metrics of a copy compute nothing: their values reach nobody."""
    for metric in _metrics_of(shadow):
        nothing = torch.zeros(())
        for name in ("forward", "update", "compute"):
            metric.__dict__[name] = lambda *args, **kwargs: nothing  # noqa: B023


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """A record that fails counts as zero: an error would tell that it was there."""
    try:
        yield
    except BaseException as error:
        if shows_private_errors() or _is_from_the_user(error):
            raise


def _is_from_the_user(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and was_interrupted()
