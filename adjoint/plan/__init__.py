"""What fits where, how long it takes, how layers are cut: known before a run."""
