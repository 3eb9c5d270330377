"""Kernels of other libraries as backends: mamba-ssm, causal-conv1d and flash-linear-attention.

Each is an object with the functions NAME_forward and NAME_backward of the operations that the library
computes as our references do. `lacks` says what a call needs and the library does not have, in one place for
the choice, the errors and `adjoint doctor`. Nothing is imported before it is used.

What is said of the libraries here was read in mamba-ssm 2.3.2, causal-conv1d 1.7.0 (and 1.6.1) and
flash-linear-attention 0.6.0. The Triton kernels of the first and the last agree with the reference under
Triton's interpreter (tests/kernels/test_libraries.py); on a GPU none of them has run here.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation, Operation

HALF = (torch.bfloat16, torch.float16)
# The need that `dispatch.fitting` adds: the bits of the offset of the last element that a call reaches.
OFFSET_BITS = "offset_bits"


@functools.cache  # asked for in every call
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache  # a failing import is slow, and may fail otherwise the second time
def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled modules fail in many ways against another torch
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


@functools.cache
def _version(package: str) -> tuple[int, ...]:
    """The first two numbers of the installed version."""
    numbers = importlib.metadata.version(package).split(".")[:2]
    return tuple(int("".join(c for c in number if c.isdigit()) or 0) for number in numbers)


class Library:
    """A library whose kernels are a backend.

    Attributes:
        name: of the backend.
        package: what pip installs.
        operations: names of the operations that it has, each with the module that is imported for it.
        refused: names of operations that the library has but that are no backend, each with the reason.
    """

    name: str
    package: str
    operations: ClassVar[Mapping[str, str]]
    refused: ClassVar[Mapping[str, str]] = {}

    def absent(self) -> str | None:
        """Return None if it is installed, else one line that says so."""
        if _installed(next(iter(self.operations.values())).partition(".")[0]):
            return None
        return f"not installed (pip install --no-build-isolation {self.package})"

    def broken(self, operation: str | None = None) -> str | None:
        """Return None if the module of an operation (None: of the first one) imports, else one line that says
        why not. Takes seconds the first time."""
        module = self.operations[operation or next(iter(self.operations))]
        problem = _import_problem(module)
        if problem is None:
            return None
        return f"import {module} fails ({problem}): install another version of {self.package}"

    def lacks(
        self, operation: str, dtype: torch.dtype, windowed: bool, resets: bool, needs: Mapping[str, int]
    ) -> str | None:
        """Say in one line what a call needs and the library does not have; None if it has it all.

        needs: sizes (`d_conv=4`) and options (`dt_softplus=1`) of the call; one that is not there is as
            layers have it.
        """
        if operation in self.refused:
            return self.refused[operation]
        if operation not in self.operations:
            return f"it is no backend for {operation}, only for {' and '.join(self.operations)}"
        if windowed:
            return "it has no windows"
        return self._lacks(operation, dtype, resets, needs)

    def _lacks(
        self, operation: str, dtype: torch.dtype, resets: bool, needs: Mapping[str, int]
    ) -> str | None:
        raise NotImplementedError

    def implementation(self, operation: Operation) -> Implementation:
        """The library's forward and backward of an operation; it saves nothing in between."""
        forward, backward = (getattr(self, f"{operation.code_name}_{way}") for way in ("forward", "backward"))
        return Implementation(self.name, forward, backward)

    def _module(self, operation: str) -> Any:
        return importlib.import_module(self.operations[operation])


def _only_half(dtype: torch.dtype) -> str | None:
    if dtype in HALF:
        return None
    return "it multiplies in TF32 or 16 bits, so it is for bfloat16 and float16 alone"


def _no_float64(dtype: torch.dtype) -> str | None:
    return "it has no float64" if dtype == torch.float64 else None


def _short_offsets(needs: Mapping[str, int]) -> str | None:
    """Refuse what 32 bits do not reach: offsets would wrap, and results be wrong without an error."""
    if needs.get(OFFSET_BITS, 32) > 32:
        return "it computes offsets in 32 bits, which do not reach all elements: use fewer tokens per chunk"
    return None


