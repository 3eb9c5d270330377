"""The arithmetic of one tile: the forward with its pullback (`linearize`), the vjp cut to a window
(`windowed_vjp`), and sums of parameters' gradients (`Gradients`)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint.engine.arriving_gradients import ArrivingGradient
from adjoint.engine.decay import Decays
from adjoint.engine.leaves import TAKE_ARRIVING, UnlistedLeaves, aliases, next_node, suspend_hooks
from adjoint.errors import UserError
from adjoint.kernels.add_product import add_product
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.gated import products_kept
from adjoint.kernels.operation import operators_saved_under_recompute
from adjoint.layers import Block, State
from adjoint.loss import WEIGHT_SUM, WeightSum

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
MAX_PENDING_BYTES = 64e6  # `Gradients.max_pending_bytes`
MAX_COMPENSATED_NUMEL = 1 << 20  # of a tensor whose sum is compensated, which takes its memory again
MAX_PLAIN_ADDITIONS = 4096  # chunks after which matrices' sums are compensated, too
DTYPE = operator.attrgetter("dtype")  # of a tensor
MANY_TERMS = 256  # a product that sums fewer terms per element is cheaper to recompute than to store

Cotangents = tuple[Tensor | None, ...]
Replaced = Callable[[dict[Tensor, Tensor]], contextlib.AbstractContextManager[None]]
KEPT_ACTIVATION = (
    "the loss reads a tensor of one chunk's own graph, such as an activation that a forward hook has kept; "
    "chunks are computed apart, so its gradient would lack all other chunks: take such a loss from the "
    "outputs of the call, or call the unwrapped model"
)
Pullback = Callable[[Tensor | None, Cotangents], tuple[Tensor | None, Cotangents]]


class Gradients:
    """Sums of parameters' gradients over tiles, in float32 at least.

    A bfloat16 sum over many chunks would lose the small ones. Sums of vectors, and after some thousand chunks
    of small matrices, are compensated for rounding (Kahan 1965): they keep float32's digits over any number
    of chunks. Large matrices' are not: their rounding is 1e-6 after 4,096 chunks, 6e-6 after 100,000.

    Args:
        unlisted_leaves: tensors that tiles may reach without listing them, by default none.
        loss_cotangent: as in `begin_backward`.

    Attributes:
        max_pending_bytes: bytes of gradients that collect on a GPU before one launch adds them.
        fetch_sums: puts the sums that are in other memory (`engine.programs`) into `sums`; None if none are.
    """

    def __init__(
        self, unlisted_leaves: UnlistedLeaves | None = None, loss_cotangent: Tensor | None = None
    ) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.arriving: collections.deque[tuple[Tensor, ArrivingGradient]] = collections.deque()
        self.unlisted_leaves = unlisted_leaves or UnlistedLeaves()
        self.room: dict[Tensor, Tensor] = {}
        self.excess: dict[Tensor, Tensor] = {}  # what rounding has added to compensated sums
        self.counted: Tensor | None = None  # a parameter, and how often it was added to: about once per chunk
        self.additions = 0
        self.loss_cotangent = loss_cotangent
        self.max_pending_bytes = MAX_PENDING_BYTES
        self.fetch_sums: Callable[[bool, Tensor | None], None] | None = None

    def begin_backward(self, loss_cotangent: Tensor | None) -> None:
        """Set the cotangent that each chunk's loss will get, a scalar; None if it is not known.

        A tile that is linearized after this must be pulled back once, with this cotangent."""
        self.loss_cotangent = loss_cotangent

    def weight_sum(self, parameter: Tensor) -> WeightSum | None:
        """Return the sum to which the head adds its weight's gradient while it computes a chunk's loss.

        None if the cotangent is not known, if there is no sum yet, or if additions are compensated."""
        total = self.sums.get(parameter)
        if total is None or self.loss_cotangent is None or not self._adds_plainly(total):
            return None
        is_added = self.unlisted_leaves.runs_again
        if parameter is self.counted and not is_added:
            self.additions += 1
        self._wait_for_sum(parameter)
        return WeightSum(total, self.loss_cotangent, is_added)

    def reserve(self, parameters: Iterable[Tensor]) -> None:
        """Allocate the sums of parameters on a CPU now.

        What stays is allocated before what comes and goes there: sums between a chunk's tensors would leave
        holes in the heap."""
        reserved = [
            p
            for p in parameters
            if p.requires_grad and p.device.type == "cpu" and type(p) in (Tensor, torch.nn.Parameter)
        ]
        dtypes = {dtype: accumulate_dtype(dtype) for dtype in {p.dtype for p in reserved}}
        self.room = {p: torch.empty_like(p, dtype=dtypes[p.dtype]) for p in reserved}

    def add(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Add a parameter's gradient."""
        if gradient is None:
            return
        if self.arriving:
            self._wait_for_sum(parameter)
        total = self.sums.get(parameter)
        if total is not None:
            if parameter is self.counted:
                self.additions += 1
            if self._adds_plainly(gradient):
                total += gradient
            else:
                self._add_compensated(parameter, total, gradient)
            return
        self.counted = parameter if self.counted is None else self.counted
        self.excess.pop(parameter, None)
        if parameter in self.room:
            self.sums[parameter] = self.room.pop(parameter).copy_(gradient)
        else:  # a copy: autograd may have given the same memory to others
            self.sums[parameter] = gradient.to(accumulate_dtype(gradient.dtype), copy=True)

    def _adds_plainly(self, gradient: Tensor) -> bool:
        """Whether a gradient of this shape is added without compensation for rounding."""
        few = gradient.dim() > 1 and self.additions < MAX_PLAIN_ADDITIONS
        return few or gradient.numel() > MAX_COMPENSATED_NUMEL

    def round(self, parameters: Iterable[Tensor]) -> None:
        """Hold sums, to which nothing will be added, in their parameters' own dtypes."""
        totals = dict[Tensor, Tensor]()
        for parameter in parameters:
            total = self.sums.get(parameter)
            if total is not None and total.dtype != parameter.dtype:
                self._wait_for_sum(parameter)
                self.excess.pop(parameter, None)
                totals[parameter] = total
        self.sums |= copies_of(totals, map(DTYPE, totals))

    def replace(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Hold totals over several workers in the place of this one's sums."""
        self.sums = dict(totals)
        self.excess.clear()

    def add_all(self, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Add several (parameter, gradient) pairs, to existing sums by one launch for all of a class."""
        pairs: dict[type, list[tuple[Tensor, Tensor]]] = collections.defaultdict(list)
        first: dict[Tensor, Tensor] = {}
        for parameter, gradient in gradients:
            if gradient is not None and (parameter in self.sums or parameter in first):
                self._wait_for_sum(parameter)
                pairs[type(gradient)].append((parameter, gradient))
            elif gradient is not None and gradient.is_cuda and not is_traceable_wrapper_subclass(gradient):
                first[parameter] = gradient
            else:
                self.add(parameter, gradient)
        if first and self.counted is None:
            self.counted = next(iter(first))
        self.sums |= copies_of(first, map(accumulate_dtype, map(DTYPE, first.values())))
        for same_class in pairs.values():  # one launch takes no tensors and DTensors together
            self._add_to_sums(same_class)

    def _add_compensated(self, parameter: Tensor, total: Tensor, gradient: Tensor) -> None:
        """Add a gradient to an existing sum, compensated."""
        term, excess = gradient.to(total.dtype), self.excess.get(parameter)
        term = term if excess is None else term - excess
        new_total = total + term
        self.excess[parameter] = new_total - total - term
        total.copy_(new_total)

    def _add_to_sums(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add (parameter, gradient) pairs of one class of tensors to existing sums."""
        plain, compensated, repeated = [], dict[Tensor, Tensor](), []
        for parameter, gradient in pairs:
            if parameter is self.counted:
                self.additions += 1
            if self._adds_plainly(gradient):
                plain.append((self.sums[parameter], gradient))
            elif parameter in compensated:
                repeated.append((parameter, gradient))
            else:
                compensated[parameter] = gradient
        if plain:
            torch._foreach_add_(*zip(*plain, strict=True))
        if compensated:
            sums = [self.sums[p] for p in compensated]
            terms_by_parameter = copies_of(compensated, map(DTYPE, sums))
            if rounded_before := [p for p in compensated if p in self.excess]:
                excess = [self.excess[p] for p in rounded_before]
                torch._foreach_sub_([terms_by_parameter[p] for p in rounded_before], excess)
            terms = list(terms_by_parameter.values())
            totals = torch._foreach_add(sums, terms)
            rounded = torch._foreach_sub(torch._foreach_sub(totals, sums), terms)
            torch._foreach_copy_(sums, totals)
            self.excess.update(zip(compensated, rounded, strict=True))
        if repeated:
            self._add_to_sums(repeated)

    def add_rows(self, parameter: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Add gradient (n, d) to the rows (n,) of an embedding table's sum, without a table for the chunk."""
        total = self._sum_of(parameter)
        if total.is_cuda:  # sorts the rows, where index_add_ adds in whatever order threads come
            total.index_put_((rows,), gradient.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, rows, gradient.to(total.dtype))

    def add_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a @ b, the factors in half precision, to a float32 parameter's gradient."""
        is_first = parameter not in self.sums
        add_product(self._sum_of(parameter, has_values=not is_first), a, b, overwrites=is_first)

    def add_arriving(self, parameter: Tensor, gradient: ArrivingGradient) -> None:
        """Start to add a gradient that may still be on its way to host memory; `finish` waits for it."""
        while self.arriving and self.arriving[0][1].is_added():
            self.arriving.popleft()[1].finish()
        is_first = parameter not in self.sums
        if is_first:
            total = self.room.pop(parameter, None)
            dtype = accumulate_dtype(gradient.values.dtype)
            self.sums[parameter] = torch.empty_like(gradient.values, dtype=dtype) if total is None else total
        gradient.start_adding(self.sums[parameter], overwrites=is_first)
        self.arriving.append((parameter, gradient))

    def finish(self) -> None:
        """Wait until the sums have all that was added; raise an error that a thread has met."""
        if self.fetch_sums is not None:
            self.fetch_sums(False, None)
        while self.arriving:
            self.arriving.popleft()[1].finish()

    def lend_sums(self, fetch: Callable[[bool, Tensor | None], None] | None) -> None:
        """Set what puts the sums that are in other memory into `sums`; None once it has."""
        self.fetch_sums = fetch

    def scale(self, factor: Tensor, rounds: bool) -> None:
        """Multiply the sums, to which nothing will be added.

        Args:
            rounds: whether those that are in other memory may get their parameters' own dtypes.
        """
        for total in self.sums.values():
            total.mul_(factor)
        if self.fetch_sums is not None:
            self.fetch_sums(rounds, factor)

    def _wait_for_sum(self, parameter: Tensor) -> None:
        """Wait until a sum has all that was added to it: no two threads may write it, in any order."""
        for waiting, gradient in self.arriving:
            if waiting is parameter:
                gradient.finish()

    def _sum_of(self, parameter: Tensor, has_values: bool = True) -> Tensor:
        """Return a parameter's sum; one that is begun here has zeros, or no values yet."""
        self._wait_for_sum(parameter)
        if parameter not in self.sums:
            room, dtype = self.room.pop(parameter, None), accumulate_dtype(parameter.dtype)
            total = torch.empty_like(parameter, dtype=dtype) if room is None else room
            self.sums[parameter] = total.zero_() if has_values else total
        return self.sums[parameter]

    def vjp(self, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Cotangents:
        """Call the function `vjp`; a subclass may compute it in another way."""
        return vjp(pairs, inputs)

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's summed gradient in its own dtype; None if it has none."""
        if self.arriving:
            self._wait_for_sum(parameter)
        total = self.sums.get(parameter)
        return None if total is None else total.to(parameter.dtype)


def copies_of(tensors: Mapping[Tensor, Tensor], dtypes: Iterable[torch.dtype]) -> dict[Tensor, Tensor]:
    """Return copies of the values, in one dtype each, made by one launch."""
    copies = {
        key: torch.empty_like(t, dtype=dtype) for (key, t), dtype in zip(tensors.items(), dtypes, strict=True)
    }
    if copies:
        torch._foreach_copy_(list(copies.values()), list(tensors.values()))
    return copies


class TapeHooks:
    """Hooks of a tape's leaves, which add gradients to sums while the tape's own pullback runs.

    So a tile's gradients never all exist at once: together they may be as large as the model. On a GPU some
    at a time are added, by one launch for all.

    A tensor of a tile's graph that user code has kept, such as an activation in a forward hook, leads to
    these leaves, which stand for parameters and inputs. In another backward its gradient would be lost there,
    so it is refused.

    Attributes:
        gradients: the sums while the pullback runs; None before and after.
        pending: (parameter, gradient) pairs that are not added yet, with `pending_bytes` bytes.
    """

    def __init__(self) -> None:
        self.gradients: Gradients | None = None
        self.pending: list[tuple[Tensor, Tensor | None]] = []
        self.pending_bytes = 0

    def take(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Add the gradient of the leaf that stands for `parameter`; return a stand-in without memory.

        This is the leaf's hook: autograd takes the stand-in for the gradient."""
        if self.gradients is None:
            raise UserError(KEPT_ACTIVATION)
        if gradient is None:
            return None
        if gradient.is_cuda:
            self.pending.append((parameter, gradient))
            self.pending_bytes += gradient.nbytes
            if self.pending_bytes > self.gradients.max_pending_bytes:
                self.flush()
        else:
            self.gradients.add(parameter, gradient)
        return gradient.new_empty(()).expand_as(gradient)

    def flush(self) -> None:
        """Add what is pending."""
        assert self.gradients is not None
        self.gradients.add_all(self.pending)
        self.pending, self.pending_bytes = [], 0

    def take_arriving(self, parameter: Tensor, gradient: ArrivingGradient) -> None:
        """Hand on a gradient, or a part of it, that is on its way to host memory."""
        if self.gradients is None:
            raise UserError(KEPT_ACTIVATION)
        self.gradients.add_arriving(parameter, gradient)

    def check(self, gradient: Tensor | None) -> None:
        """Raise UserError if the gradient of an input does not come from the pullback."""
        if self.gradients is None:
            raise UserError(KEPT_ACTIVATION)


class Tape:
    """A tile's pullback, and the leaves of its graph."""

    def __init__(self, pullback: Pullback, leaves: Sequence[Tensor]) -> None:
        self.pullback, self.leaves = pullback, leaves

    def __call__(self, dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        """Pull cotangents back; see `linearize`."""
        return self.pullback(dy, dstate)

    def check_is_ours(self) -> None:
        """Raise UserError if the backward that runs now goes through this graph by itself.

        Called in the backward of an autograd function. The graph is freed by its pullback, after which
        PyTorch would only say that it is gone through a second time."""
        for leaf in self.leaves:
            try:
                is_reached = torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
            except (AttributeError, RuntimeError):  # PyTorch does not say it of leaves in autograd.grad
                return
            if is_reached:
                raise UserError(KEPT_ACTIVATION)


def linearize(
    call: Callable[[list[Tensor], Tensor, State], tuple[Tensor, State]],
    parameters: Sequence[Tensor],
    x: Tensor,
    state: State,
    gradients: Gradients,
    used: Sequence[Tensor] | None = None,
) -> tuple[Tensor, State, Tape]:
    """Return `call(parameters, x, state)` and a pullback that adds parameters' gradients to `gradients`.

    Args:
        call: gets leaves that share the parameters' memory (`aliases`), in the same order. Other leaves of
            its graph get a gradient like parameters, or are refused: see `leaves.UnlistedLeaves`.
        x: gets a cotangent if it is of floating point; token ids get none.
        state: entries that are no tensors, such as a `Past`, are passed on as they are, without a cotangent;
            the graph may lead to their `anchor`, if they have one.
        used: tensors to use in place of the parameters, such as casts of them.

    Returns:
        y, the new state, and the pullback (dy, dstate) → (dx, dstate), where None stands for no cotangent.
        The pullback may be called once; the tape that it holds is then freed.
    """
    tensors = [x, *[s for s in state if isinstance(s, Tensor)]]
    x, *state_leaves = aliases(tensors, map(Tensor.is_floating_point, tensors))
    rest = iter(state_leaves)
    state = tuple([next(rest) if isinstance(s, Tensor) else s for s in state])
    differentiable = [t for t in (x, *state_leaves) if t.requires_grad]
    differentiable += [a for s in state if (a := getattr(s, "anchor", None)) is not None]
    leaves = aliases(parameters if used is None else used, [p.requires_grad for p in parameters])
    begin, stand_ins, hooks = next_node(), gradients.unlisted_leaves.make_stand_ins(), TapeHooks()
    if gradients.loss_cotangent is not None:
        for parameter, leaf in zip(parameters, leaves, strict=True):
            vars(leaf)[WEIGHT_SUM] = functools.partial(gradients.weight_sum, parameter)
    with torch.enable_grad(), stand_ins or contextlib.nullcontext():
        y, after = call(leaves, x, state)
    outputs: list[Tensor] = [y, *after]
    trained = [(p, leaf) for p, leaf in zip(parameters, leaves, strict=True) if leaf.requires_grad]
    trained += stand_ins.leaves.items() if stand_ins else ()
    inputs = [*differentiable, *[leaf for _, leaf in trained]]
    unlisted = gradients.unlisted_leaves.collect(outputs, set(inputs), begin)
    for leaf in differentiable:
        leaf.register_hook(hooks.check)
    for parameter, leaf in trained:
        leaf.register_hook(functools.partial(hooks.take, parameter))
        vars(leaf)[TAKE_ARRIVING] = functools.partial(hooks.take_arriving, parameter)

    def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        pairs = zip(outputs, (dy, *dstate), strict=True)
        seeds = [(out, d) for out, d in pairs if d is not None and out.requires_grad]
        outputs.clear()
        if not seeds:
            return None, (None,) * len(state)
        hooks.gradients = gradients
        try:
            with suspend_hooks(unlisted) if unlisted else contextlib.nullcontext():
                grads = gradients.vjp(seeds, [*inputs, *unlisted])
            hooks.flush()
        finally:
            hooks.gradients = None
        gradients.add_all(zip(unlisted, grads[len(inputs) :], strict=True))
        grad_by_id = dict(zip(map(id, differentiable), grads, strict=False))
        return grad_by_id.get(id(x)), tuple(map(grad_by_id.get, map(id, state)))

    return y.detach(), tuple([s.detach() for s in after]), Tape(pullback, inputs)


def recomputed(call: Callable[..., Any], inputs: tuple, mode: str, random: bool = False) -> Any:
    """Return call(*inputs), leaving out parts of its tape, which the backward recomputes.

    It uses torch.utils.checkpoint.

    Args:
        mode: the part left out: "full", everything; "selective", everything but the tensors that are costly
            for their size (Korthikanti et al. 2022, section 5): results of scans and of matrix products,
            other than products of few terms (dt_proj's) or into the residual stream (inputs[0]'s width):
            no backward reads those.
        random: whether `call` draws random numbers, which must then be drawn again.
    """
    call = products_kept()(call)
    if mode == "full":
        return checkpointed(call, *inputs, use_reentrant=False, preserve_rng_state=random)
    width, saved = inputs[0].shape[-1], operators_saved_under_recompute()

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        if op in PRODUCTS:
            left, right = args[-2:]
            keeps = left.shape[-1] >= MANY_TERMS and right.shape[-1] != width
        else:
            keeps = op.namespace == "adjoint" and op._opname in saved
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(call, *inputs, use_reentrant=False, preserve_rng_state=random, context_fn=contexts)


def reset_rows(state: State, rows: Tensor | None) -> State:
    """Return the state with zeros in `rows` (batch,) bool, which begin a document.

    Neither state nor cotangent crosses there. Append-only entries stay: a `Past` knows which of its tokens
    are visible. An entry that is still on its way from another rank (`StateHandoff`) is reset when it
    arrives."""
    if rows is None:
        return state
    for s in state:
        if hasattr(s, "reset"):
            s.reset(rows)
    return tuple(_without(s, rows) if isinstance(s, Tensor) else s for s in state)


def _without(s: Tensor, rows: Tensor) -> Tensor:
    return s.masked_fill(rows.view(-1, *[1] * (s.dim() - 1)), 0)


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives each of `outputs` its cotangent, whatever its own cotangent is."""

    @staticmethod
    def forward(ctx: Any, cotangents: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return outputs[0].new_empty(())  # nobody reads it

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.cotangents


def vjp(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the cotangents of `inputs` from (output, cotangent) pairs; None for an input without influence.

    It is `torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)` without its import of SymPy,
    which only compares shapes and takes a second and 40 MB of memory."""
    return torch.autograd.grad(seeded(pairs), inputs, allow_unused=True)


def seeded(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return a scalar whose backward gives each output of the (output, cotangent) pairs its cotangent."""
    outputs, cotangents = zip(*pairs, strict=True)
    with torch.enable_grad():
        return _Seed.apply(list(cotangents), *outputs)


# ----------------------------------------------------------------------------------------- blocks, windowed


def forward_noting_decay(
    block: Block, y: Tensor, state: State, decays: Decays, seq_idx: Tensor | None = None
) -> tuple[Tensor, State]:
    """Run a block's forward, adding its recurrence's decays to `decays`."""
    mixer, tail = block.mixer, state[0] if len(state) > 1 else None
    inputs, new_tail = mixer.scan_inputs(block.mixer_input(y), tail, seq_idx)
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
        left, start, stop: token positions (see `Grid.extent`); the halo ends where x ends, at halo_stop.
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
    block: Block, replaced: Replaced, inputs: Windowed, gradients: Gradients
) -> tuple[Tensor, Cotangents]:
    """Compute the vjp of a block on the tokens that a tile owns; add parameters' gradients to `gradients`.

    Args:
        replaced: `ModuleTensors.replaced` of the block's tensors.

    Returns:
        The tile's part of the inputs' cotangents on [left, stop), (batch, stop - left, d_model), and the
        cotangents of the state before `start`.
    """
    left, start, stop, x, dy = inputs.left, inputs.start, inputs.stop, inputs.x, inputs.dy
    x_read, x_halo = x[:, : stop - left].detach().requires_grad_(), x[:, stop - left :]
    state = tuple(s.detach().requires_grad_() for s in inputs.state)
    parameters: list[Tensor] = [p for p in block.parameters() if p.requires_grad]
    leaves = aliases(parameters, [True] * len(parameters))
    begin, stand_ins = next_node(), gradients.unlisted_leaves.make_stand_ins()
    leaves_in_place = replaced(dict(zip(parameters, leaves, strict=True)))
    with torch.enable_grad(), stand_ins or contextlib.nullcontext(), leaves_in_place:
        x_left, x_own = x_read.split([start - left, stop - start], dim=1)
        y, scan_halo, ahead, after = _windowed(block, x_left, x_own, x_halo, state, inputs)
    pairs = [(y, dy[:, : stop - start])]
    if x_halo.shape[1]:
        # what the halo's outputs add to the states' cotangents; other tiles own these tokens' gradients
        with torch.enable_grad():
            scan_ahead = scan_halo.detach().requires_grad_()
            y_ahead = block.feed_forward(block.mixer.scan_outputs(scan_ahead, ahead), residual=x_halo)
        (d_ahead,) = vjp([(y_ahead, dy[:, stop - start :])], [scan_ahead])
        assert d_ahead is not None
        pairs.append((scan_halo, d_ahead))
    ends = zip(after, inputs.d_final, strict=True)
    pairs += [(end, d) for end, d in ends if end is not None and d is not None]
    if stand_ins:
        parameters, leaves = [*parameters, *stand_ins.leaves], [*leaves, *stand_ins.leaves.values()]
    outputs = [t for t in (y, scan_halo, *after) if t is not None]
    unlisted = gradients.unlisted_leaves.collect(outputs, {x_read, *state, *leaves}, begin)
    with suspend_hooks(unlisted):
        grads = vjp(pairs, [x_read, *state, *leaves, *unlisted])
    gradients.add_all(zip([*parameters, *unlisted], grads[1 + len(state) :], strict=True))
    assert grads[0] is not None
    return grads[0], grads[1 : 1 + len(state)]


def _windowed(
    block: Block, x_left: Tensor, x_own: Tensor, x_halo: Tensor, state: State, inputs: Windowed
) -> Any:
    """Run a block on the tokens that a tile owns, with its recurrence continued through the halo."""
    mixer, left, halo = block.mixer, x_left.shape[1], x_halo.shape[1]
    (h,), conv, seq_idx = reset_rows(state[-1:], inputs.starts_document), state[:-1], inputs.seq_idx
    own_idx = joined_idx = ahead_idx = None
    if seq_idx is not None:
        _, own_idx, ahead_idx = seq_idx.split([left, x_own.shape[1], halo], dim=1)
        joined_idx = seq_idx[:, left:]
    conv_state = conv[0] if conv else None
    if conv_state is not None and left:
        tail = mixer.conv_tail(block.mixer_input(x_left))
        missing = conv_state.shape[2] - tail.shape[2]  # tokens from before the sequence
        conv_state = torch.cat([conv_state[:, :, :missing], tail.to(conv_state.dtype)], dim=2)
        if seq_idx is not None and own_idx is not None:
            numbers = torch.nn.functional.pad(seq_idx[:, :left], (missing, 0), value=0)
            conv_state = conv_state.masked_fill((numbers != own_idx[:, :1]).unsqueeze(1), 0)
    scanned, tail = mixer.scan_inputs(block.mixer_input(x_own), conv_state, own_idx)
    joined, ahead = scanned, None
    if halo:
        with torch.no_grad():
            begins = None if own_idx is None or ahead_idx is None else own_idx[:, -1] != ahead_idx[:, 0]
            before = None if tail is None else reset_rows((tail,), begins)[0]
            ahead, _ = mixer.scan_inputs(block.mixer_input(x_halo), before, ahead_idx)
        joined = type(scanned)(*(torch.cat(pair, dim=1) for pair in zip(scanned, ahead, strict=True)))
    y_scan, h_final = mixer.scan(joined, h, window=inputs.window, halo=halo, seq_idx=joined_idx)
    scan_own, scan_halo = y_scan.split([x_own.shape[1], halo], dim=1)
    y = block.feed_forward(mixer.scan_outputs(scan_own, scanned), residual=x_own)
    return y, scan_halo, ahead, (None if halo else tail, h_final) if conv else (h_final,)
