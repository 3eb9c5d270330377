"""A `Stack` split by tensor and sequence parallelism over gloo ranks, against one process."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import adjoint
from adjoint.errors import UserError
from tests.model_helpers import assert_same
from tests.ranks import on_ranks

pytestmark = pytest.mark.xdist_group("tensor_parallel")
SIZES: dict[str, Any] = {"vocab_size": 19, "d_model": 16, "n_layer": 2, "headdim": 8, "d_state": 8}
EXACT = adjoint.Exact(chunk_size=8)
MAMBA2 = adjoint.StackConfig(**SIZES, mixer="mamba2")


class RunningMean(torch.nn.Module):
    """A user's own mixer: y_t = W (mean of x up to t). State: number of tokens and their sum."""

    def __init__(self, config: adjoint.StackConfig) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(config.d_model, config.d_model)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        width = self.linear.in_features + 1
        return (torch.zeros(batch, width, dtype=dtype, device=device),)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        ones = torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)
        sums = state[0].to(x.dtype)[:, None] + ones.cumsum(1)
        return self.linear(sums[..., 1:] / sums[..., :1]), (sums[:, -1].clone(),)


def config(mixer: str, **sizes: Any) -> adjoint.StackConfig:
    return adjoint.StackConfig(**{**SIZES, "mixer": mixer, **sizes})


CASES = {
    "mamba": config("mamba", d_intermediate=24, bias=True),
    "mamba2": config("mamba2", tie_embeddings=False),
    "mamba2-groups": config("mamba2", ngroups=2, bias=True, conv_bias=False),
    "mamba3": config("mamba3", ngroups=2, is_outproj_norm=True, bias=True),
    "mamba3-mimo": config("mamba3", is_mimo=True, mimo_rank=3),
    "attention": config("attention", num_attention_heads=4, num_key_value_heads=2, attention_d_conv=3),
    "multi-query": config("attention", num_attention_heads=4, num_key_value_heads=1, attention_bias=True),
    "gated_deltanet": config("gated_deltanet", linear_num_key_heads=1, d_intermediate=8),
    "kda": config("kda", bias=True),
    "rwkv7": config("rwkv7"),
    "hyena_se": config("hyena_se", hyena_groups=8, bias=True),
    "hyena_mr": config("hyena_mr", hyena_groups=4, hyena_mr_len=20, d_conv=3),
    "hyena_li": config("hyena_li", d_intermediate=8, conv_bias=False),
    "diagonal": config("diagonal"),
    "scalar": config("scalar"),
    "dense": config("dense"),
    "own": config("tests.test_tensor_parallel:RunningMean", d_intermediate=8),
}


def results(
    model: adjoint.Stack, method: Any, seqlen: int, gather: Callable[[str, Tensor], Tensor], **options: Any
) -> dict[str, Tensor]:
    """Return loss and gradients of a call; gather: makes a part of a gradient whole."""
    generator = torch.Generator().manual_seed(seqlen)
    ids = torch.randint(19, (2, seqlen), generator=generator)
    model.zero_grad()
    output = model(ids, labels=ids.masked_fill(ids % 7 == 3, -100), method=method, **options)
    output.loss.backward()
    gradients = {name: gather(name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, "loss": output.loss.detach()}


def make(case: str) -> tuple[adjoint.Stack, adjoint.Stack]:
    """Return the same stack in float64 twice, the second one split over the ranks."""
    plain = adjoint.Stack(CASES[case], seed=1).double()
    split = adjoint.Stack(CASES[case], seed=1 + dist.get_rank()).double()  # the first rank's weights count
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), split.parameters(), strict=True):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            if dist.get_rank() == 0:
                other.copy_(parameter)
    split.parallelize(dist.group.WORLD)
    return plain, split


METHODS: list[dict[str, Any]] = [
    {"name": "Exact", "chunk_size": 8, "recompute": "selective"},
    {"name": "Exact", "chunk_size": 8, "recompute": "full"},
    {"name": "Exact", "chunk_size": 8, "keep": "inputs"},
    {"name": "Exact", "chunk_size": 4, "checkpoints": 2},
    {"name": "LayerLocal", "chunk_size": 8},
    {"name": "Backprop"},
    {"name": "Backprop", "checkpoint": True},
]
WINDOWS: list[dict[str, Any]] = [
    {"name": "Truncated", "window": 5, "chunk_size": 8},
    {"name": "Truncated", "window": "auto", "chunk_size": 8},
    {"name": "LayerLocal", "window": 5, "chunk_size": 8},
]
LLAMA, DEFAULT = "LlamaForCausalLM", {"name": "Exact", "chunk_size": 8}
WRAPPED = [{"name": "Exact", "chunk_size": 8, "recompute": "full"}, {"name": "Exact", "memory": "1GB"}]
WRAPPED += [{"name": "MiniSequence"}]
QUICK = ("mamba", "multi-query")


