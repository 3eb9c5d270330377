"""Other libraries as backends: what they are handed, what comes back, when they are taken and when not.

Their kernels need a GPU. Stand-ins with the libraries' signatures, which insist on what the libraries insist
on and compute with the reference in float64, show that arguments, layouts and gradients are routed right.
Where the libraries are installed, their own Triton kernels run under Triton's interpreter (`-m slow`).
"""

import importlib.util
import inspect
import json
import sys
import warnings
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from adjoint.kernels import dispatch, libraries, trial
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.causal_conv1d.reference import causal_conv1d_backward, causal_conv1d_forward
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.gated_delta_rule.reference import gated_delta_rule_backward, gated_delta_rule_forward
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.operation import all_operations
from adjoint.kernels.ssd_scan.reference import ssd_scan_backward, ssd_scan_forward
from tests.fuzz.operators import by_operation, results
from tests.kernels.helpers import make_case, optional, run_interpreted, tensors_of

CPU = torch.device("cpu")
PAIRS = [(name, operation) for name, library in LIBRARIES.items() for operation in library.operations]


def test_libraries_name_operations_that_there_are():
    refused = [operation for library in LIBRARIES.values() for operation in library.refused]
    assert {operation for _, operation in PAIRS} | {*refused} <= {*all_operations()}


# -------------------------------------------------------------- stand-ins, with the signatures of the sources


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
    return_varlen_states=False,
):  # fmt: skip
    assert return_final_states
    inputs = x, dt, A, B, C, D, dt_bias, dt_softplus, initial_states, starts(seq_idx)
    return ssd_scan_forward(*inputs)[:2]


def _mamba_chunk_scan_combined_bwd(
    dout, x, dt, A, B, C, out, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
    dfinal_states=None, seq_idx=None, dt_softplus=False, dt_limit=(0.0, float("inf")), dx=None, ddt=None,
    dB=None, dC=None, dz=None, recompute_output=False,
):  # fmt: skip
    assert out.shape == x.shape
    inputs = x, dt, A, B, C, D, dt_bias, dt_softplus, initial_states, starts(seq_idx)
    saved = ssd_scan_forward(*inputs)[2]
    *found, dbias, dinitial = ssd_scan_backward(dout, dfinal_states, *inputs, saved, None)
    return *found, None, dbias, None if initial_states is None else dinitial.to(x.dtype)


def channels_last(x, *rest):
    """What causal-conv1d insists on, seen from its side: x (batch, channels, seqlen)."""
    assert x.shape[1] % 8 == 0
    assert x.stride(1) == 1 < x.stride(2)
    assert x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert x.data_ptr() % (8 * x.element_size()) == 0
    return x.transpose(1, 2)


def causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation):
    assert final_states_out is None
    assert 2 <= weight.shape[1] <= 4
    assert bias is None or (bias.dtype == weight.dtype and bias.stride(0) == 1)
    if initial_states is not None:
        assert initial_states.dtype == x.dtype
        assert initial_states.stride(1) == 1
    given = channels_last(x), weight, bias, initial_states, silu_activation, starts(seq_idx)
    return torch.empty_like(x).copy_(causal_conv1d_forward(*given).transpose(1, 2))


def causal_conv1d_bwd_function(
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu_activation
):
    assert dfinal_states is None
    assert dx is None
    assert return_dinitial_states == (initial_states is not None)
    given = channels_last(x), weight, bias, initial_states, silu_activation, starts(seq_idx)
    dx, dweight, dbias, dinitial = causal_conv1d_backward(channels_last(dout), *given)
    return dx.transpose(1, 2), dweight, dbias, dinitial.to(x.dtype) if return_dinitial_states else None


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert output_final_state
    assert scale == 1.0
    return DeltaRule.apply(q, k, v, g, beta, initial_state)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    assert g.dim() == 4
    return chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state)


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state):
        ctx.save_for_backward(q, k, v, g, beta, initial_state)
        return gated_delta_rule_forward(q, k, v, g, beta, initial_state, None)[:2]

    @staticmethod
    def backward(ctx, do, dht):
        inputs = *ctx.saved_tensors, None
        saved = gated_delta_rule_forward(*inputs)[2]
        *found, dinitial = gated_delta_rule_backward(do, dht, *inputs, saved)
        return *found, None if inputs[5] is None else dinitial


