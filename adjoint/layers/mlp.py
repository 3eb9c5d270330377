"""The gated MLP (SwiGLU and its kin) that may follow a mixer."""

import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.gated import gated_linear
from adjoint.layers.weight_splits import Section, Splits, by_columns, by_rows


class GatedMLP(nn.Module):
    """(…, d_model) → (…, d_model): out_proj(activation(gate) * value), both from in_proj and d_intermediate
    wide.

    Args:
        activation: "silu", "gelu" or "identity".
    """

    def __init__(self, d_model: int, d_intermediate: int, bias: bool, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.in_proj = nn.Linear(d_model, 2 * d_intermediate, bias=bias)
        self.out_proj = nn.Linear(d_intermediate, d_model, bias=bias)

    def splits(self) -> Splits:
        """Return how tensor parallelism splits the parameters."""
        channels = [Section("d_intermediate", self.out_proj.in_features)]
        return {**by_rows(in_proj=2 * channels), **by_columns(out_proj=channels)}

    def reset_parameters(self) -> None:
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.in_proj(x).chunk(2, dim=-1)
        if self.activation == "silu":
            return gated_linear(gate, value, self.out_proj)
        product: Tensor = (F.gelu(gate) if self.activation == "gelu" else gate) * value
        return self.out_proj(product)
