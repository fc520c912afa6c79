"""A privacy budget for every private record."""
