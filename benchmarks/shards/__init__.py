"""Real shards against their simulation: `python -m benchmarks.shards` (see `command`)."""
