"""The compiled CPU backend: float32 and float64, all cores. The functions NAME_forward and NAME_backward of
each operation have the arguments and results of its reference; NAME_saved_shape is the shape of what forward
saves."""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.columns import gradient_like
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.dplr_delta_rule.reference import dplr_delta_rule_saved_shape
from adjoint.kernels.gated_delta_rule.reference import gated_delta_rule_saved_shape
from adjoint.kernels.plain_recurrence import step_size, zero_where
from adjoint.kernels.ssd_scan.reference import ssd_step_gradients

MIN_TOKENS_OF_BLOCK, MIN_STATE_OF_BLOCK = 8, 16  # below, matrix products gain nothing over a recurrence
ALIGNMENT = 64  # of a cache line, and of the widest vector
LONGEST_TAPS = 16  # of the convolution that goes token by token; longer filters go by blocks
MODAL_SEGMENT = 64  # tokens between the saved states of a modal filter
# Tokens between the saved states of an SSD scan, some blocks of its products; more for a larger state.
SSD_INTERVAL = 128
ELEMENTS_A_THREAD = 1 << 17  # about a tenth of a millisecond
_I64 = ctypes.c_int64
_PTR = ctypes.c_void_p


class _Rows(ctypes.Structure):
    """Rows of (batch, tokens, …), numbers of a row side by side."""

    _fields_ = [("data", _PTR), ("batch_stride", _I64), ("time_stride", _I64)]


class _HeadRows(ctypes.Structure):
    """Rows of (batch, heads, tokens, width), of whole vectors, each on a vector's boundary."""

    _fields_ = [("data", _PTR), *((name, _I64) for name in ("batch_stride", "head_stride", "token_stride"))]


class _Args(ctypes.Structure):
    """The arguments of a compiled function. They keep every tensor that they point to alive, by its name.

    Attributes:
        kinds: of the fields, by name: `_Rows` and `_HeadRows`, where tensors may have strides; for a pointer
            they are contiguous.
        dtypes: of the tensors that have another dtype than the function's, by name.
        aligned: names of contiguous tensors that the function reads by whole vectors.
        nonzero_sizes: names of sizes without which all results are zero; no function runs where one is 0.
    """

    kinds: ClassVar[Mapping[str, type]]
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"reset": torch.bool}
    aligned: ClassVar[frozenset[str]] = frozenset()
    nonzero_sizes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.kinds = {field[0]: field[1] for field in cls._fields_}

    def run(
        self,
        function: str,
        dtype: torch.dtype,
        *options: int,
        inputs: Mapping[str, Tensor | None],
        outputs: Mapping[str, Tensor | None],
    ) -> None:
        """Call a compiled function. Inputs whose layout does not fit their field are copied.

        Raises:
            ValueError: a tensor has another dtype or device, and would be read as other numbers; or is of a
                class that wraps other tensors, as DTensor does; or the layout of an output does not fit its
                field: a copy would get the results.
        """
        tensors = vars(self)
        for name, x in (*inputs.items(), *outputs.items()):
            if x is None:
                continue
            kind = self.kinds[name]
            if kind is _Rows:
                rows = x.flatten(2)  # a view where strides allow it
                rows = rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
                setattr(self, name, _Rows(rows.data_ptr(), rows.stride(0), rows.stride(1)))
            elif kind is _HeadRows:
                rows = _in_head_rows(name, x)
                setattr(self, name, _HeadRows(rows.data_ptr(), *rows.stride()[:3]))
            else:
                rows = x.contiguous()
                if name in self.aligned and rows.data_ptr() % _vector_bytes():
                    rows = _aligned(tuple(x.shape), x.dtype).copy_(x)
                setattr(self, name, rows.data_ptr())
            if name in outputs and rows.data_ptr() != x.data_ptr():
                raise ValueError(
                    f"the compiled CPU kernels cannot write {name} where it is: shape {tuple(x.shape)}, "
                    f"strides {x.stride()}, address {x.data_ptr():#x}; pass a contiguous tensor"
                )
            tensors[name] = rows
        for name, x in tensors.items():
            expected = self.dtypes.get(name, dtype)
            if x.dtype != expected or not x.is_cpu:
                raise ValueError(
                    f"the compiled CPU kernel {function} needs {name} in {expected} on the CPU, "
                    f"got {x.dtype} on {x.device}"
                )
            if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its address is 0
                raise ValueError(
                    f"the compiled CPU kernel {function} reads memory, and {name} is a {type(x).__name__}, "
                    "which has none of its own"
                )
        for size in self.nonzero_sizes:
            if not getattr(self, size):
                for x in outputs.values():
                    if x is not None:
                        x.zero_()
                return
        _function(function, dtype)(ctypes.byref(self), *options)


_ArgsOfRows = TypeVar("_ArgsOfRows", bound=_Args)


