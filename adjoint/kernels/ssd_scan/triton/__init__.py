"""Mamba-2's scan in Triton."""
