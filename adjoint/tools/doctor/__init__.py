"""`adjoint doctor`: what this machine has, which code runs what, and whether it works."""
