"""The idea on one page: backpropagation's gradient of a long sequence in the memory of one chunk.

For any step (chunk, state) → (loss, state). The forward records nothing and keeps the state before each
chunk. The backward goes through the chunks from the last to the first: it runs a chunk again, recorded this
time, and pulls back the loss's cotangent together with that of the chunk's final state, the *adjoint state*,
which the chunk after it has just given. Kept are a state per chunk and the activations of one chunk.

`adjoint.Exact()` computes this. What its engine adds: packed documents, attention's keys and values (which
grow instead of being replaced), a memory budget, windows, and several workers.

python examples/exact_by_hand.py
"""

import torch
from torch import nn


class ByChunks(torch.autograd.Function):
    """(initial state, parameters) → the sum of the chunks' losses. `step(chunk, state)` gives a chunk's loss
    and the state after it; a state is a tuple of tensors."""

    @staticmethod
    def forward(ctx, step, chunks, n, *tensors):
        state, ctx.parameters = tensors[:n], tensors[n:]
        ctx.step, ctx.chunks, ctx.states, total = step, chunks, [], 0.0
        for chunk in chunks:  # PyTorch records nothing here
            ctx.states.append(state)
            loss, state = step(chunk, state)
            state = tuple(s.clone() for s in state)  # a view would keep its chunk alive
            total = total + loss
        return total

    @staticmethod
    def backward(ctx, d_loss):
        sums = [torch.zeros_like(p) for p in ctx.parameters]
        d_state = None  # of the last chunk's final state: nothing depends on it
        for chunk, before in zip(reversed(ctx.chunks), reversed(ctx.states), strict=True):
            before = tuple(s.detach().requires_grad_() for s in before)
            with torch.enable_grad():
                loss, after = ctx.step(chunk, before)
            outputs, cotangents = [loss], [d_loss]
            if d_state is not None:
                outputs, cotangents = [loss, *after], [d_loss, *d_state]
            found = torch.autograd.grad(
                outputs, [*before, *ctx.parameters], cotangents, materialize_grads=True
            )
            d_state = found[: len(before)]
            for total, gradient in zip(sums, found[len(before) :], strict=True):
                total += gradient
        return None, None, None, *d_state, *sums


def exact(step, chunks, state, parameters):
    """The sum of the chunks' losses, differentiable; `parameters`: all that `step` uses."""
    return ByChunks.apply(step, chunks, len(state), *state, *parameters)


if __name__ == "__main__":
    torch.manual_seed(0)
    d, seqlen, size = 32, 1000, 64
    model = nn.ModuleDict(
        {"embed": nn.Embedding(256, d), "rnn": nn.GRU(d, d, batch_first=True), "head": nn.Linear(d, 256)}
    ).double()
    ids = torch.randint(256, (2, seqlen + 1))

    def step(chunk, state):
        y, h = model["rnn"](model["embed"](ids[:, :-1][:, chunk]), state[0])
        logits, targets = model["head"](y), ids[:, 1:][:, chunk]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (h,)

    zeros = (torch.zeros(1, 2, d, dtype=torch.float64),)
    parameters = list(model.parameters())
    whole, _ = step(slice(0, seqlen), zeros)
    wanted = torch.autograd.grad(whole, parameters)
    chunks = [slice(i, min(i + size, seqlen)) for i in range(0, seqlen, size)]
    loss = exact(step, chunks, zeros, parameters)
    got = torch.autograd.grad(loss, parameters)
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True))
    print(f"loss {loss.item():.6f}, by backpropagation {whole.item():.6f}; gradients apart by {error:.0e}")