def cases_of_the_fuzzer() -> Iterator[Any]:
    """Each mixer on two and four ranks, also with fewer heads, groups or tokens than ranks; each method."""
    frozen = {"config": CASES["mamba"], "frozen": 0.4, "seqlen": 37}
    cases = [{"config": c, "seqlen": 37} for c in CASES.values()] + [frozen]
    for name, c in CASES.items():
        packed = {} if name == "own" else {"documents": 0.1}
        cases += [{"config": c, "ranks": 4, "seqlen": seqlen, **packed} for seqlen in (37, 3, 10)]
    cases += [{"config": CASES["mamba"], "seqlen": n, "method": m} for m in METHODS for n in (37, 8)]
    for name in ("mamba", "mamba2-groups", "diagonal", "dense", "hyena_li"):
        # every rank has all tokens of the stream
        cases += [{"config": CASES[name], "seqlen": 37, "method": m} for m in WINDOWS]
    cases += [{"model": LLAMA, "seqlen": 37, "method": m} for m in WRAPPED]
    cases += [{"model": n, "seqlen": 37, "documents": 0.1} for n in (LLAMA, "Qwen3_5ForCausalLM")]
    quick = [{"config": CASES[name], "seqlen": 37} for name in QUICK]
    for case in cases:
        name = case.get("model") or next(n for n, c in CASES.items() if c is case["config"])
        rest = [f"{k}={v}" for k, v in case.items() if k not in ("config", "model")]
        yield pytest.param(case, id="-".join([name, *rest]), marks=[] if case in quick else pytest.mark.slow)


@pytest.mark.parametrize("case", [*cases_of_the_fuzzer()])
def test_loss_and_gradients_are_those_of_one_process(case: dict[str, Any]) -> None:
    """Compare stacks and transformers' models, in two calls whose gradients are added up."""
    pytest.importorskip("transformers")
    from tests.fuzz import ranks

    if "config" in case:
        case = case | {"config": dataclasses.asdict(case["config"])}
    ranks.check({"kind": "ranks", "way": "tensor", "batch": 2, "calls": 2, "method": DEFAULT, **case})


def states_and_logits() -> None:
    """States are a rank's heads; logits are all ids', differentiable without a method; samples agree."""
    plain, split = make("mamba2")
    ids = torch.arange(2 * 21).view(2, 21) * 5 % 19
    torch.manual_seed(4)
    state = [tuple(torch.randn_like(s) for s in layer) for layer in plain.initial_state(2)]
    heads = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    first = [(conv_channels(tail), h[:, heads].clone()) for tail, h in state]
    for model, before in ((plain, state), (split, first)):
        for layer in before:
            for s in layer:
                s.requires_grad_()
        output = model(ids, labels=ids, method=EXACT, state=before, return_state=True, return_logits=True)
        (output.loss + sum((h**2).sum() for _, h in output.state)).backward()
        model.outputs = output
    assert_same(dict(enumerate([split.outputs.logits])), dict(enumerate([plain.outputs.logits])), 1e-10)
    for (tail, h), (tail_part, h_part) in zip(state, first, strict=True):
        assert_same({"h": h_part.grad}, {"h": h.grad[:, heads]}, 1e-10)
        assert_same({"tail": tail_part.grad}, {"tail": conv_channels(tail.grad)}, 1e-10)
    plain_logits, logits = plain(ids).logits, split(ids).logits
    assert_same({"logits": logits}, {"logits": plain_logits}, 1e-10)
    torch.manual_seed(dist.get_rank())
    samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(samples, split.generate(ids[:, :5], 7).tolist())
    assert samples[0] == samples[1]


