"""Callbacks: the glue between private teachers and ``trainer.fit``."""

from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.round_settings import LabelingBudget
from pl_privknn.callbacks.run_report import RunReport
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.private_training import PrivateTraining

__all__ = ["LabelingBudget", "PrivateLabeler", "PrivateTraining", "RunFiles", "RunReport"]