def _documents(reset: Tensor | None) -> Tensor | None:
    """Numbers of the documents, int32, the first token's being 0: to it the initial state belongs."""
    return None if reset is None else reset.cumsum(1, dtype=torch.int32)


class MambaSSM(Library):
    """The SSD scan of mamba-ssm (Triton; Dao & Gu 2024), with both states and their gradients.

    For half precision the states between its chunks and the initial state's gradient are rounded to it.
    """

    name = package = "mamba-ssm"
    operations: ClassVar = {"ssd_scan": "mamba_ssm.ops.triton.ssd_combined"}
    refused: ClassVar = {
        "selective_scan": "its selective scan takes no initial state and ignores the final state's gradient, "
        "so a chunk cannot hand its state on"
    }
    CHUNK = 256  # tokens between its states, mamba-ssm's default

    def _lacks(
        self, operation: str, dtype: torch.dtype, resets: bool, needs: Mapping[str, int]
    ) -> str | None:
        if not needs.get("dt_softplus", True):
            return "it cuts decays off at 1, which only dt_softplus=True makes sure of"
        return _only_half(dtype) or _short_offsets(needs)

    def _options(self, D, dt_bias, dt_softplus, initial_state, reset) -> dict[str, Any]:
        return {
            "D": D,
            "dt_bias": dt_bias,
            "initial_states": initial_state,
            "seq_idx": _documents(reset),
            "dt_softplus": dt_softplus,
        }

    def ssd_scan_forward(self, x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, save=True):
        scan = self._module("ssd_scan").mamba_chunk_scan_combined
        options = self._options(D, dt_bias, dt_softplus, initial_state, reset)
        with torch.no_grad():
            y, final_state = scan(x, dt, A, B, C, self.CHUNK, **options, return_final_states=True)
        return y, final_state, final_state.new_empty(0)  # its backward computes the states again

    def ssd_scan_backward(
        self,
        dy,
        dfinal_state,
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        dt_softplus,
        initial_state,
        reset,
        saved,
        window,
        halo=0,
    ):
        backward = self._module("ssd_scan")._mamba_chunk_scan_combined_bwd
        options = self._options(D, dt_bias, dt_softplus, initial_state, reset)
        # its argument `out` is read only with a gate z, which is not among what is handed on
        dx, ddt, dA, dB, dC, dD, _, dbias, dinitial = backward(
            dy, x, dt, A, B, C, dy, self.CHUNK, **options, dfinal_states=dfinal_state
        )
        dinitial = None if initial_state is None else dinitial.to(initial_state.dtype)
        return dx, ddt, dA, dB, dC, dD, dbias, dinitial


class CausalConv1dLibrary(Library):
    """The convolution of causal-conv1d (CUDA); its inputs before the first token in x's dtype."""

    name = package = "causal-conv1d"
    operations: ClassVar = {"causal_conv1d": "causal_conv1d.cpp_functions"}

    def _lacks(
        self, operation: str, dtype: torch.dtype, resets: bool, needs: Mapping[str, int]
    ) -> str | None:
        if not 2 <= needs.get("d_conv", 4) <= 4:
            return "it takes a d_conv from 2 to 4"
        if needs.get("channels", 8) % 8:
            return "it takes channels in eights"
        if resets and self.absent() is None and _version(self.package) < (1, 7):
            return "before 1.7 it takes no documents (seq_idx) together with a state"
        return _no_float64(dtype) or _short_offsets(needs)

    def causal_conv1d_forward(self, x, weight, bias, initial_state, silu, reset):
        forward = self._module("causal_conv1d").causal_conv1d_fwd_function
        x, before = _channels_last(x), self._before(initial_state, x)
        return forward(x, weight, bias, _documents(reset), before, None, silu).transpose(1, 2)

    def causal_conv1d_backward(self, dy, x, weight, bias, initial_state, silu, reset):
        backward = self._module("causal_conv1d").causal_conv1d_bwd_function
        x, dy, before = _channels_last(x), _channels_last(dy), self._before(initial_state, x)
        inputs = x, weight, bias, dy, _documents(reset), before
        dx, dweight, dbias, dbefore = backward(*inputs, None, None, before is not None, silu)
        dinitial = None if initial_state is None else dbefore.to(initial_state.dtype)
        return dx.transpose(1, 2), dweight, dbias, dinitial

    @staticmethod
    def _before(initial_state: Tensor | None, x: Tensor) -> Tensor | None:
        if initial_state is None:
            return None
        return initial_state.to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """x (batch, seqlen, channels) as causal-conv1d wants it: (batch, channels, seqlen), channels side by side
    and every token's on a boundary of eight. A slice of a projection's output may be copied for it."""
    strides = x.stride()
    fits = strides[2] == 1 and not any(n % 8 for n in (strides[0], strides[1], x.storage_offset()))
    return (x if fits else x.clone(memory_format=torch.contiguous_format)).transpose(1, 2)


