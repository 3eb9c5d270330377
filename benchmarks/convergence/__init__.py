"""Does training still converge? `python -m benchmarks.convergence` (see `command`)."""
