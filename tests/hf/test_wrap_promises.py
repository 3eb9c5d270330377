"""Exact, or refused by name: what a call of a wrapped model may bring, what may have been done to the model
before, between calls and between forward and backward, and what random numbers it may draw. See
docs/promises.md."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import operator
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint.engine.executor import Executor
from adjoint.errors import UserError
from adjoint.hf.model_parts import original_class
from tests.hf.hf_models import (
    REFUSED,
    RELEASE,
    VOCAB,
    assert_exact,
    assert_slope,
    current_gradients,
    loss_and_gradients,
    make,
    make_batch,
    one_line,
)

pytestmark = pytest.mark.usefixtures("one_thread", "double")

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: E402
from transformers.integrations import use_kernel_func_from_hub_with_fallback  # noqa: E402

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
BATCH = make_batch(29)
IDS = BATCH["input_ids"]
NEW_IDS = torch.randint(3, VOCAB, IDS.shape, generator=torch.Generator().manual_seed(7))


def wrapped(model: Any) -> Any:
    return adjoint.wrap(model, adjoint.Exact(chunk_size=8))


def leave_unchanged(model: Any) -> None:
    pass


def loss_of(model: Any, **inputs: Any) -> Tensor:
    """Return the loss of the batch, with some inputs replaced."""
    return model(**{name: value for name, value in {**BATCH, **inputs}.items() if value is not None}).loss


def run(model: Any, **inputs: Any) -> Tensor:
    """Run forward and backward, and return the loss."""
    loss = loss_of(model, **inputs)
    loss.backward()
    return loss.detach()


def assert_same_as_unwrapped(
    name: str,
    change: Callable[[Any], Any] = leave_unchanged,
    call: Callable[[Any], Tensor] = loss_of,
    prepare: Callable[[Any], Any] = wrapped,
    **options: Any,
) -> None:
    """Assert that loss and gradients of a changed model are the same, wrapped and not.

    A change may return another model in its place, and a call may be backpropagated already."""
    results = []
    for each in (prepare, leave_unchanged):
        model = make(name, **options)
        torch.manual_seed(1)
        model = (change(model) or model).double()
        each(model)
        model.zero_grad()
        torch.manual_seed(2)
        loss = call(model)
        if loss.requires_grad:
            loss.backward()
        results.append((loss.detach(), current_gradients(model)))
    assert_exact(*results)


# ------------------------------------------------------------------------------------------------- the model


def mlp_of(model: Any) -> Any:
    return model.model.layers[1].mlp


def smoothed(model: Any) -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)

    model.loss_function = loss


def more_loss(model: Any) -> None:
    original = original_class(model)

    class More(original):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + 0.05 * output.logits.square().mean().sqrt()
            return output

    wrap_state = vars(model).get("_adjoint")
    model.__class__ = More
    if wrap_state is not None:
        adjoint.wrap(model, wrap_state.method)


def hooked_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)


def other_forward(model: Any) -> None:
    mlp = mlp_of(model)
    mlp.forward = lambda x: mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x))


def other_head(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = nn.Linear(24, VOCAB, dtype=torch.float64)


def other_scaling(model: Any) -> None:
    model.logits_scaling = model.config.logits_scaling = 7.0


def not_causal(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def with_batch_norm(model: Any) -> None:
    class Normed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.norm = inner, nn.BatchNorm1d(24)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)

    model.model.layers[1].mlp = Normed(mlp_of(model))


def with_running_mean(assign: Callable[[nn.Module, Tensor], None], is_read: bool) -> Callable[[Any], None]:
    """Return a change after which an MLP's forward updates a buffer by `assign`.

    Args:
        is_read: whether the forward reads it too; BatchNorm in training does not."""

    class Centred(nn.Module):
        mean: Tensor

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("mean", torch.zeros(24))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x - self.mean if is_read else x)
            assign(self, 0.9 * self.mean + 0.1 * x.detach().mean((0, 1)))
            return y

    return lambda model: setattr(model.model.layers[1], "mlp", Centred(mlp_of(model)))


def parametrized(kind: str) -> Callable[[Any], None]:
    return lambda model: setattr(
        mlp_of(model), "up_proj", getattr(nn.utils.parametrizations, kind)(mlp_of(model).up_proj)
    )


def with_settings(place: str, **values: Any) -> Callable[[Any], None]:
    """Return a change that sets attributes of a module, given by its name."""
    return lambda model: vars(model.get_submodule(place)).update(values)


class Inner(nn.Module):
    """An activation with another inside."""

    config = None  # which is no configuration

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def put_in(model: Any, act: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = act


class OtherMlp(nn.Module):
    """A gated MLP which reads a number from its configuration at each call, as for dropout or annealing."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.config = mlp.config

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y * getattr(self.config, "mlp_scale", 1.0))


def other_mlps(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = OtherMlp(layer.mlp)


class OwnHead(transformers.LlamaForCausalLM):
    """Logits are divided by a temperature, and moved by what is learnt of the words."""

    def forward(self, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        out = super().forward(*args, **inputs)
        out.logits = out.logits * self.temperature + self.prior
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, self.config.vocab_size, num_items_in_batch)
        return out


class FusedLoss(transformers.LlamaForCausalLM):
    """A forward like Liger's, whose loss is computed without logits unless these are asked for.

    In training it takes `return_token_accuracy`, in evaluation it passes over it."""

    def forward(self, labels: Any = None, skip_logits: bool | None = None, **inputs: Any) -> Any:
        returns_accuracy = inputs.pop("return_token_accuracy", False)
        logits = self.lm_head(self.model(**inputs)[0])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        out = transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=None if skip_logits else logits)
        if self.training and returns_accuracy:
            out["token_accuracy"] = (logits.argmax(-1) == labels).double().mean()
        return out


