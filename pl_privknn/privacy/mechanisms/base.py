"""The contract of a mechanism: a frozen set of public parameters that knows what one release costs."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import MAX_COUNT, check_choice, check_int, shown
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.guarantee import UNCONDITIONAL, Guarantee, Level

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Adjacency = Literal["add_remove", "replace_one"]
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one")

#: Most outcomes that a mechanism lists one by one.
MAX_LISTED = 10**5

_REGISTRY: dict[str, type[Mechanism]] = {}


def require_unsampled(kind: str, sampling_rate: float, adjacency: Adjacency) -> None:
    """Raise ``ValueError`` for a sampled release under ``replace_one``.

    A Poisson sample that holds the old record, the new one or neither compares three distributions, so the
    sensitivity of a replacement alone does not bound the cost.
    """
    if adjacency == "replace_one" and sampling_rate < 1:
        raise ValueError(
            f"{kind}: sampling_rate={sampling_rate!r} is accounted under adjacency='add_remove' only; use "
            "that adjacency with the sensitivity of adding or removing one record, or sampling_rate=1"
        )


def check_adjacency(adjacency: str) -> Adjacency:
    """Return ``adjacency``, or raise ``ValueError`` where it is not one of :data:`ADJACENCIES`.

    Example:
        >>> check_adjacency("add_remove")
        'add_remove'
    """
    return check_choice("adjacency", adjacency, ADJACENCIES)  # type: ignore[return-value]


class Mechanism(abc.ABC):
    """One kind of release. Subclasses are frozen dataclasses whose fields are public parameters.

    A mechanism both draws its noise (methods of the subclass that take data and a
    :class:`~pl_privknn.privacy.noise.NoiseSource`) and states its cost, so the noise that is drawn and the
    noise that is accounted can't come from two places. Fields are validated in ``__post_init__`` and hold
    nothing that depends on private data.

    Attributes:
        kind: the name of the mechanism in records, for instance ``"gaussian"``.
        guarantee: ``"conditional"`` where the cost holds only under a stated condition.
        reason: the condition, in words; empty for unconditional mechanisms.

    Example:
        >>> import numpy as np
        >>> from pl_privknn.privacy import Gaussian
        >>> Gaussian(sigma=2.0).rdp(np.array([2.0, 8.0]), "add_remove").tolist()  # αμ²/2
        [0.25, 1.0]
    """

    kind: ClassVar[str] = ""
    guarantee: ClassVar[Level] = "unconditional"
    reason: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind:
            _REGISTRY[cls.kind] = cls

    @property
    def label(self) -> str:
        """Name for reports: what is released."""
        return self.kind

    @abc.abstractmethod
    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """Rényi differential privacy of one release.

        Args:
            orders: Rényi orders above 1, shape ``(n,)``, not necessarily whole.
            adjacency: the neighbouring relation.

        Returns:
            ε(α) for each order, shape ``(n,)``, the larger of both directions; ``inf`` where unbounded.
        """

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """Privacy loss distribution of a pair that dominates one release, in both directions.

        The default turns the RDP curve into a dominating pair (see
        :func:`pl_privknn.privacy.accounting.pld.from_rdp`), which is valid for every mechanism and loose for most:
        mechanisms with a known pair override it.

        Args:
            adjacency: the neighbouring relation.
            discretization: spacing of the loss grid. The result is pessimistic (an upper bound) at any
                spacing and tight for a small one.

        Raises:
            ValueError: where the mechanism is not defined under ``adjacency``; it says what to do.
        """
        orders = rdp.ORDERS
        return pld.from_rdp(orders, self.rdp(orders, adjacency), discretization)

    def outcome_pairs(self, adjacency: Adjacency) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """The family of pairs of output distributions, for mechanisms without a single worst pair.

        Args:
            adjacency: the neighbouring relation.

        Returns:
            None for mechanisms with one fixed pair. Otherwise ``(p, q)``, each of shape
            ``(pairs, outcomes)``: row i holds the probabilities of the outcomes with the record (p; for
            sampled releases the mixture over its coin) and without it (q), for the i-th way in which the
            rest of the data can stand. Every reachable pair is dominated by some row. Each probability is
            accurate relative to itself, also where it is far smaller than 1e-16; a ``q`` of zero beside a
            ``p`` above zero is an infinite likelihood ratio. Rows cover the remove direction as (p, q) and
            the add direction as (q, p).
        """
        return None

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ where one release is *exactly* μ-Gaussian-DP with the pair N(0, 1), N(μ, 1); None otherwise.

        Such releases compose without error: n of them are √n·μ-Gaussian-DP.
        """
        return None

    def loss_scale(self, adjacency: Adjacency) -> tuple[float, float] | None:
        """About (variance, largest value) of the loss, for mechanisms without a finite RDP; sets grids only."""
        return None

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """Bound on the loss of any outcome: the ε of pure DP; ``inf`` where there is none."""
        return math.inf

    def to_record(self) -> dict[str, Any]:
        """The mechanism as JSON: its kind and its fields (no count), switches only where they are on."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if not (field.metadata.get("switch") and getattr(self, field.name) is False)
        }
        return {"mechanism": self.kind, **fields}


@dataclasses.dataclass(frozen=True)
class Charge:
    """``count`` releases of one mechanism.

    Attributes:
        mechanism: what is released.
        count: how often.
        mark: what weakens the guarantee of these releases beyond the mechanism's own conditions, such as noise
            from a seed. It travels with the charge: into records, sums and reports.

    Raises:
        ValueError: if ``count`` is not a whole number from 1 to :data:`~pl_privknn._checks.MAX_COUNT`.

    Example:
        >>> from pl_privknn.privacy import Charge, Laplace
        >>> record = Charge(Laplace(scale=20.0), count=3).to_record()
        >>> record["mechanism"], record["scale"], record["count"]
        ('laplace', 20.0, 3)
    """

    mechanism: Mechanism
    count: int = 1
    mark: Guarantee = UNCONDITIONAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", check_int("count", self.count, maximum=MAX_COUNT))

    @property
    def guarantee(self) -> Guarantee:
        """How far the cost of these releases holds: the mechanism's own conditions and the mark."""
        mechanism = self.mechanism
        if mechanism.guarantee == "unconditional":
            return self.mark
        return Guarantee(mechanism.guarantee, (f"{mechanism.label}: {mechanism.reason}",)) & self.mark

    def marked(self, mark: Guarantee) -> Charge:
        """The same releases with a guarantee that is no stronger than ``mark``."""
        return self if mark == UNCONDITIONAL else dataclasses.replace(self, mark=self.mark & mark)

    def to_record(self) -> dict[str, Any]:
        """The charge as JSON: the mechanism's record and ``count``; where it is marked, the mark."""
        marks = (
            {}
            if not self.mark.reasons
            else {"guarantee": self.mark.level, "reasons": list(self.mark.reasons)}
        )
        return {**self.mechanism.to_record(), "count": self.count, **marks}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Charge:
        """Read what :meth:`to_record` wrote.

        Raises:
            ValueError: for an unknown mechanism, a missing, unknown or invalid field; it names the field.
        """
        if not isinstance(record, dict):
            raise ValueError(f"record {shown(record)} must be a JSON object with a 'mechanism' field")
        fields = dict(record)
        kind = fields.pop("mechanism", None)
        count = fields.pop("count", 1)
        marks = {name: fields.pop(name) for name in ("guarantee", "reasons") if name in fields}
        if not isinstance(kind, str) or kind not in _REGISTRY:
            raise ValueError(f"mechanism={shown(kind)} is unknown; known are {', '.join(sorted(_REGISTRY))}")
        mechanism_class = _REGISTRY[kind]
        known = {field.name: field for field in dataclasses.fields(mechanism_class)}  # type: ignore[arg-type]
        if unknown := [name for name in fields if name not in known]:
            raise ValueError(f"{kind}: unknown field {shown(unknown[0])}; its fields are {', '.join(known)}")
        if nothing := [name for name, value in fields.items() if value is None]:
            raise ValueError(f"{kind}: {nothing[0]}=None must be a value, or left out")
        missing = [
            name
            for name, field in known.items()
            if name not in fields
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{kind}: field {missing[0]!r} is missing from {shown(record)}")
        try:
            charge = cls(mechanism_class(**fields), count)
            level, reasons = marks.get("guarantee", "unconditional"), marks.get("reasons", ())
            return charge.marked(Guarantee(level, reasons)) if marks else charge
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error


def check_known(charge: Charge) -> None:
    """Raise ``ValueError`` unless the charge can be read back from its record as what it is."""
    mechanism = charge.mechanism
    if not isinstance(mechanism, Mechanism) or not mechanism.kind:
        raise ValueError(f"mechanism={mechanism!r} must be a Mechanism with a kind")
    if not _is_faithful(mechanism):
        raise ValueError(f"{mechanism.kind}: its record does not read back as the same mechanism")


@functools.lru_cache(maxsize=1024)
def _is_faithful(mechanism: Mechanism) -> bool:
    # Through text, as the ledger keeps it: NaN and infinity are no JSON.
    text = json.dumps(mechanism.to_record(), allow_nan=False)
    return Charge.from_record(json.loads(text)).mechanism == mechanism


def merged(charges: Iterable[Charge]) -> dict[Mechanism, Charge]:
    """Charges of equal mechanisms as one: counts add up, marks compose. In order of first appearance."""
    found: dict[Mechanism, Charge] = {}
    for charge in charges:
        known = found.get(charge.mechanism)
        found[charge.mechanism] = (
            charge
            if known is None
            else dataclasses.replace(known.marked(charge.mark), count=known.count + charge.count)
        )
    return found
