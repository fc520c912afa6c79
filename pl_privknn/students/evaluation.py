"""What a student does with validation, test and prediction batches."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.students.losses import weighted_mean
from pl_privknn.students.metrics import AttributeAccuracy
from pl_privknn.students.output_types import Outputs


class EvaluatedModule(pl.LightningModule):
    """Logs accuracy and loss on ``(x, y)``, and predicts ``x`` or ``(x, …)``.

    Attributes:
        outputs: what logits mean under the task; a subclass sets it.
        val_accuracy: metric of validation; a subclass sets it.
        test_accuracy: metric of the test; a subclass sets it.
    """

    outputs: Outputs
    val_accuracy: MulticlassAccuracy | AttributeAccuracy
    test_accuracy: MulticlassAccuracy | AttributeAccuracy

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val/accuracy`` and ``val/loss``."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test/accuracy`` and ``test/loss``."""
        self._evaluate(batch, "test", self.test_accuracy)

    def on_validation_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("val", self.val_accuracy)

    def on_test_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("test", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities of classes, or of attributes, float32 ``(n, num_classes)``."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.outputs.probabilities(self(images))

    def _log_attributes(self, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        if not isinstance(accuracy, AttributeAccuracy):
            return
        each = accuracy.compute()
        accuracy.reset()
        names = getattr(getattr(self.trainer, "datamodule", None), "attribute_names", ())
        if len(names) != len(each):
            names = tuple(map(str, range(len(each))))
        self.log(f"{stage}/accuracy", each.nanmean(), prog_bar=True)
        for name, value in zip(names, each, strict=True):
            if bool(value.isfinite()):
                self.log(f"{stage}/accuracy_{name}", value)

    def _evaluate(self, batch: Any, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        x, y = batch[0], batch[1]
        logits = self(x)
        if isinstance(accuracy, MulticlassAccuracy) and y.ndim == 2:
            y = y.argmax(dim=1)
        accuracy.update(logits, y)
        loss = weighted_mean(self.outputs.losses(logits, y), self.outputs.known(logits, y))
        if isinstance(accuracy, MulticlassAccuracy):  # of attributes, see _log_attributes
            self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(x))
        self.log(f"{stage}/loss", loss, batch_size=len(x), sync_dist=True)
