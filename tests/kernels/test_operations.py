"""Every operation by every backend, Triton's interpreted ones among them: outputs, states and all gradients
against a plain loop over tokens under autograd in float64 (`tests.fuzz.operators`).

Inputs lie in memory that is NaN around them, and memory that nobody has written reads as NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels import dispatch
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.selective_scan import selective_scan
from tests.fuzz.operators import SHAPES, Case, Tensors, by_loop, by_operation, results
from tests.kernels import helpers
from tests.kernels.helpers import (
    BACKENDS,
    BARE,
    INTERPRETED,
    OF_EACH_TOKEN,
    OPERATIONS,
    SCANS,
    cut_sequences,
    has_kernel,
    make_case,
    numbered,
    of_tokens,
    rows,
    run,
    takes_case,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

FLOAT64 = torch.float64
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def backends_of(cases: list[Case], longest: int) -> list[Any]:
    """Each case by each backend that has a kernel for it. What takes the interpreter long is slow there."""
    return [
        pytest.param({**case, "backend": backend}, id=named(case, backend), marks=marks)
        for case in cases
        for backend in BACKENDS
        if has_kernel(case["operation"].removeprefix("grouped "), backend) and takes_case(case, backend)
        for marks in [pytest.mark.slow if INTERPRETED and case["seqlen"] > longest else ()]
    ]


def named(case: Case, backend: str) -> str:
    usual = make_case(case["operation"], case["seqlen"])
    other = {k: v for k, v in case.items() if usual.get(k) != v and k not in ("layouts", "absent", "wide")}
    return "-".join(
        [case["operation"], backend, str(case["seqlen"]), *(f"{k}={v}" for k, v in other.items())]
    )


@pytest.fixture
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sequences into the pieces that the case names, if it does (`cut_sequences`)."""
    case = request.node.callspec.params["case"]
    if "pieces" in case:
        cut_sequences(monkeypatch, case["pieces"], split=6 if "window" in case else 8)


def check(case: Case, dtype: str, tolerance: float | None = None) -> None:
    """Against the loop; where its windows take long, against the reference, held to it by shorter ones."""
    long = "window" in case and case["seqlen"] > 40
    case = {**case, "dtype": dtype}
    expected = results({**case, "backend": "reference"}, by_operation if long else by_loop, FLOAT64)
    helpers.assert_close(results(case, by_operation), expected, tolerance or TOLERANCE[dtype])


# ------------------------------------------------------------------------------------------ values, gradients

