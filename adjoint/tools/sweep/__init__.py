"""`adjoint sweep`: gradients of the methods against backpropagation."""
