"""What draws without a mechanism's method: clients' messages, and the stream of Ind-KNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.labelers.ind_knn import prediction
from pl_privknn.labelers.ind_knn.algorithm import Floats, IndKNNParameters, Votes
from pl_privknn.labelers.reverse_knn_local import LocalRandomizer, Shuffled
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.drawing_methods import DrawingMethod, Entered, subclasses
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.watch import Watch

#: So far above any count that the floor under it plays no part, and exact in float64.
_FAR = 2.0**20


def protocol_methods() -> list[DrawingMethod]:
    """Those of local and shuffled reverse kNN, and of Ind-KNN."""
    protocols = [*subclasses(LocalRandomizer), *subclasses(Shuffled)]
    return [
        *(
            DrawingMethod(cls, name, answers)
            for cls in protocols
            for name in ("simulate", "randomize", "messages")
            if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False)
        ),
        StreamMethod(prediction, "ask", lambda *given: given[0]),
    ]


def answers(protocol: Any, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Entered:
    """What enters a protocol in which every client noises its own answer: the answers, a row a client.

    Any two answers are covered, so what counts is how many clients' answers differ: one. An answer names its cells
    once each, as the protocol's randomiser takes for granted.
    """
    named = protocol.table.cells_of(nearest, labels).sort(dim=1).values
    if bool((named.diff(dim=1) == 0).any()):
        raise LabelerCheckError(
            "a record's message names a cell twice; its randomiser covers different cells"
        )
    return Entered(protocol.mechanism, named, _answers_changed)


def _answers_changed(first: Tensor, second: Tensor) -> tuple[float, float]:
    if first.shape != second.shape:
        return float("inf"), 1.0
    return float((first != second).any(dim=1).sum()), 1.0


class StreamMethod(DrawingMethod):
    """One answer of Ind-KNN: the number of neighbours enters, and then their votes at the number released.

    Both are Gaussian releases of the stream that is paid for as a whole. What enters them, and the deviation of the
    noise that meets it, is found from outside, by asking with other noise and with copies of the budgets.
    """

    def view(
        self, watch: Watch, earlier: Votes | None, original: Callable[..., Votes], *given: Any, **named: Any
    ) -> tuple[list[Entered], Votes]:
        """See the base."""
        return _through_ask(watch, earlier, original, *given, **named)


def _through_ask(
    watch: Watch,
    earlier: Votes | None,
    original: Callable[..., Votes],
    parameters: IndKNNParameters,
    near: NDArray[np.intp],
    kappa: Floats,
    labels: NDArray[np.int64],
    left: Floats,
    public_votes: Floats,
    num_public: int,
    draws: Floats,
    **further: Any,
) -> tuple[list[Entered], Votes]:
    source = watch.claim(np.asarray(draws))
    if source is None:
        raise LabelerCheckError(
            "a query of Ind-KNN is answered with noise that no other draw was made for: every query needs a row of "
            "its own from the labeler's noise_source"
        )

    def asked(first: float, others: float, budgets: Floats) -> Votes:
        given = np.concatenate([[first], np.full(len(draws) - 1, others)])
        return original(parameters, near, kappa, labels, budgets, public_votes, num_public, given, **further)

    high = _FAR / parameters.sigma1
    far = asked(high, 0.0, left.copy()).count
    count_deviation = asked(high + 1, 0.0, left.copy()).count - far
    first = float(draws[0])
    if earlier is not None:  # noise that brings this table's number of neighbours to the one released
        floor = earlier.count <= parameters.min_count
        first = -high if floor else high + (earlier.count - far) / count_deviation
    quiet, loud = (asked(first, others, left.copy()).noisy for others in (0.0, 1.0))
    given = np.concatenate([[first], draws[1:]])
    outcome = original(parameters, near, kappa, labels, left, public_votes, num_public, given, **further)
    return [
        Entered(Gaussian(count_deviation * source.parameter), torch.tensor([far], dtype=torch.float64)),
        Entered(Gaussian(float((loud - quiet).min()) * source.parameter), torch.from_numpy(quiet)),
    ], outcome
