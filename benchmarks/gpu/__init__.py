"""A GPU, validated: `python -m benchmarks.gpu` (see `command`)."""