SMALL = {"pieces": "small"}
VALUES = [
    *(rows(name, seqlen, b=b) for name in OPERATIONS for seqlen, b in ((1, 3), (2, 1), (19, 2))),
    *(rows(name, 23, documents=None) for name in OPERATIONS),
    *(rows(name, 11, d=8, **BARE) for name in OPERATIONS),
    *(rows(name, 19, b=1, d=11, cotangents=only) for name in OPERATIONS for only in ("first", "last")),
    *(rows(name, 19, **SMALL) for name in OPERATIONS if name != "ssd_scan"),
    rows("selective_scan", 131, d=19, n=5),
    rows("selective_scan", 300, b=1, d=40, n=16),
    rows("selective_scan", 9, b=1, d=9, n=40),
    rows("selective_scan", 13, b=1, d=34, pieces="blocks"),
    *(rows("selective_scan", 41, d=9, n=n) for n in (16, 33, 128)),
    rows("selective_scan", 131, d=9, pieces="split"),
    *(rows("grouped selective_scan", 17, g=g, d=6 // g, n=5) for g in (1, 2, 3)),
    rows("ssd_scan", 131, d=12, n=8),
    rows("ssd_scan", 70, b=1, g=1, d=33, n=80),
    rows("ssd_scan", 33, g=2, d=5, n=40),
    rows("ssd_scan", 75, g=2, h=10, d=9, n=17, documents=0.05),  # more heads than C++ takes at once
    rows("ssd_scan", 150, b=1, g=1, h=3, d=20, n=24, documents=None),
    rows("ssd_scan", 35, b=1, g=1, h=5, d=3, **SMALL),
    rows("ssd_scan", 70, b=1, g=2, h=1, n=20, **SMALL),
    *(rows("ssd_scan", 70, g=g, h=h, documents=None, **SMALL) for g, h in ((1, 2), (2, 2), (3, 1))),
    *(rows("ssd_scan", 270, b=1, g=1, h=1, d=64, n=128, documents=0.01, pieces=n) for n in (64, 128, 256)),
    *(rows(f"{kind} linear_scan", 131, n=n) for kind, n in (("scalar", 37), ("diagonal", 37), ("dense", 16))),
    *(rows("dense linear_scan", seqlen, b=3, n=n) for seqlen, n in ((67, 4), (77, 8), (35, 32), (34, 13))),
    *(
        rows(name, seqlen, b=b, h=h, d=d, n=n, documents=documents)
        for name in ("gated_delta_rule", "kda", "dplr_delta_rule")
        for seqlen, b, h, d, n in (
            (131, 2, 3, 12, 20),
            (200, 1, 2, 33, 7),
            (64, 1, 2, 64, 64),
            (67, 2, 1, 130, 18),  # two blocks of keys in Triton's loops from chunk to chunk
            (1, 2, 1, 16, 16),
        )
        for documents in (None, 0.08)
    ),
    *(rows("causal_conv1d", seqlen, w=w) for seqlen, w in ((5, 3), (5, 1), (41, 4), (150, 2), (37, 16))),
    *(  # by blocks in C++: of outputs, of taps, of tokens
        rows("causal_conv1d", seqlen, w=w, d=d)
        for seqlen, w, d in ((5, 17, 5), (41, 20, 19), (300, 128, 3), (140, 131, 9))
    ),
    rows("causal_conv1d", 290, w=33, documents=0.02),
    *(rows("modal_scan", seqlen, d=d, n=n) for seqlen, d, n in ((131, 19, 5), (300, 11, 16), (70, 8, 33))),
    *(rows("causal_conv1d", seqlen, documents=1.0) for seqlen in (1, 2, 3)),  # fewer than the taps
    rows("causal_conv1d", 33, absent=["initial_state"]),
    *(rows("rms_norm", 7, g=3, d=10, absent=[name]) for name in ("gate", "residual")),
    *(
        rows("rms_norm", seqlen, b=b, g=g, d=d)
        for b, g, d, seqlen in ((1, 1, 33, 3), (1, 1, 5, 1), (4, 4, 16, 300))
    ),
    *(rows("swiglu", seqlen, d=d) for seqlen, d in ((5, 37), (1, 1), (3, 1030))),
]


@pytest.mark.sampled(10 if INTERPRETED else 3)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("case", backends_of(VALUES, longest=20))
def test_values_and_gradients(case: Case) -> None:
    check(case, "float32" if INTERPRETED else "float64")


@pytest.mark.sampled(16 if INTERPRETED else 7)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("case", backends_of(VALUES, longest=20))
def test_values_and_gradients_in_the_other_precision(case: Case) -> None:
    check(case, "float64" if INTERPRETED else "float32")


def windowed(seqlen: int, windows: list[int | None], halos: tuple[int, ...], **more: Any) -> list[Case]:
    pairs = [(window, halo) for window in windows for halo in halos if window or halo]
    return [rows(name, seqlen, window=w, halo=h, **more) for name in SCANS for w, h in pairs]


# Windows that divide nothing and that do, all of a sequence, a token more, and longer than that.
WINDOWS = [
    *windowed(11, [1, 4, 10, 11, 12, 40, None], (0, 3), **SMALL),
    *windowed(34, [17] if INTERPRETED else [2, 3, 17, 24, 33], (6,) if INTERPRETED else (0, 6)),
    *windowed(131, [66] if INTERPRETED else [1, 2, 12, 17, 64, 65, 66, 130, 131, 132], (0, 7)),
    *windowed(131, [None], (70,)),
    *windowed(131, [50], (7,), pieces="split"),
    rows("selective_scan", 13, b=1, d=17, window=3, pieces="blocks"),
    *(rows("selective_scan", 21, d=9, n=n, window=5) for n in (16, 33, 128)),
    *(  # by blocks in C++
        rows("ssd_scan", 131, g=2, h=10, d=9, n=17, window=w, halo=halo, documents=documents)
        for w in ([20] if INTERPRETED else [1, 5, 20, 31, 32, 33, 50, 66, 100, 130, 131])
        for halo, documents in ((0, None), (70, 0.04))
    ),
]


@pytest.mark.sampled(29 if INTERPRETED else 11)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("case", backends_of(WINDOWS, longest=13))
def test_windows_and_halos(case: Case) -> None:
    check(case, "float32" if INTERPRETED else "float64")


# ------------------------------------------------------------------------------------------------- precision


Call = Callable[..., list[Tensor]]


def changed(call: Call, change: Callable[[Tensors], Tensors]) -> Call:
    """The call with other tensors than the case's."""
    return lambda operation, case, t, *rest: call(operation, case, change(t), *rest)


def remembering(call: Call) -> Call:
    """Decays such that many tokens are remembered."""
    return changed(call, lambda t: {**t, "A": 0.2 * t["A"]} if "A" in t else t)


def kinds_of_decay(t: Tensors) -> Tensors:
    """Some decays are 1, next to 1, or such that products underflow; some matrices are multiples of one."""
    a = t["a"]
    one = torch.eye(a.shape[-1], dtype=a.dtype) if a.dim() == 4 else torch.ones_like(a)
    kind = torch.arange(a.shape[1]).view(1, -1, *[1] * (a.dim() - 2)) * 5 % 12
    for i, scale in enumerate((1.0, 1 - 1e-12, 1e-300)):
        a = torch.where(kind == i, scale * one, a)
    return {**t, "a": a}


def rates(rate: float) -> Callable[[Tensors], Tensors]:
    return lambda t: {**t, "delta": torch.ones_like(t["delta"]), "A": torch.full_like(t["A"], -rate)}


def small_steps(t: Tensors) -> Tensors:
    """softplus(-12) is 6e-6: 1 + exp(x) rounds, log1p must not; and no output is large beside the states'."""
    return {**t, "delta": t["delta"] * 0.1 - 12, "delta_bias": t["delta_bias"] * 0.1, "D": 0 * t["D"]}


def strong_decay(t: Tensors) -> Tensors:
    """Over a chunk dt A sums to thousands, whose rounding in float32 must not reach neighbouring tokens."""
    dt = torch.where(torch.arange(t["dt"].shape[1])[:, None] % 8 < 2, t["dt"] - 9, t["dt"])
    return {**t, "A": 0 * t["A"] - 4, "dt_bias": 0 * t["dt_bias"] + 4, "dt": dt}


def channels_apart(t: Tensors) -> Tensors:
    """Channels that keep what they have for thousands of tokens beside some that lose it at once."""
    scale = 10.0 ** (torch.arange(t["g"].shape[-1]) % 6 * 1.5 - 4)
    return {**t, "g": t["g"] * scale.to(t["g"].dtype)}


NEAR_ONE = [
    make_case("selective_scan", n, b=1, softplus=False, documents=None, window=n // 3) for n in (400, 13)
]
EXTREMES = [
    *((make_case(name, 23), kinds_of_decay, 1e-10) for name in SCANS if name.endswith("linear_scan")),
    *(
        (make_case(name, 23, window=w), kinds_of_decay, 1e-10)
        for name in SCANS
        if name.endswith("linear_scan")
        for w in (1, 3, 16, 22, 24)
    ),
    *((case, rates(rate), 1e-5) for case in NEAR_ONE for rate in (1e-6, 30.0)),
    (make_case("selective_scan", 5, d=8), small_steps, 1e-5),
    (make_case("ssd_scan", 128, g=1, d=4), strong_decay, 1e-5),
    *(
        (make_case(name, 67, d=12, n=8), channels_apart, tolerance)
        for name in ("kda", "dplr_delta_rule")
        for tolerance in (1e-5, 1e-11)
    ),
    (make_case("dplr_delta_rule", 19, b=1, h=1, d=12, n=8, documents=None), channels_apart, 1e-5),
]


@pytest.mark.parametrize(
    "case, change, tolerance",
    [
        pytest.param({**case, "backend": backend}, *rest, id=named(case, backend), marks=marks)
        for case, *rest in EXTREMES
        for backend in BACKENDS
        if has_kernel(case["operation"], backend) and not (INTERPRETED and case["seqlen"] in (23, 400))
        for long in [case["operation"] in ("dplr_delta_rule", "kda") and case["seqlen"] > 40]
        for marks in [pytest.mark.slow if INTERPRETED and (long or case["seqlen"] > 100) else ()]
    ],
)
def test_extremes_keep_their_precision(
    case: Case, change: Callable[[Tensors], Tensors], tolerance: float
) -> None:
    """Of decays, steps and sums; 1e-10 is asked of float64."""
    case = {**case, "dtype": "float64" if tolerance < 1e-5 else "float32"}
    exact = by_operation if case["seqlen"] == 400 else by_loop

    expected = results({**case, "backend": "reference"}, changed(exact, change), FLOAT64)
    helpers.assert_close(results(case, changed(by_operation, change)), expected, tolerance)


def halves(operation: str, seqlen: int, dtype: str, **more: Any) -> Case:
    """Tokens in half precision, what is shared and the states in float32."""
    wide = [name for name in SHAPES[operation] if name not in of_tokens(operation)]
    return make_case(operation, seqlen, dtype=dtype, wide=wide, documents=None, **more)


HALVES = [
    halves(name, 24, dtype, d=8, n=8)
    for dtype in ("bfloat16", "float16")
    for name in OPERATIONS
    if name
    not in ("gated_delta_rule", "kda", "dplr_delta_rule", "dense linear_scan")  # these are for float32
]


@pytest.mark.sampled(17 if INTERPRETED else 1)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    "case",
    backends_of([*HALVES, halves("ssd_scan", 40, "bfloat16", b=1, g=1, d=8, n=16, **SMALL)], longest=40),
)
def test_half_precision_is_no_worse_than_autograd(case: Case) -> None:
    """And each output has its dtype: the tokens', of states float32."""
    got, exact = results(case, remembering(by_operation)), results(case, remembering(by_loop), FLOAT64)
    rounded = results(case, remembering(by_loop), getattr(torch, case["dtype"]))
    helpers.assert_no_worse(got, exact, rounded)
    inputs = case["operation"] in ("causal_conv1d", "rms_norm")  # the second output is of inputs, not a state
    dtypes = [torch.float32 if i and not inputs else getattr(torch, case["dtype"]) for i in range(2)]
    outputs = [t.dtype for name, t in got.items() if name.startswith("output")]
    assert outputs == dtypes[: len(outputs)]


@pytest.mark.parametrize(
    "case", backends_of([halves(n, 12, "bfloat16", window=5, halo=2) for n in (SCANS[0], *SCANS[2:4])], 40)
)
def test_windows_of_half_precision(case: Case) -> None:
    """float32 throughout, but for the rounding of what is given back."""
    helpers.assert_close(results(case, by_operation), results(case, by_loop, FLOAT64), 2**-8)


# ------------------------------------------------------------------------------------------------- documents

# They end in, on and next to the edges of the kernels' pieces.
LENGTHS = {name: [3, 7, 1, 5, 3] if INTERPRETED else [17, 1, 30, 3, 61, 1, 28] for name in OPERATIONS}
LENGTHS["ssd_scan"] = [3, 7, 1, 5, 17, 3] if INTERPRETED else LENGTHS["ssd_scan"]
APART = [
    {**make_case(name, sum(LENGTHS[name]), d=3, n=3, h=1, **SMALL), "window": window, "halo": halo}
    for name in OPERATIONS
    for window, halo in ((None, 0), (1, 0), (5, 2), (2, 0), (64, 0), (9, 8), (None, 4))
    if name not in OF_EACH_TOKEN and (name in SCANS or (window, halo) == (None, 0))
]
# large enough for the products of C++
APART.append({**make_case("ssd_scan", sum(LENGTHS["ssd_scan"]), d=8, n=16, h=1), "window": None, "halo": 0})


@pytest.mark.sampled(53 if INTERPRETED else 7)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("case", backends_of(APART, longest=40))
def test_documents_are_apart(case: Case, value: float) -> None:
    """What is no number in any tensor of a document's tokens, in the states at both ends and the cotangents,
    changes nothing of other documents; interpreted: bit for bit, in all these tensors and in every second
    document at once."""
    case = {**case, "dtype": "float32" if INTERPRETED else "float64"}
    lengths = LENGTHS[case["operation"]]
    seq_idx, last = numbered(lengths, case["b"]), len(lengths) - 1
    given = {name: t.detach() for name, t in tensors_of(case).items()}
    tokens, outputs = of_tokens(case["operation"]), run(case, given, seq_idx)
    given |= {f"d output {i}": torch.randn(y.shape, dtype=y.dtype) for i, y in enumerate(outputs)}
    in_tokens, ends = {*tokens, "output 0", "d output 0"}, {"initial_state": 0}
    ends |= dict.fromkeys(("output 1", "d output 1"), last)

    def results_of(given: Tensors) -> Tensors:
        leaves = {name: given[name].clone().requires_grad_() for name in SHAPES[case["operation"]]}
        made = run(case, leaves, seq_idx)
        cotangents = [given[f"d output {i}"] for i in range(len(made))]
        found = dict(zip(leaves, torch.autograd.grad(made, list(leaves.values()), cotangents), strict=True))
        return found | {f"output {i}": y.detach() for i, y in enumerate(made)}

    expected = results_of(given)
    every_second = range(0, last + 1, 2), range(1, last + 1, 2)
    for documents in every_second if INTERPRETED else [[0], [2], [last - 1], [last]]:
        elsewhere = ~torch.isin(seq_idx[0], torch.tensor(list(documents)))
        mine = {n: t for n, t in given.items() if n in in_tokens or ends.get(n) in documents}
        for names in [list(mine)] if INTERPRETED else [[name] for name in mine]:
            poisoned = {name: given[name].clone() for name in names}
            for name, t in poisoned.items():
                t[(slice(None), ~elsewhere) if name in in_tokens else ...] = value
            got = results_of({**given, **poisoned})
            for name, b in expected.items():
                a = got[name]
                if name in in_tokens:
                    a, b = a[:, elsewhere], b[:, elsewhere]
                elif ends.get(name, documents[0]) in documents:  # parameters' gradients are sums over all
                    continue
                assert b.isfinite().all()
                exact = {"rtol": 0.0, "atol": 0.0} if INTERPRETED else {"rtol": 1e-9, "atol": 1e-7}
                torch.testing.assert_close(a, b, **exact, msg=f"{names} of {documents} in {name}")


# ---------------------------------------------------------------------------------------- what is beside them


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 2, 9, 300, 699, 700])
def test_dense_scan_gives_the_same_bits_on_any_number_of_threads(batch: int, window: int | None) -> None:
    tensors = tensors_of(make_case("dense linear_scan", 700, b=batch, n=32, dtype="float32"))
    h, inputs = linear_scan(**tensors, window=window), list(tensors.values())
    g, threads, found = torch.randn(h.shape), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            found.append(torch.autograd.grad(h, inputs, g, retain_graph=True))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window must be"),
        ({"window": -3}, "window must be"),
        ({"window": 2.5}, "window must be"),
        ({"halo": 5}, "halo must be"),
        ({"backend": "cuda"}, "there is no such backend"),
        ({"A": torch.zeros(5)}, r"A must have shape \(d_inner, d_state\), got \(5,\)"),
        ({"D": torch.zeros(3)}, "D must have shape"),
        ({"seq_idx": torch.zeros(1, 4)}, "seq_idx must have shape"),
        ({"B": torch.zeros(2, 5, 3, 4)}, "B's ngroups must divide d_inner = 5, got 3"),
        ({"C": torch.zeros(2, 5, 1, 4)}, r"C must have shape \(2, 5, 4\), got \(2, 5, 1, 4\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selective_scan(**{**tensors_of(make_case("selective_scan", 5, b=2, dtype="float32")), **change})


def test_no_grad_gives_the_same_and_no_graph() -> None:
    case = make_case("selective_scan", 50)
    with torch.no_grad():
        quiet = run(case, tensors_of(case))
    assert torch.equal(quiet[0], run(case, tensors_of(case))[0]) and quiet[0].grad_fn is None


def test_loading_the_compiled_kernels_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    cpu_build.load()
    assert (torch.tensor([1e-40]) * 1.0).item() > 0


def test_without_a_compiler_there_is_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = cpu_build.load, cpu_build.warn_once, dispatch.choose, dispatch._first
    monkeypatch.setenv("ADJOINT_DISABLE_CPU_KERNELS", "1")
    try:
        for cache in caches:
            cache.cache_clear()
        case = make_case("selective_scan", 4)
        with pytest.warns(UserWarning, match="compiled CPU kernels are not usable") as seen:
            (
                run(case, tensors_of(case)),
                run(make_case("causal_conv1d", 4), tensors_of(make_case("causal_conv1d", 4))),
            )
        assert len(seen) == 1 and "cpu" not in dispatch.backends()
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="Triton can run here")
def test_a_backend_is_refused_by_name_where_it_cannot_run() -> None:
    assert "triton" not in dispatch.backends()
    with pytest.raises(ValueError, match="backend 'triton' is not usable here"):
        causal_conv1d(torch.ones(1, 4, 2), torch.ones(2, 4), backend="triton")


