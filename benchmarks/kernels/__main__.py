"""Each operation against others: `python -m benchmarks.kernels` (see `command`)."""

from benchmarks.kernels.command import Kernels

raise SystemExit(Kernels().main())