def local_part(full: Tensor, split: Any, shape: tuple[int, ...]) -> Tensor:
    """Return this rank's part of a tensor of the state: its rows by the mixer's split, else an even share of
    the dimension that is shorter here."""
    if split is not None:
        rows = split.rows(dist.get_rank(), dist.get_world_size())
        return full.index_select(split.dim, rows)
    for dim, (size, local) in enumerate(zip(full.shape, shape, strict=True)):
        if size != local:
            return full.narrow(dim, dist.get_rank() * local, local)
    return full


def states_at_both_ends(cases: list[str]) -> None:
    """Initial and final states have the whole's gradients, of parts that several ranks have, too."""
    ids = torch.arange(2 * 21).view(2, 21) * 5 % 19
    for case, method in itertools.product(cases, (EXACT, None)):
        plain, split = make(case)
        parts, wholes = [], []
        for block, layer in zip(plain.blocks(), split.initial_state(2), strict=True):
            shapes = block.mixer.initial_state(2, torch.float64, torch.device("cpu"))
            splits = block.mixer.state_splits() if case != "own" else [None] * len(shapes)
            for zero, local, piece in zip(shapes, layer, splits, strict=True):
                grown = [n or 3 for n in zero.shape]  # attention's past: three tokens
                wholes.append(torch.rand(grown, dtype=torch.float64, generator=torch.manual_seed(9)))
                parts.append((piece, tuple(n or 3 for n in local.shape)))
        count = len(parts) // len(plain.blocks())
        results_by_model = []
        for model in (plain, split):
            leaves = [t if model is plain else local_part(t, *p) for t, p in zip(wholes, parts, strict=True)]
            leaves = [t.clone().requires_grad_() for t in leaves]
            states = [tuple(leaves[i : i + count]) for i in range(0, len(leaves), count)]
            output = model(ids, labels=ids, method=method, state=states, return_state=True)
            (output.loss + sum((t**3).sum() for layer in output.state for t in layer)).backward()
            gradients = {str(i): t.grad for i, t in enumerate(leaves)}
            for name, p in model.named_parameters():
                gradients[name] = p.grad if model is plain else split.tensor_parallel.gather(name, p.grad)
            results_by_model.append(gradients)
        expected = {
            name: local_part(g, *parts[int(name)]) if name.isdigit() else g
            for name, g in results_by_model[0].items()
        }
        assert_same(results_by_model[1], expected, 1e-10)


