"""The gated MLP (SwiGLU) that may follow a mixer."""

from torch import Tensor, nn

from adjoint.kernels.gated import gated_linear
from adjoint.layers.weight_splits import Section, Splits, by_columns, by_rows


class GatedMLP(nn.Module):
    """(…, d_model) → (…, d_model): out_proj(silu(gate) * value), both from in_proj, d_intermediate wide."""

    def __init__(self, d_model: int, d_intermediate: int, bias: bool) -> None:
        super().__init__()
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
        return gated_linear(gate, value, self.out_proj)
