"""Adjoint sharding word for word: the paper's Algorithms 1–4, slow and plain (docs/paper.md).

The oracle of the tests. Every adjoint state is computed, every vector–Jacobian product (vjp) is evaluated by
itself and counted: quadratic in seqlen, for a few dozen tokens in float64. It shares the layers' networks
with what it checks and nothing else: the recurrence is a loop over tokens, A is a full matrix whatever the
structure, the loss is PyTorch's own; no scan, no tile, no autograd over the sequence.

Tokens are numbered from 0 here, from 1 in the paper; `states[i]` is the state *before* token i, its h^{i-1}.
"""

import collections
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp

from adjoint.layers import Block
from adjoint.layers.selective import SelectiveMixer
from adjoint.stack import Stack
from adjoint.tools.sweep.compare import truncated_products

IGNORE_INDEX = -100

Gradients = dict[str, Tensor]
# Vjps of the networks 𝒜, ℬ and 𝒞; one takes the whole batch, as in the paper's Table 1.
Counts = collections.Counter[str]


def vjp_counts(seqlen: int, n_layer: int = 1, window: int | None = None) -> Counts:
    """The vjps of Algorithm 4 as the paper counts them (section 4.3): n_layer layers, seqlen tokens."""
    products = n_layer * truncated_products(seqlen, window)
    return Counts(A=products, B=products, C=n_layer * seqlen)


def saved_share(seqlen: int, window: int) -> float:
    """Share of the vjps of 𝒜 and ℬ that a window saves (section 4.3): 0.64 for 2,000 of 10,000 tokens."""
    return 1 - truncated_products(seqlen, window) / truncated_products(seqlen)


# ------------------------------------------------------------------------------------------------ one network


class _Network(nn.Module):
    """A function and the modules it reads, so that `torch.func` can differentiate it by their parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor], **modules: nn.Module | None) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            if module is not None:
                self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def vjp(self, x: Tensor, vector: Tensor) -> tuple[Gradients, Tensor]:
        """vector · ∂function/∂(parameters) and vector · ∂function/∂x, at x."""
        parameters = {name: p.detach() for name, p in self.named_parameters()}
        pullback = vjp(lambda p, x: functional_call(self, p, (x,)), parameters, x)[1]
        return pullback(vector)


def _networks(mixer: SelectiveMixer) -> tuple[_Network, _Network, _Network]:
    """𝒜, ℬ and 𝒞 of a layer: tokens (batch, d_model) → (batch, N, N), (batch, N, P), (batch, P, N)."""

    def transition(x: Tensor) -> Tensor:
        A = mixer.transition(x)
        if mixer.structure == "dense":
            return A
        # a diagonal, or one number times the identity
        return torch.diag_embed(A.expand(*A.shape[:-1], mixer.d_state))

    return (
        _Network(transition, A_proj=mixer.A_proj),
        _Network(mixer.input_matrix, B_proj=mixer.B_proj),
        _Network(mixer.output_matrix, C_proj=mixer.C_proj),
    )


# -------------------------------------------------------------------------------------------------- one layer


class LayerForward(NamedTuple):
    """What Algorithm 1 stores of one layer, a list entry a token. N is d_state, P is d_model.

    A (batch, N, N), B (batch, N, P), C (batch, P, N); states (batch, N), the initial one first and so one
    more than there are tokens; outputs ỹ (batch, P).
    """

    A: list[Tensor]
    B: list[Tensor]
    C: list[Tensor]
    states: list[Tensor]
    outputs: list[Tensor]


@torch.no_grad()
def layer_forward(mixer: SelectiveMixer, x: Tensor) -> LayerForward:
    """Algorithm 1, lines 4–8, one layer: h^t = A^t h^{t-1} + B^t x̂^t, ỹ^t = C^t h^t, token by token; of
    normalised inputs x̂ (batch, seqlen, d_model), from h^0 = 0."""
    networks = _networks(mixer)
    h = x.new_zeros(x.shape[0], mixer.d_state)
    stored = LayerForward([], [], [], [h], [])
    for token in x.unbind(1):
        A, B, C = (network(token) for network in networks)
        h = _apply(A, h) + _apply(B, token)
        for values, value in zip(stored, (A, B, C, h, _apply(C, h)), strict=True):
            values.append(value)
    return stored


def adjoint_states(A: list[Tensor], C: list[Tensor], t: int, window: int | None = None) -> dict[int, Tensor]:
    """Algorithm 2: λ^{t,i} = C^t A^t A^{t-1} … A^{i+1}, the last `window` adjoint states of token t.

    Args:
        A: (batch, d_state, d_state) for each token. C: (batch, d_model, d_state) for each token. t: from 0.
        window: T̄, how many at most; all t + 1 of them if None.

    Returns:
        λ^{t,i}, (batch, d_model, d_state), by i = max(0, t + 1 - window) … t. λ^{t,t} is C^t.
    """
    first = 0 if window is None else max(0, t + 1 - window)
    zeta = torch.eye(A[t].shape[-1], dtype=A[t].dtype, device=A[t].device)  # line 4
    states = {}
    for i in range(t, first - 1, -1):
        states[i] = C[t] @ zeta
        zeta = zeta @ A[i]
    return states


class LayerGradient(NamedTuple):
    """parameters: gradients by the mixer's names. x: that of the inputs x̂, (batch, seqlen, d_model)."""

    parameters: Gradients
    x: Tensor
    counts: Counts


