"""The delta rule with a diagonal plus low-rank transition in Triton."""
