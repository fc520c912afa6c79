"""Callbacks that connect private teachers with ``trainer.fit``."""

from pl_privknn.callbacks.labeling_arguments import LabelingOptions
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.run_summary import RunReport

__all__ = ["LabelingOptions", "PrivateLabeler", "RunReport"]
