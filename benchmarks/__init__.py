"""Benchmarks, their stored results, and tables and plots of these: ``python -m benchmarks``."""
