"""Verification of a wrapped model on first use: which trials a call needs, and the trials themselves."""
