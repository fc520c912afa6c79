"""From charges to ε: Rényi DP, privacy loss distributions, and the exact adaptive worst case."""