class _ScanArgs(_Args):  # mirrors ScanArgs in scan.h
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "nheads", "headdim", "ngroups", "d_state")),
        *((name, _I64) for name in ("interval", "threads", "partials", "softplus", "window", "halo")),
        *((name, _Rows) for name in ("u", "delta", "B", "C", "z", "decay", "y")),
        *(
            (name, _PTR)
            for name in ("A", "D", "delta_bias", "initial_state", "final_state", "checkpoints", "reset")
        ),
        *((name, _Rows) for name in ("dy", "du", "ddelta", "dz", "ddecay")),
        *((name, _PTR) for name in ("dB", "dC")),
        *((name, _Rows) for name in ("dB_sum", "dC_sum")),
        *((name, _PTR) for name in ("dA", "dD", "ddelta_bias", "dfinal_state", "dinitial_state")),
    ]
    aligned = frozenset({"checkpoints"})
    nonzero_sizes = "nheads", "headdim"


class _ConvArgs(_Args):  # mirrors ConvArgs in conv.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "channels", "width", "threads", "silu")),
        ("x", _Rows),
        *((name, _PTR) for name in ("weight", "bias", "initial_state", "y", "reset")),
        ("dy", _Rows),
        ("dx", _Rows),
        *((name, _PTR) for name in ("dweight", "dbias", "dinitial_state")),
    ]
    dtypes = {"reset": torch.bool, "dweight": torch.float64, "dbias": torch.float64}
    nonzero_sizes = ("channels",)


class _FilterArgs(_Args):  # mirrors FilterArgs in filter.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "channels", "width", "threads")),
        ("x", _Rows),
        *((name, _PTR) for name in ("weight", "initial_state", "y", "reset")),
        ("dy", _Rows),
        *((name, _PTR) for name in ("dx", "dweight", "dinitial_state")),
    ]
    dtypes = {"reset": torch.bool, "dweight": torch.float64}
    nonzero_sizes = ("channels",)


class _ModalArgs(_Args):  # mirrors ModalArgs in modal.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "channels", "order", "threads", "segment")),
        *((name, _I64) for name in ("window", "halo")),
        ("u", _Rows),
        *((name, _PTR) for name in ("pole", "R", "D", "initial_state", "final_state", "y", "checkpoints")),
        ("reset", _PTR),
        ("dy", _Rows),
        *((name, _PTR) for name in ("dfinal_state", "dinitial_state", "du", "dpole", "dR", "dD")),
    ]
    dtypes = {"reset": torch.bool, **dict.fromkeys(("pole", "R", "D", "dpole", "dR", "dD"), torch.float64)}
    nonzero_sizes = ("channels",)


class _AttentionArgs(_Args):  # mirrors AttentionArgs in attention.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "heads", "queries", "keys", "width", "threads", "causal")),
        ("scale", ctypes.c_double),
        *((name, _HeadRows) for name in ("q", "k", "v", "out", "d", "dk", "dv")),
        *((name, _PTR) for name in ("log", "delta", "dq")),
    ]


class _LinearArgs(_Args):  # mirrors LinearArgs in linear.h
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "d_state", "a_width", "threads", "window", "halo")),
        *((name, _PTR) for name in ("a", "b", "initial_state", "h", "dh", "da", "db", "dinitial_state")),
        ("reset", _PTR),
    ]
    nonzero_sizes = ("d_state",)


class _NormArgs(_Args):  # mirrors NormArgs in norm.cpp
    _fields_ = [
        *((name, _I64) for name in ("rows", "width", "group", "threads")),
        ("eps", ctypes.c_double),
        *((name, _PTR) for name in ("x", "residual", "gate", "weight", "y", "s", "rstd")),
        *((name, _I64) for name in ("x_stride", "residual_stride", "gate_stride")),
        *((name, _PTR) for name in ("dy", "ds", "dx", "dgate", "dweight")),
        *((name, _I64) for name in ("dy_stride", "ds_stride", "dx_stride", "dgate_stride")),
    ]
    dtypes = {"dweight": torch.float64}


class _SwigluArgs(_Args):  # mirrors SwigluArgs in swiglu.cpp
    _fields_ = [
        *((name, _I64) for name in ("rows", "width", "threads")),
        *((name, _PTR) for name in ("gate", "value", "d", "y", "d_gate", "d_value")),
        *((name, _I64) for name in ("gate_stride", "value_stride", "d_stride")),
    ]
    nonzero_sizes = ("width",)


class _DeltaArgs(_Args):  # mirrors DeltaArgs in delta.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "nheads", "d_k", "d_v", "wide", "threads")),
        *((name, _Rows) for name in ("q", "k", "v", "d_o")),
        *((name, _PTR) for name in ("g", "beta", "initial_state", "reset")),
        *((name, _PTR) for name in ("o", "final_state", "checkpoints", "dfinal_state")),
        *((name, _Rows) for name in ("dq", "dk", "dv")),
        *((name, _PTR) for name in ("dg", "dbeta", "dinitial_state")),
    ]
    nonzero_sizes = "nheads", "d_k", "d_v"


