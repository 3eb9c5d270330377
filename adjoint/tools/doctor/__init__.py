"""`adjoint doctor`: what a machine has, and whether a model is supported."""
