"""A training run in one process: configuration, the run's folder, checkpoints, the loop."""
