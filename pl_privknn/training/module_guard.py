"""A LightningModule during its private training: another training_step, and a log that private figures don't pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from pl_privknn.privacy.redaction import UndeclaredError, check_declared
from pl_privknn.training.step_checks import without_loggers

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ModuleGuard:
    """Stands before some methods of a module, from the start of a fit to its end; the module's class stays as it is.

    * ``training_step`` is replaced; the module's own one is for :meth:`private_step` alone.
    * Hooks that move batches leave those of the private loader alone: parts of them pass within a step.
    * ``log`` passes what is logged outside of training, and of that in training what is declared
      (:mod:`pl_privknn.privacy.redaction`); the rest is dropped, with one warning for each name.

    Args:
        module: in its trainer.
        step: the training step to take, of a batch and its number.
        ended: whether the training is over, asked before each step.
    """

    def __init__(
        self, module: pl.LightningModule, step: Callable[[Any, int], Any], ended: Callable[[], bool]
    ) -> None:
        self.module = module
        self._inside = False
        self._told: set[str] = set()
        self._dropped: set[str] = set()
        self._own: dict[str, Any] = {}
        self.training_step: Any = module.training_step
        start = module.on_train_batch_start

        def on_train_batch_start(batch: Any, batch_idx: int) -> Any:
            return -1 if ended() else start(batch, batch_idx)

        def training_step(batch: Any, batch_idx: int) -> Any:
            return step(batch, batch_idx)

        self._put("training_step", training_step)
        self._put("on_train_batch_start", on_train_batch_start)
        self._put("log", self._log_of(module.log))
        for name in filter(lambda name: is_overridden(name, module), _TRANSFERS):
            self._put(name, self._transfer_of(getattr(module, name)))

    def take_off(self) -> None:
        """Give the module its methods back."""
        for name, own in self._own.items():
            if own is None:
                vars(self.module).pop(name, None)
            else:
                setattr(self.module, name, own)
        self._own = {}

    @contextlib.contextmanager
    def private_step(self) -> Iterator[None]:
        """While the module's own ``training_step`` sees private records: no logger, no log, no metric after it."""
        before = {id(metric): metric.update_count for metric in self._metrics()}
        self._inside = True
        kept, self.module.training_step = self.module.training_step, self.training_step  # type: ignore[method-assign]
        try:
            with without_loggers(self.module.trainer):
                yield
        finally:
            self._inside = False
            self.module.training_step = kept  # type: ignore[method-assign]
            for metric in self._metrics():
                if metric.update_count != before.get(id(metric), 0):
                    metric.reset()

    def moved(self, part: Any) -> Any:
        """A batch by the module's own transfer hooks on its device; within :meth:`private_step`."""
        trainer = self.module.trainer
        part = trainer.precision_plugin.convert_input(part)
        part = self.module._on_before_batch_transfer(part, dataloader_idx=0)
        return trainer.strategy.batch_to_device(part, dataloader_idx=0)

    def tell(self, names: set[str] | None = None) -> None:
        """Warn of names that were dropped, or will be; once for each."""
        new = (self._dropped if names is None else names) - self._told
        if new:
            self._told |= new
            rank_zero_warn(
                f"{', '.join(sorted(new))}: logged in training, where private records are at hand, so it is dropped. "
                "Log what validation shows instead; what is made of public figures alone may be declared by "
                "pl_privknn.privacy.redaction.declare(name, 'what it is made of')"
            )

    def _metrics(self) -> list[Metric]:
        return [layer for layer in self.module.modules() if isinstance(layer, Metric)]

    def _put(self, name: str, method: Callable[..., Any]) -> None:
        self._own[name] = vars(self.module).get(name)
        setattr(self.module, name, method)

    def _log_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def log(name: str, *args: Any, **kwargs: Any) -> None:
            if self._passes(name):
                own(name, *args, **kwargs)
            else:
                self._dropped.add(name)
                if not self._inside:
                    self.tell()

        return log

    def _passes(self, name: str) -> bool:
        if self._inside:
            return False
        if not self.module.trainer.training:
            return True
        try:
            check_declared([name])
        except UndeclaredError:
            return False
        return True

    def _transfer_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(batch: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self.module.trainer.training and not self._inside
            return batch if ours else own(batch, *args, **kwargs)

        return transfer
