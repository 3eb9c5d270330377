"""Exact against plain backpropagation: gradients, states, memory, and the manners of any module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch
from adjoint.engine import budget
from adjoint.engine.autocast import CastWeights
from adjoint.errors import UserError
from adjoint.layers import WINDOWED
from adjoint.methods import RECOMPUTE
from adjoint.plan.planned_stack import StackModel
from adjoint.plan.stage_memory import Conditions, count, counting, example
from adjoint.stack import StackCall, chunked, structure
from tests.fuzz import stacks
from tests.fuzz.oracle import same
from tests.model_helpers import (
    SIZES,
    UNWINDOWED,
    VARIANTS,
    assert_same,
    current_gradients,
    error,
    gradients,
    make_ids,
    make_model,
    relative,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KEEP = ("edges", "inputs", "offload")
CHUNKS = {2: (1, 2, 5), 11: (1,), 63: (8, 62, 64), 257: (64, 100, None), 1000: (333, 512, None)}
EVERY_METHOD = [Backprop(), Backprop(checkpoint=True), *(Exact(chunk_size=8, keep=keep) for keep in KEEP)]


def flat(states: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [s for state in states for s in state]


def check(methods: list[Any], variant: str, **case: Any) -> None:
    """Losses, states, and all gradients of a case of the fuzzer are those of the first method."""
    case = {"seed": 0, "config": {**SIZES, **(VARIANTS | UNWINDOWED)[variant]}, **case}
    model = stacks.make(case).double()
    expected, *found = (stacks.run(case, model, method, torch.float64)[0] for method in methods)
    for got in found:
        same(got, expected)


@pytest.mark.sampled(59)
@pytest.mark.parametrize("seqlen", CHUNKS)
@pytest.mark.parametrize("batch, before", [(1, None), (3, 3)])
@pytest.mark.parametrize("variant", [*VARIANTS, *UNWINDOWED])
def test_gradients_equal_backprop(variant: str, batch: int, before: int | None, seqlen: int) -> None:
    """Of a loss of labels and of the final states, from states and from none."""
    states = {} if before is None else {"states": 1.0, "before": before}
    methods = [*EVERY_METHOD[:2], *(Exact(chunk, keep) for chunk in CHUNKS[seqlen] for keep in KEEP)]
    check(methods, variant, batch=batch, seqlen=seqlen, ignored=0.1, final=True, **states)


@pytest.mark.parametrize("variant", ["hybrid", "mixed, untied", "mamba, MLP, untied"])
def test_final_states_alone_carry_gradients(variant: str) -> None:
    """To the initial ones and to parameters."""
    check(EVERY_METHOD, variant, batch=3, seqlen=29, states=1.0, before=3, final="alone")


def test_gradient_is_the_derivative_of_the_loss() -> None:
    """Finite differences along a random direction, so that a mistake shared with Backprop would show."""
    for variant in (*VARIANTS, *UNWINDOWED):
        model, input_ids = make_model(variant), make_ids(2, 23)
        _, found = gradients(model, input_ids, input_ids, Exact(chunk_size=7))
        directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        losses = []
        for step in (1e-7, -2e-7):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(directions[name], alpha=step)
                losses.append(model(input_ids, labels=input_ids).loss)
        slope = (losses[0] - losses[1]) / 2e-7
        assert relative(sum((found[name] * directions[name]).sum() for name in found), slope) <= 1e-7, variant


def test_ignored_labels_at_chunk_edges_and_a_whole_chunk_ignored() -> None:
    model, input_ids = make_model("mixed, untied"), make_ids(2, 61)
    labels = input_ids.clone()
    labels[0, [7, 8, 9, 16, 23, 24, 60]] = -100
    labels[1, 30:44] = -100
    labels[:, 48:57] = -100
    by_hand = torch.nn.functional.cross_entropy(
        model(input_ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    (_, expected), *found = (gradients(model, input_ids, labels, method) for method in EVERY_METHOD)
    for loss, got in found:
        assert relative(loss, by_hand.detach()) <= 1e-13
        assert_same(got, expected)


@pytest.mark.parametrize("method", EVERY_METHOD, ids=str)
def test_all_labels_ignored_is_zero_with_a_warning(method: object) -> None:
    model, input_ids = make_model("mamba"), make_ids(2, 20)
    with pytest.warns(UserWarning, match="every label is ignored"):
        loss, got = gradients(model, input_ids, torch.full_like(input_ids, -100), method)
    assert loss == 0
    assert all((g == 0).all() for g in got.values())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("variant, cut", [("hybrid", 37), ("mixed, untied", 37), ("mixed, untied", 2)])
def test_two_calls_with_the_state_passed_equal_one(variant: str, cut: int) -> None:
    """Of the mean loss of both pieces; no call predicts the second piece's first token."""
    model, ids = make_model(variant), make_ids(2, 61)
    labels = ids.clone()
    labels[:, cut] = -100
    loss, expected = gradients(model, ids, labels, Backprop())
    plain, by_edges, by_inputs = Backprop(), Exact(8), Exact(9, keep="inputs")
    for methods in ((plain, by_edges), (by_edges, by_inputs), (by_inputs, plain)):
        model.zero_grad()
        first = model(ids[:, :cut], labels=labels[:, :cut], method=methods[0], return_state=True)
        second = model(ids[:, cut:], labels=labels[:, cut:], method=methods[1], state=first.state)
        total = (first.loss * (cut - 1) + second.loss * (60 - cut)) / 59
        total.backward()
        assert relative(total.detach(), loss) <= 1e-13
        assert_same(current_gradients(model), expected)


