"""`adjoint plan`: memory and time of a run before it runs."""
