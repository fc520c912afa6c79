"""Attacks on a labeler or a training: measured lower bounds on ε, compared with the stated ε."""

from pl_privknn.auditing.bounds import Audit
from pl_privknn.auditing.labelers import Target, attack_labeler, small_target

__all__ = [
    "Audit",
    "Target",
    "attack_labeler",
    "small_target",
]
