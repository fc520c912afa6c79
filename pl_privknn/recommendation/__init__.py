"""Recommendation of a run, and of a comparison of methods, from public data, sizes and ε."""
