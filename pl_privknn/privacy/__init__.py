"""Costs of releases, and their record. Names are loaded on first use; nothing here is heavy."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "accounting.accountant": (
        "PrivacyReport", "TradeOff", "account", "delta_for_epsilon", "epsilon_for_delta", "read_records", "trade_off",
    ),
    "accounting.certificate": ("certify", "write_certificate"),
    "accounting.exact": ("exact_epsilon",),
    "accounting.lower_bound": ("epsilon_lower",),
    "ledger": ("BudgetExceeded", "Ledger"),
    "mechanisms": (
        "Charge", "Conditional", "ExponentialArgmax", "Gaussian", "GaussianDPStream", "Laplace",
        "Mechanism", "NoisyScreening", "PureDP", "RandomizedResponse", "RepeatAndSelect", "ShuffleAmplification",
    ),
    "noise": ("NoiseSource", "SeededNoise", "SystemNoise", "default_noise"),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
