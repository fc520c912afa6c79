"""Benchmarks, their stored results, and the tables and plots made of them: ``python -m benchmarks``."""
