"""A GPU, validated: `python -m benchmarks.gpu` (see `command`, and docs/gpu.md)."""

from benchmarks.gpu.command import Gpu

raise SystemExit(Gpu().main())
