"""Stacks of any layers by any method, against plain autograd in float64."""

from __future__ import annotations

import random
from typing import Any

import torch

from adjoint import Stack, StackConfig
from adjoint.layers import MIXERS, WINDOWED
from adjoint.methods import KEEP, RECOMPUTE
from tests.fuzz.oracle import Case, Deviation, documents, error, method_of, reference_of, same, some
from tests.model_helpers import draw_states, forward

LENGTHS = (1, 2, 3, 5, 8, 13, 17, 29, 33, 64, 65, 100)


def draw(rng: random.Random) -> Case:
    config = draw_config(rng)
    seqlen = rng.choice(LENGTHS)
    case = {
        "kind": "stacks",
        "seed": rng.randrange(10**6),
        "config": config,
        "method": draw_method(rng, StackConfig(**config), seqlen),
        "batch": rng.randint(1, 3),
        "seqlen": seqlen,
    }
    precision = lambda: rng.choice(("float32", "float32", "bfloat16", "bfloat16 weights"))  # noqa: E731
    case |= some(rng, 0.3, {
        "documents": lambda: rng.choice((0.05, 0.3, 1.0)),
        "cu_seqlens": True,
        "states": lambda: rng.choice((0.5, 1.0)),  # share of them that wants a gradient
        "before": lambda: rng.randint(0, 9),  # tokens that attention has seen
        "final": lambda: rng.choice((True, "alone")),  # the loss looks at final states too
        "ignored": lambda: rng.choice((0.1, 0.6)),
        "frozen": lambda: rng.choice((0.2, 0.6)),
        "scale": 3.0,
        "again": True,  # a second backward through the same graph
        "twice": True,  # a second batch, of another length, before the first one's backward
        "logits": True,
        "int32": True,
        "strided": True,
        "precision": precision,
    })  # fmt: skip
    if case["method"].get("window") == "auto":  # the two would have windows of their own
        case.pop("twice", None)
    return case


def draw_config(rng: random.Random, kinds: tuple[str, ...] = tuple(MIXERS)) -> Case:
    while True:
        n_layer = rng.randint(1, 4)
        pick = rng.choice(kinds)
        config: Case = {
            "vocab_size": rng.choice((2, 5, 17)),
            "d_model": rng.choice((1, 2, 3, 5, 6, 8, 12, 16)),
            "n_layer": n_layer,
            "mixer": pick if rng.random() < 0.5 else [rng.choice(kinds) for _ in range(n_layer)],
            "d_state": rng.choice((1, 2, 3, 4, 5, 8, 16)),
            "expand": rng.randint(1, 3),
            "headdim": rng.choice((1, 2, 3, 4, 6, 8, 12)),
        }
        config |= some(rng, 0.35, {
            "d_conv": lambda: rng.choice((1, 2, 3, 16)),
            "ngroups": lambda: rng.randint(2, 4),
            "dt_rank": lambda: rng.randint(1, 4),
            "d_intermediate": lambda: rng.choice((1, 7, 10)),
            "tie_embeddings": False,
            "bias": True,
            "conv_bias": False,
            "num_attention_heads": lambda: rng.choice((1, 2, 4)),
            "num_key_value_heads": lambda: rng.choice((1, 2)),
            "head_dim": lambda: rng.choice((2, 4, 6)),
            "rotary_emb_dim": lambda: rng.choice((0, 2, 4)),
            "attention_bias": lambda: rng.random() < 0.5,
            "attention_d_conv": lambda: rng.choice((1, 2, 4)),
            "sliding_window": lambda: rng.choice((1, 2, 5, 40)),
            "linear_num_key_heads": lambda: rng.randint(1, 3),
            "rope_fraction": 1.0,
            "hyena_se_len": lambda: rng.choice((1, 2, 20)),
            "hyena_mr_len": lambda: rng.choice((1, 5, 17, 40)),
            "hyena_groups": lambda: rng.choice((1, 2, 3)),
            "hyena_mr_decay": lambda: rng.choice(("normal", "strong", None)),
            "mlp_activation": lambda: rng.choice(("gelu", "identity")),
            "out_proj_bias": lambda: rng.random() < 0.5,
            "rope_scaling_factor": 3.0,
            "is_outproj_norm": True,
            "is_mimo": True,
            "mimo_rank": lambda: rng.randint(1, 3),
        })  # fmt: skip
        # of one number the norm of queries and keys leaves the sign, whose gradient is rounding
        try:
            mixers = StackConfig(**config).mixers
        except ValueError:
            continue
        if config["d_state"] > 1 or not {"gated_deltanet", "kda", "rwkv7"}.intersection(mixers):
            return config


def draw_method(rng: random.Random, config: StackConfig, seqlen: int) -> Case:
    windowed = set(config.mixers) <= set(WINDOWED)
    size = some(rng, 0.9, {"chunk_size": lambda: rng.randint(1, seqlen + 3)})
    kind = rng.random()
    if kind < 0.05:
        return {"name": "Backprop", "checkpoint": True}
    if kind < 0.6:
        keep = some(rng, 0.5, {"keep": lambda: rng.choice(KEEP)})
        keep |= some(rng, 0.3, {"segment_layers": lambda: rng.randint(1, 3)})
        storage = {
            "memory": lambda: rng.choice((1, "20KB", "300KB", "1GB")),
            "checkpoints": lambda: rng.choice((1, 2, 3, 5, 8, 40)),
        }
        if keep:
            storage.pop("checkpoints")
        storage = some(rng, 0.4, storage)
        options = {"recompute": lambda: rng.choice(RECOMPUTE), "offload": True}
        return {"name": "Exact", **size, **keep, **storage, **some(rng, 0.4, options)}
    window = rng.randint(1, seqlen + 2) if windowed else seqlen + rng.randint(0, 2)
    if kind < 0.85:
        auto = windowed and rng.random() < 0.2
        tolerance = {"tolerance": rng.choice((0.5, 0.01))} if auto else {}
        return {"name": "Truncated", "window": "auto" if auto else window, **size, **tolerance}
    return {"name": "LayerLocal", **size, **some(rng, 0.6, {"window": window})}