def fuse_later(model: Any) -> None:
    wrapped(model)
    model.forward = types.MethodType(FusedLoss.forward, model)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_fused_loss_in_place_of_the_forward(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward as Liger's in place of the class's before wrapping, or after it of the instance's: then the
    backbone runs by chunks."""
    tiles, forward = [], Executor.forward
    monkeypatch.setattr(Executor, "forward", lambda self, t: tiles.append(t) or forward(self, t))

    def fuse(model: Any) -> None:
        model.__class__ = FusedLoss

    change, prepare = (leave_unchanged, fuse_later) if is_late else (fuse, wrapped)
    assert_same_as_unwrapped(LLAMA, change, lambda model: loss_of(model, skip_logits=True), prepare)
    assert len(tiles) > -(-29 // 8)


def test_an_input_that_is_read_in_training_alone_is_refused() -> None:
    model = make(LLAMA)
    model.__class__ = FusedLoss
    wrapped(model)
    ids = make_batch(29)["input_ids"]
    with pytest.raises(UserError, match=r"^FusedLoss .*: return_token_accuracy is not an input .* Liger's"):
        model(input_ids=ids, labels=ids, return_token_accuracy=True)


def own_head(model: Any, trained: bool = False) -> None:
    model.__class__ = OwnHead
    tensors = {"temperature": torch.ones(()), "prior": torch.zeros(VOCAB)}
    for name, tensor in tensors.items():
        if trained:
            setattr(model, name, nn.Parameter(tensor))
        else:
            model.register_buffer(name, tensor)


def filled(model: Any) -> None:
    with torch.no_grad():
        model.temperature.fill_(0.3)
        model.prior.copy_(torch.linspace(-1, 1, VOCAB))


# What is made of a model before its first call, and what is changed after it.
LATER: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "an activation in a list of them": (
        lambda model: put_in(model, nn.Sequential(nn.SiLU())),
        lambda model: operator.setitem(model.model.layers[1].mlp.act_fn, 0, nn.GELU()),
    ),
    "an activation's inner module": (
        lambda model: put_in(model, Inner()),
        lambda model: setattr(model.model.layers[1].mlp.act_fn, "inner", nn.GELU()),
    ),
    "a number that an MLP reads": (other_mlps, lambda model: setattr(model.config, "mlp_scale", 1.7)),
    "buffers of the head": (own_head, filled),
    "a trained head": (functools.partial(own_head, trained=True), filled),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", LATER)
def test_a_change_between_calls(case: str) -> None:
    """A change of a module or the head takes effect: nothing stays from the call before."""
    before, change = LATER[case]

    def later(model: Any) -> Tensor:
        run(model)
        model.zero_grad()
        change(model)
        return loss_of(model)

    assert_same_as_unwrapped(LLAMA, before, later)


def test_a_buffer_that_scales_logits_is_read_at_each_call() -> None:
    """A scale of logits is measured once per model where no tensor of the model's own can change it."""

    def before(model: Any) -> None:
        del model.logit_scale
        model.register_buffer("logit_scale", torch.tensor(0.5, dtype=torch.float64))

    def later(model: Any) -> Tensor:
        run(model)
        model.zero_grad()
        model.logit_scale.fill_(0.3)
        return loss_of(model)

    assert_same_as_unwrapped("CohereForCausalLM", before, later)


def wrapped_by_torch(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    layers = tuple({type(layer) for layer in model.model.layers})
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layers))
    model.config.use_cache = False


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "one module under two names": (
        LLAMA,
        lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp),
    ),
    "a hook on the head": (LLAMA, hooked_head),
    "logit_scale": ("CohereForCausalLM", with_settings("", logit_scale=0.3)),
    "logits_scaling": ("GraniteForCausalLM", other_scaling),
    "an activation": (LLAMA, lambda model: setattr(mlp_of(model), "act_fn", nn.GELU())),
    "a forward": (LLAMA, other_forward),
    "another head": (LLAMA, other_head),
    "a layer dropped": (LLAMA, lambda model: setattr(model.model, "layers", model.model.layers[:-1])),
    "weight_norm": (LLAMA, parametrized("weight_norm")),
    "layers recomputed by PyTorch's wrapper": (LLAMA, wrapped_by_torch),
}
NOT_THE_WHOLE, TABLE = "in chunks is not that of the whole", "model.embed_tokens"
CHANGES_REFUSED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a loss that is a mean": (
        "its loss_function is not a sum over tokens divided by num_items_in_batch",
        smoothed,
    ),
    "more than its loss": ("hidden states are the same, the loss is", more_loss),
    "attention that is not causal": (
        "hidden states differ (first in layers.0, from token 0 on; chunks begin at every 5th)",
        not_causal,
    ),
    "a layer left out now and then": (
        "model: layerdrop skips a layer",
        with_settings("model", layerdrop=0.5),
    ),
    "BatchNorm": ("BatchNorm in training takes statistics", with_batch_norm),
    "a buffer written to": (
        "the forward changes model.layers.1.mlp.mean",
        with_running_mean(lambda module, mean: module.mean.copy_(mean), is_read=True),
    ),
    "a buffer replaced": (
        "model.layers.1.mlp.mean differs from the whole's",
        with_running_mean(lambda module, mean: setattr(module, "mean", mean), is_read=False),
    ),
    "spectral_norm": (NOT_THE_WHOLE, parametrized("spectral_norm")),
    "scale_grad_by_freq": ("scale_grad_by_freq", with_settings(TABLE, scale_grad_by_freq=True)),
    "sparse": ("set sparse=False", with_settings(TABLE, sparse=True)),
    "max_norm": ("max_norm changes weights", with_settings(TABLE, max_norm=0.5)),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_the_model_is_seen(case: str, when: str) -> None:
    name, change = CHANGES[case]

    def changed_later(model: Any) -> Tensor:
        run(model)
        change(model)
        model.zero_grad()
        return loss_of(model)

    assert_same_as_unwrapped(
        name, *((change, loss_of) if when.startswith("before") else (leave_unchanged, changed_later))
    )


def test_a_weight_that_is_trained_later_is_looked_at_again() -> None:
    """A setting that is allowed with a frozen weight is refused once the weight is trained."""
    model = make(LLAMA)
    table = model.model.embed_tokens
    table.sparse = True
    table.weight.requires_grad_(False)
    run(wrapped(model))
    table.weight.requires_grad_()
    with pytest.raises(ValueError, match="set sparse=False"):
        run(model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CHANGES_REFUSED)
