"""Shared parts of the Triton kernels, which are in their operations' folders."""
