"""What a record's labels are to a linear model: one class of several, or attributes that hold or don't."""

from __future__ import annotations

import abc
import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn.labelers.attributes import check_attribute_table
from pl_privknn.labelers.base import check_table


class Targets(abc.ABC):
    """Labels as vectors, and the exponential family in which a linear model speaks of them.

    A record's part in a gradient is (p − y) xᵀ, y its vector and p what the model expects of it. ``c`` is the number
    of classes or attributes.
    """

    task: ClassVar[str]
    #: What sums subtract from each entry of y: the vectors are then short, of length 1 after :meth:`error_scale`.
    centre: ClassVar[float] = 0.0
    #: Largest distance of two such vectors.
    farthest: ClassVar[float]

    @abc.abstractmethod
    def check(self, features: Tensor, labels: Tensor, num_targets: int) -> None:
        """Raise ``ValueError`` unless these make a private table."""

    @abc.abstractmethod
    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Y of labels, float64 ``(n, c)``, entries 0 or 1."""

    @abc.abstractmethod
    def expected(self, scores: Tensor) -> Tensor:
        """E[y] of a model with these scores, ``(n, c)``: the gradient of :meth:`log_partition`."""

    @abc.abstractmethod
    def log_partition(self, scores: Tensor) -> Tensor:
        """Log of what exp⟨scores, y⟩ is divided by, ``(n,)``."""

    @abc.abstractmethod
    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Probabilities nearest to least-squares estimates of y, ``(n, c)``."""

    @abc.abstractmethod
    def answers(self, probabilities: Tensor) -> Tensor:
        """Labels of the most likely vectors, int64 as labels are."""

    @abc.abstractmethod
    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """Labels and probabilities of queries that were not answered."""

    def error_scale(self, num_targets: int) -> float:
        """Public constant that errors p − y are multiplied with: brings them to a length of about 1 at first."""
        return 1.0


class Classes(Targets):
    """One class a record: a softmax."""

    task = "multiclass"
    farthest = math.sqrt(2.0)

    def check(self, features: Tensor, labels: Tensor, num_targets: int) -> None:
        """See :meth:`Targets.check`."""
        check_table(features, labels, num_targets)

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """Of class j, the j-th unit vector."""
        return functional.one_hot(labels, num_targets).double()

    def expected(self, scores: Tensor) -> Tensor:
        """Class probabilities."""
        return scores.softmax(dim=1)

    def log_partition(self, scores: Tensor) -> Tensor:
        """Log Σ exp."""
        return scores.logsumexp(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """The positive parts over their sum."""
        # The largest stays the largest where none is positive.
        positive = (estimates - estimates.amax(dim=1, keepdim=True).clamp(max=0)).clamp(min=0) + 1e-12
        return positive / positive.sum(dim=1, keepdim=True)

    def answers(self, probabilities: Tensor) -> Tensor:
        """The likeliest class, ``(n,)``."""
        return probabilities.argmax(dim=1)

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """-1, ``(n,)``, and zeros."""
        return torch.full((count,), -1), torch.zeros(count, num_targets)


class Attributes(Targets):
    """Attributes that hold or don't, each by itself: one sigmoid for each of them."""

    task = "multilabel"
    centre, farthest = 0.5, 2.0

    def check(self, features: Tensor, labels: Tensor, num_targets: int) -> None:
        """See :meth:`Targets.check`."""
        check_attribute_table(features, labels, num_targets)

    def vectors(self, labels: Tensor, num_targets: int) -> Tensor:
        """The attributes themselves."""
        return labels.double()

    def expected(self, scores: Tensor) -> Tensor:
        """Probabilities of the attributes."""
        return scores.sigmoid()

    def log_partition(self, scores: Tensor) -> Tensor:
        """Σ log(1 + exp)."""
        return functional.softplus(scores).sum(dim=1)

    def probabilities_of(self, estimates: Tensor) -> Tensor:
        """Cut off at 0 and 1."""
        return estimates.clamp(0, 1)

    def answers(self, probabilities: Tensor) -> Tensor:
        """What is likelier than not, ``(n, c)``."""
        return (probabilities > 0.5).long()

    def unknown(self, count: int, num_targets: int) -> tuple[Tensor, Tensor]:
        """-1, ``(n, c)``, and ½."""
        return torch.full((count, num_targets), -1), torch.full((count, num_targets), 0.5)

    def error_scale(self, num_targets: int) -> float:
        """2/√c: before anything is learned, each entry of an error is ½ or −½."""
        return 2 / math.sqrt(num_targets)


#: By the name of what data modules call a task.
TARGETS: dict[str, Targets] = {kind.task: kind for kind in (Classes(), Attributes())}
