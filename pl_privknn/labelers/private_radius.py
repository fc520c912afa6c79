"""Radius neighbours: noisy votes of all sampled private records within a public distance."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.labelers.aggregation import Aggregation, Neighbors, NeighborVoting, Screening
from pl_privknn.neighbors import Coins, RadiusNeighbors, top_k
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Mechanism
from pl_privknn.privacy.noise import NoiseSource

_EXAMPLES = 2000


class PrivateRadius(NeighborVoting):
    """Votes of the records within a public radius of each query.

    Beyond the Private-kNN paper. A record more or less changes one count by one and pushes no other record out: the
    L2 sensitivity is 1 where that of the k nearest is √2, and an arg-max by Gumbel noise costs half as much at the
    same noise. The radius comes from public data alone; a query in a thin region has few votes or none.

    Args:
        radius: Euclidean distance in the units of the features; None takes ``public_share``.
        public_share: the radius within which half of the public examples have at least this share of the other
            public examples; found anew in each round from that round's features.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`~pl_privknn.labelers.aggregation.Screening`, or None to answer every query.
        max_votes: a count above this is cut to it; needed for ``screening``, whose price covers all counts up to it.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        secure: see :func:`~pl_privknn.labelers.aggregation.secure_noise`.
        release_counts: let out all noisy counts of an answered query; not with the default ``noise``.

    Raises:
        ValueError: for parameters out of range, both or none of ``radius`` and ``public_share``, or a threshold
            above ``max_votes``.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN, PrivateRadius
        >>> from pl_privknn.privacy import ExponentialArgmax, epsilon_for_delta
        >>> noise = ExponentialArgmax(20.0)
        >>> teachers = PrivateRadius(radius=1.0, sampling_rate=1.0, noise=noise), PrivateKNN(300, 1.0, noise=noise)
        >>> [round(epsilon_for_delta(teacher.plan(50, 50, 10), 1e-5), 3) for teacher in teachers]
        [0.691, 1.468]
    """

    def __init__(
        self,
        radius: float | None = None,
        public_share: float | None = 0.01,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        max_votes: int | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        secure: bool = False,
        release_counts: bool = False,
    ) -> None:
        if radius is None and public_share is None:
            raise ValueError("radius=None, public_share=None: give one of them")
        self.radius = None if radius is None else check_positive("radius", radius)
        self.public_share = None if public_share is None else check_open_unit("public_share", public_share)
        if max_votes is not None:
            check_int("max_votes", max_votes)
        noise = noise if noise is not None else ExponentialArgmax(20.0)
        super().__init__(
            max_votes, 1.0, 1.0, sampling_rate, screening, noise, noise_source, secure, release_counts
        )
        self._radius = self.radius

    @property
    def uses_public_features(self) -> bool:
        """Whether the radius is found among them."""
        return self.radius is None

    def fit_public(self, features: Tensor) -> None:
        """Find the radius, where none is given; see :meth:`Labeler.fit_public`.

        Raises:
            ValueError: where the public examples are too few or too alike to tell a radius.
        """
        if self.radius is not None or self.public_share is None:
            return
        examples = features[:: max(1, len(features) // _EXAMPLES)]
        others = max(1, round(self.public_share * (len(features) - 1)))
        distances, _ = top_k(examples, features, others + 1, device=self.device)  # the nearest is itself
        found = float(distances[:, -1].median()) if len(features) > 1 else 0.0
        if not found > 0:
            raise ValueError(
                f"public_share={self.public_share}: the {len(features)} public examples tell no radius above 0; give "
                "more or more different ones, or a radius"
            )
        self._radius = found

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        """Any size will do: a query may have no votes."""

    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        if self._radius is None:
            raise RuntimeError(
                "PrivateRadius without a radius needs fit_public(features of the public examples) first"
            )
        members = RadiusNeighbors(
            features, labels, num_classes, self._radius, self.sampling_rate, device=self.device
        )
        return _CutVotes(members, self.most_votes)


class _CutVotes:
    """Counts of at most ``most``: a record still moves one of them by one at most."""

    def __init__(self, neighbors: RadiusNeighbors, most: int | None) -> None:
        self._neighbors, self._most = neighbors, most
        self.rank = neighbors.rank

    def votes(self, ranked: Any, coins: Coins | None = None) -> Tensor:
        votes = self._neighbors.votes(ranked, coins)
        return votes if self._most is None else votes.clamp(max=self._most)
