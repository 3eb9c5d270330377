"""Time against context and workers, counted and simulated: `python -m benchmarks.scaling` (see `command`)."""
