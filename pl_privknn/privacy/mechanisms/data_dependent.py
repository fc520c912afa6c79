"""Data-dependent Rényi costs of PATE's aggregators and of screening, as conditional figures.

A data-dependent cost is small where the votes agree. It is a function of the private votes: stating it
reveals something about them, so it is no guarantee that may be published. It never carries over to a random
sample of the records (amplification needs the same bound on every sample): sampled mechanisms are refused.
The curves themselves come from :mod:`pl_privknn.privacy.accounting.data_dependent`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_choice, check_int
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism
from pl_privknn.privacy.mechanisms.gaussian import Gaussian
from pl_privknn.privacy.mechanisms.laplace import Laplace
from pl_privknn.privacy.mechanisms.screening import NoisyScreening

Floats = NDArray[np.float64]

RELEASES = ("lnmax", "gnmax", "noisy_screening")
#: Orders at which records keep a curve.
SUMMARY_ORDERS: Floats = np.append(rdp.ORDERS[:-1:6], rdp.ORDERS[-1:])


@dataclasses.dataclass(frozen=True)
class DataDependent(Mechanism):
    """The summed data-dependent RDP of one run's releases, charged as a whole.

    Between the orders of the record (α−1)ε(α) is interpolated linearly, which bounds the truth from above
    because that function of a pair of distributions is convex; below the first order ε(α) is at most
    its value there, above the last it is unbounded.

    Attributes:
        release: what the curve is of, one of :data:`RELEASES`.
        releases: how many releases it sums over, for information.
        orders: Rényi orders above 1, ascending.
        curve: ε(α) at each order, computed **from the private votes**.

    Example:
        >>> from pl_privknn.privacy import Charge, DataDependent, account
        >>> spent = DataDependent("gnmax", releases=100, orders=(2.0, 32.0, 64.0), curve=(0.01, 0.2, 0.4))
        >>> report = account([Charge(spent)], delta=1e-5)
        >>> f"{report.epsilon:.3f} {report.guarantee}"
        '0.430 conditional'
    """

    kind: ClassVar[str] = "data_dependent"
    guarantee = "conditional"
    reason = (
        "computed from the private votes (data-dependent RDP, Papernot et al. 2018), so it bounds the cost "
        "of this table only and is itself private; publish the data-independent figure"
    )

    release: str
    releases: int
    orders: tuple[float, ...]
    curve: tuple[float, ...]

    def __post_init__(self) -> None:
        check_choice("release", self.release, RELEASES)
        object.__setattr__(self, "releases", check_int("releases", self.releases, minimum=0))
        for name in ("orders", "curve"):
            try:
                values = np.asarray(getattr(self, name), dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: must be a list of numbers") from error
            if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
                raise ValueError(f"{name}: must be a list of finite numbers, at least one")
            object.__setattr__(self, name, tuple(values.tolist()))
        orders = np.array(self.orders)
        if len(self.curve) != len(orders) or orders[0] <= 1 or bool((np.diff(orders) <= 0).any()):
            raise ValueError("orders: must be above 1, ascending, and as many as there are in curve")
        if min(self.curve) < 0:
            raise ValueError("curve: Rényi divergences are at least 0")

    @property
    def label(self) -> str:
        """What was released."""
        return self.release

    @classmethod
    def summarize(cls, release: str, curves: Floats) -> DataDependent:
        """From the curves of single releases at :data:`SUMMARY_ORDERS`, shape ``(releases, orders)``."""
        total = curves.sum(axis=0)
        return cls(release, len(curves), tuple(SUMMARY_ORDERS.tolist()), tuple(total.tolist()))

    @classmethod
    def answers(cls, mechanism: Gaussian | Laplace, votes: Any) -> DataDependent:
        """Noisy arg-maxima of these votes: GNMAX for Gaussian, LNMAX for Laplace noise.

        Confident GNMAX is this for the answered queries and :meth:`screening` for all of them.

        Args:
            mechanism: what drew the noise, with PATE's sensitivity (√2 or 2).
            votes: counts of every class, shape ``(queries, classes)``.

        Raises:
            ValueError: for a sampled mechanism (see the module), another kind, or votes that are no counts.
        """
        from pl_privknn.privacy.accounting.data_dependent import answers_rdp

        if not isinstance(mechanism, (Gaussian, Laplace)):
            raise ValueError(
                f"mechanism={mechanism.kind!r}: data-dependent costs are known for gaussian and laplace"
            )
        _refuse_sampling(mechanism.sampling_rate)
        release = "gnmax" if isinstance(mechanism, Gaussian) else "lnmax"
        return cls.summarize(release, answers_rdp(mechanism, _checked(votes), SUMMARY_ORDERS))

    @classmethod
    def screening(cls, mechanism: NoisyScreening, max_votes: Any) -> DataDependent:
        """Screening at the largest counts that occurred (Zhu et al. 2020, supplement E).

        Args:
            mechanism: the screening, not sampled.
            max_votes: whole numbers, shape ``(queries,)``.

        Raises:
            ValueError: for a sampled mechanism: amplifying a data-dependent bound is not valid.
        """
        from pl_privknn.privacy.accounting.data_dependent import screening_rdp

        _refuse_sampling(mechanism.sampling_rate)
        counts = np.asarray(max_votes)
        if counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu":
            raise ValueError(
                f"max_votes: {counts.dtype} of shape {counts.shape}; want whole numbers, one a query"
            )
        return cls.summarize(
            "noisy_screening", screening_rdp(mechanism, counts.astype(np.int64), SUMMARY_ORDERS)
        )

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """The curve, interpolated; see the class."""
        known, curve = np.array(self.orders), np.array(self.curve)
        scaled = np.interp(orders, known, (known - 1) * curve) / (orders - 1)
        return np.where(orders <= known[0], curve[0], np.where(orders > known[-1], math.inf, scaled))


def _refuse_sampling(sampling_rate: float) -> None:
    if sampling_rate < 1:
        raise ValueError(
            f"sampling_rate={sampling_rate!r}: a data-dependent bound does not carry over to random samples; "
            "use sampling_rate=1 or the data-independent cost"
        )


def _checked(votes: Any) -> NDArray[np.int64]:
    counts = np.asarray(votes)
    if counts.ndim != 2 or counts.shape[1] < 2 or not len(counts) or counts.dtype.kind not in "iu":
        raise ValueError(
            f"votes: {counts.dtype} of shape {counts.shape}; want whole numbers, (queries, classes), with a "
            "column for every class, voted for or not"
        )
    if (counts < 0).any():
        raise ValueError("votes: some counts are negative; give the number of votes of each class")
    return counts.astype(np.int64)
