"""Does training still converge? `python -m benchmarks.convergence` (see `command`)."""

from benchmarks.convergence.command import Convergence

raise SystemExit(Convergence().main())
