"""`adjoint compare`: what wrapping a model of transformers gains on this machine."""
