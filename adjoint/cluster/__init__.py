"""Layer shards over processes, GPUs and MIG slices: devices, partition, schedules, transport, recovery."""
