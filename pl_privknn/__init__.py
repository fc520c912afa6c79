"""pl_privknn: student models trained on labels bought from private data, with a stated ε.

The public names are loaded when they are first used, so that ``import pl_privknn`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Gaussian": "pl_privknn.privacy.mechanisms",
    "NoisyScreening": "pl_privknn.privacy.mechanisms",
    "Ledger": "pl_privknn.privacy.ledger",
    "BudgetExceeded": "pl_privknn.privacy.ledger",
    "Labeler": "pl_privknn.labelers.base",
    "Release": "pl_privknn.labelers.base",
    "PrivateKNN": "pl_privknn.labelers.private_knn",
    "Screening": "pl_privknn.labelers.private_knn",
    "HOG": "pl_privknn.features.hog",
    "VATStudent": "pl_privknn.students.vat",
    "PrivateLabeler": "pl_privknn.callbacks.private_labeler",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pl_privknn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
