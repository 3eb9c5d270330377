"""The same stacks over shards, workers of a sequence and replicas, threads of one process, against autograd
in one piece."""

from __future__ import annotations

import random

import torch

from adjoint import StackConfig
from adjoint.cluster.shard import Microbatch
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from tests.cluster.threads import disturbed_shards, disturbed_stack, together
from tests.fuzz import stacks
from tests.fuzz.oracle import Case, Deviation, documents, method_of, reference_of, same, some
from tests.model_helpers import forward


def draw(rng: random.Random) -> Case:
    config = stacks.draw_config(rng)
    has_attention = "attention" in StackConfig(**config).mixers
    sequence = 1 if has_attention else rng.randint(1, 3)
    shards = rng.randint(1, config["n_layer"])
    replicas = rng.choice((1, 1, 2))
    seqlen = rng.choice([n for n in stacks.LENGTHS if n >= 2 * sequence])
    method = stacks.draw_method(rng, StackConfig(**config), seqlen)
    if sequence > 1:
        method = {"name": "Exact"} if method["name"] == "Backprop" else method
        method["window"] = seqlen if method.get("window") == "auto" else method.get("window")
        refused = ("tolerance", "checkpoints")
        method = {k: v for k, v in method.items() if k not in refused and v is not None}
        if "chunk_size" in method:  # each worker has a chunk
            method["chunk_size"] = rng.randint(1, max(1, seqlen // sequence - 1))
    case = {
        "kind": "distributions",
        "config": config,
        "method": method,
        "batch": rng.randint(replicas, 4),
        "seqlen": seqlen,
        "seed": rng.randrange(10**6),
        **{k: v for k, v in (("shards", shards), ("sequence", sequence), ("replicas", replicas)) if v > 1},
    }
    if method["name"] == "LayerLocal" and not has_attention and sequence == 1:
        helped = lambda: [rng.randrange(shards) for _ in range(rng.randint(1, 3))]  # noqa: E731
        case |= some(rng, 0.4, {"helpers": helped})  # the shard of each
    return case | some(rng, 0.3, {"documents": lambda: rng.choice((0.05, 0.3, 1.0)), "twice": True})


def check(case: Case) -> None:
    config, method = stacks.config_of(case), method_of(case)
    replicas, calls = case.get("replicas", 1), 1 + case.get("twice", False)
    shape = {"batch": case.get("batch", replicas), "seqlen": case["seqlen"]}
    rand = torch.Generator().manual_seed(case["seed"])
    batches = [
        (
            torch.randint(config.vocab_size, (shape["batch"], shape["seqlen"]), generator=rand),
            documents({**case, **shape}, rand),
        )
        for _ in range(calls)
    ]
    training = TrainingConfig(steps=1, warmup_steps=0)
    helpers = len(case.get("helpers", ()))
    layout = Layout(case.get("shards", 1), case.get("sequence", 1), replicas, helpers)
    made = disturbed_shards(config, layout, method, training)
    losses: list[float] = []
    windows: list[list[int] | None] = []  # of each batch, where the method picks them
    for number, (ids, seq_idx) in enumerate(batches, 1):
        found = together(
            made,
            lambda shard, ids=ids, seq_idx=seq_idx, final=number == calls: shard.accumulate(
                ids, seq_idx=seq_idx, step=Microbatch(calls, final)
            ),
        )
        losses.append(sum(part for part in found if part is not None))
        first_replica = [shard for shard in made if layout.replica(shard.spec.rank) == 0]
        windows.append([w for shard in first_replica for w in shard.windows or ()] or None)
    stack = disturbed_stack(config)
    for (ids, seq_idx), loss, picked in zip(batches, losses, windows, strict=True):
        reference = reference_of(method, shape["seqlen"], picked)
        expected = forward(stack, ids, reference, seq_idx=seq_idx).loss / calls
        expected.backward()
        same({"loss": torch.tensor(loss, dtype=torch.float64)}, {"loss": expected.detach()})
    gradients = {name: p.grad for name, p in stack.named_parameters()}
    for shard in made:
        own = {name: p.grad for name, p in shard.named_weights().items()}
        unknown = own.keys() - gradients.keys()
        if unknown:
            raise Deviation(f"weights of no layer: {unknown}")
        # the tolerance is relative to the whole gradient: a shard may have the tiny ones
        same({**gradients, **own}, gradients)
    held = {name for shard in made for name in shard.named_weights()}
    if held != gradients.keys():
        raise Deviation(f"nobody's: {gradients.keys() - held}")