def test_a_change_that_is_refused(case: str) -> None:
    """A change is refused whether gradients are asked for or not, also after calls that succeeded."""
    message, change = CHANGES_REFUSED[case]
    model = wrapped(make(LLAMA))
    run(model)
    change(model)
    model.double()
    with one_line(message):
        run(model)
    if case in ("more than its loss", "attention that is not causal"):
        with torch.no_grad(), one_line(message):
            model(**BATCH)


def transformed(transform: str, model: Any) -> Any:
    named = dict(model.named_parameters())

    def loss(others: dict[str, Tensor]) -> Tensor:
        return functional_call(model, others, (), BATCH).loss

    if transform == "vmap":
        return torch.func.vmap(lambda ids: model(input_ids=ids, labels=ids).loss)(IDS.expand(2, -1, -1))
    if transform == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            return loss(named)
    return torch.func.grad(loss)(named) if transform == "grad" else torch.func.jvp(loss, (named,), (named,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "forward mode"])
def test_transforms_are_refused(transform: str) -> None:
    with one_line(
        "forward-mode differentiation" if transform == "forward mode" else "torch.func's grad, vmap and jvp"
    ):
        transformed(transform, wrapped(make(LLAMA)))


def test_a_weaker_comparison_says_so() -> None:
    """A warning says if no copy can be made, or if one does not run in float32 or with shorter windows."""
    model = make("MistralForCausalLM", torch.bfloat16, sliding_window=4096)

    def hook(refuses: Callable[[Any, Tensor], bool]) -> Any:
        def check(module: Any, inputs: Any) -> None:
            if refuses(module, inputs[0]):
                raise ValueError("not made for this")

        return model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(check)

    model.lock = threading.Lock()
    with pytest.warns(
        UserWarning, match="compared in its own precision, .*no copy of it fits or can be made"
    ):
        wrapped(model)(**BATCH)
    del model.lock
    handle = hook(lambda _, x: x.dtype == torch.float32)
    with pytest.warns(UserWarning, match="a copy in float32 does not run: ValueError: not made for this"):
        wrapped(model)(**BATCH)
    handle.remove()
    called_modules: list[Any] = []
    handle = hook(lambda *_: bool(called_modules) and called_modules[0].config.sliding_window == 5)
    model.model.register_forward_pre_hook(lambda module, _: called_modules.insert(0, module))
    with pytest.warns(
        UserWarning, match="compared with windows as they are .shorter ones do not run: ValueError"
    ):
        wrapped(model)(**BATCH)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = make(LLAMA)
    with torch.no_grad():
        mlp_of(model).up_proj.weight[0, 0] = float("nan")
    with one_line("loss of 13 tokens is nan as model.layers.1.mlp.up_proj.weight is not finite; look for"):
        run(wrapped(model))


def test_cached_parametrizations_are_refused() -> None:
    """Their weights would be one chunk's in all others."""
    model = make(LLAMA)
    parametrized("weight_norm")(model)
    model = wrapped(model.double())
    with nn.utils.parametrize.cached(), one_line("parametrize.cached() keeps weights"):
        run(model)
    run(model)


@pytest.mark.parametrize("name", REFUSED)
def test_an_evaluation_is_checked_too(name: str) -> None:
    for frozen in (False, True):
        model = wrapped(make(name, torch.float32)).requires_grad_(not frozen)
        with torch.set_grad_enabled(frozen), pytest.raises(ValueError, match="cannot be trained by chunks"):
            model.eval()(**BATCH)


@pytest.fixture
def own_mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let RecurrentGemma's own mixers run, which keep their states in themselves."""
    monkeypatch.setattr("adjoint.hf.kernels.mixers.MIXERS", {})


@pytest.mark.usefixtures("own_mixers")
def test_a_short_first_call_is_not_the_one_that_is_compared() -> None:
    model = wrapped(make("RecurrentGemmaForCausalLM", torch.float32))
    with one_line(NOT_THE_WHOLE):
        model(**{name: value[:, :3] for name, value in BATCH.items()})


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("own_mixers")
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_is_compared_in_float32(seed: int) -> None:
    """A state outside of the cache, and 5% of a loss, are found although both are within bfloat16's error."""
    off, smooth = (make(n, torch.bfloat16, seed) for n in ("RecurrentGemmaForCausalLM", LLAMA))
    more_loss(smooth)
    for model in (off, smooth):
        with one_line(NOT_THE_WHOLE):
            wrapped(model)(**BATCH)
    wrapped(make(LLAMA, torch.bfloat16, seed))(**BATCH)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_layer_of_each_kind_is_compared_where_all_do_not_fit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adjoint.hf.verify import first_use, trial_copy

    layers = ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]
    model = make("GraniteMoeHybridForCausalLM", dtype, num_hidden_layers=6, layer_types=layers)
    every, few = (
        trial_copy.bytes_needed(p for name, p in model.named_parameters() if is_counted(name))
        for is_counted in (
            lambda name: True,
            lambda name: ".layers." not in name or name.split(".")[2] in "01",
        )
    )
    copies, make_trial_copy = [], first_use.make_trial_copy
    monkeypatch.setattr(
        first_use, "make_trial_copy", lambda model: copies.append(make_trial_copy(model)) or copies[-1]
    )
    for room, copied_layers in ((every, 6), (few, 2), (few - 1, 0)):
        monkeypatch.setattr(trial_copy, "memory_left", lambda device, room=room: 2 * room)
        wrapped(model)(**BATCH)
        got = [] if copies[-1] is None else copies[-1].model.layers
        assert sum(any(True for _ in layer.parameters()) for layer in got) == copied_layers


