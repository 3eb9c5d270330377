"""The gated delta rule in Triton."""