@pytest.mark.parametrize("chunk_size", [8, 32])
def test_a_returned_state_is_no_way_into_the_backward(chunk_size: int) -> None:
    """Recurrent states are copies. The backward reads keys and values, and tells if they were modified."""
    model, ids = make_model("hybrid"), make_ids(2, 30)
    _, expected = gradients(model, ids, ids, Exact(chunk_size))
    for k, block in enumerate(model.blocks()):
        model.zero_grad()
        out = model(ids, labels=ids, method=Exact(chunk_size), return_state=True)
        with torch.no_grad():
            for tensor in out.state[k]:
                tensor.mul_(3)
        if any(dim is not None for dim in block.mixer.grows):
            with pytest.raises(UserError, match="were modified in place"):
                out.loss.backward()
        else:
            out.loss.backward()
            assert_same(current_gradients(model), expected)


# -------------------------------------------------------------------------------------- like any other module


@pytest.mark.parametrize("keep", KEEP)
def test_a_graph_is_there_once_or_as_often_as_it_is_retained(keep: str) -> None:
    method = Exact(chunk_size=8, keep=keep)
    check([Backprop(), method], "mixed, untied", batch=2, seqlen=30, again=True)
    model, ids = make_model(), make_ids(2, 30)
    loss = model(ids, labels=ids, method=method).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradient_hooks_run_and_may_change_the_gradient() -> None:
    model, ids = make_model("mamba"), make_ids(2, 30)
    _, expected = gradients(model, ids, ids, Backprop())
    model.zero_grad()
    accumulated: list[str] = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g: 2 * g)
        p.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.append(name))
    model(ids, labels=ids, method=Exact(chunk_size=8)).loss.backward()
    assert sorted(accumulated) == sorted(expected)  # once each, the tied weight too
    assert_same(current_gradients(model), {name: 2 * g for name, g in expected.items()})


def test_gradients_of_some_parameters_by_autograd_grad() -> None:
    model, ids = make_model("mamba"), make_ids(2, 30)
    _, expected = gradients(model, ids, ids, Backprop())
    names = ["layers.0.mixer.A_log", "embedding.weight"]
    loss = model(ids, labels=ids, method=Exact(chunk_size=8)).loss
    asked = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    assert_same(dict(zip(names, asked, strict=True)), {name: expected[name] for name in names})


