"""The SSD scan in Triton."""