class _DplrArgs(_Args):  # mirrors DplrArgs in dplr.cpp
    _fields_ = [
        *((name, _I64) for name in ("batch", "seqlen", "nheads", "d_k", "d_v", "threads")),
        *((name, _Rows) for name in ("q", "k", "v", "a", "b", "g", "d_o")),
        *((name, _PTR) for name in ("initial_state", "reset", "o", "final_state", "checkpoints")),
        *((name, _PTR) for name in ("dfinal_state", "dq", "dk", "dv", "da", "db", "dg", "dinitial_state")),
    ]
    nonzero_sizes = "nheads", "d_k", "d_v"


def _library() -> ctypes.CDLL:
    library, reason = cpu_build.load()
    if library is None:
        raise ValueError(f"backend 'cpu' is not usable: {reason}")
    return library


@functools.cache  # asked for in every forward and backward
def _function(name: str, dtype: torch.dtype) -> Callable[..., object]:
    suffixes = {torch.float32: "f32", torch.float64: "f64"}
    if dtype not in suffixes:
        raise ValueError(f"the compiled CPU kernel {name} is for float32 and float64, not {dtype}")
    function = getattr(_library(), f"adjoint_{name}_{suffixes[dtype]}")
    function.restype = None
    return function


@functools.cache
def _vector_bytes() -> int:
    return int(_library().adjoint_vector_bytes())


@functools.cache
def _lanes(dtype: torch.dtype) -> int:
    """Channels in a vector."""
    return _vector_bytes() // dtype.itemsize


@functools.cache
def _attention_block(*, of_keys: bool) -> int:
    """Queries that a thread of attention's forward takes at once, or keys of its backward."""
    return int(_library().adjoint_attention_block(of_keys))


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory on a 64-byte boundary, which the kernels' vector loads rely on."""
    numel = 1
    for n in shape:
        numel *= n
    spare = ALIGNMENT // dtype.itemsize
    storage = torch.empty(numel + spare, dtype=dtype, device="cpu")  # whatever the default device is
    offset = -storage.data_ptr() % ALIGNMENT // dtype.itemsize
    return storage[offset : offset + numel].view(shape)


def _in_head_rows(name: str, x: Tensor) -> Tensor:
    """(batch, heads, tokens, width) with each row on a vector's boundary: x, or a copy.

    Raises:
        ValueError: a row is no whole number of vectors.
    """
    lanes = _lanes(x.dtype)
    if x.shape[3] % lanes:
        raise ValueError(f"the width of {name} must be a multiple of {lanes}, got shape {tuple(x.shape)}")
    sizes = zip(x.shape[:3], x.stride()[:3], strict=True)
    is_split = x.stride(3) != 1 or any(step % lanes for size, step in sizes if size > 1)
    if is_split or x.data_ptr() % _vector_bytes():
        return _aligned(tuple(x.shape), x.dtype).copy_(x)
    return x


def _selective_interval(d_state: int) -> int:
    """Tokens between the saved states of a selective scan: what is kept of a segment fits the first-level
    cache; longer for a larger state, to save fewer."""
    return max(32, d_state)


