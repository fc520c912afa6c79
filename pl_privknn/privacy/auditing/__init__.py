"""Empirical lower bounds on ε."""
