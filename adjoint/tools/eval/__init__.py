"""`adjoint eval`: the loss by position, or needles."""
