"""Mamba-1's scan in Triton."""
