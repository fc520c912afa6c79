"""What was measured, by what, and the tables and plots made of it: ``python -m benchmarks``."""
