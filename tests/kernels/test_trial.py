"""The trial a backend stands before it is picked by itself: right ones pass, wrong and broken ones do not."""

import dataclasses
import time
import warnings

import pytest
import torch

import adjoint
from adjoint.kernels import dispatch, trial
from adjoint.kernels.dplr_delta_rule import trial as dplr_trial
from adjoint.kernels.gated_delta_rule import trial as delta_trial
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.operation import registered
from adjoint.kernels.ssd_scan import trial as ssd_trial
from tests.kernels.helpers import INTERPRETED

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_delta_rules(monkeypatch):
    """Heads of models take the reference seconds on a CPU."""
    for module in (delta_trial, dplr_trial):
        monkeypatch.setattr(module, "SIZES", (3, 16, 24))


OPERATIONS = dispatch.operations()
# A trial of these takes long on a CPU: the reference keeps every state of them.
LONG = ("ssd_scan", "selective_scan")
QUICK_FIRST = [pytest.param(o, marks=pytest.mark.slow if o in LONG else ()) for o in OPERATIONS]


@pytest.mark.skipif("cpu" not in adjoint.backends(), reason="no C++ compiler")
@pytest.mark.parametrize("operation", QUICK_FIRST)
def test_the_compiled_backend_passes(operation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.float64):
            assert trial.passes(dispatch.load(operation, "cpu"), operation, CPU, dtype)


def changed(operation, **functions):
    """The reference's code as if it were another backend's, one of its functions changed."""
    return dataclasses.replace(dispatch.load(operation, "reference"), backend="changed", **functions)


@pytest.fixture
def short(monkeypatch):
    """A trial of a fraction of a second."""
    monkeypatch.setattr(trial, "SEQLEN", 150)


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize("operation", QUICK_FIRST)
def test_one_wrong_result_is_seen(operation, function, result):
    right = getattr(dispatch.load(operation, "reference"), function)

    def wrong(*arguments):
        """The first or the last result is off by a thousandth."""
        results = right(*arguments)
        if isinstance(results, torch.Tensor):
            return results * 1.001
        results = list(results)
        place = [i for i, r in enumerate(results) if r is not None][-result]
        results[place] = results[place] * 1.001
        return tuple(results)

    assert trial.passes(changed(operation), operation, CPU, torch.float32)
    with pytest.warns(UserWarning, match=f"{operation} runs in plain PyTorch"):
        assert not trial.passes(changed(operation, **{function: wrong}), operation, CPU, torch.float32)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("operation", [o for o in QUICK_FIRST if str(o.values[0]).endswith("scan")])
def test_each_kind_of_kernel_fails_alone(operation):
    """Windowed kernels, and those for several documents, are others than the plain ones."""
    right = dispatch.load(operation, "reference").backward

    def wrong(*arguments):
        results = list(right(*arguments))
        window, reset = arguments[-2], arguments[4 if len(arguments) == 7 else -4]
        if window is not None or reset is not None:
            results[1] = results[1] + float("nan")
        return tuple(results)

    code = changed(operation, backward=wrong)
    assert trial.passes(code, operation, CPU, torch.float32)
    for said, flags in {"windowed": (True, False), "with resets": (False, True)}.items():
        message = rf"{operation} \({said}\) runs in plain PyTorch.*its \w+ is off by inf"
        with pytest.warns(UserWarning, match=message):
            assert not trial.passes(code, operation, CPU, torch.float32, *flags)


@pytest.fixture
def accelerated(monkeypatch):
    """A device on which Triton is usable, whose windowed kernels fail their trial (tensors on ``meta``)."""
    monkeypatch.setattr(dispatch, "why_not", lambda name, *_: "absent" if name in LIBRARIES else None)
    monkeypatch.setattr(
        trial, "passes", lambda code, operation, device, dtype, windowed, resets: not windowed
    )
    dispatch._warn_of_size.cache_clear()
    dispatch._first.cache_clear()
    yield
    dispatch._first.cache_clear()