def causal_conv1d_fwd(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
):  # fmt: skip
    before = None if initial_state is None else initial_state[:, :, 1:]
    assert initial_state is None or initial_state.shape[2] == weight.shape[1]
    return causal_conv1d_forward(x, weight, bias, before, activation == "silu"), None


def causal_conv1d_bwd(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
):  # fmt: skip
    assert dht is None
    before = None if initial_state is None else initial_state[:, :, 1:]
    given = x, weight, bias, before, activation == "silu"
    dx, dweight, dbias, dinitial = causal_conv1d_backward(dy, *given)
    return dx, dweight, dbias, None, None if initial_state is None else F.pad(dinitial, (1, 0))


def starts(seq_idx):
    """Where documents begin, of their numbers as the libraries want them."""
    if seq_idx is None:
        return None
    assert seq_idx.dtype == torch.int32
    assert seq_idx.is_contiguous()
    assert not seq_idx[:, 0].any(), "an initial state belongs to document 0"
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


STAND_INS = {
    "mamba_ssm.ops.triton.ssd_combined": (mamba_chunk_scan_combined, _mamba_chunk_scan_combined_bwd),
    "causal_conv1d.cpp_functions": (causal_conv1d_fwd_function, causal_conv1d_bwd_function),
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule,),
    "fla.ops.kda": (chunk_kda,),
    "fla.modules.causal_conv1d": (causal_conv1d_fwd, causal_conv1d_bwd),
}


@pytest.fixture
def stand_ins(monkeypatch):
    """The libraries as if they were installed, on the CPU and in float64."""
    for name, functions in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
    here = dispatch.why_not
    monkeypatch.setattr(
        dispatch, "why_not", lambda name, *rest: None if name in LIBRARIES else here(name, *rest)
    )
    for rule in ("_only_half", "_no_float64"):
        monkeypatch.setattr(libraries, rule, lambda dtype: None)
    monkeypatch.setattr(libraries, "_installed", lambda module: True)
    monkeypatch.setattr(libraries, "_version", lambda package: (1, 7))
    libraries._import_problem.cache_clear()
    dispatch.choose.cache_clear()
    yield
    libraries._import_problem.cache_clear()
    dispatch.choose.cache_clear()


