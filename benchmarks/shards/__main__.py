"""Real shards against their simulation: `python -m benchmarks.shards` (see `command`)."""

from benchmarks.shards.command import Shards

raise SystemExit(Shards().main())
