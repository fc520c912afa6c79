"""Callbacks: the glue between private teachers and ``trainer.fit``."""

from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.run_report import RunReport

__all__ = ["PrivateLabeler", "RunReport"]
