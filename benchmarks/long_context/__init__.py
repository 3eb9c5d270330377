"""A whole training step at long context: `python -m benchmarks.long_context` (see `command`)."""
