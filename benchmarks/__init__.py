"""Benchmarks: `python -m benchmarks.NAME`; what they measured lies in benchmarks/results/."""