@pytest.mark.usefixtures("accelerated")
def test_a_call_takes_the_reference_for_its_own_kind_alone():
    pytest.importorskip("triton")
    x = torch.empty(1, 5, 4, device="meta")
    assert dispatch.fitting("selective_scan", None, x, d_state=16) == "triton"
    assert dispatch.fitting("selective_scan", None, x, reset=x, d_state=16) == "triton"
    assert dispatch.fitting("selective_scan", None, x, window=3, d_state=16) == "reference"
    assert dispatch.fitting("selective_scan", None, x, halo=3, d_state=16) == "reference"
    assert dispatch.fitting("selective_scan", "triton", x, window=3, d_state=16) == "triton", "asked for"
    assert dispatch.fitting("selective_scan", None, torch.empty(1), window=3) is None, "the CPU has its own"


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize(
    ("operation", "size"),
    [("selective_scan", "d_state"), ("ssd_scan", "headdim"), ("causal_conv1d", "d_conv")],
)
def test_sizes_beyond_triton_take_the_reference_with_one_line(operation, size):
    pytest.importorskip("triton")
    most = registered(operation).limits("triton")[size]
    x = torch.empty(1, 5, 4, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.fitting(operation, None, x, **{size: most}) == "triton"
    with pytest.warns(
        UserWarning, match=f"{operation} runs in plain PyTorch.*{size}={most + 1}.*{size}={most} or less"
    ):
        assert dispatch.fitting(operation, None, x, **{size: most + 1}) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.fitting(operation, None, x, **{size: most + 1}) == "reference"


def test_a_compiler_does_not_trace_the_choice():
    def choose(x):
        return x + 1 if dispatch.fitting("selective_scan", None, x, d_state=16) == "reference" else x

    compiled = torch.compile(choose, fullgraph=True, backend="eager", dynamic=True)
    assert compiled(torch.empty(3, device="meta")).shape == (3,)


@pytest.mark.skipif(not INTERPRETED, reason="Triton runs where it is interpreted")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "operation", [pytest.param(o, marks=() if o == "rms_norm" else pytest.mark.slow) for o in OPERATIONS]
)
def test_triton_passes(operation, monkeypatch):
    monkeypatch.setattr(trial, "SEQLEN", 19 if operation == "rms_norm" else 67)
    assert trial.passes(dispatch.load(operation, "triton"), operation, CPU, torch.float32)


def test_the_trial_draws_on_no_default_device(monkeypatch):
    monkeypatch.setattr(trial, "SEQLEN", 70)
    monkeypatch.setattr(ssd_trial, "SIZES", (2, 16, 32))
    with torch.device("meta"):
        for operation in OPERATIONS:
            code = dispatch.load(operation, "reference")
            assert set(trial.errors(code, operation, CPU, torch.float64).values()) == {0.0}


def raising(error):
    def forward(*arguments):
        raise error

    return changed("rms_norm", forward=forward)


def test_a_backend_that_fails_is_passed_over_with_one_warning():
    said = "rms_norm runs in plain PyTorch on cpu.*no kernel image is available.*install another version"
    broken = raising(RuntimeError("no kernel image\nis available"))
    with pytest.warns(UserWarning, match=said):
        assert not trial.passes(broken, "rms_norm", CPU, torch.float32)


def test_a_kernel_that_ends_the_gpus_work_is_named(monkeypatch):
    """The next operation would fail with an error of its own, far from the kernel."""
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*arguments):
        raise broken

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(trial, "errors", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    code = dispatch.load("kda", "triton")
    with pytest.raises(trial.BrokenDevice, match=r"kda: the triton kernel.*cuda:0.*illegal memory access"):
        trial.passes(code, "kda", torch.device("cuda", 0), torch.float32)


def test_a_capture_is_no_place_for_a_trial(monkeypatch):
    """It would end the capture, and the backend would pass for a broken one ever after."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"rms_norm has not run on cuda:0 yet.*before capturing"):
        trial.passes(raising(AssertionError("tried")), "rms_norm", torch.device("cuda", 0), torch.float32)


def test_a_trial_that_lasts_says_what_it_waits_for(monkeypatch):
    messages, right = [], dispatch.load("dense_scan", "reference").forward

    def forward(*inputs):
        time.sleep(0.1)
        return right(*inputs)

    monkeypatch.setattr(trial, "is_heard", lambda: True)
    monkeypatch.setattr(trial.LOGGER, "info", messages.append)
    slow = changed("dense_scan", forward=forward)
    for silent_s, lines in ((60.0, 0), (0.02, 1)):
        monkeypatch.setattr(trial, "SILENT_S", silent_s)
        assert trial.passes.__wrapped__(slow, "dense_scan", CPU, torch.float32)
        assert len(messages) == lines
    assert "compiling the changed kernels of dense_scan, " in messages[0]


def test_no_memory_left_is_not_held_against_the_backend():
    code = raising(torch.OutOfMemoryError("all taken"))
    for _ in range(2):  # not remembered either
        with pytest.raises(torch.OutOfMemoryError, match="all taken"):
            trial.passes(code, "rms_norm", CPU, torch.float32)


def test_a_trial_leaves_inference_mode() -> None:
    """A library's backward is reached through autograd, and a failure would be kept for the process."""
    modes, right = [], dispatch.load("dense_scan", "reference").forward

    def forward(*inputs):
        modes.append(torch.is_inference_mode_enabled())
        with torch.enable_grad():
            a = inputs[0].clone().requires_grad_()
            torch.autograd.grad((a * a).sum(), a)
        return right(*inputs)

    passes = trial.passes.__wrapped__
    with torch.inference_mode():
        assert passes(changed("dense_scan", forward=forward), "dense_scan", CPU, torch.float32)
    assert modes == [False]