@pytest.mark.parametrize(
    "name, function",
    [
        ("Qwen3NextForCausalLM", "torch_chunk_gated_delta_rule"),
        ("Mamba2ForCausalLM", "mamba2_chunk_scan"),
        ("Mamba2ForCausalLM", "mamba2_split_conv1d_scan_combined"),
        ("BambaForCausalLM", "mamba2_split_conv1d_scan_combined"),
    ],
)
def test_the_comparison_is_with_pytorch(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference does not run another library's kernels, which round products to TF32: this one is 1%
    off."""
    model, calls = make(name).train(), list[str]()
    module = sys.modules[type(model).__module__]
    original = vars(module)[function].__wrapped__

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        output = original(*args, **kwargs)
        assert output is not None, "a kernel for the whole mixer, where chunks are compared with PyTorch"
        return 1.01 * output if isinstance(output, Tensor) else (1.01 * output[0], *output[1:])

    kernel.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    library = types.ModuleType("library")
    library.kernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", library)
    decorated = use_kernel_func_from_hub_with_fallback("kernel", "library")(original)
    monkeypatch.setattr(module, function, decorated)
    wrapped(model)(**BATCH).loss.backward()
    assert calls == [] and vars(module)[function] is decorated
    with contextlib.suppress(AssertionError):
        adjoint.unwrap(model)(**BATCH, use_cache=False)
    assert calls  # which it runs by itself


def test_windows_longer_than_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets the past beyond a window of 4,096 is found in a copy with a shorter window."""
    from adjoint.hf import cache

    model = make("MistralForCausalLM", sliding_window=4096)
    wrapped(copy.deepcopy(model))(**BATCH)
    narrower = property(lambda layer: layer.sliding_window - 2 * (layer.sliding_window < 100))
    monkeypatch.setattr(cache.CHUNK_LAYER_CLASSES[DynamicSlidingWindowLayer], "window", narrower)
    with one_line("windows turned down to 5"):
        wrapped(model)(**BATCH)
    assert model.config.sliding_window == 4096  # it was a copy's that was turned down


# -------------------------------------------------------------------------------------------------- the call

LEFT = torch.ones_like(IDS)
LEFT[1, :6] = 0
TEXT = IDS.clamp(min=3)
LEFT_LABELS = TEXT.clone()
LEFT_LABELS[1, :7] = -100
LEFT_PADDED = {"input_ids": TEXT, "labels": LEFT_LABELS, "attention_mask": LEFT}
RIGHT_POSITIONS = torch.arange(29).repeat(2, 1)
RIGHT_POSITIONS[1, -7:] = 1
INSIDE = BATCH["attention_mask"].clone()
INSIDE[0, 5] = 0
FOUR = torch.ones(2, 1, 29, 29).tril()
ENCODED = torch.zeros(1, 3, 8, 8)

FEW = NEW_IDS % 3
BLOCKS = torch.zeros_like(IDS)  # of images: longer than a chunk, across its edge, up to it, in a padded row
BLOCKS[:, 3:12], BLOCKS[0, 14:19], BLOCKS[0, 22:24], BLOCKS[1, 20:22] = 1, 1, 1, 1
IMAGES = "Gemma3ForConditionalGeneration"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "token_type_ids": (GPT2, {"token_type_ids": NEW_IDS}),
    "task_type_ids": ("ErnieForCausalLM", {"task_type_ids": FEW}),
    "shapes": ("RoCBertForCausalLM", {"input_shape_ids": FEW, "input_pronunciation_ids": FEW.flip(1)}),
    "token_type_ids that make masks": (IMAGES, {"token_type_ids": BLOCKS}),
    "token_type_ids that make masks, in documents": (
        IMAGES,
        {"token_type_ids": BLOCKS, **LEFT_PADDED},
    ),
    "int32": (LLAMA, {"input_ids": IDS.int(), "attention_mask": BATCH["attention_mask"].int()}),
    "positions of padding": (LLAMA, {"position_ids": RIGHT_POSITIONS}),
    "what is no more than the default": (LLAMA, {"output_attentions": False, "logits_to_keep": 0}),
    "padding at the left, rotary": (LLAMA, LEFT_PADDED),
    "padding at the left, Mamba-2 and attention": ("BambaForCausalLM", LEFT_PADDED),
    "padding at the left, with positions": (
        GPT2,
        {**LEFT_PADDED, "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)},
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CALLS)
def test_an_input_is_honoured(case: str) -> None:
    name, inputs = CALLS[case]
    if "make masks" in case and RELEASE < (5, 18):
        pytest.skip("masks of image tokens are made for whole sequences alone")
    assert_same_as_unwrapped(name, call=lambda model: loss_of(model, **inputs))


ROW = torch.arange(29)[None]
MASK = BATCH["attention_mask"]
CALLS_REFUSED: dict[str, dict[str, Any]] = {  # by what is said of them
    "position_ids and seq_idx describe different documents": {"position_ids": ROW, "seq_idx": ROW // 9},
    "token_type_ids lets tokens attend to later ones": {"token_type_ids": BLOCKS},
    "encoder_hidden_states is not an input that can be split into chunks": {"encoder_hidden_states": ENCODED},
    "set the labels that do not count to -100": {"ignore_index": 5},
    "logits_to_keep is not an input that can be split into chunks: Exact and Truncated give logits beside a "
    "loss under torch.no_grad()": {"logits_to_keep": 3},
    "an attention_mask (dict) is not supported": {"attention_mask": {"full_attention": None}},
    "an attention_mask (of 4 dimensions) is not supported": {"attention_mask": FOUR},
    "attention_mask has values other than 0 and 1": {"attention_mask": 2 * MASK},
    "zeros between ones": {"attention_mask": INSIDE},
    "labels include padded tokens, or the first token after padding: set labels to -100 where attention_mask "
    "is 0, and at the first token after padding": {
        "labels": TEXT.masked_fill(LEFT == 0, -100),
        "attention_mask": LEFT,
    },
    "labels include padded tokens": {"labels": IDS},
    "GPT2LMHeadModel counts padding in its tokens' positions: give position_ids": LEFT_PADDED,
    "labels must be whole numbers of": {"labels": IDS[:, :-1]},
    "position_ids must count up from 0 in each document": {"position_ids": ROW + 1},
    "position_ids must have input_ids' shape (2, 29), got (29,)": {"position_ids": ROW[0]},
    "seq_idx must have input_ids' shape (2, 29), got (3, 29)": {"seq_idx": torch.zeros(3, 29)},
    "cu_seq_lens_q must rise from 0 to the 58 tokens of the batch; got [0, 9": {
        "cu_seq_lens_q": torch.tensor([0, 9, 4, 58])
    },
    "cu_seq_lens_q must rise from 0 to the 58 tokens of the batch; got [0, 29]": {
        "cu_seq_lens_q": torch.tensor([0, 29])
    },
    "give exactly one of input_ids and inputs_embeds": {"inputs_embeds": torch.zeros(2, 29, 24)},
    "give exactly one of input_ids and": {"input_ids": None},
    "inputs_embeds must be (batch, seqlen, 24) floating point numbers, got torch.float32 (2, 29, 23)": {
        "input_ids": None,
        "inputs_embeds": torch.zeros(2, 29, 23),
    },
}
HRM = "HrmTextForCausalLM"
NO_LLAMA = {
    "tokens attend to later ones": HRM,
    "GPT2": GPT2,
    "encoder": GPT2,
    "dict": "Gemma3ForCausalLM",
}  # by a part of the message


@pytest.mark.sampled(3)
@pytest.mark.parametrize("message", CALLS_REFUSED)
def test_an_input_that_is_refused(message: str) -> None:
    model = wrapped(make(next((name for text, name in NO_LLAMA.items() if text in message), LLAMA)))
    with one_line(message):
        run(model, **CALLS_REFUSED[message])
    run(model)  # and is none the worse for it


def test_an_input_that_is_given_twice_or_has_no_name() -> None:
    model = wrapped(make(LLAMA))
    for module in (model, model.model):
        for args, keywords in (((IDS,), {"input_ids": NEW_IDS}), ([None] * 20, {})):
            with pytest.raises(TypeError, match=r"forward\(\)"):
                module(*args, **keywords)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [GPT2, "MambaForCausalLM", "Gemma4ForCausalLM", "BambaForCausalLM", "MixtralForCausalLM"]
)
def test_a_call_without_labels_in_training(name: str) -> None:
    """The causal LM finds hidden states in its backbone's output and None for everything else."""
    # with which the Trainer calls where it makes the loss itself
    inputs = {} if name == "MambaForCausalLM" else {"num_items_in_batch": torch.tensor(7)}
    assert_same_as_unwrapped(name, call=lambda model: model(IDS, **inputs).logits.square().mean())


def test_documents_that_the_model_by_itself_does_not_keep_apart() -> None:
    positions = torch.cat([torch.arange(11), torch.arange(18)])[None].expand(2, -1)
    for name, differs in (("BloomForCausalLM", None), ("BambaForCausalLM", True), (LLAMA, False)):
        model = wrapped(make(name))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                inputs = {"position_ids": positions, "attention_mask": None, "use_cache": False}
                if differs is None:
                    inputs.pop("position_ids")
                run(model, **inputs)
        said = [w for w in caught if "own forward lets documents attend" in str(w.message)]
        assert len(said) == bool(differs), name


def test_labels_that_are_all_ignored() -> None:
    with pytest.warns(UserWarning, match="every label is ignored"):
        assert run(wrapped(make(LLAMA)), labels=torch.full_like(IDS, -100)).item() == 0


# ------------------------------------------------------------------------------- between forward and backward


def other_settings(model: Any) -> None:
    model.config.use_cache = False
    model.model.layers[0].self_attn.scaling = 0.1


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "eval()": lambda model: model.eval(),
    "gradient_checkpointing_enable()": lambda model: model.gradient_checkpointing_enable(),
    "a hook removed": lambda model: model.handle.remove(),
    "settings": other_settings,
    "unwrap": adjoint.unwrap,
    "a weight frozen": lambda model: mlp_of(model).up_proj.weight.requires_grad_(False),
    "a frozen weight trained": lambda model: mlp_of(model).down_proj.weight.requires_grad_(True),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_the_backward_finds_the_model_as_it_was(case: str) -> None:
    def hook(model: Any) -> None:
        model.handle = model.model.layers[1].register_forward_hook(
            lambda module, inputs, output: output * 1.5
        )
        mlp_of(model).down_proj.weight.requires_grad_(False)

    def settings_of(model: Any) -> tuple[Any, ...]:
        trained = [p.requires_grad for p in model.parameters()]
        return model.training, model.config.use_cache, len(model.model.layers[1]._forward_hooks), trained

    def call(model: Any) -> Tensor:
        loss = model(**BATCH).loss
        training = model.training
        BETWEEN[case](model)
        after = settings_of(model)
        loss.backward()
        assert after == settings_of(model)
        assert training
        return loss.detach()

    assert_same_as_unwrapped(LLAMA, hook, call)


def test_dropout_is_as_it_was_after_eval() -> None:
    model, gradients = wrapped(make(GPT2, resid_pdrop=0.2)), []
    for change in (leave_unchanged, BETWEEN["eval()"]):
        model.train().zero_grad()
        torch.manual_seed(5)
        loss = model(**BATCH).loss
        change(model)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    first = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, first)
    adapted.add_adapter("b", LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    return adapted


def with_trainable_tokens(model: Any) -> Any:
    """PEFT's module for tokens of a tied table stands under two names."""
    from peft import LoraConfig, get_peft_model

    tokens = {"trainable_token_indices": [3, 4, 5], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **tokens))


def adapters_disabled(model: Any) -> Tensor:
    model.requires_grad_(True)
    with model.disable_adapter():
        return loss_of(model)


def adapters_in_turn(model: Any) -> Tensor:
    loss = torch.zeros(())
    for adapter in ("default", "b"):
        model.set_adapter(adapter)
        loss = loss + loss_of(model)
    return loss


def with_adapted_experts(model: Any) -> Any:
    """PEFT writes to the frozen weight in each forward, and puts it back."""
    from peft import LoraConfig, get_peft_model

    experts = {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []}
    return get_peft_model(model, LoraConfig(r=2, **experts, init_lora_weights=False))


def twice(model: Any) -> Tensor:
    """Backpropagated twice."""
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    return loss


MIXTRAL = "MixtralForCausalLM"
ADAPTERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor], dict[str, Any]]] = {
    "disable_adapter": (adapted, adapters_disabled, {}),
    "two adapters": (adapted, adapters_in_turn, {}),
    "trainable tokens": (with_trainable_tokens, loss_of, {"tie_word_embeddings": True}),
    "adapted experts": (with_adapted_experts, twice, {}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_are_as_they_were(case: str) -> None:
    pytest.importorskip("peft")
    change, call, options = ADAPTERS[case]
    assert_same_as_unwrapped(MIXTRAL if "experts" in case else LLAMA, change, call, **options)


def test_cpt_is_refused() -> None:
    """PEFT's CPT calls with labels, and makes its loss of the logits."""
    peft = pytest.importorskip("peft")
    config = {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}
    adapted = peft.get_peft_model(make(LLAMA), peft.CPTConfig(task_type="CAUSAL_LM", **config))
    with one_line("PEFT's CPT computes its loss from the logits"):
        run(wrapped(adapted))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Lily", {"target_modules": ["q_proj"]}, "takes the mean of its routers over all tokens"),
        ("Poly", {"target_modules": ["q_proj"], "r": 4, "n_tasks": 2}, "picks adapters by the row"),
        ("Shadow", {}, "runs its own network on the whole sequence first"),
    ],
)
def test_adapters_that_read_the_whole_batch(name: str, options: dict[str, Any], reason: str) -> None:
    peft = pytest.importorskip("peft")
    if (config := getattr(peft, f"{name}Config", None)) is None:
        pytest.skip(f"this PEFT has no {name}")
    adapted = wrapped(
        peft.get_peft_model(make(LLAMA, torch.float32), config(task_type="CAUSAL_LM", **options))
    )
    rows = {"task_ids": torch.zeros(len(IDS), dtype=torch.long)} if name == "Poly" else {}
    with one_line(f"PEFT's {name} {reason}"):
        adapted(**BATCH, **rows)


