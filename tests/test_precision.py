"""TF32, emulated on the CPU: results are compared without it, and it is on again afterwards."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint import Exact, Stack, StackConfig
from adjoint.engine import custom_layers
from adjoint.kernels import trial
from adjoint.kernels.precision import full_float32
from adjoint.parallel.fsdp import FSDPWeights
from adjoint.tools.measure import passes
from tests.engine.test_first_use import Leaky, stack
from tests.model_helpers import make_ids

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
# Operators whose arguments at these places are rounded, and the setting that says whether they are.
PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1)}
PRODUCTS[aten.baddbmm.default] = (1, 2)
CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}


def tf32(tensor: Tensor) -> Tensor:
    """Round to the nearest number with a mantissa of ten bits, to even ones in between."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class EmulatedTF32(TorchDispatchMode):
    """Products and convolutions round their inputs where the settings of a GPU allow it."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = {torch.backends.cuda.matmul: PRODUCTS, torch.backends.cudnn.conv: CONVOLUTIONS}
        rounded = [operators for setting, operators in settings.items() if setting.fp32_precision == "tf32"]
        places = next((operators[func] for operators in rounded if func in operators), ())
        args = [tf32(x) if place in places else x for place, x in enumerate(args)]
        return func(*args, **(kwargs or {}))


def by_older_setting() -> None:
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does


def by_trainer() -> None:
    torch.backends.fp32_precision = "tf32"  # tf32=True of the Trainer


def by_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def by_cudnn_alone() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


WAYS = [by_older_setting, by_trainer, by_backend, by_cudnn_alone]


def settings() -> list[object]:
    """Return PyTorch's settings, "error" for an older one that a newer one contradicts."""

    def read(setting: Callable[[], object]) -> object:
        try:
            return setting()
        except RuntimeError:
            return "error"

    readers: list[Callable[[], object]] = [torch.get_float32_matmul_precision]
    readers += [lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32]
    holders = [
        torch.backends,
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
    ]
    holders += [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn]
    return [*map(read, readers), *(holder.fp32_precision for holder in holders)]


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    """Put PyTorch's defaults back after a test."""
    before = settings()
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        backend.matmul.fp32_precision = "none"
    torch.backends.mkldnn.conv.fp32_precision = torch.backends.mkldnn.rnn.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "tf32"
    assert settings() == before


@pytest.mark.parametrize("allow", WAYS)
def test_settings_are_as_before(allow: Callable[[], None]) -> None:
    """Inside, no setting allows TF32 and none contradicts another; two threads may leave in any order."""
    allow()
    before = settings()
    entered, leaving = threading.Event(), threading.Event()

    def other() -> None:
        with full_float32():
            entered.set()
            leaving.wait(10)

    thread = threading.Thread(target=other)
    with full_float32():
        thread.start()
        assert entered.wait(10)
        assert torch.backends.cuda.matmul.allow_tf32 is False
        assert set(settings()[4:]) == {"ieee"}
    assert set(settings()[4:]) == {"ieee"}
    leaving.set()
    thread.join()
    assert settings() == before
    torch.backends.fp32_precision = "none"
    # what has followed this setting still does
    assert (torch.backends.mkldnn.matmul.fp32_precision == "none") is (allow is not by_older_setting)


@pytest.mark.parametrize("allow", [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def test_wrapped_model(allow: Callable[[], None]) -> None:
    """A right model whose gradients differ by more than the limit where products are in TF32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1}
    config = transformers.Mamba2Config(vocab_size=61, num_hidden_layers=4, **sizes)
    model = adjoint.wrap(transformers.Mamba2ForCausalLM(config).train(), Exact(8))
    ids = make_ids(1, 24) % 61
    allow()
    before = settings()
    with EmulatedTF32():
        model(input_ids=ids, labels=ids).loss.backward()
    assert settings() == before


def test_layer_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = stack(Leaky, torch.float32), make_ids(2, 24)
    by_older_setting()
    precisions, forward = [], Leaky.forward

    def noting(layer: Leaky, x: Tensor, *others: Any) -> Any:
        precisions.append((x.shape[1], torch.backends.cuda.matmul.fp32_precision))
        return forward(layer, x, *others)

    monkeypatch.setattr(Leaky, "forward", noting)
    model(ids, labels=ids, method=Exact(8)).loss.backward()
    tokens_tried = {
        custom_layers.TOKENS,
        custom_layers.CHUNK_SIZE,
        custom_layers.TOKENS % custom_layers.CHUNK_SIZE,
    }
    assert {precision for tokens, precision in precisions if tokens in tokens_tried} == {"ieee"}
    assert {precision for tokens, precision in precisions if tokens == 8} == {"tf32"}


def test_stack_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    precisions, compute = list[str](), FSDPWeights.loss_and_gradients

    def noting(*arguments: Any) -> Any:
        precisions.append(torch.backends.cuda.matmul.fp32_precision)
        return compute(*arguments)

    monkeypatch.setattr(FSDPWeights, "loss_and_gradients", noting)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, ids = Stack(StackConfig(vocab_size=17, d_model=8, n_layer=2), seed=0), make_ids(1, 24)
        for module in (*model.layers, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        by_older_setting()
        model(ids, labels=ids, method=Exact(8)).loss.backward()
    finally:
        dist.destroy_process_group()
    assert precisions == ["ieee", "ieee"]


def test_trial_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    precisions: list[str] = []

    def problem(*_: object) -> dict[str, Tensor]:
        precisions.append(torch.backends.cudnn.conv.fp32_precision)
        return {"y": torch.ones(1)}

    monkeypatch.setattr(
        trial, "registered", lambda name: types.SimpleNamespace(trial=problem, reference=None)
    )
    monkeypatch.setattr(trial, "implementation_in", lambda *arguments: None)
    trial.errors(None, "any", torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    assert precisions == ["ieee", "ieee"]


def test_compared_ways() -> None:
    """`adjoint compare` and the benchmarks."""
    precisions: list[str] = []
    parameter = torch.nn.Linear(1, 1)

    def loss(ids: Tensor) -> Tensor:
        precisions.append(torch.backends.cuda.matmul.fp32_precision)
        return parameter(ids.float()).sum()

    by_trainer()
    passes.gradients_apart([("one", passes.Passes(parameter, loss))], torch.ones(1, 1))
    assert precisions == ["ieee"]
