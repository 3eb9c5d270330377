"""Benchmarks: `python -m benchmarks.NAME`; what they measured lies in benchmarks/results/."""

import adjoint  # noqa: F401  before torch: it lets OpenMP's waiting threads sleep, in peers' processes too