def test_x_lora_is_refused_although_its_layers_are_those_of_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(make(LLAMA, torch.float32), config).save_pretrained(tmp_path)
    model = make(LLAMA, torch.float32)
    model.config.use_cache = False
    mixed = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=24, adapters={"0": str(tmp_path)})
    with one_line("PEFT's X-LoRA weighs adapters by a first pass"):
        wrapped(peft.get_peft_model(model, mixed))(**BATCH)


@pytest.mark.parametrize("name", ["CorDA", "EVA", "LoRA-GA"])
def test_initial_weights_that_hooks_collect(name: str) -> None:
    """LoRA-GA divides gradients by the number of calls of its hooks, which is another one by chunks."""
    peft, corda = pytest.importorskip("peft"), pytest.importorskip("peft.tuners.lora.corda")
    model, method = make(LLAMA), name.lower().replace("-", "_")
    options = {
        "CorDA": lambda: {"corda_config": peft.tuners.lora.config.CordaConfig(corda_method="kpm")},
        "EVA": lambda: {"eva_config": peft.EvaConfig()},
        "LoRA-GA": lambda: {"lora_ga_config": peft.LoraGAConfig()},
    }[name]()
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=method, task_type="CAUSAL_LM", **options
    )
    adapted = peft.get_peft_model(model, config).double() if name == "EVA" else model
    run(wrapped(adapted))
    initialize = {
        "CorDA": lambda: corda.preprocess_corda(model, config, lambda: model(**BATCH)),
        "EVA": lambda: peft.initialize_lora_eva_weights(adapted, [BATCH], show_progress_bar=False),
        "LoRA-GA": lambda: peft.tuners.lora.preprocess_loraga(model, config, lambda: run(model)),
    }[name]
    with one_line(f"self_attn.q_proj: PEFT's {name} reads the whole sequence in hooks"):
        initialize()


