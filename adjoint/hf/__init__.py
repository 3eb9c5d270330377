"""Hugging Face models, their cache being the state: `adjoint.wrap`."""
