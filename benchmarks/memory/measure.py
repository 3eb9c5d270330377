"""What the memory benchmark compares, and the measurement of one point, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adjoint import memory
from benchmarks import timing
from benchmarks.common import Point

MODEL: dict[str, Any] = {
    "d_model": 256,
    "n_layer": 4,
    "d_state": 16,
    "expand": 2,
    "vocab_size": 256,
    "headdim": 64,
}


@dataclass(frozen=True)
class Method:
    """One curve: what it is called, what it is built from and how far it is taken."""

    label: str
    peer: bool
    mixer: str
    checkpoint: bool = False
    exact: bool = False
    memory: str | None = None  # of Exact
    mambapy: bool = False
    max_length: int | None = None  # the slow path of transformers takes minutes beyond the shortest
    max_repeats: int | None = None


METHODS = {
    "exact": Method("Exact", False, "mamba", exact=True),
    "exact-600MiB": Method('Exact(memory="600MiB")', False, "mamba", exact=True, memory="600MiB"),
    "backprop": Method("Backprop", False, "mamba"),
    "backprop-checkpoint": Method("Backprop + checkpointing", False, "mamba", checkpoint=True),
    "exact-mamba2": Method("Exact, Mamba-2", False, "mamba2", exact=True),
    "hf-mamba": Method("transformers Mamba (mambapy)", True, "mamba", mambapy=True),
    "hf-mamba-checkpoint": Method(
        "transformers Mamba (mambapy) + checkpointing", True, "mamba", mambapy=True, checkpoint=True
    ),
    "hf-mamba-slow": Method("transformers Mamba (default)", True, "mamba", max_length=1024, max_repeats=1),
    "hf-mamba2": Method("transformers Mamba-2", True, "mamba2"),
    "hf-mamba2-checkpoint": Method("transformers Mamba-2 + checkpointing", True, "mamba2", checkpoint=True),
}


def ours(method: Method) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    """How this package's model is built, and its loss under `method`: `(model, ids) -> loss`."""
    import adjoint

    exact, backprop = adjoint.Exact(memory=method.memory), adjoint.Backprop(checkpoint=method.checkpoint)
    how = exact if method.exact else backprop
    config = adjoint.StackConfig(mixer=method.mixer, tie_embeddings=True, **MODEL)
    return lambda: adjoint.Stack(config), lambda model, ids: model(ids, labels=ids, method=how).loss


def theirs(method: Method) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    """The same of transformers' causal language model of the same widths."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": MODEL["vocab_size"],
        "hidden_size": MODEL["d_model"],
        "num_hidden_layers": MODEL["n_layer"],
        "state_size": MODEL["d_state"],
        "expand": MODEL["expand"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if method.mixer == "mamba2":
        heads = MODEL["d_model"] * MODEL["expand"] // MODEL["headdim"]
        config: Any = transformers.Mamba2Config(
            **shape, head_dim=MODEL["headdim"], num_heads=heads, n_groups=1
        )
        kind: Any = transformers.Mamba2ForCausalLM
    else:
        if method.mambapy:
            import mambapy.pscan  # noqa: F401  without it transformers takes another path in silence
        config = transformers.MambaConfig(**shape, use_mambapy=method.mambapy)
        kind = transformers.MambaForCausalLM

    def build() -> Any:
        model = kind(config).train()
        if method.checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return build, lambda model, ids: model(input_ids=ids, labels=ids).loss


def measure(point: Point) -> dict[str, Any]:
    """Run one point in this process: its memory (bytes), the seconds of each pass, and the loss."""
    method, device = METHODS[point["method"]], point["device"]
    build, loss_of = (theirs if method.peer else ours)(method)
    cuda = device.startswith("cuda")
    memory.reset_peak_rss()
    baseline, _ = memory.rss_bytes()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    ids = torch.randint(MODEL["vocab_size"], (1, point["length"]), device=device)
    model = build().to(device)
    value = 0.0

    def forward_backward(ids: Any = ids) -> None:
        nonlocal value
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, ids)
        loss.backward()
        value = loss.item()

    forward_backward(ids[:, :128])
    seconds = timing.repeated(forward_backward, device, point["repeat_s"], least=1, most=20)
    peak = torch.cuda.max_memory_allocated() if cuda else memory.rss_bytes()[1] - baseline
    return {"memory_bytes": peak, "baseline_bytes": baseline, "seconds": seconds, "loss": value}
