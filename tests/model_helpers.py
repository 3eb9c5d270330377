"""Small models with parameters away from their initial values, and gradients side by side."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint import Stack, StackConfig, StackOutput
from adjoint.batch import Batch, State
from adjoint.engine.executor import Executor
from adjoint.engine.storage import Edges, Slab
from adjoint.layers import MIXERS, WINDOWED
from adjoint.layers.packed_documents import document_numbers
from adjoint.parallel.context import WithinTiles
from adjoint.parallel.handoff import StateHandoff

SIZES: dict[str, Any] = {"vocab_size": 17, "d_model": 12, "n_layer": 2, "d_state": 4, "headdim": 6}
MIXED = ["mamba", "mamba2", "diagonal", "scalar", "dense"]
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba": {"mixer": "mamba"},
    "mamba2": {"mixer": "mamba2", "ngroups": 2},
    "diagonal": {"mixer": "diagonal"},
    "scalar": {"mixer": "scalar"},
    "dense": {"mixer": "dense"},
    "mamba, MLP, untied": {"mixer": "mamba", "d_intermediate": 10, "tie_embeddings": False, "bias": True},
    "mamba2, MLP, no conv bias": {"mixer": "mamba2", "d_intermediate": 10, "conv_bias": False, "d_conv": 2},
    "mixed, untied": {"mixer": MIXED, "n_layer": len(MIXED), "tie_embeddings": False},
}
VARIANTS |= {kind: {"mixer": kind} for kind in WINDOWED if kind not in VARIANTS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
CONVOLVED = {"attention_d_conv": 4, "rotary_emb_dim": 4, "attention_bias": True}
UNWINDOWED: dict[str, dict[str, Any]] = {  # mixers without windows
    "attention": {"mixer": "attention", **HEADS},
    "attention, window": {"mixer": "attention", **HEADS, "sliding_window": 5, "bias": True},
    "attention, conv": {"mixer": "attention", **HEADS, **CONVOLVED},
    "gated_deltanet": {"mixer": "gated_deltanet", "linear_num_key_heads": 2},
    "kda": {"mixer": "kda", "linear_num_key_heads": 2},
    "mamba3": {"mixer": "mamba3", "ngroups": 2},
    "mamba3, mimo": {"mixer": "mamba3", "is_mimo": True, "mimo_rank": 3, "ngroups": 2},
    "mamba3, norm": {"mixer": "mamba3", "is_outproj_norm": True, "rope_fraction": 1.0, "bias": True},
    "hybrid": {
        "mixer": ["mamba", "attention", "gated_deltanet", "mamba3", "diagonal"],
        "n_layer": 5,
        "d_intermediate": 10,
        "tie_embeddings": False,
        "is_mimo": True,
        "mimo_rank": 2,
        "attention_d_conv": 3,
        **HEADS,
    },
}
UNWINDOWED |= {kind: {"mixer": kind} for kind in MIXERS if kind not in VARIANTS | UNWINDOWED}
# Kinds of mixers whose state is replaced by each chunk's; attention's grows.
RECURRENT = [kind for kind, mixer in MIXERS.items() if not mixer.attended_channels(StackConfig(**SIZES))]


def make_model(
    variant: str = "mamba", dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any
) -> Stack:
    """The variant's model, its weights larger than at initialisation: so that every path matters."""
    torch.manual_seed(seed)
    model = Stack(StackConfig(**{**SIZES, **(VARIANTS | UNWINDOWED)[variant], **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype)


def make_ids(batch: int, seqlen: int, vocab_size: int = SIZES["vocab_size"], seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def draw_states(model: Stack, batch: int, rand: Callable[..., Tensor], tokens: int = 0) -> list[State]:
    """Random states; keys and values are of `tokens` tokens."""

    def shape(s: Tensor) -> tuple[int, ...]:
        return (*s.shape[:2], tokens, s.shape[3]) if s.dim() == 4 and not s.shape[2] else tuple(s.shape)

    return [tuple(rand(*shape(s)) for s in state) for state in model.initial_state(batch)]


def random_from(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """`torch.randn` of a generator of its own."""
    return functools.partial(torch.randn, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def forward(
    model: Stack, ids: Tensor, method: Any, labels: Tensor | None = None, **given: Any
) -> StackOutput:
    """A call, by default with the ids for labels; `method` may be a reference, whose `run(model, batch,
    states)` gives loss and final states."""
    labels = ids if labels is None else labels
    if not hasattr(method, "run"):
        return model(ids, labels=labels, method=method, **given)
    batch = Batch.from_labels(
        ids, labels, document_numbers(ids, given.get("seq_idx"), given.get("cu_seqlens"))
    )
    states = given.get("state") or model.initial_state(len(ids))
    loss, final = method.run(model, batch, states)
    logits = None
    if given.get("return_logits"):
        with torch.no_grad():
            logits = model(ids, **{**given, "return_logits": False}).logits
    return StackOutput(loss=loss, state=final, logits=logits)


def gradients(
    model: Stack, input_ids: Tensor, labels: Tensor, method: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every parameter's gradient, float64, by name."""
    model.zero_grad()
    loss = model(input_ids, labels=labels, method=method).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def current_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error; 0 for two zeros, infinite for something where there should be nothing."""
    error, size = (got - expected).norm().item(), expected.norm().item()
    return 0.0 if error == 0 else error / size if size else float("inf")


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    errors = {name: relative(got[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.1e}"


def error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative L2 error of all gradients taken as one vector."""
    return relative(*(torch.cat([g[name].flatten() for name in expected]) for g in (got, expected)))


@contextlib.contextmanager
def nothing_held() -> Iterator[None]:
    """What steps inside have stored is freed with them: nothing is left for the garbage collector to find."""

    def stored() -> list[Any]:
        return [o for o in gc.get_objects() if type(o) in {Executor, WithinTiles, Slab, Edges, StateHandoff}]

    gc.collect()
    before = stored()  # an earlier test's model may hold on to a tensor of its own
    gc.disable()
    try:
        yield
        assert len(stored()) == len(before)
    finally:
        gc.enable()
