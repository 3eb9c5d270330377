"""Ways to run a backward pass, as interchangeable objects: pass one as `method=` to the model.

    | method     | equals backprop   | memory                          | time                                   |
    | Backprop   | is backprop       | grows with seqlen               | forward + backward                     |
    | Exact      | yes, to rounding  | flat, but for small chunk edges | one more forward, but for the last chunk |
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint import exact
from adjoint.tile import State

if TYPE_CHECKING:
    from adjoint.stack import Stack

KEEP = ("edges", "inputs", "offload")


@dataclasses.dataclass(frozen=True)
class Backprop:
    """Plain backpropagation through the whole sequence: the baseline.

    Do not use it for sequences whose activations do not fit in memory; that is what the other methods are for.

    Args:
        checkpoint: recompute each layer in the backward instead of keeping its activations.
    """

    name: ClassVar[str] = "backprop"
    checkpoint: bool = False

    def run(self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int, states: list[State]) -> tuple[Tensor, list[State]]:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        y = model.embed(input_ids)
        final_states = []
        for layer, state in zip(model.layers, states, strict=True):
            if self.checkpoint and torch.is_grad_enabled():
                y, state = checkpointed(layer, y, state, use_reentrant=False)  # type: ignore[misc]
            else:
                y, state = layer(y, state)
            final_states.append(state)
        return model.head_loss(y, targets) / max(valid, 1), final_states


@dataclasses.dataclass(frozen=True)
class Exact:
    """The exact gradient by adjoint states over chunks, in memory that hardly grows with the sequence (docs/method.md §4).

    Forward keeps the recurrent states at chunk edges; the backward sweeps the chunks in reverse, recomputes each one and
    carries the accumulated adjoint state across its edge. Do not use it where the whole sequence's activations fit anyway and time is
    all that counts: `Backprop` saves the extra forward.

    Args:
        chunk_size: tokens a chunk; need not divide seqlen. None picks one from the model's widths and the device.
        keep: "edges" keeps only the states at chunk edges and recomputes all layers of a chunk at a time; "inputs" also
            keeps every layer's input (n_layer × seqlen × d_model), so that one layer of a chunk is worked on at a time; "offload" is
            "inputs" with edges and inputs in host memory (on a CPU the same as "inputs").

    Raises:
        ValueError: chunk_size is not a positive whole number, or keep is none of the three.
    """

    name: ClassVar[str] = "exact"
    chunk_size: int | None = None
    keep: str = "edges"

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {', '.join(KEEP)}; got {self.keep!r}")

    def run(self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int, states: list[State]) -> tuple[Tensor, list[State]]:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        chunk_size = self.chunk_size or default_chunk_size(model, input_ids)
        return exact.run(model, input_ids, targets, valid, states, chunk_size, self.keep)


METHODS: dict[str, Any] = {method.name: method for method in (Backprop, Exact)}


def check_chunk_size(chunk_size: object) -> None:
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a whole number of tokens, 1 or more, or None to have one picked; got {chunk_size!r}")


def default_chunk_size(model: "Stack", input_ids: Tensor) -> int:
    """Tokens a chunk: enough work to keep the device busy, few enough that a chunk's activations stay small.

    On a CPU about 1,000 tokens are as fast as more. A GPU wants more at a time; there the chunk's activations, about
    40 channels of d_model a token and layer in the widest case, get an eighth of the device's memory.
    """
    batch = input_ids.shape[0]
    if input_ids.device.type != "cuda":
        return max(64, 1024 // batch)
    budget = torch.cuda.get_device_properties(input_ids.device).total_memory // 8
    per_token = 40 * model.config.d_model * model.config.n_layer * 4
    return min(16384, max(256, budget // per_token // batch))
