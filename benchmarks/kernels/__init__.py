"""Each operation against others: `python -m benchmarks.kernels` (see `command`)."""
