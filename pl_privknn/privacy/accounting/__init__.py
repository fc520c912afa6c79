"""Accountants: Rényi DP, privacy loss distributions, and the exact worst case of adaptive composition."""