class FLA(Library):
    """The gated delta rule, with a decay per head or per channel, and the convolution of
    flash-linear-attention (Triton).

    The delta rules go by the library's public functions, whose backward wants what their forward has saved:
    so the forward runs once more in the backward.
    """

    name, package = "fla", "flash-linear-attention"
    operations: ClassVar = {
        "gated_delta_rule": "fla.ops.gated_delta_rule",
        "kda": "fla.ops.kda",
        "causal_conv1d": "fla.modules.causal_conv1d",
    }

    def _lacks(
        self, operation: str, dtype: torch.dtype, resets: bool, needs: Mapping[str, int]
    ) -> str | None:
        if resets:
            return "its documents are lengths that the host has to wait for, with a state in memory for each"
        if operation == "causal_conv1d":
            return _no_float64(dtype)
        if needs.get("d_k", 0) > 256:
            return "it takes keys of up to 256 channels"
        return _only_half(dtype)

    def gated_delta_rule_forward(self, q, k, v, g, beta, initial_state, reset, save=True):
        with torch.no_grad():
            o, final_state = self._delta_rule(q, k, v, g, beta, initial_state)
        return o, final_state, final_state.new_empty(0)

    def gated_delta_rule_backward(self, do, dfinal_state, q, k, v, g, beta, initial_state, reset, saved):
        inputs = [t for t in (q, k, v, g, beta, initial_state) if t is not None]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs]
            o, final_state = self._delta_rule(*leaves)
            outputs, cotangents = [o], [do]
            if dfinal_state is not None:
                outputs, cotangents = [o, final_state], [do, dfinal_state]
            gradients = torch.autograd.grad(outputs, leaves, cotangents)
        return (*gradients, None)[:6]

    def _delta_rule(self, q, k, v, g, beta, initial_state=None):
        name = "kda" if g.dim() == 4 else "gated_delta_rule"
        rule = getattr(self._module(name), f"chunk_{name}")
        states = {"initial_state": initial_state, "output_final_state": True}
        return rule(q, k, v, g, beta, scale=1.0, **states)

    def causal_conv1d_forward(self, x, weight, bias, initial_state, silu, reset):
        forward = self._module("causal_conv1d").causal_conv1d_fwd
        activation = "silu" if silu else None
        return forward(x, weight, bias, None, self._before(initial_state), False, activation)[0]

    def causal_conv1d_backward(self, dy, x, weight, bias, initial_state, silu, reset):
        backward = self._module("causal_conv1d").causal_conv1d_bwd
        activation = "silu" if silu else None
        before = self._before(initial_state)
        dx, dweight, dbias, _, dbefore = backward(x, dy, None, weight, bias, None, before, activation)
        return dx, dweight, dbias, None if initial_state is None else dbefore[..., 1:]

    @staticmethod
    def _before(initial_state: Tensor | None) -> Tensor | None:
        """The state as fla has it: d_conv inputs, of which the oldest is never read."""
        return None if initial_state is None else torch.nn.functional.pad(initial_state, (1, 0))


# In the order in which they are asked.
LIBRARIES: dict[str, Library] = {
    library.name: library for library in (MambaSSM(), CausalConv1dLibrary(), FLA())
}
