"""Test accuracy of a run's models, and which test images they get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn.callbacks.labeling_round import MODELS, ReleasedHead
from pl_privknn.callbacks.loggers import MOST_TESTED
from pl_privknn.students.losses import TASKS


class TestedModels:
    """Test accuracy and confusion matrix of a module, of a head, and of their mean.

    Args:
        module: whose outputs are logits, ``(b, classes)`` or of attributes; other outputs are not counted.
        head: the model that a teacher's releases make, if there is one.
        data: the data module; of a head it is one of this package.
    """

    __test__ = False  # no test, whatever its name

    def __init__(self, module: pl.LightningModule, head: ReleasedHead | None, data: Any) -> None:
        self.head = head
        #: By name of a model of :data:`MODELS`, int64 ``(classes, classes)``; nothing for attributes.
        self.confusions: dict[str, Tensor] = {}
        #: By name of a model, :func:`~pl_privknn.students.metrics.reliability_counts`.
        self.reliability: dict[str, Tensor] = {}
        #: By name of a model, the test examples whose true class has the lowest probability, float64 ``(m, 4)``:
        #: position, true class, prediction, probability of the true class.
        self.furthest: dict[str, Tensor] = {}
        self._count = 0
        self._logits: Tensor | None = None
        self._images: Any = None
        self._features: Tensor | None = None
        self._undo = [module.register_forward_hook(self._keep)]
        if head is not None:
            if head.has_features_of(module):
                student: Any = module
                self._undo.append(student.whitening.register_forward_pre_hook(self._keep_features))
            self._outputs = TASKS[data.task]
            from pl_privknn.students.metrics import accuracy_metric

            self._metrics = {name: accuracy_metric(data.task, data.num_classes) for name in MODELS[1:]}

    @torch.no_grad()
    def add(self, batch: Any) -> None:
        """Count a batch ``(x, y)`` that the module has processed; batches of other kinds are not counted.

        Args:
            batch: ``y`` is int64 ``(b,)`` or ``(b, a)``, -1 where unknown.
        """
        logits, self._logits = self._logits, None
        if logits is None or logits.ndim != 2 or not (isinstance(batch, list | tuple) and len(batch) == 2):
            return
        images, labels = batch
        if not isinstance(labels, Tensor) or len(labels) != len(logits):
            return
        outputs = [logits.cpu()]
        if self.head is not None:
            head = self.head(images, self._features if images is self._images else None)
            self._images = self._features = None
            mean = (head + self._outputs.probabilities(logits).cpu()) / 2
            outputs += [head, mean]
            for metric, probabilities in zip(self._metrics.values(), (head, mean), strict=True):
                metric.update(probabilities - 0.5, labels.cpu())  # metrics take logits: above 0 is a yes
        if labels.ndim == 1 and _are_classes(labels, logits.shape[1]):
            from torchmetrics.functional.classification import multiclass_confusion_matrix as confusion_of

            from pl_privknn.students.metrics import reliability_counts

            outputs[0] = outputs[0].softmax(dim=1)
            for name, values in zip(MODELS, outputs, strict=False):
                found = confusion_of(values, labels.cpu(), values.shape[1], ignore_index=-1)
                self.confusions[name] = self.confusions.get(name, 0) + found
                counts = reliability_counts(values, labels.cpu())
                self.reliability[name] = self.reliability.get(name, 0) + counts
                self._keep_furthest(name, values.double(), labels.cpu())
            self._count += len(labels)

    def _keep_furthest(self, name: str, probabilities: Tensor, labels: Tensor) -> None:
        known = torch.nonzero(labels >= 0).flatten()
        truth = probabilities[known].gather(1, labels[known, None])
        said = probabilities[known].argmax(dim=1)
        rows = torch.stack([known + self._count, labels[known], said, truth[:, 0]], dim=1)
        rows = torch.cat([self.furthest.get(name, rows[:0]), rows])
        self.furthest[name] = rows[rows[:, 3].argsort(stable=True)[:MOST_TESTED]]

    def accuracies(self, student: float | None) -> dict[str, float | None]:
        """Accuracy of each of :data:`MODELS`, given the student's."""
        shares = {name: float(metric.compute().nanmean()) for name, metric in self._metrics.items()}
        return {"student": student, **{name: round(share, 6) for name, share in shares.items()}}

    def close(self) -> None:
        """Restore the module."""
        for hook in self._undo:
            hook.remove()

    def _keep(self, module: Any, images: Any, outputs: Any) -> None:
        self._images, self._logits = images[0], outputs.detach() if isinstance(outputs, Tensor) else None

    def _keep_features(self, module: Any, features: Any) -> None:
        self._features = features[0]


def _are_classes(labels: Tensor, outputs: int) -> bool:
    """Whether labels are numbers of classes, of which each has an output."""
    return not labels.is_floating_point() and max(1, int(labels.max())) < outputs