def _blocks(nheads: int, headdim: int, dtype: torch.dtype) -> int:
    return nheads * -(-headdim // _lanes(dtype))


def _threads(units: int, work: int) -> int:
    """Threads for `units` independent pieces and `work` elements in all: another must be worth waking."""
    return max(1, min(torch.get_num_threads(), units, work // ELEMENTS_A_THREAD))


def _saved_shape(x: Tensor, nheads: int, headdim: int, d_state: int, interval: int) -> tuple[int, ...]:
    """States of a scan before each segment, channels in vectors: (batch, segments, blocks, d_state,
    lanes)."""
    segments = -(-x.shape[1] // interval)
    return x.shape[0], segments, _blocks(nheads, headdim, x.dtype), d_state, _lanes(x.dtype)


def selective_scan_saved_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    d_inner, d_state = A.shape
    return _saved_shape(u, 1, d_inner, d_state, _selective_interval(d_state))


def selective_scan_forward(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, reset, save=True
):
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    blocks = _blocks(1, d_inner, u.dtype)
    threads = _threads(batch * blocks, u.numel() * d_state)
    args = _ScanArgs(batch, seqlen, 1, d_inner, 1, d_state, _selective_interval(d_state), threads)
    y = u.new_empty(batch, seqlen, d_inner)
    final_state = u.new_empty(batch, d_inner, d_state)
    checkpoints = _aligned(selective_scan_saved_shape(u, A), u.dtype) if save else None
    args.softplus = delta_softplus
    inputs = {"u": u, "delta": delta, "B": B, "C": C, "z": z, "A": A, "D": D, "delta_bias": delta_bias}
    inputs |= {"initial_state": initial_state, "reset": reset}
    outputs = {"y": y, "final_state": final_state, "checkpoints": checkpoints}
    args.run("scan", u.dtype, 0, 0, inputs=inputs, outputs=outputs)
    return y, final_state, checkpoints


def selective_scan_backward(
    dy,
    dfinal_state,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    delta_softplus,
    initial_state,
    reset,
    checkpoints,
    window,
    halo=0,
):
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    threads = _threads(batch * _blocks(1, d_inner, u.dtype), u.numel() * d_state)
    args = _ScanArgs(batch, seqlen, 1, d_inner, 1, d_state, _selective_interval(d_state), threads)
    du, ddelta = [u.new_empty(batch, seqlen, d_inner) for _ in range(2)]
    dz = None if z is None else gradient_like(z)
    dB, dC = _partials(args, u, batch, seqlen, 1, d_state)
    dA = u.new_empty(batch, d_inner, d_state)
    dD = None if D is None else u.new_empty(batch, d_inner)
    dbias = None if delta_bias is None else u.new_empty(batch, d_inner)
    dinitial = u.new_empty(batch, d_inner, d_state)
    args.softplus, args.window, args.halo = delta_softplus, _effective(window, seqlen), halo
    inputs = {"u": u, "delta": delta, "B": B, "C": C, "z": z, "A": A, "D": D, "delta_bias": delta_bias}
    inputs |= {"dy": dy, "dfinal_state": dfinal_state, "reset": reset, "checkpoints": checkpoints}
    outputs = {"du": du, "ddelta": ddelta, "dz": dz, "dB": dB, "dC": dC, "dA": dA, "dD": dD}
    outputs |= {"ddelta_bias": dbias, "dinitial_state": dinitial}
    args.run("scan", u.dtype, 0, 1, inputs=inputs, outputs=outputs)
    dD = None if dD is None else dD.sum(0)
    dbias = None if dbias is None else dbias.sum(0)
    dB, dC = [_total(g).squeeze(2) for g in (dB, dC)]
    return du, ddelta, dA.sum(0), dB, dC, dD, dz, dbias, dinitial


def _partials(
    args: _ScanArgs, like: Tensor, batch: int, seqlen: int, ngroups: int, d_state: int
) -> list[Tensor]:
    """Room for dB and dC, (partials, batch, seqlen, ngroups, d_state) each: one for every thread, unless each
    has groups of its own."""
    separate = batch * ngroups % args.threads == 0
    shape = 1 if separate else args.threads, batch, seqlen, ngroups, d_state
    args.partials = shape[0]
    return [like.new_empty(shape) if separate else like.new_zeros(shape) for _ in range(2)]


def _total(partials: Tensor) -> Tensor:
    return partials[0] if len(partials) == 1 else partials.sum(0)


def _effective(window: int | None, seqlen: int) -> int:
    """0 where the window drops nothing: it must also reach from the token before the first to the last."""
    return 0 if window is None or window > seqlen else window


def ssd_scan_saved_shape(x: Tensor, B: Tensor) -> tuple[int, ...]:
    return _saved_shape(x, x.shape[2], x.shape[3], B.shape[-1], max(SSD_INTERVAL, B.shape[-1]))


def _ssd_args(x: Tensor, B: Tensor) -> tuple[_ScanArgs, int, bool]:
    """Arguments of an SSD scan, the pieces of a row that are independent, and whether matrix products of
    blocks of tokens are faster than the recurrence token by token."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    is_large = seqlen >= MIN_TOKENS_OF_BLOCK and d_state >= MIN_STATE_OF_BLOCK
    by_blocks = is_large and 2 * headdim >= _lanes(x.dtype)
    pieces = nheads if by_blocks else _blocks(nheads, headdim, x.dtype)
    threads = _threads(batch * pieces, x.numel() * d_state)
    interval = max(SSD_INTERVAL, d_state)
    return _ScanArgs(batch, seqlen, nheads, headdim, ngroups, d_state, interval, threads), pieces, by_blocks


def ssd_scan_forward(x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, save=True):
    batch, _, nheads, headdim = x.shape
    args, _, by_blocks = _ssd_args(x, B)
    y = x.new_empty(x.shape)
    final_state = x.new_empty(batch, nheads, headdim, B.shape[-1])
    checkpoints = _aligned(ssd_scan_saved_shape(x, B), x.dtype) if save else None
    inputs = {"u": x, "B": B, "C": C, "A": A, "initial_state": initial_state, "reset": reset}
    outputs = {"y": y, "final_state": final_state, "checkpoints": checkpoints}
    if by_blocks:
        args.softplus = dt_softplus
        inputs |= {"delta": dt, "delta_bias": dt_bias, "D": D}
        args.run("ssd", x.dtype, 0, inputs=inputs, outputs=outputs)
    else:
        d = step_size(dt, dt_bias, dt_softplus)
        inputs |= {"delta": d, "D": None if D is None else D.repeat_interleave(headdim)}
        outputs["decay"] = (d * A).contiguous()  # the scan writes decays in the exponents' place
        args.run("scan", x.dtype, 1, 0, inputs=inputs, outputs=outputs)
    return y, final_state, checkpoints


def ssd_scan_backward(
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
    checkpoints,
    window,
    halo=0,
):
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    args, blocks, by_blocks = _ssd_args(x, B)
    dx = gradient_like(x)
    dinitial = x.new_empty(batch, nheads, headdim, d_state)
    args.window, args.halo = _effective(window, seqlen), halo
    inputs = {"u": x, "B": B, "C": C, "A": A, "dy": dy, "dfinal_state": dfinal_state}
    inputs |= {"reset": reset, "checkpoints": checkpoints}
    outputs = {"du": dx, "dinitial_state": dinitial}
    if by_blocks:
        args.softplus = dt_softplus
        ddt, dB, dC = map(gradient_like, (dt, B, C))
        outputs |= {"ddelta": ddt, "dB_sum": dB, "dC_sum": dC}
        if batch * ngroups % args.threads:  # threads share groups
            parts = x.new_empty(2, args.threads, *B.shape)
            outputs |= {"dB": parts[0], "dC": parts[1]}
        inputs |= {"delta": dt, "delta_bias": dt_bias, "D": D}
        dA, dD, dbias = x.new_empty(3, batch, nheads).unbind()
        outputs |= {
            "dA": dA,
            "dD": None if D is None else dD,
            "ddelta_bias": None if dt_bias is None else dbias,
        }
        args.run("ssd", x.dtype, 1, inputs=inputs, outputs=outputs)
        return dx, ddt, dA.sum(0), dB, dC, dD.sum(0), dbias.sum(0), dinitial
    d = step_size(dt, dt_bias, dt_softplus)
    inputs |= {"delta": d, "D": None if D is None else D.repeat_interleave(headdim)}
    decay = (d * A).contiguous()  # as in the forward
    dd, dexponent = x.new_empty(2, batch, seqlen, blocks).unbind()
    dB, dC = _partials(args, x, batch, seqlen, ngroups, d_state)
    dD = None if D is None else x.new_empty(batch, nheads * headdim)
    outputs |= {"ddelta": dd, "dB": dB, "dC": dC, "ddecay": dexponent, "dD": dD, "decay": decay}
    args.run("scan", x.dtype, 1, 1, inputs=inputs, outputs=outputs)
    per_head = nheads, _blocks(1, headdim, x.dtype)
    dd, dexponent = (g.unflatten(2, per_head).sum(-1) for g in (dd, dexponent))
    ddt, dA = ssd_step_gradients(dd, dexponent * decay, d, dt, A, dt_bias, dt_softplus)
    dbias = None if dt_bias is None else ddt.sum((0, 1))
    dD = None if dD is None else dD.sum(0).view(nheads, headdim).sum(1)
    return dx, ddt, dA, _total(dB), _total(dC), dD, dbias, dinitial


def linear_scan_forward(a: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    return _linear_forward(zero_where(a, reset), b, initial_state, reset, dense=False)


def dense_scan_forward(A: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    return _linear_forward(zero_where(A, reset), b, initial_state, reset, dense=True)


def _linear_forward(
    a: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None, dense: bool
) -> Tensor:
    batch, seqlen, d_state = b.shape
    h = b.new_empty(batch, seqlen, d_state)
    args = _linear_args(a, b, batch if dense else batch * _linear_blocks(d_state, b.dtype))
    inputs = {"a": a, "b": b, "initial_state": initial_state, "reset": reset}
    args.run("dense" if dense else "linear", b.dtype, 0, inputs=inputs, outputs={"h": h})
    return h


def _linear_args(a: Tensor, b: Tensor, units: int) -> _LinearArgs:
    batch, seqlen, d_state = b.shape
    threads = _threads(units, a.numel())
    return _LinearArgs(batch, seqlen, d_state, a.shape[2:].numel(), threads)


def _linear_blocks(d_state: int, dtype: torch.dtype) -> int:
    return -(-d_state // _lanes(dtype))


def linear_scan_backward(dh, a, h, initial_state, reset, window, halo=0):
    return _linear_backward(dh, a, h, initial_state, reset, window, halo, dense=False)


def dense_scan_backward(dh, A, h, initial_state, reset, window, halo=0):
    return _linear_backward(dh, A, h, initial_state, reset, window, halo, dense=True)


def _linear_backward(dh, a, h, initial_state, reset, window, halo, dense):
    batch, seqlen, d_state = h.shape
    blocks = _linear_blocks(d_state, h.dtype)
    a = zero_where(a, reset)
    args = _linear_args(a, h, batch * (seqlen if dense else blocks))
    per_token = a.shape[2:] if dense or a.shape[-1] > 1 else (blocks,)
    da = h.new_empty(batch, seqlen, *per_token)
    db = h.new_empty(batch, seqlen, d_state)
    dinitial = h.new_empty(batch, d_state)
    args.window, args.halo = _effective(window, seqlen), halo
    inputs = {"a": a, "h": h, "initial_state": initial_state, "dh": dh, "reset": reset}
    outputs = {"da": da, "db": db, "dinitial_state": dinitial}
    args.run("dense" if dense else "linear", h.dtype, 1, inputs=inputs, outputs=outputs)
    if a.shape[2:] == (1,):
        da = da.sum(-1, keepdim=True)
    return zero_where(da, reset), db, dinitial


def _conv_args(x: Tensor, weight: Tensor, silu: bool) -> _ConvArgs:
    batch, seqlen, channels = x.shape
    threads = _threads(batch * -(-seqlen // 64), x.numel() * weight.shape[1])
    return _ConvArgs(batch, seqlen, channels, weight.shape[1], threads, silu)


def causal_conv1d_forward(x, weight, bias, initial_state, silu, reset=None):
    if weight.shape[1] > LONGEST_TAPS:
        y = _filter_forward(x, weight, initial_state, reset)
        y = y if bias is None else y.add_(bias)
        return F.silu(y) if silu else y
    y = x.new_empty(x.shape)
    args = _conv_args(x, weight, silu)
    inputs = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "reset": reset}
    args.run("conv1d", x.dtype, 0, inputs=inputs, outputs={"y": y})
    return y


def causal_conv1d_backward(dy, x, weight, bias, initial_state, silu, reset=None):
    batch, _, channels = x.shape
    if weight.shape[1] > LONGEST_TAPS:
        if silu:
            y = causal_conv1d_forward(x, weight, bias, initial_state, False, reset)
            dy = torch.ops.aten.silu_backward(dy.to(y.dtype), y)
        to_bias = None if bias is None else dy.sum((0, 1), dtype=torch.float64).to(x.dtype)
        to_x, to_weight, to_state = _filter_backward(dy, x, weight, initial_state, reset)
        return to_x, to_weight, to_bias, to_state
    args = _conv_args(x, weight, silu)
    dx = gradient_like(x)
    dweight = x.new_zeros(args.threads, *weight.shape, dtype=torch.float64)
    dbias = None if bias is None else x.new_zeros(args.threads, channels, dtype=torch.float64)
    dinitial = x.new_empty(batch, channels, weight.shape[1] - 1)
    inputs = {
        "dy": dy,
        "x": x,
        "weight": weight,
        "bias": bias,
        "initial_state": initial_state,
        "reset": reset,
    }
    outputs = {"dx": dx, "dweight": dweight, "dbias": dbias, "dinitial_state": dinitial}
    args.run("conv1d", x.dtype, 1, inputs=inputs, outputs=outputs)
    dweight, dbias = [None if g is None else g.sum(0).to(x.dtype) for g in (dweight, dbias)]
    return dx, dweight, dbias, dinitial


def _filter_args(x: Tensor, weight: Tensor) -> _FilterArgs:
    batch, seqlen, channels = x.shape
    threads = _threads(batch * -(-seqlen // 256), x.numel() * weight.shape[1])
    return _FilterArgs(batch, seqlen, channels, weight.shape[1], threads)


def _filter_forward(x: Tensor, weight: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    y = x.new_empty(x.shape)
    inputs = {"x": x, "weight": weight, "initial_state": initial_state, "reset": reset}
    _filter_args(x, weight).run("filter", x.dtype, 0, inputs=inputs, outputs={"y": y})
    return y


def _filter_backward(
    dy: Tensor, x: Tensor, weight: Tensor, initial_state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, channels = x.shape
    args, dx = _filter_args(x, weight), x.new_empty(x.shape)
    dweight = x.new_zeros(args.threads, *weight.shape, dtype=torch.float64)
    dinitial = x.new_zeros(batch, channels, weight.shape[1] - 1)
    inputs = {"dy": dy, "x": x, "weight": weight, "initial_state": initial_state, "reset": reset}
    outputs = {"dx": dx, "dweight": dweight, "dinitial_state": dinitial}
    args.run("filter", x.dtype, 1, inputs=inputs, outputs=outputs)
    return dx, dweight.sum(0).to(x.dtype), dinitial


def modal_scan_saved_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """States before each segment, channels last: (batch, segments, order, channels)."""
    return u.shape[0], -(-u.shape[1] // MODAL_SEGMENT), A.shape[1], A.shape[0]


def _modal_args(u, A, R, D, reset) -> tuple[_ModalArgs, dict[str, Tensor | None]]:
    batch, seqlen, channels = u.shape
    units = batch * -(-channels // _lanes(torch.float64))
    threads = _threads(units, u.numel() * A.shape[1])
    args = _ModalArgs(batch, seqlen, channels, A.shape[1], threads, MODAL_SEGMENT)
    pole, D = A.double().exp().t(), None if D is None else D.double()
    return args, {"u": u, "pole": pole, "R": R.double().t(), "D": D, "reset": reset}


def modal_scan_forward(u, A, R, D, initial_state, reset, save=True):
    checkpoints = u.new_empty(modal_scan_saved_shape(u, A)) if save else None
    args, inputs = _modal_args(u, A, R, D, reset)
    y, final_state = u.new_empty(u.shape), u.new_empty(u.shape[0], *A.shape)
    inputs["initial_state"] = initial_state
    outputs = {"final_state": final_state, "y": y, "checkpoints": checkpoints}
    args.run("modal", u.dtype, 0, inputs=inputs, outputs=outputs)
    return y, final_state, checkpoints


def modal_scan_backward(dy, dfinal_state, u, A, R, D, initial_state, reset, checkpoints, window, halo=0):
    batch, seqlen, channels = u.shape
    args, inputs = _modal_args(u, A, R, D, reset)
    args.window, args.halo = _effective(window, seqlen), halo
    du, dinitial = u.new_empty(u.shape), u.new_empty(batch, *A.shape)
    dpole, dR = [u.new_empty(batch, A.shape[1], channels, dtype=torch.float64) for _ in range(2)]
    dD = None if D is None else u.new_empty(batch, channels, dtype=torch.float64)
    inputs |= {"dy": dy, "dfinal_state": dfinal_state, "checkpoints": checkpoints}
    outputs = {"dinitial_state": dinitial, "du": du, "dpole": dpole, "dR": dR, "dD": dD}
    args.run("modal", u.dtype, 1, inputs=inputs, outputs=outputs)
    dA = dpole.sum(0).t() * A.double().exp()
    dD = None if dD is None else dD.sum(0).to(u.dtype)
    return du, dA.to(u.dtype), dR.sum(0).t().to(u.dtype), dD, dinitial


def _delta_args(k, v, g) -> _DeltaArgs:
    batch, seqlen, nheads, d_k = k.shape
    d_v = v.shape[-1]
    threads = _threads(batch * nheads, batch * seqlen * nheads * d_k * d_v)
    return _DeltaArgs(batch, seqlen, nheads, d_k, d_v, g.dim() == 4, threads)


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    batch, _, nheads, d_k = k.shape
    args = _delta_args(k, v, g)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "reset": reset}
    o, final_state = v.new_empty(v.shape), v.new_empty(batch, nheads, d_k, v.shape[-1])
    checkpoints = v.new_empty(gated_delta_rule_saved_shape(k, v)) if save else None
    outputs = {"o": o, "final_state": final_state, "checkpoints": checkpoints}
    args.run("delta", k.dtype, 0, inputs=inputs, outputs=outputs)
    return o, final_state, checkpoints


def gated_delta_rule_backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, checkpoints):
    args = _delta_args(k, v, g)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "reset": reset}
    inputs |= {"d_o": do, "checkpoints": checkpoints, "dfinal_state": dfinal_state}
    gradients = [*map(gradient_like, (q, k, v))]
    gradients += [x.new_empty(x.shape) for x in (g, beta, checkpoints[:, :, 0])]
    names = "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"
    outputs = dict(zip(names, gradients, strict=True))
    args.run("delta", k.dtype, 1, inputs=inputs, outputs=outputs)
    return tuple(gradients)


def _dplr_args(k, v) -> _DplrArgs:
    batch, seqlen, nheads, d_k = k.shape
    d_v = v.shape[-1]
    threads = _threads(batch * nheads, batch * seqlen * nheads * d_k * d_v)
    return _DplrArgs(batch, seqlen, nheads, d_k, d_v, threads)


def dplr_delta_rule_forward(q, k, v, a, b, g, initial_state, reset, save=True):
    batch, _, nheads, d_k = k.shape
    args = _dplr_args(k, v)
    inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g, "initial_state": initial_state, "reset": reset}
    o, final_state = v.new_empty(v.shape), v.new_empty(batch, nheads, d_k, v.shape[-1])
    checkpoints = v.new_empty(dplr_delta_rule_saved_shape(k, v)) if save else None
    outputs = {"o": o, "final_state": final_state, "checkpoints": checkpoints}
    args.run("dplr", k.dtype, 0, inputs=inputs, outputs=outputs)
    return o, final_state, checkpoints


def dplr_delta_rule_backward(do, dfinal_state, q, k, v, a, b, g, initial_state, reset, checkpoints):
    args = _dplr_args(k, v)
    inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g, "initial_state": initial_state, "reset": reset}
    inputs |= {"d_o": do, "checkpoints": checkpoints, "dfinal_state": dfinal_state}
    gradients = [x.new_empty(x.shape) for x in (q, k, v, a, b, g, checkpoints[:, :, 0])]
    names = "dq", "dk", "dv", "da", "db", "dg", "dinitial_state"
    outputs = dict(zip(names, gradients, strict=True))
    args.run("dplr", k.dtype, 1, inputs=inputs, outputs=outputs)
    return tuple(gradients)


def _channel_args(kind: type[_ArgsOfRows], *sizes: int, **tensors: Tensor | None) -> _ArgsOfRows:
    """Arguments with (…, width) tensors as rows with a stride each, in place where the strides allow it.

    Args:
        sizes: those between the width and the number of threads. tensors: by field, the first not None."""
    first = next(iter(tensors.values()))
    assert first is not None
    *_, width = first.shape
    count = first.shape[:-1].numel()
    args = kind(count, width, *sizes, _threads(count, 4 * first.numel()))
    for name, tensor in tensors.items():
        if tensor is not None:
            rows = tensor.reshape(count, width)
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            vars(args)[name] = rows
            setattr(args, name, rows.data_ptr())
            setattr(args, f"{name}_stride", rows.stride(0))
    return args


def _norm_weight(x: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    if weight is None:
        return x.new_full((x.shape[-1],), offset)
    return weight + offset


def rms_norm_forward(x, weight, gate, residual, eps, group_size, dtype, offset=0.0):
    y, rstd = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], x.shape[-1] // group_size)
    s = None if residual is None else x.new_empty(x.shape)
    args = _channel_args(_NormArgs, group_size, x=x, gate=gate, residual=residual)
    args.eps = eps
    scales = weight if weight is not None and not offset else _norm_weight(x, weight, offset)
    args.run("norm", x.dtype, 0, inputs={"weight": scales}, outputs={"rstd": rstd, "y": y, "s": s})
    return y.to(dtype), s, rstd


def rms_norm_backward(dy, ds, s, weight, gate, rstd, group_size, x_dtype, offset=0.0):
    dx, dgate = gradient_like(s), None if gate is None else gradient_like(gate)
    args = _channel_args(_NormArgs, group_size, x=s, gate=gate, dy=dy.to(s.dtype), ds=ds, dx=dx, dgate=dgate)
    dweight = s.new_zeros(args.threads, s.shape[-1], dtype=torch.float64)
    scales = weight if weight is not None and not offset else _norm_weight(s, weight, offset)
    args.run("norm", s.dtype, 1, inputs={"weight": scales, "rstd": rstd}, outputs={"dweight": dweight})
    return dx, None if weight is None else dweight.sum(0).to(s.dtype), dgate, None


def attention_lanes(dtype: torch.dtype) -> int:
    """Numbers in a vector, of which the compiled attention's widths are multiples; 0 where it is not usable,
    or slower than PyTorch's: with vectors of 16 bytes."""
    if dtype not in (torch.float32, torch.float64) or cpu_build.load()[0] is None:
        return 0
    return _lanes(dtype) if _vector_bytes() > 16 else 0


def _attention_args(q, k, causal, scale, blocks) -> _AttentionArgs:
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    threads = _threads(batch * heads * blocks, batch * heads * queries * keys)
    return _AttentionArgs(batch, heads, queries, keys, width, threads, causal, scale)


def past_attention_forward(q, k, v, causal, scale):
    batch, heads, queries, width = q.shape
    out = _aligned((batch, queries, heads, width), q.dtype).transpose(1, 2)
    log = q.new_empty(batch, heads, queries)
    args = _attention_args(q, k, causal, scale, -(-queries // _attention_block(of_keys=False)))
    args.run("attention", q.dtype, 0, inputs={"q": q, "k": k, "v": v}, outputs={"out": out, "log": log})
    return out, log


def past_attention_delta(d: Tensor, out: Tensor, log: Tensor) -> Tensor:
    """Return d · out of each query, like log, also in autocast: what the backward reads of the output."""
    return torch.linalg.vecdot(d, out, out=torch.empty_like(log))


def past_attention_backward(d, q, k, v, out, log, causal, scale, delta=None):
    """The reference's cotangents.

    Args:
        delta: `past_attention_delta` of the same queries, if it is known."""
    blocks = -(-k.shape[2] // _attention_block(of_keys=True))
    args = _attention_args(q, k, causal, scale, blocks)
    heads = args.batch * args.heads
    dq = _aligned((_threads_of_head(args.threads, heads, blocks), *q.shape), q.dtype).zero_()
    dk, dv = _aligned(tuple(k.shape), q.dtype), _aligned(tuple(k.shape), q.dtype)
    delta = past_attention_delta(d, out, log) if delta is None else delta
    inputs = {"q": q, "k": k, "v": v, "d": d, "log": log, "delta": delta}
    args.run("attention", q.dtype, 1, inputs=inputs, outputs={"dq": dq, "dk": dk, "dv": dv})
    return _total(dq), dk, dv


def _threads_of_head(threads: int, heads: int, blocks: int) -> int:
    """Most threads that share a head's blocks of keys, where each thread takes as many consecutive blocks."""

    def thread_of(block: int) -> int:
        return ((block + 1) * threads - 1) // (heads * blocks)

    return max(thread_of((h + 1) * blocks - 1) - thread_of(h * blocks) + 1 for h in range(heads))


def swiglu_forward(gate, value):
    y, args = gate.new_empty(gate.shape), _channel_args(_SwigluArgs, gate=gate, value=value)
    args.run("swiglu", gate.dtype, 0, inputs={}, outputs={"y": y})
    return (y,)


def swiglu_backward(d, gate, value, in_place=False):
    d_gate, d_value = d if in_place else gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    args = _channel_args(_SwigluArgs, gate=gate, value=value, d=d)
    args.run("swiglu", gate.dtype, 1, inputs={}, outputs={"d_gate": d_gate, "d_value": d_value})
    return d_gate, d_value