def config_of(case: Case) -> StackConfig:
    return StackConfig(**{"vocab_size": 5, "d_model": 4, "n_layer": 1, **case.get("config", {})})


def make(case: Case) -> Stack:
    """Weights away from their initial values, so that every path matters."""
    torch.manual_seed(case["seed"])
    model = Stack(config_of(case))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    for p in model.parameters():
        p.requires_grad_(torch.rand(()).item() >= case.get("frozen", 0))
    next(model.parameters()).requires_grad_()
    return model


def run(case: Case, model: Stack, method: Any, dtype: torch.dtype) -> tuple[dict[str, Any], Any]:
    """Losses, final states and gradients of one life of the model, by name; and the first call's output."""
    draw = torch.Generator().manual_seed(case["seed"])
    rand = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    model.zero_grad()
    found: dict[str, Any] = {}
    losses, outputs = [], []
    for call in range(1 + case.get("twice", False)):
        batch, seqlen = case.get("batch", 1), max(1, case["seqlen"] - 3 * call)
        shape = {**case, "batch": batch, "seqlen": seqlen}
        ids = torch.randint(model.config.vocab_size, (batch, 2 * seqlen), generator=draw)
        ids = ids[:, ::2] if case.get("strided") else ids[:, :seqlen].contiguous()
        labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < case.get("ignored", 0), -100)
        packed = documents(shape, draw)
        given: dict[str, Any] = {"seq_idx": packed}
        if packed is not None and case.get("cu_seqlens"):
            begins = torch.ones_like(packed, dtype=torch.bool)
            begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
            given = {"cu_seqlens": torch.tensor([*begins.flatten().nonzero().flatten(), ids.numel()])}
        states = None
        if "states" in case:
            states = draw_states(model, batch, rand, case.get("before", 0))
            for s in (s for state in states for s in state):
                s.requires_grad_(torch.rand((), generator=draw).item() < case["states"])
        if case.get("int32"):
            ids, labels = ids.int(), labels.int()
        out = forward(
            model, ids, method, labels, state=states, return_state=True,
            return_logits=case.get("logits", False), **given,
        )  # fmt: skip
        total = out.loss * case.get("scale", 1.0) if case.get("final") != "alone" else 0.0
        final = [s for state in out.state for s in state]
        found |= {f"final {call}.{i}": s.detach() for i, s in enumerate(final)}
        if case.get("final"):
            total = total + sum((s * rand(*s.shape)).sum() for s in final) * 0.1
        if out.logits is not None:
            found[f"logits {call}"] = out.logits.detach()
        losses.append(total)
        outputs.append(out)
        found |= {f"loss {call}": out.loss.detach()}
        found |= {f"state {call}.{i}": s for i, s in enumerate(s for state in states or () for s in state)}
    for loss in losses:
        loss.backward(retain_graph=case.get("again", False))
        if case.get("again"):
            loss.backward()
    for name, s in found.items():
        if name.startswith("state"):
            found[name] = s.grad
    found |= {name: p.grad for name, p in model.named_parameters()}
    # no gradient and a gradient of zero are alike
    return {k: v for k, v in found.items() if v is not None and (v.numel() and v.any())}, outputs[0]


def check(case: Case) -> None:
    if "precision" in case:
        return check_precision(case)
    method, model = method_of(case), make(case).double()
    got, out = run(case, model, method, torch.float64)
    reference = reference_of(method, case["seqlen"], out.windows)
    same(got, run(case, model, reference, torch.float64)[0])


def check_precision(case: Case) -> None:
    """No further from the gradient in float64 than autograd is; where one draw says so, on average."""
    ours, theirs = errors(case)
    floor, precision = (1e-5 if case["precision"] == "float32" else 1e-3), case["precision"]
    if ours > max(floor, 1.5 * theirs):
        found = torch.tensor([errors({**case, "seed": case["seed"] + more}) for more in range(1, 13)])
        ours, theirs = found.square().mean(0).sqrt().tolist()
        if not ours <= max(floor, 1.5 * theirs):
            raise Deviation(f"{precision}: off by {ours:.1e}, autograd by {theirs:.1e}")


def errors(case: Case) -> list[float]:
    """Of all gradients by the method and by autograd, in the case's precision."""
    method, model = method_of(case), make(case)
    dtype = torch.bfloat16 if case["precision"] == "bfloat16 weights" else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "bfloat16"):
        ours, out = run(case, model.to(dtype), method, dtype)
        reference = reference_of(method, case["seqlen"], out.windows)
        theirs, _ = run(case, model, reference, dtype)
    expected, _ = run(case, model.double(), reference, torch.float64)
    expected = {name: g for name, g in expected.items() if name.split()[0] not in ("loss", "final", "logits")}
    return [error(ours, expected), error(theirs, expected)]
