"""Audits: lower bounds on ε that are measured, beside the stated one."""

from pl_privknn.auditing.bounds import Audit, epsilon_of_guesses, gaussian_mu_of_guesses
from pl_privknn.auditing.releases import Target, attack_labeler, audit, audit_labeler, audit_records

__all__ = [
    "Audit",
    "Target",
    "attack_labeler",
    "audit",
    "audit_labeler",
    "audit_records",
    "epsilon_of_guesses",
    "gaussian_mu_of_guesses",
]