@pytest.mark.parametrize("keep", KEEP)
def test_without_gradients_there_is_no_graph_and_nothing_is_kept(keep: str) -> None:
    model, ids = make_model("mamba"), make_ids(2, 30)
    expected, _ = gradients(model, ids, ids, Backprop())
    with torch.no_grad():
        out = model(ids, labels=ids, method=Exact(chunk_size=8, keep=keep), return_state=True)
    assert relative(out.loss, expected) <= 1e-13
    assert not out.loss.requires_grad
    assert not any(s.requires_grad for s in flat(out.state))
    model.requires_grad_(False)
    assert not model(ids, labels=ids, method=Exact(chunk_size=8, keep=keep)).loss.requires_grad


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("seqlen", [6, 30])
def test_parameters_changed_before_the_backward_are_noticed(keep: str, seqlen: int) -> None:
    for name in ("embedding.weight", "layers.0.mixer.A_log", "layers.1.norm.weight", "norm_f.weight"):
        model, ids = make_model("mamba"), make_ids(1, seqlen)
        loss = model(ids, labels=ids, method=Exact(chunk_size=8, keep=keep)).loss
        with torch.no_grad():
            model.get_parameter(name).mul_(1.01)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    "method", [Exact(chunk_size=8), Truncated(4, chunk_size=4), LayerLocal(chunk_size=8)]
)
def test_parameters_of_functional_call(method: Any) -> None:
    """They are others than the model's own, and gone by the backward."""
    model, ids = make_model("mamba"), make_ids(2, 20)
    others = {name: p * 1.1 for name, p in model.named_parameters()}
    functional_call(model, others, (ids,), {"labels": ids, "method": method}).loss.backward()
    got = current_gradients(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    expected = gradients(model, ids, ids, method)[1]
    assert_same(got, {name: 1.1 * gradient for name, gradient in expected.items()})


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def embedding(kind: type = nn.Embedding, **options: Any) -> Callable[[Stack], None]:
    def change(model: Stack) -> None:
        table = kind(*model.embedding.weight.shape, **options).double()
        table.weight.data.copy_(model.embedding.weight.data)
        model.embedding = table

    return change


def hooked(model: Stack) -> None:
    def double(module: Any, given: Any, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    for module in (model.embedding, model.layers[0], model.layers[1].mixer.in_proj, model.norm_f):
        module.register_forward_hook(double)


def one_layer_twice(model: Stack) -> None:
    model.layers[1] = model.layers[0]


def reparametrised(model: Stack) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0].mixer.in_proj)


def steps_of(model: Stack) -> Any:
    return model.layers[0].mixer.dt_proj


def with_steps_hooked(model: Stack) -> None:
    steps_of(model).register_forward_hook(lambda module, args, output: 2 * output)


def with_adapters(model: Stack) -> None:
    peft = pytest.importorskip("peft")
    modules = ["embedding", "in_proj", "x_proj", "dt_proj", "out_proj"]
    torch.manual_seed(1)
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False), model
    ).double()


def in_sequence(model: Stack) -> None:
    """A model whose table is replaced by a module of several, as factorised embeddings are."""
    torch.manual_seed(1)
    model.embedding = nn.Sequential(nn.Embedding(17, 3), nn.Linear(3, 12)).double()


CHANGES = [
    embedding(padding_idx=3),
    embedding(sparse=True),
    embedding(max_norm=0.5),
    embedding(Scaled),
    hooked,
    one_layer_twice,
]
CHANGES += [with_steps_hooked, with_adapters, in_sequence]


