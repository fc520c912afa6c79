"""Costs of releases, and their record. Names are loaded on first use; nothing here is heavy."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "account": "accounting.accountant",
    "read_records": "accounting.accountant",
    "epsilon_for_delta": "accounting.accountant",
    "delta_for_epsilon": "accounting.accountant",
    "PrivacyReport": "accounting.accountant",
    "Charge": "mechanisms",
    "Mechanism": "mechanisms",
    "Gaussian": "mechanisms",
    "NoisyScreening": "mechanisms",
    "Laplace": "mechanisms",
    "ExponentialArgmax": "mechanisms",
    "RandomizedResponse": "mechanisms",
    "RepeatAndSelect": "mechanisms",
    "PureDP": "mechanisms",
    "ShuffleAmplification": "mechanisms",
    "GaussianDPStream": "mechanisms",
    "Conditional": "mechanisms",
    "DataDependent": "mechanisms",
    "Ledger": "ledger",
    "BudgetExceeded": "ledger",
    "NoiseSource": "noise",
    "SeededNoise": "noise",
    "SystemNoise": "noise",
    "default_noise": "noise",
    "exact_epsilon": "accounting.exact",
    "epsilon_lower": "accounting.lower_bound",
    "certify": "accounting.certificate",
    "write_certificate": "accounting.certificate",
    "trade_off": "accounting.accountant",
    "TradeOff": "accounting.accountant",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