@pytest.mark.skipif(not INTERPRETED, reason="Triton runs where it is interpreted")
def test_triton_is_a_backend_of_its_own() -> None:
    """Its kernels are what the interpreter runs, it takes half precision as it is, and what is asked for by
    name."""
    from triton.runtime.interpreter import InterpretedFunction

    from adjoint.kernels.selective_scan.triton import forward

    assert BACKENDS == ["triton"] and "triton" in dispatch.backends()
    assert all(
        has_kernel(name, "triton") for name in ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm")
    )
    assert any(isinstance(found, InterpretedFunction) for found in vars(forward).values())
    half = torch.empty(1, dtype=torch.bfloat16)
    assert dispatch.sequence_dtype("selective_scan", "triton", half) == torch.bfloat16
    case = make_case("selective_scan", 9, d=4, n=3, dtype="float32")
    a, b = (run({**case, "backend": name}, tensors_of(case))[0] for name in ("triton", "reference"))
    assert not torch.equal(a, b) and (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.skipif(not INTERPRETED, reason="Triton's sizes")
@pytest.mark.parametrize(
    "operation, sizes, said",
    [
        ("selective_scan", {"n": 300}, "d_state=300"),
        ("ssd_scan", {"d": 200}, "headdim=200, d_state=4"),
        ("ssd_scan", {"d": 4, "n": 300}, "headdim=4, d_state=300"),
    ],
)
def test_sizes_too_large_for_triton_are_refused(operation: str, sizes: dict[str, int], said: str) -> None:
    case = make_case(operation, 1, dtype="float32", backend="triton", **sizes)
    with pytest.raises(ValueError, match=said):
        run(case, tensors_of(case))