def test_an_error_on_the_tokens_of_the_comparison_says_so() -> None:
    model = wrapped(make(LLAMA))
    scales = torch.ones(*IDS.shape, 1, dtype=torch.float64)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * scales)
    with pytest.raises(RuntimeError, match="The size of tensor") as caught:
        run(model)
    (note,) = caught.value.__notes__
    assert "13 tokens of one row on which gradients are compared" in note


def test_one_adapter_for_some_rows() -> None:
    peft = pytest.importorskip("peft")
    model = make(LLAMA)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"
    )
    adapted = wrapped(peft.get_peft_model(model, config).double())
    ids = IDS.clone()
    ids[:, 10], ids[:, 11] = 5, 6
    with one_line("aLoRA"):
        adapted(input_ids=ids, labels=ids)


def test_parameters_of_functional_call() -> None:
    """functional_call's parameters are not the model's own, and are gone by the time of the backward."""

    def call(model: Any) -> Tensor:
        others = {name: p * 1.1 for name, p in model.named_parameters()}
        return functional_call(model, others, (), BATCH).loss

    assert_same_as_unwrapped(LLAMA, call=call)


def constant_changed(model: Any, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, inputs: inputs["input_ids"].copy_(NEW_IDS), "modified by an inplace operation"),
        (lambda _, inputs: inputs["shift_labels"].copy_(NEW_IDS), "modified by an inplace operation"),
        (constant_changed, "model.embed_tokens.weight was changed in place between forward and backward"),
        (lambda model, _: other_head(model), "module lm_head was replaced between forward and backward"),
    ],
)
def test_what_cannot_be_undone_is_an_error(change: Callable[[Any, Any], None], message: str) -> None:
    model = wrapped(make(LLAMA))
    model.model.embed_tokens.weight.requires_grad_(False)
    inputs = {"input_ids": IDS.clone(), "shift_labels": IDS.clone()}
    loss = model(**inputs).loss
    change(model, inputs)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("seqlen", [13, 33])
def test_parameter_hooks_fire_once_and_not_without_a_gradient(seqlen: int) -> None:
    """Hooks of two kinds, on a parameter with a gradient and on one that no loss reaches."""
    model = make("LlamaForCausalLM")
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    mlp_of(model).unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    calls: list[tuple[str, Tensor | None]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append((name, gradient)))
    expected = loss_and_gradients(copy.deepcopy(model), **make_batch(seqlen))[1]
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    for _ in range(2):
        calls.clear()
        _, gradients = loss_and_gradients(model, **make_batch(seqlen))
        assert sorted(name for name, _ in calls) == sorted(expected)
        for name, gradient in calls:
            assert gradient is not None
            assert torch.equal(gradient, gradients[name])


