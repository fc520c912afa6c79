"""Callbacks: the glue between private teachers and ``trainer.fit``."""

from pl_privknn.callbacks.labeling_arguments import LabelingBudget
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.run_summary import RunReport
from pl_privknn.privacy.settings import RunFiles

__all__ = ["LabelingBudget", "PrivateLabeler", "RunFiles", "RunReport"]
