"""Noise is handed out by the payment for it: nobody draws before the charge is on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism
from pl_privknn.privacy.noise import NoiseSource


class ChargesLedger(Protocol):
    """What labelers and baselines need of a ledger: to pay before they draw."""

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
    ) -> int:
        """Record ``count`` releases durably, or raise ``BudgetExceeded``; returns the row's position."""
        ...


def paid(
    ledger: ChargesLedger,
    source: NoiseSource,
    mechanism: Mechanism,
    count: int,
    key: str,
    adjacencies: Sequence[Adjacency],
) -> NoiseSource:
    """Pay for releases and get the noise for them.

    Args:
        ledger: pays.
        source: protective randomness; the charge records whether it is cryptographic.
        mechanism: what is released, with the sensitivity that holds under ``adjacencies``.
        count: number of releases.
        key: what the noise is for; a seeded source gives each key and row a stream of its own.
        adjacencies: neighbouring relations for which ``mechanism`` states its cost; a ledger of another one
            refuses the charge.

    Returns:
        the noise, after the charge is on disk.

    Raises:
        BudgetExceeded: if the charge would pass the budget; nothing was drawn.
        ValueError: where the ledger counts under another adjacency.
    """
    return source.stream(key, ledger.charge(mechanism, count, noise=source, adjacencies=adjacencies))