@pytest.mark.parametrize("hidden", [False, True])
def test_a_second_derivative_is_refused(hidden: bool) -> None:
    model = wrapped(make(LLAMA))
    loss = model.model(IDS)[0].square().mean() if hidden else model(**BATCH).loss
    with pytest.raises(RuntimeError, match="is differentiable once"):
        loss.backward(create_graph=True)


def test_a_backward_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gradients, backward = wrapped(make("BambaForCausalLM")), [], Executor.backward
    for fails in (False, True):
        model.zero_grad()
        loss, tiles = model(**BATCH).loss, iter(range(100))

        def interrupted(self: Executor, tile: Any, tiles: Any = tiles) -> None:
            if next(tiles) == 2:
                raise KeyboardInterrupt
            backward(self, tile)

        if fails:
            monkeypatch.setattr(Executor, "backward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            monkeypatch.setattr(Executor, "backward", backward)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_hidden_states_leave_nothing_behind() -> None:
    def executors() -> set[int]:
        return {id(o) for o in gc.get_objects() if type(o) is Executor}

    model = wrapped(make(LLAMA))
    gc.collect()
    gc.disable()
    before = executors()  # graphs that other tests hold, such as a fixture's
    try:
        model.model(IDS)[0].sum().backward()
        assert executors() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_first_call(reentrant: bool) -> None:
    def call(model: Any) -> Tensor:
        x = torch.zeros(1, requires_grad=True)
        return checkpoint(lambda x: loss_of(model) + 0 * x.sum(), x, use_reentrant=reentrant)

    assert_same_as_unwrapped(LLAMA, call=call)


# ---------------------------------------------------------------------------------------------------- noise


class Noisy(nn.Module):
    """An MLP that adds random numbers in training, from one of several generators."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        self.generator, self.rng = torch.Generator(), np.random.default_rng(0)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        draw: dict[str, Callable[[], Any]] = {
            "NumPy's": lambda: torch.from_numpy(np.random.randn(*y.shape)),  # noqa: NPY002
            "Python's": lambda: random.random(),
            "Python's, the module's own": lambda: self.random.random(),
            "NumPy's, the module's own": lambda: torch.from_numpy(self.rng.standard_normal(y.shape)),
            "the module's own": lambda: torch.randn(y.shape, generator=self.generator),
            "in some chunks": lambda: torch.randn(y.shape) if float(x.detach().sum()) > 0 else 0,
            "somebody's": lambda: torch.randn(y.shape, generator=SOMEBODYS),
        }
        return y + 0.1 * draw[self.kind]() if self.training else y


SOMEBODYS = torch.Generator()


NOISE: dict[str, tuple[str, dict[str, Any], str]] = {
    **{kind: (LLAMA, {}, "none") for kind in ("NumPy's", "NumPy's, the module's own", "the module's own")},
    **{kind: (LLAMA, {}, "none") for kind in ("Python's", "Python's, the module's own")},
    "in some chunks": (LLAMA, {}, "none"),
    "attention's dropout": (LLAMA, {"attention_dropout": 0.2}, "none"),
    "dropout": (GPT2, {"resid_pdrop": 0.2}, "none"),
    "dropout, layers recomputed": (GPT2, {"resid_pdrop": 0.2}, "full"),
    "a router's": ("MixtralForCausalLM", {"router_jitter_noise": 0.2}, "none"),
    "a router's, layers recomputed": ("MixtralForCausalLM", {"router_jitter_noise": 0.2}, "full"),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("source", NOISE)
def test_noise_is_drawn_again(source: str) -> None:
    """The gradient is that of the loss that was returned, by finite differences under a fixed seed; a second
    backward pass gives it again."""
    name, options, recompute = NOISE[source]
    model = make(name, **options)
    noisy = Noisy(nn.Identity(), source)
    if not options:
        noisy.inner = mlp_of(model)
        model.model.layers[1].mlp = noisy
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, recompute=recompute))(**BATCH)

    def loss() -> Tensor:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        noisy.generator.manual_seed(5)
        noisy.rng = np.random.default_rng(5)
        random.seed(5)
        noisy.random.seed(5)
        return model(**BATCH).loss

    first = loss()
    first.backward(retain_graph=True)
    gradients = current_gradients(model)
    first.backward()
    assert all(torch.equal(p.grad, 2 * gradients[name]) for name, p in model.named_parameters())
    assert first.item() != model.eval()(**BATCH).loss.item()
    model.train()
    assert_slope(model, loss, gradients)


def test_noise_from_elsewhere_is_refused() -> None:
    """Noise of an unknown generator is refused on first use, and in the backward if it begins later."""
    model = make(LLAMA)
    quiet = wrapped(copy.deepcopy(model))
    model.model.layers[1].mlp = Noisy(mlp_of(model), "somebody's")
    with one_line(NOT_THE_WHOLE):
        run(wrapped(model))
    run(quiet)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, F, "silu", F.silu)
        silu = F.silu
        F.silu = lambda x, *a, **k: silu(x, *a, **k) + 0.1 * torch.randn(x.shape, generator=SOMEBODYS)
        with pytest.raises(RuntimeError, match="when they were computed again for the backward"):
            run(quiet)


# --------------------------------------------------------------------------------------------------- threads


def test_a_model_in_another_thread_is_left_alone() -> None:
    """A model in another thread runs transformers' own mask and attention from start to end.

    It begins while a chunk of the wrapped model runs, and continues after that."""
    plain, trained = make(LLAMA).eval(), wrapped(make(LLAMA))
    run(trained)
    ids, logits, begun, over = NEW_IDS[:1, :12], [], threading.Event(), threading.Event()
    with torch.no_grad():
        expected = plain(ids).logits[:, 6:]
        cache = transformers.DynamicCache(config=plain.config)
        plain(ids[:, :6], past_key_values=cache, use_cache=True)

    def go_on() -> None:
        with torch.no_grad():
            logits.append(plain(ids[:, 6:], past_key_values=cache, use_cache=True).logits)

    def wait(*_: Any) -> None:
        begun.set()
        assert over.wait(60)

    plain.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=go_on)

    def begin(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not begun.is_set() and chunks:
            thread.start()
            assert begun.wait(60)

    chunks: list[int] = []
    trained.model.layers[1].register_forward_pre_hook(begin)
    run(trained)  # the comparison on first use of a model with this hook
    chunks.append(1)
    run(trained)
    over.set()
    thread.join()
    assert torch.allclose(logits[0], expected, atol=1e-9)


def test_threads_that_train_one_model() -> None:
    model = wrapped(make(LLAMA))
    run(model)
    once = current_gradients(model)
    model.zero_grad()
    threads = [threading.Thread(target=run, args=(model,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(p.grad, 4 * once[n], rtol=1e-12) for n, p in model.named_parameters())


# ----------------------------------------------------------------------------------------- reasons and copies


class Own(Exception):
    """An error of the user's code."""


def failing(calls: Callable[[int], bool], error: type[Exception]) -> Callable[..., None]:
    """Return a hook that raises the error in the calls, counted from 0, for which `calls` is true."""
    numbers = itertools.count()

    def fail(*_: Any) -> None:
        if calls(next(numbers)):
            raise error("my own hook failed")

    return fail


@pytest.mark.parametrize(
    ("place", "error"),
    [("model.layers.1", RuntimeError), ("model.layers.1", ValueError), ("lm_head", Own)],
)
@pytest.mark.parametrize("successes", [0, 1, 2])
def test_an_error_of_ones_own_is_told_as_it_is(successes: int, place: str, error: type[Exception]) -> None:
    """Also where it first comes in chunks of the comparison on first use, after the whole has run."""
    model = wrapped(make(LLAMA))
    model.get_submodule(place).register_forward_hook(failing(lambda n: n >= successes, error))
    with pytest.raises(error) as caught:
        run(model)
    assert type(caught.value) is error and caught.value.args == ("my own hook failed",)
    assert caught.traceback[-1].name == "fail"
    notes = getattr(caught.value, "__notes__", [])
    if successes:
        assert "LlamaForCausalLM cannot be trained by chunks: it does not continue from the cache" in notes[0]


def test_an_error_of_ones_own_loss_is_told_as_it_is() -> None:
    """The batch has the label that it refuses, and the tokens of the comparison have not."""
    model, sum_of_tokens = wrapped(make(LLAMA)), make(LLAMA).loss_function

    def loss_function(labels: Tensor, **inputs: Any) -> Tensor:
        if bool((labels == VOCAB - 1).any()):
            raise KeyError("a class that is not listed")
        loss: Tensor = sum_of_tokens(labels=labels, **inputs)
        return loss

    model.loss_function = loss_function
    with pytest.raises(KeyError, match="a class that is not listed") as caught:
        model(IDS, labels=torch.full_like(IDS, VOCAB - 1))
    assert "its loss_function is not a sum over tokens" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [ValueError, Own])
