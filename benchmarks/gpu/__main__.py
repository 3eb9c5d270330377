"""One command for a GPU's first half hour: `python -m benchmarks.gpu` (see `command`, and docs/gpu.md)."""

from benchmarks.gpu.command import Gpu

raise SystemExit(Gpu().main())