def layer_gradient(mixer: SelectiveMixer, x: Tensor, g: Tensor, window: int | None = None) -> LayerGradient:
    """Algorithms 3 and 4 for one layer: Proposition 2 summed over tokens, or eq. 7 with a window.

        dL/dθ = Σ_t Σ_i vjp_{𝒜,i}(g^t λ^{t,i} ⊗ h^{i-1})  ⊕  Σ_t Σ_i vjp_{ℬ,i}(g^t λ^{t,i} ⊗ x̂^i)
              ⊕  Σ_t vjp_{𝒞,t}(g^t ⊗ h^t)

    with i over the last `window` tokens up to t. The inputs receive what the vjps say of them, and g^t
    λ^{t,i} B^i through the product B^i x̂^i; the paper has no use for that, the norm before the layer has. A
    window shortens the sums over i and nothing else: what x̂^t receives through C^t is never cut.

    Args:
        mixer: a layer, dense, diagonal or scalar.
        x: its normalised inputs x̂ (batch, seqlen, d_model).
        g: the loss's gradient with respect to its outputs ỹ, same shape.
        window: T̄ tokens; None for all.
    """
    x, g = x.detach(), g.detach()
    network_A, network_B, network_C = _networks(mixer)
    stored = layer_forward(mixer, x)
    tokens, states = x.unbind(1), stored.states
    gradients = {name: torch.zeros_like(p) for name, p in mixer.named_parameters()}
    dx = [torch.zeros_like(token) for token in tokens]
    counts = Counts()

    def accumulate(network: _Network, i: int, vector: Tensor) -> None:
        by_parameter, by_token = network.vjp(tokens[i], vector)
        for name, gradient in by_parameter.items():
            gradients[name] += gradient
        dx[i] += by_token

    for t, g_t in enumerate(g.unbind(1)):
        accumulate(network_C, t, _outer(g_t, states[t + 1]))
        counts += Counts(C=1)
        for i, state in adjoint_states(stored.A, stored.C, t, window).items():
            vector = _apply(state.mT, g_t)  # g^t λ^{t,i}, (batch, d_state)
            accumulate(network_A, i, _outer(vector, states[i]))
            accumulate(network_B, i, _outer(vector, tokens[i]))
            counts += Counts(A=1, B=1)
            dx[i] += _apply(stored.B[i].mT, vector)
    return LayerGradient(gradients, torch.stack(dx, 1), counts)


# ---------------------------------------------------------------------------------------------------- a model


def layer_local_gradients(
    model: Stack, input_ids: Tensor, labels: Tensor, window: int | None = None
) -> tuple[Gradients, Counts]:
    """Algorithm 4: every layer's gradient from the same dL/dy_K (Proposition 3, eq. 6; eq. 7 with a window).

    Without a window the gradient of backpropagation for the last layer and the head, and so for one layer;
    not for the layers below, since what their outputs change in the inputs of the layers above is left out.
    Proposition 3 speaks of the mixers alone. The rest of a block (norm, MLP) gets the gradient of the block's
    own map with y_{k-1} held constant; the embedding gets what the first block's own pullback hands down, so
    that one layer is exact throughout; final norm and head are exact.

    Args:
        model: a float64 stack whose mixers are dense, diagonal or scalar.
        input_ids, labels: (batch, seqlen) int64, as for a model; the loss is the mean over valid labels.
        window: T̄ tokens; None for all.

    Returns:
        The gradients by the names of `model.named_parameters()`, and the vjps evaluated.
    """
    return _model_gradients(model, input_ids, labels, window, propagate=False)