def test_states_at_both_ends(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, states_at_both_ends, ["mamba2", "multi-query", "rwkv7", "hyena_mr"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_states_of_each_mixer(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, states_at_both_ends, list(CASES), timeout=300)


def conv_channels(tail: Tensor) -> Tensor:
    """Return this rank's channels of a Mamba-2 layer's conv tail: its heads' x, and all of B and C."""
    x, groups = tail[:, :32], tail[:, 32:]
    return torch.cat([x[:, 16 * dist.get_rank() :][:, :16], groups], dim=1).detach().clone()


def test_states_and_logits(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, states_and_logits)


def across_a_sequence_group(case: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    plain = adjoint.Stack(CASES[case], seed=1).double()
    split = adjoint.Stack(CASES[case], seed=1).double()
    split.parallelize(mesh["tensor"])
    for seqlen in (37, 19):
        expected = results(plain, None, seqlen, lambda _, g: g)
        got = results(split, EXACT, seqlen, split.tensor_parallel.gather, sequence_group=mesh["sequence"])
        assert_same(got, expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mamba", "mamba2-groups", "mamba3", "multi-query", "kda", "dense"])
def test_across_a_sequence_group(case: str, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, across_a_sequence_group, case)


def in_bfloat16() -> None:
    """No further from float64 than one process is, times the rounding of sums over ranks."""
    exact, split = make("mamba2-groups")
    plain = adjoint.Stack(CASES["mamba2-groups"], seed=1)
    plain.load_state_dict(exact.state_dict())
    split = split.float()
    expected = results(exact, None, 37, lambda _, g: g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unsplit = results(plain, EXACT, 37, lambda _, g: g)
        got = results(split, EXACT, 37, split.tensor_parallel.gather)

    def error(result: dict[str, Tensor]) -> float:
        total = sum(float((result[n].double() - e).square().sum()) for n, e in expected.items())
        return (total / sum(float(e.square().sum()) for e in expected.values())) ** 0.5

    assert error(got) < 1.5 * error(unsplit)


@pytest.mark.slow
def test_in_bfloat16(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, in_bfloat16)


def refusals() -> None:
    def refused(words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(UserError, match=words) as raised:
            call()
        assert "\n" not in str(raised.value)

    group = dist.group.WORLD
    three = dataclasses.replace(MAMBA2, d_model=12)  # 3 heads
    refused(
        r"layer 0 \(mamba2\): 2 ranks must divide the number of heads, which is 3",
        lambda: adjoint.Stack(three).parallelize(group),
    )
    few = dataclasses.replace(MAMBA2, vocab_size=1)
    refused("2 ranks split 1 token ids", lambda: adjoint.Stack(few).parallelize(group))
    refused("tensor_group must be a process group", lambda: adjoint.Stack(MAMBA2).parallelize(2))
    split = adjoint.Stack(MAMBA2)
    split.parallelize(group)
    refused("split already", lambda: split.parallelize(group))
    ids = torch.zeros(1, 16 + dist.get_rank(), dtype=torch.int64)
    refused("different numbers of tokens", lambda: split(ids, labels=ids, method=EXACT))
    ids = ids[:, :16]
    refused("different tokens", lambda: split(ids + dist.get_rank(), labels=ids, method=EXACT))
    refused("different tokens", lambda: split(ids, labels=ids + dist.get_rank(), method=EXACT))
    refused("different", lambda: split(ids, labels=ids, method=adjoint.Exact(chunk_size=8 + dist.get_rank())))
    torch.manual_seed(dist.get_rank())
    drops = adjoint.Truncated(8, 4, unbiased=True)
    refused("random number generator", lambda: split(ids, labels=ids, method=drops))
    refused("memory=", lambda: split(ids, labels=ids, method=adjoint.Exact(memory="1GB")))
    split.norm_f.eps = 1e-5 * (1 + dist.get_rank())
    refused(
        "rank 1 and rank 0 of the group differ in norm_f.eps", lambda: split(ids, labels=ids, method=EXACT)
    )


def test_refusals(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, refusals)


def keeps_local_tokens() -> None:
    """A tape holds a rank's own tokens of what a split module reads; the backward gathers them again."""
    from adjoint.layers import block

    _, split = make("mamba")
    gathered: list[weakref.ref[Tensor]] = []
    gather = block.gather_tokens

    def noted(*args: Any, **options: Any) -> Tensor:
        tokens = gather(*args, **options)
        gathered.append(weakref.ref(tokens))
        return tokens

    block.gather_tokens = noted
    y = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    state = tuple(split.layers[0].mixer.initial_state(2, torch.float64, torch.device("cpu")))
    output, _ = split.layers[0](y, state, None, 7)
    assert len(gathered) == 2 and all(tokens() is None for tokens in gathered)
    output.sum().backward()


@pytest.mark.slow
def test_a_tape_keeps_local_tokens(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, keeps_local_tokens)


def collectives_counted() -> None:
    """A layer's collectives, per chunk, are as many as the plan counts; one more sums what ranks share."""
    from adjoint.kernels import collectives
    from adjoint.plan.tensor_rank import collectives_of

    counts: collections.Counter[str] = collections.Counter()

    def counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return collective(*args, **options)

        return call

    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(collectives, name, counted(name, getattr(collectives, name)))
    dist.all_reduce = counted("all_reduce", dist.all_reduce)

    def messages(chunks: int, layers: int) -> dict[str, int]:
        config = dataclasses.replace(MAMBA2, n_layer=layers, d_intermediate=8, ngroups=2)
        split = adjoint.Stack(config, seed=1)
        split.parallelize(dist.group.WORLD)
        ids = torch.arange(8 * chunks)[None] % 19
        counts.clear()
        split(ids, labels=ids, method=EXACT).loss.backward()
        return dict(counts)

    config = dataclasses.replace(MAMBA2, d_intermediate=8)
    forward, backward = collectives_of(config)
    for chunks in (1, 4):
        of_one_layer, of_two = messages(chunks, 1), messages(chunks, 2)
        moved = sum(
            of_two[name] - of_one_layer[name] for name in ("all_gather_single", "reduce_scatter_single")
        )
        recomputed = chunks - 1  # the last chunk's tape is kept
        assert moved == chunks * (forward + backward) + recomputed * forward
        # one sums the loss, two compare the batch, two what modules hold besides weights
        assert of_one_layer["all_reduce"] == of_two["all_reduce"] == 5


@pytest.mark.slow
def test_collectives_are_those_of_the_plan(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, collectives_counted)
