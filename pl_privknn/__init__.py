"""pl_privknn: student models trained on privately released labels, with a stated ε.

The public names are loaded when they are first used, so that ``import pl_privknn`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "BackboneFeatures": "pl_privknn.features",
    "BudgetExceeded": "pl_privknn.privacy.ledger",
    "Charge": "pl_privknn.privacy.mechanisms",
    "ExponentialArgmax": "pl_privknn.privacy.mechanisms",
    "FixMatchStudent": "pl_privknn.students",
    "Gaussian": "pl_privknn.privacy.mechanisms",
    "HOG": "pl_privknn.features",
    "IndKNN": "pl_privknn.labelers",
    "IndKNNPredictor": "pl_privknn.labelers",
    "Labeler": "pl_privknn.labelers.base",
    "Laplace": "pl_privknn.privacy.mechanisms",
    "Ledger": "pl_privknn.privacy.ledger",
    "NoisyScreening": "pl_privknn.privacy.mechanisms",
    "NoisySGD": "pl_privknn.training",
    "PATE": "pl_privknn.labelers",
    "PrivateKNN": "pl_privknn.labelers.private_knn",
    "PrivateLabeler": "pl_privknn.callbacks.private_labeler",
    "PrivateRadius": "pl_privknn.labelers",
    "PrivateTraining": "pl_privknn.training",
    "PublicFeatures": "pl_privknn.features",
    "Recommendation": "pl_privknn.recommendation",
    "Release": "pl_privknn.labelers.base",
    "ReverseKNN": "pl_privknn.labelers.reverse_knn",
    "RunReport": "pl_privknn.callbacks.run_summary",
    "Screening": "pl_privknn.labelers.private_knn",
    "SupervisedStudent": "pl_privknn.students",
    "TimmFeatures": "pl_privknn.features",
    "UDAStudent": "pl_privknn.students",
    "VATStudent": "pl_privknn.students",
    "recommend": "pl_privknn.recommendation",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pl_privknn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
