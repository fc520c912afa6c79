"""Callbacks that connect private teachers with ``trainer.fit``."""

from pl_privknn.callbacks.labeling_arguments import LabelingOptions
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.run_summary import RunReport
from pl_privknn.callbacks.selection import (
    ClusterSelection,
    FullSelection,
    RandomSelection,
    Selector,
    UncertainSelection,
)

__all__ = [
    "ClusterSelection",
    "FullSelection",
    "LabelingOptions",
    "PrivateLabeler",
    "RandomSelection",
    "RunReport",
    "Selector",
    "UncertainSelection",
]