# ------------------------------------------------------------------------------------------ what is handed on


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("cotangents", ["first", "all"])
@pytest.mark.parametrize(("name", "operation"), PAIRS)
def test_gradients_of_the_public_function_equal_the_references(name, operation, cotangents, absent):
    """By name, through the operator, with and without states, with documents, from unaligned slices."""
    layouts = dict.fromkeys(("x", "q", "k", "v"), "surrounded")
    more = {"documents": None if name == "fla" else 0.1, "layouts": layouts, "cotangents": cotangents}
    case = make_case(operation, 37, d=16, **more, absent=optional(operation) if absent else [])
    found, wanted = (results({**case, "backend": backend}, by_operation) for backend in (name, "reference"))
    for key, expected in wanted.items():
        assert found[key].dtype == expected.dtype
        assert (found[key] - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.usefixtures("stand_ins")
def test_half_precision_is_handed_on_and_states_stay_wide(monkeypatch):
    seen = {}
    module = sys.modules["fla.ops.gated_delta_rule"]

    def watched(q, k, v, g, beta, **rest):
        seen.update(q=q.dtype, k=k.dtype, v=v.dtype, g=g.dtype, beta=beta.dtype)
        seen.update(state=rest["initial_state"].dtype)
        wide = (t.float() for t in (q, k, v, g, beta))
        o, state = DeltaRule.apply(*wide, rest["initial_state"])
        return o.to(q.dtype), state

    monkeypatch.setattr(module, "chunk_gated_delta_rule", watched)
    half, tensors = (
        dict.fromkeys("qkv", torch.bfloat16),
        tensors_of(make_case("gated_delta_rule", 9, dtype="float32")),
    )
    v, initial = tensors["v"].detach().bfloat16().requires_grad_(), tensors["initial_state"]
    o, state = gated_delta_rule(**{**tensors, "v": v}, backend="fla")
    assert seen == half | dict.fromkeys(("g", "beta", "state"), torch.float32)
    assert (o.dtype, state.dtype) == (torch.float32, torch.float32)
    dv, dinitial = torch.autograd.grad(o.sum() + state.sum(), [v, initial])
    assert (dv.dtype, dinitial.dtype) == (torch.bfloat16, torch.float32)


# ------------------------------------------------------------------------------------------- when it is taken


@pytest.fixture
def usable(monkeypatch):
    """A device (tensors on ``meta``) on which everything is installed and passes its trial; what is asked to
    stand one."""
    asked = []
    monkeypatch.setattr(dispatch, "why_not", lambda *_: None)
    monkeypatch.setattr(libraries, "_installed", lambda module: True)
    monkeypatch.setattr(libraries, "_import_problem", lambda module: None)
    monkeypatch.setattr(libraries, "_version", lambda package: (1, 7))
    monkeypatch.setattr(trial, "passes", lambda code, *call: asked.append((code, *call)) or True)
    dispatch._warn_of_size.cache_clear()
    dispatch._first.cache_clear()
    yield asked
    dispatch._first.cache_clear()


def picked(operation, dtype=torch.bfloat16, **call):
    return dispatch.fitting(operation, None, torch.empty(1, 5, 4, device="meta", dtype=dtype), **call)


def test_a_call_takes_a_library_that_has_what_it_needs(usable):
    pytest.importorskip("triton")
    reset, scan = torch.zeros(1), {"headdim": 64, "d_state": 128, "dt_softplus": True}
    assert picked("ssd_scan", **scan) == picked("ssd_scan", reset=reset, **scan) == "mamba-ssm"
    assert picked("ssd_scan", window=3, **scan) == picked("ssd_scan", halo=3, **scan) == "triton"
    assert picked("ssd_scan", torch.float32, **scan) == "triton"
    assert picked("ssd_scan", **scan | {"dt_softplus": False}) == "triton"
    assert picked("selective_scan", d_state=16) == picked("rms_norm", group_size=8) == "triton"
    sizes = {"d_conv": 4, "channels": 16}
    for dtype in (torch.float32, torch.bfloat16):
        assert picked("causal_conv1d", dtype, **sizes) == "causal-conv1d"
        assert picked("causal_conv1d", dtype, reset=reset, **sizes) == "causal-conv1d"
    assert picked("causal_conv1d", torch.float64, **sizes) == "triton"
    assert picked("causal_conv1d", **sizes | {"channels": 12}) == "fla"
    assert picked("causal_conv1d", reset=reset, **sizes | {"channels": 12}) == "triton"
    assert picked("gated_delta_rule", d_k=64) == "fla"
    assert picked("kda", d_k=64) == "fla"
    assert picked("kda", reset=reset, d_k=64) == picked("kda", torch.float32, d_k=64) == "triton"
    assert picked("gated_delta_rule", reset=reset, d_k=64) == "triton"
    assert picked("gated_delta_rule", torch.float32, d_k=64) == "triton"
    tried = {(code.backend, *call) for code, *call in usable}
    meta = torch.device("meta")
    assert ("mamba-ssm", "ssd_scan", meta, torch.bfloat16, False, True) in tried
    assert ("fla", "gated_delta_rule", meta, torch.bfloat16, False, False) in tried


@pytest.mark.usefixtures("usable")
def test_an_older_causal_conv1d_gets_no_documents(monkeypatch):
    monkeypatch.setattr(libraries, "_version", lambda package: (1, 6))
    dispatch._first.cache_clear()
    sizes = {"d_conv": 4, "channels": 16}
    assert picked("causal_conv1d", **sizes) == "causal-conv1d"
    assert picked("causal_conv1d", reset=torch.zeros(1), **sizes) == "triton"


@pytest.mark.usefixtures("stand_ins")
def test_a_library_that_is_wrong_is_passed_over_with_one_line(monkeypatch):
    def wrong(*given):
        *found, dinitial = causal_conv1d_bwd_function(*given)
        return *found, dinitial * 1.001

    monkeypatch.setattr(sys.modules["causal_conv1d.cpp_functions"], "causal_conv1d_bwd_function", wrong)
    monkeypatch.setattr(trial, "SEQLEN", 70)
    code = dispatch.load("causal_conv1d", "causal-conv1d")
    call = code, "causal_conv1d", CPU, torch.float32, False, True
    said = (
        r"causal_conv1d \(with resets\) runs in adjoint's own code on cpu instead of causal-conv1d's: "
        r"causal-conv1d failed its trial there in float32 \(its dinitial_state is off by 1.0e-03, "
        r".*install another version of causal-conv1d"
    )
    trial.passes.cache_clear()
    with pytest.warns(UserWarning, match=said):
        assert not trial.passes(*call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not trial.passes(*call)
    trial.passes.cache_clear()


@pytest.mark.parametrize(
    ("operation", "name", "call", "said"),
    [
        ("ssd_scan", "mamba-ssm", {"window": 3}, "it has no windows"),
        ("ssd_scan", "mamba-ssm", {"dt_softplus": 0}, "dt_softplus=True"),
        ("ssd_scan", "fla", {}, "no backend for ssd_scan, only for gated_delta_rule and kda and"),
        ("selective_scan", "mamba-ssm", {}, "takes no initial state"),
        ("causal_conv1d", "causal-conv1d", {"d_conv": 5}, "d_conv from 2 to 4"),
        ("gated_delta_rule", "fla", {"reset": torch.zeros(1)}, "documents"),
    ],
)
@pytest.mark.usefixtures("usable")
def test_asked_for_by_name_it_says_what_it_lacks(operation, name, call, said):
    x = torch.empty(1, 5, 4, device="meta", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"backend '{name}' is not usable here for {operation}: .*{said}"):
        dispatch.fitting(operation, name, x, **call)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("operation", "name", "dim"), [("ssd_scan", "mamba-ssm", 3), ("causal_conv1d", "causal-conv1d", 2)]
)
def test_tensors_beyond_32_bits_are_not_given_to_kernels_with_32_bit_offsets(operation, name, dim):
    """mamba-ssm's kernels then read and write elsewhere, silently; rows of a wide projection's output are so
    far apart with fewer elements, too."""
    shape = (2, 1 << 16, *[8] * (dim - 1))

    def call(row_stride, **options):
        strides = (row_stride << 16, row_stride, *[8, 1][3 - dim :])
        x = torch.empty_strided(shape, strides, device="meta", dtype=torch.bfloat16)
        return dispatch.fitting(operation, name, x, **options)

    within, beyond = (1 << 14) - 8, (1 << 14) + 8
    assert call(within) == name
    for options in ({"row_stride": beyond}, {"row_stride": 64, "numel": 1 << 31}):
        with pytest.raises(ValueError, match=r"32 bits, .* use fewer tokens per chunk"):
            call(**options)


def test_one_that_is_not_here_says_so():
    x = torch.ones(1, 3, 8)
    for name, library in LIBRARIES.items():
        missing = f"not installed .pip install .*{library.package}|no CUDA device|works on CUDA tensors"
        with pytest.raises(ValueError, match=f"backend '{name}' is not usable here .*({missing})"):
            causal_conv1d(x, torch.ones(8, 4), backend=name)


# ---------------------------------------------------------------------------------------------- the libraries


def needs(module):
    """Skips where a library is not installed; it is not imported, which may take what is not here."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")


PREPARED = "from tests.kernels import interpreted_libraries; interpreted_libraries.prepare()"


@pytest.mark.slow
@pytest.mark.parametrize("module", STAND_INS)
def test_stand_ins_have_the_libraries_signatures(module):
    needs(module)
    lines = [f"print(tuple(inspect.signature(m.{f.__name__}).parameters))" for f in STAND_INS[module]]
    code = "\n".join([PREPARED, f"import inspect, {module} as m", *lines])
    own = [str(tuple(inspect.signature(f).parameters)) for f in STAND_INS[module]]
    assert run_interpreted("-c", code).splitlines()[-len(own) :] == own


@pytest.mark.slow
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("name", "operation"), PAIRS)
def test_triton_kernels_of_the_libraries_under_the_interpreter(name, operation, resets):
    """Values and gradients of every tensor, both states included, by their own code. A GPU's rounding and
    races are not in it."""
    library = LIBRARIES[name]
    needs(library.operations[operation])
    if name == "causal-conv1d" or library.lacks(operation, torch.bfloat16, False, resets, {}):
        pytest.skip("CUDA kernels, or no documents")
    code = f"""{PREPARED}
import json, torch
from adjoint.kernels import dispatch, trial
interpreted_libraries.shrink_trials({operation!r})
for dtype in torch.float32, torch.float16:
    call = dispatch.load({operation!r}, {name!r}), {operation!r}, torch.device("cpu"), dtype
    print(json.dumps(trial.errors(*call, resets={resets})))
"""
    single, half = map(json.loads, run_interpreted("-c", code).splitlines()[-2:])
    assert {"dinitial_state"} < {*single}
    assert max(single.values()) <= 1e-5, single
    assert max(half.values()) <= trial.TOLERANCE[torch.float16], half
