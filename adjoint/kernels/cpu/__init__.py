"""Kernels in C++ for CPUs, compiled on first use."""
