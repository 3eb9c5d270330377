"""A mixer's causal depthwise convolution."""

from torch import Tensor, nn

from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.layers.mixer import arrived, handed_on


class CausalConv1d(nn.Conv1d):
    """`adjoint.kernels.causal_conv1d.causal_conv1d` as a module, its weights named as in mamba-ssm."""

    def __init__(self, channels: int, taps: int, bias: bool = True) -> None:
        super().__init__(channels, channels, taps, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, tail: Tensor, silu: bool = False, seq_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (batch, seqlen, channels) → the same shape, and the tail of inputs that the next chunk's call
        takes, (batch, channels, taps - 1)."""
        weight = self.weight.squeeze(1)
        y, after = causal_conv1d(x, weight, self.bias, arrived(tail), silu, seq_idx)
        return y, handed_on(tail, after)
