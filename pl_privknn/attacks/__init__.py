"""Attacks on whole labelers: lower bounds on ε that are measured, beside the stated one."""

from pl_privknn.attacks.attack import Attacked, attack_labeler, attack_training
from pl_privknn.attacks.guessing import epsilon_of_guesses, gaussian_mu_of_guesses

__all__ = ["Attacked", "attack_labeler", "attack_training", "epsilon_of_guesses", "gaussian_mu_of_guesses"]
