"""The idea on one page: backpropagation's gradient of a long sequence in the memory of one chunk.

It works for any step (chunk, state) → (loss, state). The forward runs without autograd and stores the state
before each chunk. The backward goes through the chunks from the last to the first. It runs each chunk again,
now with autograd, and backpropagates two gradients through it: that of the loss, and that of the chunk's
final state, the *adjoint state*, which the backward of the next chunk has just computed. In memory are one
state per chunk, and the activations of one chunk.

`adjoint.Exact()` computes this. What its engine adds: packed documents, attention's keys and values (which
grow instead of being replaced), a memory budget, windows, and several workers.

python examples/exact_by_hand.py
"""

import torch
from torch import nn


class ByChunks(torch.autograd.Function):
    """Sum the losses of `step(chunk, state) -> (loss, state)` over the chunks, each with the state that the
    chunk before it returns. A state is a tuple of tensors.

    The tensors are the n of the initial state, and then the parameters."""

    @staticmethod
    def forward(ctx, step, chunks, n, *tensors):
        state, ctx.parameters = tensors[:n], tensors[n:]  # save_for_backward would also notice later writes
        ctx.step, ctx.chunks, ctx.states, total_loss = step, chunks, [], 0.0
        for chunk in chunks:  # in here autograd is off: no chunk's activations are saved
            ctx.states.append(state)
            loss, state = step(chunk, state)
            state = tuple(s.clone() for s in state)  # a view would keep its chunk alive
            total_loss = total_loss + loss
        return total_loss

    @staticmethod
    def backward(ctx, d_loss):
        d_parameters = [torch.zeros_like(p) for p in ctx.parameters]
        d_state = None  # the gradient of the state after the chunk; nothing reads the last chunk's
        for chunk, before in zip(reversed(ctx.chunks), reversed(ctx.states), strict=True):
            before = tuple(s.detach().requires_grad_() for s in before)
            with torch.enable_grad():
                loss, after = ctx.step(chunk, before)
            outputs, d_outputs = [loss], [d_loss]
            if d_state is not None:
                outputs, d_outputs = [loss, *after], [d_loss, *d_state]
            gradients = torch.autograd.grad(
                outputs, [*before, *ctx.parameters], d_outputs, materialize_grads=True
            )
            d_state = gradients[: len(before)]
            for total, gradient in zip(d_parameters, gradients[len(before) :], strict=True):
                total += gradient
        return None, None, None, *d_state, *d_parameters


def exact(step, chunks, state, parameters):
    """Return the sum of the chunks' losses, differentiable in the state and in `parameters`, all that `step`
    uses."""
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
    expected = torch.autograd.grad(whole, parameters)
    chunks = [slice(i, min(i + size, seqlen)) for i in range(0, seqlen, size)]
    loss = exact(step, chunks, zeros, parameters)
    by_chunks = torch.autograd.grad(loss, parameters)
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(by_chunks, expected, strict=True))
    print(f"loss {loss.item():.6f}, by backpropagation {whole.item():.6f}; gradients apart by {error:.0e}")
