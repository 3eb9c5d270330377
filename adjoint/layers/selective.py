"""The paper's generic selective SSM: h_t = A_t h_{t-1} + B_t x_t, y_t = C_t h_t, with A, B, C single-layer
networks of x_t (eq. 1–3).

The recurrence is kept stable by construction: a scalar or diagonal A_t is exp(-softplus(·)), in (0, 1); a
dense A_t has rows whose absolute values add up to a number in (0, 1), so no product of them ever grows in the
maximum norm.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.linear_scan import linear_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps
from adjoint.layers.mixer import ScanMixer
from adjoint.layers.weight_splits import RankConfig, Section, Splits, by_rows, local_units, rank_config


class SelectiveScanInputs(NamedTuple):
    """The scan's inputs: A_t as a (batch, seqlen, 1 | d_state | d_state, d_state), B_t x_t as b (batch,
    seqlen, d_state), C (batch, seqlen, d_model, d_state)."""

    a: Tensor
    b: Tensor
    C: Tensor


class SelectiveMixer(ScanMixer):
    """A, B, C networks → linear scan → C h. State: (h,), (batch, d_state).

    Attributes:
        structure: A's, one per subclass: "scalar", "diagonal" or "dense".
    """

    structure: ClassVar[str]

    def __init__(self, config: StackConfig) -> None:
        n = self.state_size(config)
        super().__init__(config, (n,))
        self.d_state = n
        numbers = {"scalar": 1, "diagonal": n, "dense": n + n * n}[self.structure]
        self.A_proj = nn.Linear(config.d_model, numbers)
        self.B_proj = nn.Linear(config.d_model, n * config.d_model)
        self.C_proj = nn.Linear(config.d_model, config.d_model * n)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        d_model, n = self.config.d_model, self.d_state
        decays = 1 if self.structure == "scalar" else n
        nn.init.normal_(self.A_proj.weight, std=0.1 / math.sqrt(d_model))
        self.A_proj.bias[:decays] = inverse_softplus_steps(self.config, self.A_proj.bias[:decays])
        if self.structure == "dense":  # starts near a diagonal matrix
            self.A_proj.bias[n:] = torch.eye(n, dtype=self.A_proj.bias.dtype).flatten()
        for proj, std in ((self.B_proj, 1 / d_model), (self.C_proj, 1 / math.sqrt(d_model * n))):
            nn.init.normal_(proj.weight, std=std)
            nn.init.normal_(proj.bias, std=std)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts B and C, and a dense A."""
        n = cls.state_size(config)
        return (2 * n * config.d_model + (3 * n * n if cls.structure == "dense" else 0)) * element

    def splits(self) -> Splits | None:
        """Split the state's channels; a dense A, which mixes them, is not split."""
        if self.structure == "dense":
            return None
        n, d_model = self.d_state, self.config.d_model
        channels = Section("d_state", n)
        rows = by_rows(B_proj=[channels._replace(width=d_model)], C_proj=d_model * [channels])
        return rows if self.structure == "scalar" else {**rows, **by_rows(A_proj=[channels])}

    def rank_config(self, ranks: int) -> RankConfig:
        channels = local_units("d_state", self.d_state, ranks)
        return rank_config(self.config, ranks, d_state=channels)

    def transition(self, x: Tensor) -> Tensor:
        """Return A_t for inputs (…, d_model): (…, 1), (…, d_state) or (…, d_state, d_state)."""
        raw = self.A_proj(x)
        if self.structure != "dense":
            return torch.exp(-F.softplus(raw))
        n = self.d_state
        decay = torch.exp(-F.softplus(raw[..., :n]))
        matrix = raw[..., n:].unflatten(-1, (n, n))
        return (decay / (matrix.abs().sum(-1) + 1e-6)).unsqueeze(-1) * matrix

    def input_matrix(self, x: Tensor) -> Tensor:
        """Return B_t (…, d_state, d_model)."""
        return self.B_proj(x).unflatten(-1, (self.d_state, self.config.d_model))

    def output_matrix(self, x: Tensor) -> Tensor:
        """Return C_t (…, d_model, d_state)."""
        return self.C_proj(x).unflatten(-1, (self.config.d_model, self.d_state))

    def scan_inputs(
        self, x: Tensor, conv_tail: None = None, seq_idx: Tensor | None = None
    ) -> tuple[SelectiveScanInputs, None]:
        b = (self.input_matrix(x) @ x.unsqueeze(-1)).squeeze(-1)
        return SelectiveScanInputs(self.transition(x), b, self.output_matrix(x)), None

    def scan(self, inputs: SelectiveScanInputs, h: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return all states (batch, seqlen, d_state), and the last one, from which the next chunk continues.

        The last one is not rounded to 16 bits."""
        a, b, _ = inputs
        states = linear_scan(a, b.to(accumulate_dtype(b.dtype)), initial_state=h, **options)
        last = states[:, -1].clone()  # a view would keep the memory of all states
        return states.to(b.dtype), last

    def log_decay(self, inputs: SelectiveScanInputs) -> Tensor:
        """Return each channel's log decay, (batch, seqlen, 1 | d_state).

        For a dense A it is the log of its maximum norm, which bounds how the adjoint state's sum norm
        shrinks."""
        a = inputs.a.abs().sum(-1).amax(-1, keepdim=True) if self.structure == "dense" else inputs.a
        return torch.log(a.to(accumulate_dtype(a.dtype)))

    def scan_outputs(self, y: Tensor, inputs: SelectiveScanInputs) -> Tensor:
        return (inputs.C @ y.unsqueeze(-1)).squeeze(-1)


class ScalarMixer(SelectiveMixer):
    """A_t is a number, the same for all channels."""

    structure = "scalar"


class DiagonalMixer(SelectiveMixer):
    """A_t is a number for each channel of the state."""

    structure = "diagonal"


class DenseMixer(SelectiveMixer):
    """A_t is a matrix (d_state, d_state)."""

    structure = "dense"
