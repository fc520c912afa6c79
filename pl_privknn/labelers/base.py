"""The interface behind which every private teacher stands."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.init_arguments import HasInitArguments
from pl_privknn.privacy.guarantee import noise_guarantee
from pl_privknn.privacy.ledger.run import ChargesLedger, paid
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism
from pl_privknn.privacy.noise import NoiseSource, default_noise

# Of a table that is looked through for values that are not finite: 16 MB.
_VALUES_AT_A_TIME = 1 << 22

__all__ = ["ChargesLedger", "Labeler", "Release", "check_table", "merge", "stated_plan"]


@dataclasses.dataclass(frozen=True)
class Release:
    """What a labeler lets out: differentially private answers and nothing else.

    Attributes:
        labels: int64, shape ``(m,)``; class of each query, -1 where the query was refused. Of multi-label data
            ``(m, a)``: attributes 0 or 1, whole rows of -1 where refused.
        soft: optional float32, shape ``(m, c)``; rows of answered queries sum to one. Of multi-label data
            ``(m, a)``: a probability for each attribute.
        scores: optional float, shape ``(m, c)``: the noisy counts as they were released, whatever ``labels`` says;
            rows of NaN for queries whose counts were not.
            What is made of them later, such as a smoothing over neighbouring queries, is free of privacy cost.
        score_deviation: standard deviation of the noise on one score, a public constant.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import Release
        >>> Release(torch.tensor([3, -1, 7])).answered.tolist()
        [True, False, True]
    """

    labels: Tensor
    soft: Tensor | None = None
    scores: Tensor | None = None
    score_deviation: float | None = None

    @property
    def answered(self) -> Tensor:
        """Bool, shape ``(m,)``: which queries were answered."""
        return self.labels >= 0 if self.labels.ndim == 1 else (self.labels >= 0).all(dim=1)


class Labeler(HasInitArguments, abc.ABC):
    """A private teacher: holds a private table of features and labels, answers queries about public ones.

    A new labeler is one subclass: :meth:`fit`, :meth:`plan` and :meth:`label`. It gets its noise from
    :meth:`paid`, which charges the ledger first, for the very mechanism object that draws, and never writes an ε
    formula of its own. What it may do beyond that (shards, streams, models, …) is in
    :mod:`pl_privknn.labelers.protocols`.

    Args:
        noise_source: where protective randomness comes from; the operating system's cryptographic generator
            unless given. Seeded sources are for tests.

    Example:
        >>> from pl_privknn.labelers import Labeler, PrivateKNN
        >>> isinstance(PrivateKNN(), Labeler), PrivateKNN().adjacencies
        (True, ('add_remove',))
    """

    #: Neighbouring relations under which :meth:`plan` is valid.
    adjacencies: tuple[Adjacency, ...] = ("add_remove",)
    #: Kinds of labels that :meth:`fit` takes: ``"multiclass"`` int64 ``(n,)``, ``"multilabel"`` ``(n, a)``.
    tasks: tuple[str, ...] = ("multiclass",)
    #: Where searches and assignments multiply; where their tensors lie if None. Set before :meth:`fit`. It changes
    #: the time, not an answer: what comes out is exact on every device (Ind-KNN's κ up to a last float32 digit).
    device: torch.device | None = None
    #: Whether a round's queries may be asked in several calls of :meth:`label`; False where one release
    #: answers all of them together.
    asks_in_batches: bool = True

    def __init__(self, noise_source: NoiseSource | None = None) -> None:
        self.noise_source = noise_source if noise_source is not None else default_noise()

    @abc.abstractmethod
    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table. May be called again with other features of the same records.

        Args:
            features: float32, shape ``(n, d)``.
            labels: int64, shape ``(n,)``, values in ``[0, num_classes)``.
            num_classes: number of classes, a public constant.

        Raises:
            ValueError: on shapes, dtypes or label values that do not fit.
        """

    @abc.abstractmethod
    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """The most that a run can cost.

        Args:
            num_queries: queries of all rounds together.
            max_answers: the most answers of all rounds together.
            num_classes: number of classes, a public constant.
            rounds: number of rounds, for teachers that pay by the round.
        """

    def paid(self, ledger: ChargesLedger, mechanism: Mechanism, count: int, key: str) -> NoiseSource:
        """Charge ``count`` releases of ``mechanism`` and get the noise for them: the only way to draw.

        See :func:`~pl_privknn.privacy.ledger.run.paid`; the charge states this labeler's :attr:`adjacencies` and
        whether its noise is cryptographic.

        Raises:
            BudgetExceeded: if the charge would pass the budget; nothing was drawn.
            ValueError: where the ledger counts under another adjacency.
        """
        return paid(ledger, self.noise_source, mechanism, count, key, self.adjacencies)

    @abc.abstractmethod
    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answer queries, paying for each release before its noise is drawn.

        Args:
            queries: float32 features of public examples, shape ``(m, d)``.
            ledger: pays; see :class:`ChargesLedger`.
            max_answers: answer at most this many, refuse the rest; all if None.

        Raises:
            BudgetExceeded: if a charge would pass the budget; nothing was drawn or released by it.
        """


def stated_plan(
    labeler: Labeler, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1
) -> list[Charge]:
    """:meth:`Labeler.plan`, with the guarantee that the labeler's noise leaves it."""
    mark = noise_guarantee(labeler.noise_source)
    return [
        charge.marked(mark) for charge in labeler.plan(num_queries, max_answers, num_classes, rounds=rounds)
    ]


def check_table(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise ``ValueError`` unless ``features`` and ``labels`` make a table of ``num_classes`` classes.

    Messages give shapes, dtypes and bounds, never a private value.
    """
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"features: shape {shape_text(features.shape)}, {features.dtype}; want float of shape (n, d)"
        )
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; want int64 of shape (n,), one for each row "
            "of features"
        )
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes} must be at least 2")
    if len(labels) and bool(((labels < 0) | (labels >= num_classes)).any()):
        raise ValueError(f"labels: some lie outside [0, num_classes={num_classes}); remap them to 0 … c-1")
    rows = max(1, _VALUES_AT_A_TIME // max(1, features.shape[1]))
    if not all(bool(torch.isfinite(part).all()) for part in features.split(rows)):
        raise ValueError("features: some are NaN or infinite; a distance to them has no meaning")


def merge(releases: Sequence[Release] | Iterable[Release]) -> Release:
    """Join releases of consecutive batches into one."""
    parts = list(releases)
    labels = torch.cat([part.labels for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
    deviations = {part.score_deviation for part in parts}
    same_noise = len(deviations) == 1
    return Release(
        labels,
        _joined([part.soft for part in parts]),
        _joined([part.scores for part in parts]) if same_noise else None,
        deviations.pop() if same_noise else None,
    )


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present and len(present) == len(parts) else None
