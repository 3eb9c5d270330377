"""Models in and out: a stack's sizes and weights as those of other libraries' models, and of runs.

A format is a module with `read_config`, `read_weights`, `why_not` and `convert`, and a row of
`FORMATS`. Files are read as they are: neither transformers nor mamba-ssm need be installed.
`rwkv7` has no row: its files become models of flash-linear-attention, not stacks.
"""

from adjoint.formats import caduceus, mamba_ssm, transformers

FORMATS = {"transformers": transformers, "mamba-ssm": mamba_ssm, "caduceus": caduceus}

__all__ = ["FORMATS"]
