"""The commands beside `adjoint train`, a folder each."""