def truncated_gradients(
    model: Stack, input_ids: Tensor, labels: Tensor, window: int | None = None
) -> tuple[Gradients, Counts]:
    """As `layer_local_gradients`, but a block hands the gradient of its input down to the one below it.

    Not in the paper. Without a window, or with one of seqlen and more, it is backpropagation's gradient at
    every depth.
    """
    return _model_gradients(model, input_ids, labels, window, propagate=True)


def _model_gradients(
    model: Stack, input_ids: Tensor, labels: Tensor, window: int | None, propagate: bool
) -> tuple[Gradients, Counts]:
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    blocks = [cast(Block, block) for block in model.layers]

    # Algorithm 1: all layers forward; kept are the layers' inputs y_{k-1} and what precedes each MLP.
    y = model.embedding.weight.detach()[input_ids]
    inputs, mixed = [], []
    for block in blocks:
        inputs.append(y)
        outputs = layer_forward(cast(SelectiveMixer, block.mixer), block.norm(y).detach()).outputs
        mixed.append(y + torch.stack(outputs, 1))
        y = block.feed_forward(mixed[-1]).detach()

    d_norm, d_head, dy = _head_gradient(model, y, labels)  # dy = dL/dy_K, stored "on all devices"
    gradients["norm_f.weight"] += d_norm
    gradients["embedding.weight" if model.config.tie_embeddings else "lm_head.weight"] += d_head

    # Algorithm 4: layer by layer; without propagation the order does not matter.
    counts = Counts()
    for k in reversed(range(len(blocks))):
        by_parameter, d_input, count = _block_gradient(blocks[k], inputs[k], mixed[k], dy, window)
        for name, gradient in by_parameter.items():
            gradients[f"layers.{k}.{name}"] += gradient
        counts += count
        if propagate or k == 0:  # what stands before the first layer gets what that layer hands down
            dy = d_input
    gradients["embedding.weight"].index_add_(0, input_ids.reshape(-1), dy.flatten(0, 1))
    return gradients, counts


def _block_gradient(
    block: Block, y: Tensor, mixed: Tensor, dy: Tensor, window: int | None
) -> tuple[Gradients, Tensor, Counts]:
    """Gradients of a block's parameters by name and of its input y, given dy of its output; vjps counted."""
    mixer = cast(SelectiveMixer, block.mixer)
    norm = _Network(lambda y: _rms_norm(y, block.norm.weight, block.norm.eps), norm=block.norm)

    def after_the_mixer(y: Tensor) -> Tensor:
        if block.mlp is None or block.norm2 is None:
            return y
        return y + block.mlp(_rms_norm(y, block.norm2.weight, block.norm2.eps))

    feed_forward = _Network(after_the_mixer, norm2=block.norm2, mlp=block.mlp)
    gradients, d_mixed = feed_forward.vjp(mixed, dy)
    layer = layer_gradient(mixer, block.norm(y), d_mixed, window)
    gradients |= {f"mixer.{name}": gradient for name, gradient in layer.parameters.items()}
    by_norm, d_input = norm.vjp(y, layer.x)
    return gradients | by_norm, d_mixed + d_input, layer.counts


def _head_gradient(model: Stack, y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss's gradients of final norm, head and y_K (Algorithm 1, lines 12–15)."""
    valid = max(1, int((labels[:, 1:] != IGNORE_INDEX).sum()))

    def loss(norm: Tensor, head: Tensor, y: Tensor) -> Tensor:
        logits = _rms_norm(y, norm, model.norm_f.eps) @ head.T
        targets = labels[:, 1:].reshape(-1)
        summed = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return summed / valid

    pullback = vjp(loss, model.norm_f.weight.detach(), model.lm_head.weight.detach(), y)[1]
    return pullback(y.new_ones(()))


# ---------------------------------------------------------------------------------------------------- helpers


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula: `torch.func` does not differentiate the compiled operator that the layers use."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """(batch, m, n), (batch, n) → (batch, m)."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """left ⊗ right: (batch, m), (batch, n) → (batch, m, n)."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)
