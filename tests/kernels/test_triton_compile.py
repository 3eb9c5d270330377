"""Every Triton kernel compiles for A100, H100/H200 and Blackwell without a GPU, and the main ones keep
everything in registers (``triton_aot`` lists them, compiles them and records what they take)."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from triton.runtime.jit import JITFunction

from adjoint.kernels import dispatch, trial
from adjoint.kernels.operation import registered
from tests.kernels import triton_aot as aot

HALF = {80: 81 * 1024, 90: 113 * 1024}  # of a multiprocessor's shared memory, less what the system takes
HALF |= {100: HALF[90], 103: HALF[90], 120: 49 * 1024, 121: 49 * 1024}
# What crosses lanes because the algorithm asks for it; other shuffles, and shared memory, come of layouts.
TOKENS, ROWS = 2, 2  # that a thread of the selective scan's backward holds at once
OVER_STATES = 2 * 3 * TOKENS * ROWS  # 4 lanes of states: du, ddelta, dz of every token and row
OVER_TOKENS = 24  # dD and ddelta_bias, once for eight tokens
OVER_CHANNELS = 3 * 4 * 2 * TOKENS  # 8 lanes of channels: a thread's 4 states of dB and dC, every token
SHUFFLES = {
    "selective scan": {"backward_kernel": OVER_STATES + OVER_CHANNELS + OVER_TOKENS},
    # one row, two tokens
    "selective scan, window": {"backward_kernel": 2 * 3 * 2 + 3 * 4 * 2 * 2},
    "linear scan": {},
    "linear scan, window": {"_backward_kernel": 5 * 8},  # a decay's gradient, over 32 channels, of 8 tokens
    "convolution": {"_backward_kernel": 8},
    "RMSNorm": {"_forward_kernel": 8, "_backward_kernel": 8},
}


RECORD = aot.Record(aot.RECORD)


def check(name, capability, built):
    """No more spills than we know of, and where the layout is ours (not the matrix products') it is the one
    meant."""
    kind, limits = ", ".join(name.split(", ")[:2]), aot.MAX_SPILLED_BYTES
    most = limits.get(name, limits.get(kind, (0, 0)))[capability >= 100]
    assert {k.name: k.spills for k in built if k.spills > most} == {}
    assert max(k.shared for k in built) <= 2 * HALF[capability]
    kind = name.partition(",")[0] + (", window" if "window" in name else "")
    if kind in SHUFFLES and "d_state 64" not in name and "d_state 128" not in name:
        shuffles = SHUFFLES[kind]
        assert {k.name: k.shuffles for k in built} == {k.name: shuffles.get(k.name, 0) for k in built}
        if kind != "RMSNorm":
            silent = [k for k in built if k.name not in shuffles and k.name != "step_kernel"]
            assert {k.name: k.barriers for k in silent if k.barriers or k.shared} == {}


@pytest.mark.slow
@pytest.mark.parametrize("capability", aot.ARCHITECTURES)
@pytest.mark.parametrize("name", aot.MAIN)
def test_main_kernels_keep_to_registers(name, capability):
    """Kernels that have changed since they were recorded are compiled."""
    check(name, capability, RECORD.call_resources(name, capability))


@pytest.mark.slow
def test_the_table_is_of_these_kernels():
    """Else `python -m tests.kernels.triton_aot` makes it again."""
    text = aot.TABLE.read_text()
    if not all(aot.compiler(capability) in text for capability in aot.ARCHITECTURES):
        pytest.skip("another release of Triton made it")
    record = aot.Record(aot.RECORD)
    assert [key for key in aot.all_launches() if key not in record.known] == []
    assert text == aot.page(record)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", ["convolution, bf16", "RMSNorm, bf16, gate", "linear scan, fp32"])
def test_light_kernels_keep_to_registers(name):
    built = aot.compile_call(aot.MAIN[name], 90)
    check(name, 90, built)
    assert [k.resources() for k in built] == RECORD.call_resources(name, 90)


def test_a_kernel_that_changes_has_another_key(monkeypatch):
    """The key follows its code, that of device functions, and a launch's constants; not its comments."""
    (launch, *_), other = aot.launches_of(aot.MAIN["modal filter, bf16"], 90), aot.common.over_edge
    key = aot.launch_key(launch, 90)
    assert aot.launch_key(launch, 100) != key != aot.launch_key((*launch[:2], {**launch[2], "UNROLL": 5}), 90)
    monkeypatch.setattr(other, "_src", other.src.replace('"""', '"""It is so. ', 1) + "\n    # indeed")
    assert aot.launch_key(launch, 90) == key
    monkeypatch.setattr(other, "_src", other.src.replace("0.0", "1.0", 1))
    assert aot.launch_key(launch, 90) != key


# Triton's versions lay the selective scan's tiles out each in its own way, with the same values and several
# times slower where it is the wrong one: `make test-versions` runs the tests of this name with others. Under
# another version all kernels are compiled, else those that have changed since they were recorded.
# Triton 3.6 spills 212 bytes on sm_80, in one pass of the backward.
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_the_selective_scan_keeps_its_layout(capability):
    """As a model runs it: bfloat16, no resets, even sizes."""
    name = "selective scan, bf16, d_state 16"
    built = RECORD.call_resources(name, capability)
    check(name, capability, built)
    assert {k.name for k in built} >= {"forward_kernel", "adjoint_local_kernel", "backward_kernel"}
    passes = [k for k in built if k.name == "forward_kernel"]
    assert len(passes) == 2, "one pass for the splits' own states, one for the outputs"
    # sixteen one-warp programs share a multiprocessor's 64K registers
    assert all(k.registers <= 128 for k in passes)


def test_the_windowed_selective_scan_keeps_its_layout():
    name = "selective scan, bf16, d_state 16, window"
    built = RECORD.call_resources(name, 90)
    check(name, 90, built)
    assert {k.name for k in built} >= {"marks_kernel", "backward_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_ssd_backward_does_not_spill(capability):
    """The heaviest kernels, in bfloat16; the rest of the shapes and kernels are in the slow test."""
    names = {"input_grad_kernel", "pair_grad_kernel", "group_grad_kernel"}
    name = "SSD scan, bf16, d_state 128"
    built = aot.compile_call(aot.MAIN[name], capability, frozenset(names))
    check(name, capability, built)
    assert {k.name for k in built} == names
    assert all(k.shared <= HALF[capability] and "cp.async" in k.ptx for k in built), "loads run ahead"


def ssd_launches(name):
    with aot.record_launches() as launches, aot.on_a_big_device():
        aot.MAIN[name]()
    return [launch for launch in launches if launch[2].get("num_stages", 1) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", [n for n in aot.MAIN if n.startswith("SSD scan, bf16")])
def test_every_depth_of_the_ssd_pipelines_fits(name, capability):
    """Whatever number of stages is picked: nothing spills, and two programs share a multiprocessor."""
    built = [
        aot.compile_launch((kernel, args, {**kwargs, "num_stages": stages}), capability)
        for kernel, args, kwargs in ssd_launches(name)
        for stages in aot.ssd.candidates(kwargs["num_stages"], capability)
    ]
    assert [(k.name, k.spills, k.shared) for k in built if k.spills or k.shared > HALF[capability]] == []


def test_stages_are_measured_once_for_a_size(monkeypatch):
    """On a GPU, with the launch's own arguments, and never while a graph is captured."""
    autotune, capturing, times = aot.ssd.triton.autotune, True, iter([2.0, 1.0])

    def bench(call, quantiles):
        call()
        return [next(times)] * 3

    def in_memory(configs, key, cache_results):
        return autotune(configs, key=key, do_bench=bench)

    monkeypatch.setattr(aot.ssd.triton, "autotune", in_memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(aot.ssd, "_PICKED", {})
    kernel, args, constants = ssd_launches("SSD scan, bf16, resets")[0]
    with aot.record_launches() as launches:
        assert aot.ssd._stages(kernel, (1,), args, constants) == 3
        assert launches == []
        capturing = False
        assert [aot.ssd._stages(kernel, (1,), args, constants) for _ in range(2)] == [4, 4]
    assert [launch[2]["num_stages"] for launch in launches] == [3, 4, 4]
    assert all({**launch[2], "num_stages": 3} == {**launch[2], **constants} for launch in launches)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_compile(dtype):
    names = frozenset({"forward_kernel", "output_kernel", "chunk_state_kernel", "_forward_kernel"})

    def call():
        aot.call_selective(dtype, seqlen=4096, d_inner=64)
        aot.call_ssd(dtype, seqlen=4096, nheads=2, d_state=16)
        aot.call_linear(dtype, seqlen=4096, size=64)
        aot.call_conv(dtype, seqlen=4096, channels=64)
        aot.call_norm(dtype, rows=64, width=64)

    assert {k.name for k in aot.compile_call(call, 80, names)} == names


@pytest.mark.slow
def test_a_single_token_and_channel_compile():
    """Sizes and strides of 1 become constants of the kernel, which then has other types in it."""

    def call():
        for reset in (False, True):
            aot.call_selective(seqlen=1, d_inner=1, d_state=1, reset=reset)
            aot.call_ssd(seqlen=1, nheads=1, headdim=1, d_state=1, reset=reset)
            aot.call_linear(seqlen=1, size=1, reset=reset)
            aot.call_conv(seqlen=1, channels=1, reset=reset)
        aot.call_linear(seqlen=1, size=1, window=1)
        aot.call_selective(seqlen=1, d_inner=1, d_state=1, window=1)
        aot.call_norm(rows=1, width=1)

    assert len({k.name for k in aot.compile_call(call, 90)}) > 15


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", aot.MAIN)
def test_every_launch_is_on_its_tensors_device(name, monkeypatch):
    """The current device may be another one."""
    entered = []

    @contextlib.contextmanager
    def on_device(x):
        entered.append(x.device)
        yield
        entered.pop()

    monkeypatch.setattr(aot.common, "on_device", on_device)
    outside = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: entered or outside.append(self.__name__))
    with aot.on_a_big_device():
        aot.MAIN[name]()
    assert outside == []


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("operation", "windowed", "resets", "calls"),
    [
        ("selective_scan", False, False, ["selective scan, bf16, d_state 16"]),
        ("selective_scan", True, False, ["selective scan, bf16, d_state 16, window"]),
        ("selective_scan", False, True, ["selective scan, bf16, d_state 16, resets"]),
        ("ssd_scan", False, False, ["SSD scan, bf16, d_state 128"]),
        ("ssd_scan", False, True, ["SSD scan, bf16, resets"]),
        ("linear_scan", False, False, ["linear scan, fp32"]),
        ("linear_scan", True, False, ["linear scan, fp32, scalar, window"]),
        ("linear_scan", False, True, ["linear scan, fp32, resets"]),
        ("causal_conv1d", False, False, ["convolution, bf16"]),
        ("long_conv1d", False, False, ["long convolution, bf16"]),
        ("long_conv1d", False, True, ["long convolution, bf16, resets"]),
        ("modal_scan", False, False, ["modal filter, bf16"]),
        ("modal_scan", False, True, ["modal filter, bf16, resets"]),
        ("rms_norm", False, False,
         [f"RMSNorm, bf16{kind}" for kind in (" of a fp32 stream", ", residual in fp32", ", gate")]),
        ("swiglu", False, False, ["gated product, bf16"]),
        ("causal_conv1d", False, True, ["convolution, bf16, resets"]),
    ],
)  # fmt: skip
def test_what_was_tried_is_what_runs(operation, windowed, resets, calls):
    """Models of usual sizes launch what the trial has compiled: nothing else, so nothing untried, and nothing
    is compiled twice; but for a norm's kernels, which are compiled for their width."""

    def kernels(launches):
        found = set()
        for launch in launches:
            of = aot.specialise(launch)
            if operation == "rms_norm":
                of = {"signature": of["signature"], "constexprs": dict(of["constexprs"])}
                del of["constexprs"]["GROUP"], of["constexprs"]["BLOCK"]
            found.add((launch[0].__name__, *(repr(sorted(v.items(), key=str)) for v in of.values())))
        return found

    dtype, window = aot.FP32 if operation == "linear_scan" else aot.BF16, trial.WINDOW if windowed else None
    with aot.record_launches() as tried, aot.on_a_big_device():
        code = dispatch.load(operation, "triton")
        registered(operation).trial(code, window, resets, torch.device("meta"), dtype)
    with aot.record_launches() as launched, aot.on_a_big_device():
        for name in calls:
            aot.MAIN[name]()
    assert kernels(launched) and kernels(launched) <= kernels(tried)


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda", "dplr_delta_rule"])
def test_delta_rules_are_tried_with_products_of_half_precision(operation):
    """As models run them: the public function hands q, k and v on as they are."""
    with aot.record_launches() as tried:
        code = dispatch.load(operation, "triton")
        registered(operation).trial(code, None, False, torch.device("meta"), aot.BF16)
    products = {launch[2]["DOT"] for launch in tried if "DOT" in launch[2]}
    assert products == {aot.triton.language.bfloat16}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", ["delta rule, bf16, d_k 64", "KDA, bf16, d_k 64", "DPLR, bf16, d_k 64"])
@pytest.mark.parametrize("capability", [90, 100])
def test_delta_rules_leave_out_asynchronous_products(name, capability):
    """An H100 gives wrong numbers with wgmma and reads outside shared memory, by dtype and number of warps.

    With tcgen05 Triton does not compile the delta rule's key_grad_kernel for sm_100."""
    names = frozenset({"key_grad_kernel", "state_kernel"})
    built = aot.compile_call(aot.MAIN[name], capability, names)
    assert len(built) == 2
    assert all("mma.sync" in k.ptx and "wgmma" not in k.ptx and "tcgen05" not in k.ptx for k in built)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_compilers_variable_is_set_while_any_thread_needs_it(before, monkeypatch):
    variable = aot.common._Variable("ADJOINT_TESTS_VARIABLE")
    if before is not None:
        monkeypatch.setenv(variable.name, before)
    with variable.set():
        with variable.set():
            assert os.environ[variable.name] == "1"
        assert os.environ[variable.name] == "1", "the other thread still compiles"
    assert os.environ.get(variable.name) == before


@pytest.mark.parametrize("programs", [1, 3, 128, 256, 1100, 5000])
@pytest.mark.parametrize("seqlen", [1, 100, 1792, 65536, 65537, 1_000_000])
def test_splits_fill_the_device_once(seqlen, programs):
    """No second wave of programs, which would begin when the first is done; and no idle device where the
    sequence is long enough for more splits."""
    wanted, unit, shortest = 2112, 64, 128
    length = aot.common.split_length(seqlen, programs, wanted, unit, shortest)
    splits = -(-seqlen // length)
    assert length % unit == 0 and (splits == 1 or splits * programs <= wanted)
    most = min(wanted // programs, seqlen // shortest)
    assert splits >= most * 2 // 3, "rounding up to units leaves out a few"


@pytest.mark.parametrize(
    ("batch", "passes"),
    [(1, {"forward_kernel": 2, "adjoint_local_kernel": 1, "_pass_states_kernel": 2}),
     (16, {"forward_kernel": 1})],
)  # fmt: skip
def test_a_batch_that_fills_the_device_has_no_pass_over_splits(batch, passes):
    """Of 4,096 channels 16 rows are enough programs: the sequence is not split, and the passes for that are
    not launched."""
    with aot.record_launches() as launches, aot.on_a_big_device():
        aot.call_selective(batch=batch, seqlen=4096)
    names = [launch[0].__name__ for launch in launches]
    assert {n: names.count(n) for n in names if n != "backward_kernel"} == passes


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("seqlen", [65536, 1_000_000])
def test_few_partial_sums_leave_the_selective_backward(seqlen, window):
    """dB and dC are summed over 64 channels and more before they go to memory, and the device is as full as
    with programs of a block each."""
    with aot.record_launches() as launches, aot.on_a_big_device():
        aot.call_selective(window=window, seqlen=seqlen)
    (values,) = [
        dict(zip(launch[0].arg_names, launch[1], strict=False))
        for launch in launches
        if launch[0].__name__ == "backward_kernel"
    ]
    held = sum(values[name].numel() * values[name].element_size() for name in ("dB", "dC"))
    _, rows, lanes, warps, _ = aot.selective.backward_tile(16, window is not None)
    programs = values["dB"].shape[1]
    assert held == 2 * programs * seqlen * 16 * 4 and programs <= 4096 // 64
    wanted = aot.MULTIPROCESSORS * ((8 if window else 12) // warps)
    tokens = seqlen + (window is not None)
    running = programs * -(-tokens // values["split_len"])
    assert 0.9 * wanted <= running <= wanted
    blocks = 4096 // (rows * lanes)
    assert -(-blocks // programs) * programs <= 1.1 * blocks, "all take about as many"


def test_spills_are_seen():
    """The report is read right: a kernel held to 32 registers a thread has to spill, and does so in the
    report."""
    with aot.record_launches() as launches:
        aot.call_selective(d_inner=64)
    kernel, args, kwargs = next(launch for launch in launches if launch[0].__name__ == "forward_kernel")
    assert aot.compile_launch((kernel, args, {**kwargs, "maxnreg": 32}), 90).spills > 0
