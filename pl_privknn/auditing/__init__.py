"""Attacks on a labeler or a training: measured lower bounds on ε, compared with the stated ε."""

from pl_privknn.auditing.attack import Target, attack_labeler, small_target
from pl_privknn.auditing.bounds import AttackResult

__all__ = [
    "AttackResult",
    "Target",
    "attack_labeler",
    "small_target",
]