def test_a_hook_that_ends_an_evaluation_by_an_error(error: type[Exception]) -> None:
    """The hook has the output of the whole row, as if not wrapped, although a chunk has ended before."""
    outputs: list[Tensor] = []

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        raise error

    for model in (make(LLAMA).eval(), wrapped(make(LLAMA).eval())):
        model.model.layers[1].register_forward_hook(stop)
        with torch.no_grad(), pytest.raises(error):
            model(IDS)
    assert torch.equal(outputs[-1], outputs[0])


def test_a_forward_on_the_instance_is_refused() -> None:
    """accelerate.prepare leaves a forward on the instance for mixed precision: it would run instead of
    ours."""
    model = make(LLAMA)
    for module in (model, model.model):
        module.forward = module.forward
        with one_line("wrap the model before accelerate.prepare"):
            wrapped(model)
        del module.forward
    wrapped(model)


def test_a_forward_on_the_instance_of_a_wrapped_model() -> None:
    """accelerate.prepare's forward calls the wrapped class's, by the method of the latest wrap."""
    model = wrapped(make(LLAMA))
    model.forward = model.forward
    expected = loss_and_gradients(make(LLAMA), **BATCH)
    for method in (adjoint.MiniSequence(), adjoint.Exact(chunk_size=5)):
        assert_exact(loss_and_gradients(adjoint.wrap(model, method), **BATCH), expected)
    adjoint.unwrap(model)
    assert_exact(loss_and_gradients(model, **BATCH), expected)


@pytest.mark.slow
def test_inside_a_compiled_model() -> None:
    """Only what is around the chunks is compiled."""
    model = make(LLAMA)
    compiled = torch.compile(wrapped(copy.deepcopy(model)), backend="aot_eager")
    losses = [run(each) for each in (compiled, model)]
    gradients = [current_gradients(each) for each in (compiled._orig_mod, model)]
    assert_exact(*zip(losses, gradients, strict=True))


@pytest.mark.slow
def test_a_compiled_step_may_read_the_logits() -> None:
    def step(model: Any) -> Tensor:
        out = model(**BATCH)
        loss = out.loss + out.logits.logsumexp(-1).mean()
        loss.backward()
        return loss.detach()

    models = [make("Mamba2ForCausalLM"), wrapped(make("Mamba2ForCausalLM"))]
    losses = [step(models[0]), torch.compile(step, backend="eager")(models[1])]
    assert_exact(*reversed([*zip(losses, map(current_gradients, models), strict=True)]))


def test_a_setting_that_changes_at_every_call_is_named() -> None:
    model = wrapped(make("MambaForCausalLM", num_hidden_layers=1))
    model.backbone.register_forward_pre_hook(lambda module, _: setattr(module, "count", module.count + 1))
    model.backbone.count, short = 0, {name: value[:, :4] for name, value in BATCH.items()}
    for _ in range(16):
        model(**short)
    with pytest.warns(UserWarning, match="backbone: count was changed, and something is at every call"):
        model(**short)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Any) -> None:
    """transformers leaves what is missing at random, with a warning among others."""
    from safetensors.torch import load_file, save_file

    from adjoint.train.pretrained import load

    make(LLAMA, torch.float32).save_pretrained(tmp_path)
    load(str(tmp_path), adjoint.Exact())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with one_line("1 weights of LlamaForCausalLM are missing, such as model.layers.1.mlp.up_proj.weight"):
        load(str(tmp_path), adjoint.Exact())
