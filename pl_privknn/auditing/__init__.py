"""Empirical audits: measured lower bounds on ε, compared with the stated ε."""

from pl_privknn.auditing.bounds import Audit, epsilon_of_guesses, gaussian_mu_of_guesses
from pl_privknn.auditing.labelers import Target, attack_labeler, small_target
from pl_privknn.auditing.mechanisms import audit, audit_records

__all__ = [
    "Audit",
    "Target",
    "attack_labeler",
    "audit",
    "audit_records",
    "epsilon_of_guesses",
    "gaussian_mu_of_guesses",
    "small_target",
]
