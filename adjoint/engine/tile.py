"""The arithmetic of one tile: the forward with its pullback (`linearize`), the vjp cut to a window
(`windowed_vjp`), and sums of parameters' gradients (`Gradients`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint.engine.decay import Decays
from adjoint.engine.leaves import UnlistedLeaves, alias, next_node, unseen
from adjoint.kernels.add_product import add_product
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.gated import products_kept
from adjoint.layers import Block, State

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
SCANS = ("selective_scan", "ssd_scan", "linear_scan", "gated_delta_rule", "past_attention")
WAITING = 64e6  # bytes of gradients that collect on a GPU before one launch adds them to the sums
MANY_TERMS = 256  # a product that sums fewer terms per element is cheaper to recompute than to store

Cotangents = tuple[Tensor | None, ...]
Replaced = Callable[[dict[Tensor, Tensor]], contextlib.AbstractContextManager[None]]
Pullback = Callable[[Tensor | None, Cotangents], tuple[Tensor | None, Cotangents]]


class Gradients:
    """Sums of parameter gradients over tiles, in float32 at least: a bfloat16 sum over many chunks would lose
    the small ones.

    Args:
        outside: tensors that tiles may reach without listing them, by default none.
        parameters: those whose sums get their memory now. On a CPU what stays is allocated before what comes
            and goes: sums between a chunk's tensors would leave holes in the heap.
    """

    def __init__(self, outside: UnlistedLeaves | None = None, parameters: Iterable[Tensor] = ()) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.outside = outside or UnlistedLeaves()
        self.room = {
            p: torch.empty_like(p, dtype=accumulate_dtype(p.dtype))
            for p in parameters
            if p.requires_grad and p.device.type == "cpu" and type(p) in (Tensor, torch.nn.Parameter)
        }

    def add(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Adds a parameter's gradient."""
        if gradient is None:
            return
        total = self.sums.get(parameter)
        if total is not None:
            total += gradient
        elif parameter in self.room:
            self.sums[parameter] = self.room.pop(parameter).copy_(gradient)
        else:  # a copy: autograd may have given the same memory to others
            self.sums[parameter] = gradient.to(accumulate_dtype(gradient.dtype), copy=True)

    def add_all(self, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Adds several parameters' gradients, given as (parameter, gradient): to existing sums by one launch
        for all, instead of one per parameter."""
        sums, terms = [], []
        for parameter, gradient in gradients:
            if gradient is not None and parameter in self.sums:
                sums.append(self.sums[parameter])
                terms.append(gradient)
            else:
                self.add(parameter, gradient)
        if sums:
            torch._foreach_add_(sums, terms)

    def add_rows(self, parameter: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Adds gradient (n, d) to the rows (n,) of an embedding table's sum; a chunk then needs no table of
        its own."""
        total = self._begun(parameter)
        if total.is_cuda:  # sorts the rows, where index_add_ adds in whatever order threads come
            total.index_put_((rows,), gradient.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, rows, gradient.to(total.dtype))

    def add_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds a @ b, the factors in half precision, to a float32 parameter's gradient."""
        add_product(self._begun(parameter), a, b)

    def _begun(self, parameter: Tensor) -> Tensor:
        """A parameter's sum, of zeros if there is none yet."""
        if parameter not in self.sums:
            room = self.room.pop(parameter, None)
            dtype = accumulate_dtype(parameter.dtype)
            self.sums[parameter] = torch.zeros_like(parameter, dtype=dtype) if room is None else room.zero_()
        return self.sums[parameter]

    def vjp(self, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Cotangents:
        """The function `vjp`; a subclass may compute it in another way."""
        return vjp(pairs, inputs)

    def of(self, parameter: Tensor) -> Tensor | None:
        """A parameter's summed gradient in its own dtype; None if it has none."""
        total = self.sums.get(parameter)
        return None if total is None else total.to(parameter.dtype)


class StreamingAccumulator:
    """Adds gradients to the sums while a tile's backward runs, so that they never all exist at once: together
    they may be as large as the model. On a GPU it adds some at a time, by one launch for all."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.bytes = gradients, 0
        self.waiting: list[tuple[Tensor, Tensor | None]] = []

    def take(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The hook of the leaf that stands for `parameter`; gives autograd a stand-in without memory."""
        if gradient is None:
            return None
        if gradient.is_cuda:
            self.waiting.append((parameter, gradient))
            self.bytes += gradient.nbytes
            if self.bytes > WAITING:
                self.add()
        else:
            self.gradients.add(parameter, gradient)
        return gradient.new_empty(()).expand_as(gradient)

    def add(self) -> None:
        self.gradients.add_all(self.waiting)
        self.waiting, self.bytes = [], 0


def linearize(
    call: Callable[[list[Tensor], Tensor, State], tuple[Tensor, State]],
    parameters: Sequence[Tensor],
    x: Tensor,
    state: State,
    gradients: Gradients,
    used: Sequence[Tensor] | None = None,
) -> tuple[Tensor, State, Pullback]:
    """Outputs of `call(parameters, x, state)`, and a pullback that adds parameters' gradients to `gradients`.

    Args:
        call: gets leaves that share the parameters' memory (`aliases`), in the same order. What else its
            graph begins at has a gradient like parameters, or is refused: see `leaves.UnlistedLeaves`.
        x: gets a cotangent if it is of floating point; token ids get none.
        state: entries that are no tensors, such as a `Past`, are handed on as they are, without a cotangent;
            the graph may lead to their `anchor`, if they have one.
        used: tensors to take in place of the parameters, such as casts of them.

    Returns:
        y, the new state, and the pullback (dy, dstate) → (dx, dstate), where None stands for no cotangent.
        The pullback may be called once; the tape that it holds is then freed.
    """
    x = alias(x, x.is_floating_point())
    state = tuple(alias(s, s.is_floating_point()) if isinstance(s, Tensor) else s for s in state)
    followed = [t for t in (x, *state) if isinstance(t, Tensor) and t.requires_grad]
    followed += [s.anchor for s in state if hasattr(s, "anchor")]
    pairs = zip(parameters, parameters if used is None else used, strict=True)
    leaves = [alias(t, parameter.requires_grad) for parameter, t in pairs]
    begin, instead = next_node(), gradients.outside.standing_in()
    with torch.enable_grad(), instead or contextlib.nullcontext():
        y, after = call(leaves, x, state)
    outputs: list[Tensor] = [y, *after]
    trained = [(p, leaf) for p, leaf in zip(parameters, leaves, strict=True) if leaf.requires_grad]
    trained += instead.leaves.items() if instead else ()
    others = gradients.outside.of(outputs, {*followed, *(leaf for _, leaf in trained)}, begin)

    def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        pairs = zip(outputs, (dy, *dstate), strict=True)
        given = [(out, d) for out, d in pairs if d is not None and out.requires_grad]
        outputs.clear()
        if not given:
            return None, (None,) * len(state)
        arriving = StreamingAccumulator(gradients)
        for parameter, leaf in trained:
            leaf.register_hook(functools.partial(arriving.take, parameter))
        inputs = [*followed, *(leaf for _, leaf in trained), *others]
        with unseen(others) if others else contextlib.nullcontext():
            grads = gradients.vjp(given, inputs)
        arriving.add()
        gradients.add_all(zip(others, grads[len(inputs) - len(others) :], strict=True))
        of = dict(zip(map(id, followed), grads, strict=False))
        return of.get(id(x)), tuple(of.get(id(s)) for s in state)

    return y.detach(), tuple(s.detach() for s in after), pullback


def recomputed(call: Callable[..., Any], given: tuple, how: str, random: bool = False) -> Any:
    """call(*given), leaving parts of its tape out: the backward recomputes them (torch.utils.checkpoint).

    Args:
        how: what is left out: "full", everything; "selective", all but what is costly for its size
            (Korthikanti et al. 2022, section 5): results of scans and of matrix products, other than products
            of few terms (dt_proj's) or into the residual stream (given[0]'s width), which no backward reads.
        random: whether `call` draws random numbers, which must then be drawn again.
    """
    call = products_kept()(call)
    if how == "full":
        return checkpointed(call, *given, use_reentrant=False, preserve_rng_state=random)
    width = given[0].shape[-1]

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        if op in PRODUCTS:
            left, right = args[-2:]
            keeps = left.shape[-1] >= MANY_TERMS and right.shape[-1] != width
        else:
            keeps = op.namespace == "adjoint" and op._opname in SCANS
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(call, *given, use_reentrant=False, preserve_rng_state=random, context_fn=contexts)


def reset_rows(state: State, rows: Tensor | None) -> State:
    """The state with zeros in `rows` (batch,) bool, which begin a document: nothing crosses, forward or back.
    Append-only entries stay: a `Past` says itself which of its tokens are visible. What has yet to arrive is
    told of it."""
    if rows is None:
        return state
    for s in state:
        if hasattr(s, "reset"):
            s.reset(rows)
    return tuple(_without(s, rows) if isinstance(s, Tensor) else s for s in state)


def _without(s: Tensor, rows: Tensor) -> Tensor:
    return s.masked_fill(rows.view(-1, *[1] * (s.dim() - 1)), 0)


def aliases(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters' `leaves.alias`es."""
    return [alias(p, p.requires_grad) for p in parameters]


class _Seed(torch.autograd.Function):
    """Gives the outputs passed to it their cotangents, whatever its own cotangent is."""

    @staticmethod
    def forward(ctx: Any, cotangents: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return outputs[0].new_empty(())  # nobody reads it

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.cotangents


def vjp(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The cotangents of `inputs` from (output, cotangent) pairs; None for an input without influence.

    As `torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)`, which would import SymPy to
    compare shapes: a second of time and 40 MB of memory."""
    return torch.autograd.grad(seeded(pairs), inputs, allow_unused=True)


def seeded(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A scalar whose backward gives each output of the (output, cotangent) pairs its cotangent."""
    outputs, cotangents = zip(*pairs, strict=True)
    with torch.enable_grad():
        return _Seed.apply(list(cotangents), *outputs)


# ----------------------------------------------------------------------------------------- blocks, windowed


def forward_noting_decay(
    block: Block, y: Tensor, state: State, decays: Decays, seq_idx: Tensor | None = None
) -> tuple[Tensor, State]:
    """A block's forward, which adds its recurrence's decays to `decays` on the way."""
    mixer, tail = block.mixer, state[0] if len(state) > 1 else None
    inputs, new_tail = mixer.scan_inputs(block.norm(y), tail, seq_idx)
    decays.add(mixer.log_decay(inputs))
    scanned, h = mixer.scan(inputs, state[-1], seq_idx=seq_idx)
    y = block.feed_forward(mixer.scan_outputs(scanned, inputs), residual=y)
    return y, ((h,) if tail is None else (new_tail, h))


@dataclasses.dataclass(frozen=True)
class Windowed:
    """Inputs of a block's vjp on the tokens [start, stop) that a tile owns, the recurrence cut to W tokens.

    It needs the block's inputs and output cotangents up to token stop + W - 2 (the tokens from `stop` on are
    the halo), the recurrent state before `start`, and the d_conv - 1 inputs before it. The convolution's
    short paths are not cut, so a tile computes its own copy of them instead of waiting for its neighbour.

    Attributes:
        left, start, stop: token positions (see `Grid.span`); the halo ends where x ends, at halo_stop.
        window: W.
        x: (batch, halo_stop - left, d_model), the block's inputs.
        state: the state before `start`; its conv tail is used at the start of the sequence only.
        dy: (batch, halo_stop - start, d_model), cotangents of the block's outputs.
        d_final: cotangents of the final state, for a tile that reaches the sequence's end; else None each.
        seq_idx: (batch, halo_stop - left), as in `Batch`.
        starts_document: (batch,), as in `Batch`, for the token `start`.
    """

    left: int
    start: int
    stop: int
    window: int
    x: Tensor
    state: State
    dy: Tensor
    d_final: Cotangents
    seq_idx: Tensor | None = None
    starts_document: Tensor | None = None


def windowed_vjp(
    block: Block, replaced: Replaced, given: Windowed, gradients: Gradients
) -> tuple[Tensor, Cotangents]:
    """The vjp of a block on the tokens that a tile owns; it adds parameters' gradients to `gradients`.

    Args:
        replaced: of the block's `weights.Tensors`.

    Returns:
        The tile's part of the inputs' cotangents on [left, stop), (batch, stop - left, d_model), and the
        cotangents of the state before `start`.
    """
    left, start, stop, x, dy = given.left, given.start, given.stop, given.x, given.dy
    own, x_halo = x[:, : stop - left].detach().requires_grad_(), x[:, stop - left :]
    state = tuple(s.detach().requires_grad_() for s in given.state)
    parameters: list[Tensor] = [p for p in block.parameters() if p.requires_grad]
    leaves = aliases(parameters)
    begin, instead = next_node(), gradients.outside.standing_in()
    there = replaced(dict(zip(parameters, leaves, strict=True)))
    with torch.enable_grad(), instead or contextlib.nullcontext(), there:
        x_left, x_own = own.split([start - left, stop - start], dim=1)
        y, scan_halo, ahead, after = _windowed(block, x_left, x_own, x_halo, state, given)
    pairs = [(y, dy[:, : stop - start])]
    if x_halo.shape[1]:
        # what the halo's outputs add to the states' cotangents; other tiles own these tokens' gradients
        with torch.enable_grad():
            scan_ahead = scan_halo.detach().requires_grad_()
            y_ahead = block.feed_forward(block.mixer.scan_outputs(scan_ahead, ahead), residual=x_halo)
        (d_ahead,) = vjp([(y_ahead, dy[:, stop - start :])], [scan_ahead])
        assert d_ahead is not None
        pairs.append((scan_halo, d_ahead))
    ends = zip(after, given.d_final, strict=True)
    pairs += [(end, d) for end, d in ends if end is not None and d is not None]
    if instead:
        parameters, leaves = [*parameters, *instead.leaves], [*leaves, *instead.leaves.values()]
    outputs = [t for t in (y, scan_halo, *after) if t is not None]
    others = gradients.outside.of(outputs, {own, *state, *leaves}, begin)
    with unseen(others):
        grads = vjp(pairs, [own, *state, *leaves, *others])
    gradients.add_all(zip([*parameters, *others], grads[1 + len(state) :], strict=True))
    assert grads[0] is not None
    return grads[0], grads[1 : 1 + len(state)]


def _windowed(
    block: Block, x_left: Tensor, x_own: Tensor, x_halo: Tensor, state: State, given: Windowed
) -> Any:
    """A block on the tokens that a tile owns, with its recurrence continued through the halo."""
    mixer, left, halo = block.mixer, x_left.shape[1], x_halo.shape[1]
    (h,), conv, seq_idx = reset_rows(state[-1:], given.starts_document), state[:-1], given.seq_idx
    own = joined_idx = ahead_idx = None
    if seq_idx is not None:
        _, own, ahead_idx = seq_idx.split([left, x_own.shape[1], halo], dim=1)
        joined_idx = seq_idx[:, left:]
    conv_state = conv[0] if conv else None
    if conv_state is not None and left:
        tail = mixer.conv_tail(block.norm(x_left))
        missing = conv_state.shape[2] - tail.shape[2]  # tokens from before the sequence
        conv_state = torch.cat([conv_state[:, :, :missing], tail.to(conv_state.dtype)], dim=2)
        if seq_idx is not None and own is not None:
            numbers = torch.nn.functional.pad(seq_idx[:, :left], (missing, 0), value=0)
            conv_state = conv_state.masked_fill((numbers != own[:, :1]).unsqueeze(1), 0)
    scanned, tail = mixer.scan_inputs(block.norm(x_own), conv_state, own)
    joined, ahead = scanned, None
    if halo:
        with torch.no_grad():
            begins = None if own is None or ahead_idx is None else own[:, -1] != ahead_idx[:, 0]
            before = None if tail is None else reset_rows((tail,), begins)[0]
            ahead, _ = mixer.scan_inputs(block.norm(x_halo), before, ahead_idx)
        joined = type(scanned)(*(torch.cat(pair, dim=1) for pair in zip(scanned, ahead, strict=True)))
    y_scan, h_final = mixer.scan(joined, h, window=given.window, halo=halo, seq_idx=joined_idx)
    scan_own, scan_halo = y_scan.split([x_own.shape[1], halo], dim=1)
    y = block.feed_forward(mixer.scan_outputs(scan_own, scanned), residual=x_own)
    return y, scan_halo, ahead, (None if halo else tail, h_final) if conv else (h_final,)