@pytest.mark.parametrize("beside_the_loss", [True, False])
def test_a_loss_of_an_activation_that_a_hook_has_kept_is_refused(beside_the_loss: bool) -> None:
    """The graph is that of one chunk: backward alone, it would end at leaves that nobody reads."""
    model, activations = Stack(StackConfig(vocab_size=61, d_model=16, n_layer=2)), list[torch.Tensor]()
    model.layers[1].register_forward_hook(lambda module, inputs, output: activations.append(output[0]))
    ids = torch.randint(0, 61, (1, 40))
    out = model(ids, labels=ids, method=Exact(16))
    loss = activations[-1].square().mean() + (out.loss if beside_the_loss else 0)
    with pytest.raises(UserError, match="an activation that a forward hook has kept; chunks are computed"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    if beside_the_loss:
        out.loss.backward()  # the step itself is as it was
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("change", [*CHANGES, reparametrised])
def test_what_users_do_to_a_stack(change: Callable[[Stack], None]) -> None:
    ids, found = make_ids(2, 20), []
    for method in (Exact(chunk_size=8), Backprop()):
        model = make_model("mamba, MLP, untied")
        change(model)
        model(ids, labels=ids, method=method).loss.backward()
        found.append({name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None})
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert_same(*found)


@pytest.mark.parametrize("method", [None, Exact(chunk_size=8)])
def test_steps_are_those_of_the_module_in_place_of_dt_proj(method: Any) -> None:
    """The weight of `dt_proj` may be read alone only if its module's forward adds nothing."""
    ids, losses = make_ids(2, 20), []
    for change in (with_steps_hooked, lambda model: [p.data.mul_(2) for p in steps_of(model).parameters()]):
        model = make_model("mamba")
        change(model)
        losses.append(model(ids, labels=ids, method=method).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] != pytest.approx(
        make_model("mamba")(ids, labels=ids, method=method).loss.item(), rel=1e-6
    )


class TwiceTheLoss(Stack):
    """A stack with twice its loss, made by the method that callers use."""

    def head_loss(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().head_loss(*args, **options)


class TwiceTheLossInside(Stack):
    """A stack with twice its loss, made by the method that has the weights in place."""

    def _head_loss(self, *args: Any) -> Tensor:
        return 2 * super()._head_loss(*args)


class LogitPenalty(Stack):
    """A stack with a term of its logits, which reads the head's weight from the module."""

    def head_loss(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().head_loss(y, *args, **options) + 0.1 * self.logits(y).logsumexp(-1).square().sum()


@pytest.mark.parametrize("options", [{}, {"segment_layers": 1}, {"keep": "inputs", "memory": "1GB"}], ids=str)
@pytest.mark.parametrize("kind", [TwiceTheLoss, TwiceTheLossInside, LogitPenalty])
def test_a_subclass_has_a_loss_of_its_own(kind: type[Stack], options: dict[str, Any]) -> None:
    """Each chunk has it once, forward and backward, and its weight's gradient has the subclass's factor."""
    ids, model = make_ids(2, 29), make_model("mamba, MLP, untied")
    model.__class__ = kind
    results = []
    for method in (Exact(8, **options), None):
        model.zero_grad()
        loss = model(ids, ids, method).loss
        loss.backward()
        results.append({"loss": loss.detach(), **current_gradients(model)})
    assert_same(*results)


def biased_head(model: Stack) -> None:
    model.lm_head = nn.Linear(12, 17)


def hooked_head(model: Stack) -> None:
    model.lm_head.register_forward_hook(print)


def other_norm(model: Stack) -> None:
    model.norm_f = nn.LayerNorm(12)


def parametrized_norm(model: Stack) -> None:
    nn.utils.parametrizations.weight_norm(model.norm_f)


def dropout(model: Stack) -> None:
    mixer = model.layers[0].mixer
    mixer.out_proj = nn.Sequential(mixer.out_proj, nn.Dropout())


def tied_with_max_norm(model: Stack) -> None:
    model.embedding.max_norm = 0.5
    model.lm_head.weight = model.embedding.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (embedding(scale_grad_by_freq=True), "scale_grad_by_freq"),
        (tied_with_max_norm, "max_norm rescales its weight in the forward"),
        (biased_head, "lm_head must be an nn.Linear without bias"),
        (hooked_head, "lm_head must be an nn.Linear without bias"),
        (other_norm, "norm_f must have a weight and no other"),
        (parametrized_norm, "norm_f must have a weight and no other"),
        (dropout, "Dropout cannot be trained by chunks"),
    ],
)
def test_what_is_refused_of_a_stack(change: Callable[[Stack], Any], message: str) -> None:
    model, ids = make_model("mamba, MLP, untied"), make_ids(2, 20)
    change(model)
    with pytest.raises(ValueError, match=message) as raised:
        model.double()(ids, labels=ids, method=Exact(chunk_size=8)).loss.backward()
    assert "\n" not in str(raised.value)


def test_no_chunk_looks_at_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many layers would take the host milliseconds for it, in each chunk."""
    model, ids, calls = make_model("mamba"), make_ids(1, 40), [0]
    weights_type = chunked.weights_type

    def counted(module: nn.Module) -> Any:
        calls[0] += 1
        return weights_type(module)

    for module in (chunked, structure):
        monkeypatch.setattr(module, "weights_type", counted)
    counts = []
    for chunk_size in (20, 4):
        calls[0] = 0
        model(ids, labels=ids, method=Exact(chunk_size)).loss.backward()
        counts.append(calls[0])
    assert counts[0] == counts[1] > 0


def test_second_derivatives_are_refused() -> None:
    """Before a first one is taken for a constant."""
    model, ids = make_model("mamba"), make_ids(1, 20)
    for method in (Exact(chunk_size=8), Backprop()):
        loss = model(ids, labels=ids, method=method).loss
        with pytest.raises(RuntimeError, match="is differentiable once"):
            torch.autograd.grad(loss, [model.norm_f.weight], create_graph=True)


def test_a_hook_that_reads_other_gradients_is_refused() -> None:
    """DDP's, on one parameter, would average delayed gradients of others before they are there."""
    model, ids = make_model("mamba").float(), make_ids(1, 20)
    delayed = [("norm_f.weight", model.norm_f.weight)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options: dict[str, Any] = {"param_to_hook_all_reduce": model.embedding.weight}
        ddp = nn.parallel.DistributedDataParallel(model, delay_all_reduce_named_params=delayed, **options)
        loss = ddp(ids, labels=ids, method=Exact(8)).loss
        with pytest.raises(UserError, match="by chunks all gradients come at once: leave both out"):
            loss.backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("hidden", [False, True])
def test_batched_cotangents_are_refused(hidden: bool) -> None:
    model, ids = make_model("mamba"), make_ids(1, 20)
    out = model(ids, labels=None if hidden else ids, method=Exact(8), return_hidden_states=hidden)
    result = out.hidden_states if hidden else out.loss
    cotangents, weight = torch.ones(2, *result.shape).to(result), model.layers[0].mixer.out_proj.weight
    with pytest.raises(UserError, match="is_grads_batched=True does not work"):
        torch.autograd.grad(result, [weight], cotangents, is_grads_batched=True, retain_graph=True)
    assert torch.autograd.grad(result, [weight], cotangents[0])[0].any()


# -------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gradients(variant: str) -> None:
    model, ids = make_model(variant, dtype=torch.float32), make_ids(2, 257)
    exact = gradients(model, ids, ids, Exact(chunk_size=50))[1]
    expected = gradients(model.double(), ids, ids, Backprop())[1]
    assert error(exact, expected) <= 1e-5


@pytest.mark.sampled(47)
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16 weights"])
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("mixer", WINDOWED)
def test_bfloat16_error_is_no_larger_than_backprop_s(mixer: str, keep: str, precision: str) -> None:
    """Of the same draws in pairs: the mean difference is not above zero by three standard errors."""
    case = {"config": {**SIZES, "mixer": mixer, "d_model": 32, "headdim": 16, "d_state": 8}, "batch": 2}
    case |= {
        "precision": precision,
        "seqlen": 100,
        "method": {"name": "Exact", "chunk_size": 10, "keep": keep},
    }
    ours, theirs = torch.tensor([stacks.errors({**case, "seed": seed}) for seed in range(6)]).T
    assert theirs.max() < 0.2  # else the comparison says nothing
    assert ours.sum() > 0.5 * theirs.sum()  # else it ran in float32
    assert (ours - theirs).mean() <= 3 * (ours - theirs).std() / 6**0.5, (ours, theirs)


# ----------------------------------------------------------------------------------------------------- memory

PEAKS = """
import torch
from adjoint import Backprop, Exact, Stack, StackConfig

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def step(method, seqlen):
    model(ids[:, :seqlen], labels=ids[:, :seqlen], method=method).loss.backward()

torch.set_num_threads(1)
model = Stack(StackConfig(vocab_size=64, d_model=64, n_layer=2, mixer="mamba", d_state=16, headdim=32))
ids = torch.randint(64, (1, 32768))
step(Exact(512), 64)
baseline = peak()
for method, seqlen in ((Exact(1024), 4096), (Exact(1024), 32768), (Backprop(), 8192)):
    step(method, seqlen)
    print(peak() - baseline)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_hardly_grows_with_the_sequence() -> None:
    # glibc then gives blocks from 64 KiB on back at once: the peak is what is alive, not how the heap broke
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PEAKS],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=environment,
    )
    short, long, backprop = (int(line) / 1024 for line in done.stdout.split())
    # ids, labels and states at edges are 44 bytes a token, backpropagation's tape 8,600
    growth = (long - short) / (32768 - 4096)
    assert 50 * growth < backprop / 8192, f"{short:.1f} MiB at 4,096 tokens, {long:.1f} at 32,768"
    assert backprop > 3 * long, f"{long:.1f} MiB, {backprop:.1f} by backpropagation: nothing measured"


def test_the_backward_imports_nothing():
    """`torch.autograd.grad` with cotangents imports SymPy: tens of MiB that no tile needs."""
    code = """
import sys, torch, adjoint
model = adjoint.Stack(adjoint.StackConfig(vocab_size=7, d_model=8, n_layer=1))
ids = torch.zeros(1, 9, dtype=torch.int64)
model(ids, labels=ids, method=adjoint.Backprop()).loss.backward()
before = set(sys.modules)
for method in (adjoint.Exact(4), adjoint.Truncated(3, 4)):
    model(ids, labels=ids, method=method).loss.backward()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def tapes_of(
    monkeypatch: pytest.MonkeyPatch, model: Any, ids: Tensor, expected: dict[str, Tensor], memory: Any
) -> int:
    """Return how many chunks of 64 tokens a step left linearised; its gradients are checked."""
    taken: list[tuple[int, int]] = []
    divide = budget.tapes_and_states
    monkeypatch.setattr(budget, "tapes_and_states", lambda *a: taken.append(divide(*a)) or taken[-1])
    _, got = gradients(model, ids, ids, Exact(64, memory=memory))
    assert_same(got, expected)
    return taken[0][0]


def test_a_memory_budget_is_filled_with_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None fits: one, as without a budget; room for all: all; a chunk more for each tape's bytes more."""
    model, ids = make_model("mixed, untied"), make_ids(2, 1000)
    _, expected = gradients(model, ids, ids, Backprop())
    for memory, tapes in (("1kB", 1), ("8GB", 16), ("auto", 16)):
        assert tapes_of(monkeypatch, model, ids, expected, memory) == tapes
    gradients(model, ids, ids, Exact(64, memory="8GB", recompute="full"))  # measured by itself: it takes less
    measured, less = budget.measurements_of(list(model.parameters())).values()
    assert less.tape < 0.5 * measured.tape
    fixed, share = budget.RESERVED_CPU
    edges = sum(s.numel() for state in model.initial_state(2) for s in state) * 8 * 16
    for tapes in (1, 5, 11):
        room = fixed + (1 + share) * (1.15 * edges + measured.backward_peak + (tapes + 0.5) * measured.tape)
        assert abs(tapes_of(monkeypatch, model, ids, expected, int(room)) - tapes) <= 1


def test_with_room_for_it_the_sequence_is_one_chunk() -> None:
    """Where nobody gave a chunk size: then there is nothing that backpropagation would do less."""
    model, ids = make_model("mamba"), make_ids(1, 3000)
    chunks = []
    for method in (Exact(memory="8GB"), Exact(memory="1MB"), Exact(1000, memory="8GB")):
        spec = method.engine_spec(3000, 1408)
        states = model.stage_states(model.initial_state(1))
        batch = Batch(ids, ids, 3000, states=states)
        steps = model.step(StackCall(batch, method), batch, spec)
        steps.loss()
        chunks.append((steps.executor.grid.chunks, min(steps.tapes, steps.executor.grid.chunks)))
    assert chunks == [(1, 1), (3, 1), (3, 3)]
    _, expected = gradients(model, ids, ids, Backprop())
    _, got = gradients(model, ids, ids, Exact(memory="8GB"))
    assert_same(got, expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_tile_computes_again_changes_no_bit(variant: str) -> None:
    model, ids = make_model(variant, torch.float32), make_ids(2, 257)
    _, expected = gradients(model, ids, ids, Exact(64))
    for recompute in ("selective", "full"):
        _, got = gradients(model, ids, ids, Exact(64, recompute=recompute))
        assert all(torch.equal(got[name], expected[name]) for name in expected), recompute


def test_a_tile_that_computes_more_again_keeps_less() -> None:
    """Of mamba at real proportions, beside its input: all; its output, in_proj's and the scan's results; its
    output."""
    config = StackConfig(d_model=256, n_layer=1, mixer="mamba")
    model, kept = StackModel(config), {}
    for how in RECOMPUTE:
        on = Conditions(1, 1024, 0, "float32", "cpu", how)
        mode, stage, initial = model.stage(0, on)
        with counting(on, mode) as live:
            counted = count(example(stage, initial, on, 256), live)
        kept[how] = counted.saved - counted.new_state  # its output, but no state
    states = 1024 // 32 * config.d_inner * 16 * 4
    stream, inner = 1024 * 256 * 4, 1024 * 512 * 4
    assert kept["none"] > 1.5 * kept["selective"]
    # beside them x_proj's narrow results
    assert 0 <= kept["selective"] - (stream + 3 * inner + states) <= 0.2 * inner
    assert 0 <= kept["full"] - stream <= 0.1 * stream


def test_under_autocast_weights_are_cast_once_a_step() -> None:
    """No tile but the first casts a weight; the gradients are those of casts in every tile, to the bit."""

    class MadeNarrow(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[tuple[int, ...]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
                self.made.append(tuple(out.shape))
            if func is torch.ops.aten._foreach_copy_.default:
                self.made += [tuple(t.shape) for t in args[0] if t.dtype == torch.bfloat16]
            return out

    model, ids = make_model("mamba", torch.float32, d_model=40), make_ids(1, 60)
    widths = {tuple(p.shape) for layer in model.layers for p in layer.parameters() if p.dim() == 2}
    with torch.autocast("cpu", torch.bfloat16), MadeNarrow() as seen:
        _, got = gradients(model, ids, ids, Exact(10))
        made = [shape for shape in seen.made if shape in widths]
    linear = [m for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert len(made) == len(linear)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(CastWeights, "cast_weights", lambda self, module, device: {})
        _, expected = gradients(model, ids, ids, Exact(10))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_segments_drop_their_casts_in_the_backward() -> None:
    """No layer above holds its weights in half precision while a layer's gradients are made."""
    model, ids = make_model("mamba", torch.float32, d_model=40, n_layer=4), make_ids(1, 60)
    casts_left: list[int] = []
    cast_weights = CastWeights.cast_weights
    caches: dict[CastWeights, None] = {}

    def noted(self: CastWeights, module: Any, device: torch.device) -> Any:
        caches[self] = None
        casts = cast_weights(self, module, device)
        casts_left.append(sum(cache.nbytes > 0 for cache in caches))
        return casts

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(CastWeights, "cast_weights", noted)
        gradients(model, ids, ids, Exact(10, segment_layers=1))
    assert max(casts_left) == 4
    assert casts_left[-1] == 1
    assert not any(cache.nbytes for cache in caches)
