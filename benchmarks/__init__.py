"""Benchmarks: `python -m benchmarks.NAME`; what they measured lies in benchmarks/results/."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: as in the `adjoint` command, in peers too
