"""Teachers for attributes: clipped votes and the rules that turn noisy sums into attributes."""
