"""Retrieval with a budget: records near a query for a curator, and a noisy vote over answers based on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(eq=False, repr=False)
class Context:
    """Records that one answer may be based on, the most similar first. **Private**.

    Attributes:
        ids: the owner's numbers of the records, int64, shape ``(n,)``.
        labels: int64, shape ``(n,)``.
        similarities: kernel values with the query, float64, shape ``(n,)``.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    similarities: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class VoteRelease:
    """Differentially private result of :meth:`Retrieved.vote`.

    Attributes:
        label: the class with most noisy votes.
        noisy: noisy numbers of votes, int64, shape ``(c,)``.
        deviation: standard deviation of their noise, a public constant.
    """

    label: int
    noisy: Tensor
    deviation: float


@dataclasses.dataclass(eq=False, repr=False)
class Retrieved(Context):
    """**Private.** Neighbours of one query that have paid for one vote, for the curator alone.

    **The guarantee.** A record is among the neighbours of a query if its kernel value reaches a public threshold and
    its budget covers the charge. That depends on this record, the query and earlier *releases* alone, never on
    another record. (The k nearest would not do: a record that comes pushes another one out.) So with or without one
    record the retrieved sets differ by this record and nothing else. :meth:`vote` draws a context for each record by
    itself, so one context differs, and with it one vote: √2 in L2 norm, as in PATE. The vote has Gaussian noise of
    deviation σ, and each neighbour has paid (√2)²/(2σ²) = 1/σ² of its budget B. Budgets are filters of Gaussian
    differential privacy with adaptive queries (Koskela, Tobaben, Honkela 2023), so all answers together, those of
    :meth:`~pl_privknn.labelers.IndKNNPredictor.predict` included, are √(2B)-Gaussian DP, whatever their number;
    :meth:`~pl_privknn.labelers.IndKNNPredictor.epsilon` states the ε.

    **Not covered.** The neighbours themselves: they are for the curator, who may see the data anyway. Queries:
    the asker shows them to the curator. Anything else that leaves, such as the answer for one context, a log, or
    the number of neighbours.
    """

    _owners: NDArray[np.int64]
    _sigma: float
    _num_classes: int
    _noise: NoiseSource | None

    def contexts(self, count: int, noise: NoiseSource) -> Iterator[Context]:
        """Disjoint parts: each record's or person's part is drawn by itself. **Private**."""
        _, places = np.unique(self._owners, return_inverse=True)
        drawn = noise.integers(len(self), count).numpy()[places]
        for part in range(count):
            chosen = drawn == part
            yield Context(self.ids[chosen], self.labels[chosen], self.similarities[chosen])

    def vote(self, answer: Callable[[Context], Any], contexts: int = 20) -> VoteRelease:
        """Ask for an answer based on each of some disjoint contexts, and release the noisy vote over them (GNMax).

        Args:
            answer: called with each :class:`Context` that holds a record; returns a class in ``[0, num_classes)``.
                Anything else is no vote. It must be a function of that context, the query and public data, and
                carry nothing over from one context to another. If it raises, nothing is released, and the vote may
                be asked again.
            contexts: their number, a public constant.

        Raises:
            RuntimeError: if the vote was released already: another one costs another retrieval.
            ValueError: if ``contexts`` is no whole number above 0.
        """
        if self._noise is None:
            raise RuntimeError(
                "vote: this retrieval has paid for one vote, which was released; retrieve again"
            )
        count, votes = check_int("contexts", contexts), torch.zeros(self._num_classes, dtype=torch.int64)
        for context in self.contexts(count, self._noise.stream("contexts")):
            said = answer(context) if len(context) else None
            if isinstance(said, int | np.integer | Tensor) and 0 <= int(said) < self._num_classes:
                votes[int(said)] += 1
        noise, self._noise = self._noise, None
        # Whole numbers with noise that is rounded to whole numbers: post-processing of Gaussian noise, drawn exactly.
        noisy = votes + noise.stream("votes").rounded_normal((self._num_classes,), self._sigma)
        return VoteRelease(int(noisy.argmax()), noisy, self._sigma)


def smoothed_votes(queries: Tensor, released: Sequence[VoteRelease], neighbors: int = 15) -> Tensor:
    """Noisy votes summed over the queries nearest to each, itself included. Post-processing: no further privacy cost.

    Noise falls with the root of the number of queries, so small votes become useful where many queries are at hand.

    Args:
        queries: the features that were asked about, float ``(m, d)``; compared by their cosine.
        released: the vote of each.
        neighbors: how many queries.

    Returns:
        float64, shape ``(m, c)``; the arg-max of a row is the query's class.
    """
    rows = torch.nn.functional.normalize(queries.double(), dim=1)
    near = (rows @ rows.T).topk(min(check_int("neighbors", neighbors), len(rows)), dim=1).indices
    return torch.stack([release.noisy for release in released]).double()[near].sum(dim=1)
