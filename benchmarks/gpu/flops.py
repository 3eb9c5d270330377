"""How many FLOPs a training step asks for and how many it executes, and what a GPU could do at most.

Model FLOPs per token, recomputation not counted (the M of MFU):

    3 (2 N + Σ_layers (scan + conv)),    N: weights of the linear layers, the head's too where it is tied
    scan, Mamba-1: 7 d_inner d_state     Δ A, exp, a h, (Δu) B, +, C h, +
    scan, Mamba-2: 5 d_inner d_state     a h, (Δx) B, +, C h, +       (its recurrence, not its matrix form)
    conv: 2 d_conv channels

2 N is a multiplication and an addition a weight; the backward of each term takes twice its forward (of the
Mamba-1 scan: 3 for μ, 1 for μ p, 2 each for the sums into dA, dB, dC, dΔ and d(Δu), 14), hence 3. Looking an
embedding up costs none; norms, gates, softmax and the optimizer are left out, as everywhere.

Executed FLOPs (the H of HFU) add the layers' and the head's recomputation, not what a scan's own backward
redoes of the states between its checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from adjoint.layers import MIXERS, StackConfig
from adjoint.stack import Stack
from adjoint.train.gpus import by_driver_name

_SCAN = {"mamba": 7, "mamba2": 5}  # FLOPs a state element and token, forward


@dataclass(frozen=True)
class Forward:
    """FLOPs per token of one forward pass."""

    layers: int
    head: int
    last: int  # of `layers`, each one's last product: what checkpointing need not do again

    @property
    def model(self) -> int:
        """FLOPs per token that a training step asks for: forward and backward."""
        return 3 * (self.layers + self.head)

    def executed(self, method: str, keep: str, seqlen: int, chunk_size: int | None) -> float:
        """FLOPs per token that a step of `method` executes: what it asks for, and what it does again."""
        if method == "backprop":
            return self.model
        if method == "backprop-checkpoint":
            return self.model + self.layers - self.last
        assert chunk_size is not None
        last = (seqlen - 1) % chunk_size + 1  # the last chunk's head is linearised in the forward already,
        before = 1 - last / seqlen  # with "edges" its layers too
        return self.model + (before if keep == "edges" else 1.0) * self.layers + before * self.head


def forward_flops(config: StackConfig) -> Forward:
    """Counts the model's operations. Raises ValueError for mixers other than Mamba-1 and Mamba-2."""
    unknown = sorted(set(config.mixers) - set(_SCAN))
    if unknown:
        raise ValueError(f"FLOPs are counted for mixers {' and '.join(_SCAN)}, not {', '.join(unknown)}")
    with torch.device("meta"):
        model = Stack(config)
    head = 2 * model.lm_head.weight.numel()
    weights = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, nn.Linear))
    conv = sum(2 * m.weight.numel() for m in model.layers.modules() if isinstance(m, nn.Conv1d))
    scan = sum(_SCAN[kind] * config.d_inner * MIXERS[kind].state_size(config) for kind in config.mixers)
    products = ((b.mixer if b.mlp is None else b.mlp).out_proj for b in model.blocks())
    last = sum(2 * product.weight.numel() for product in products if product is not None)
    return Forward(2 * weights + conv + scan, head, last)


def data_sheet(gpu: str | None, precision: str) -> float | None:
    """FLOPs a second of that GPU by its data sheet; None where it is not known, or of a slice of one."""
    found = None if gpu is None or precision != "bfloat16" else by_driver_name(gpu)
    return None if found is None else found.bfloat16 * 1e12
