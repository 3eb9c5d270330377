"""`checkpoint_sequence`: any recurrence by chunks, as `torch.utils.checkpoint` along the sequence.

A function (x of a chunk, state) → (y of the chunk, state) becomes the only stage of a step. The adjoint state
crosses the chunks' edges from right to left. Only states at the edges are stored, and the backward computes
each chunk again."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence, Set
from typing import TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.chunk_size import Sizes, chunk_size_on
from adjoint.engine.generators import ChunkGenerators, generators_in
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.leaves import leaves_of, suspend_hooks
from adjoint.engine.module_tensors import ModuleTensors, UntrainedTensors, version_of
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep, uncompiled
from adjoint.engine.storage import Slab, stores_on_host
from adjoint.engine.sweep import Sweep
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.engine.verification import (
    TOKENS,
    Results,
    Trial,
    TrialKind,
    in_evaluation,
    some_numbers,
    tolerance,
    verify,
)
from adjoint.errors import UserError
from adjoint.kernels import dispatch
from adjoint.kernels.checks import accumulate_dtype, outside_inference_mode, refusal_of_transforms
from adjoint.kernels.precision import full_float32
from adjoint.layers import State
from adjoint.parallel.agreement import parts_of

# Any nesting of tensors: inputs, outputs, states, targets.
X = TypeVar("X")
Y = TypeVar("Y")
S = TypeVar("S")
T = TypeVar("T")
# (x of a chunk, state before it) → (y of the chunk, state after it).
Function = Callable[..., object]
# (y of a chunk, target of the chunk) → the sum of the loss over the chunk's tokens.
Loss = Callable[..., Tensor]

CHUNK_SIZE = 5  # of the trial
RECURRENCE = TrialKind(
    claim=f"the gradient of {TOKENS} tokens in chunks is not that of the whole",
    likely_reason="it keeps or reads something besides its input and its state",
    remedy="return all of it as the state",
    chunk_size=CHUNK_SIZE,
    is_of_user_code=True,
)
RECURRENCE_AND_LOSS = dataclasses.replace(
    RECURRENCE,
    likely_reason="the loss is no sum over tokens, or the function keeps or reads something besides its input"
    " and its state",
    remedy='return a sum over the chunk\'s tokens (reduction="sum"), and all of what is kept as the state',
)


class _VerifiedCalls:
    """Kinds of calls that have been verified, with the bytes per token and row that autograd saves in each.

    Attributes:
        kinds: these.
        of: the verified calls that have another object, too, by its identity and as long as it lives: after
            those that the function reads, those that the loss reads.
    """

    def __init__(self) -> None:
        self.kinds: dict[Hashable, float] = {}
        self.of: MutableMapping[object, _VerifiedCalls] = WeakIdKeyDictionary()

    def with_objects(self, objects: Iterable[object]) -> _VerifiedCalls:
        """Return those of some objects; of one without weak references, as a list is, none are kept."""
        calls = self
        for each in objects:
            try:
                calls = calls.of.setdefault(each, _VerifiedCalls())
            except TypeError:
                return _VerifiedCalls()
        return calls


_verified = _VerifiedCalls()


@overload
def checkpoint_sequence(
    function: Callable[[X, S], tuple[Y, S]],
    x: X,
    state: S,
    chunk_size: int | None = None,
    checkpoints: int | None = None,
) -> tuple[Y, S]: ...


@overload
def checkpoint_sequence(
    function: Callable[[X, S], tuple[Y, S]],
    x: X,
    state: S,
    chunk_size: int | None = None,
    checkpoints: int | None = None,
    *,
    loss: Callable[[Y, T], Tensor],
    target: T,
) -> tuple[Tensor, S]: ...


@uncompiled
def checkpoint_sequence(
    function: Function,
    x: object,
    state: object,
    chunk_size: int | None = None,
    checkpoints: int | None = None,
    loss: Loss | None = None,
    target: object = None,
) -> tuple[object, object]:
    """Run a recurrence over a long sequence in memory that grows by one state per chunk.

    It is `function(x, state)` with the same gradients, exactly, of x, of the initial state and of all
    parameters that the function reaches. The forward stores the states at the edges of chunks, and the
    backward computes each chunk again, the last one first (docs/method.md, section 4).

        lstm = torch.nn.LSTM(64, 64, batch_first=True)
        y, (h, c) = adjoint.checkpoint_sequence(lstm, x, (h, c))

    On first use 13 tokens run both ways and the gradients are compared, for each loss again. Random numbers,
    such as dropout's, are drawn again where a chunk is computed again. Do not use it if the activations of
    the sequence fit in memory and only time counts.

    Args:
        function: any module or callable (x of a chunk, state) → (y of the chunk, state). All that it carries
            from token to token must be in the state, which has the same shapes after every chunk.
        x: a tensor (batch, seqlen, …), or any nesting of such tensors.
        state: before the first token: any nesting of tensors of any shapes and dtypes.
        chunk_size: tokens per chunk; it need not divide seqlen. By default so many that the activations of a
            chunk take as much memory as the states at all edges, or enough to keep the device busy.
        checkpoints: the number of states that are stored at a time, instead of one per chunk; the others are
            computed again by the binomial schedule (Griewank and Walther 2000).
        loss: a function (y of a chunk, target of the chunk) → its loss, summed over tokens. Then y is never
            whole: the first result is the sum over all chunks.
        target: for `loss`: any nesting of tensors (batch, seqlen, …).

    Returns:
        y (batch, seqlen, …), or with `loss` a scalar; and the state after the last token. Both are
        differentiable.

    Raises:
        UserError: x, state, chunk_size or checkpoints is not of this kind, the state changes its shape, a
            target comes without a loss, the function writes to x in place, or one of `torch.func`'s
            transforms is around the call.
        Refused: on first use, if the gradient by chunks is not that of the whole.
    """
    if why := refusal_of_transforms():
        raise UserError(f"checkpoint_sequence: {why}; call backward() or torch.autograd.grad")
    call = _SequenceCall.of_arguments(function, x, state, loss, target)
    for name, value in (("chunk_size", chunk_size), ("checkpoints", checkpoints)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(
                f"checkpoint_sequence: {name}: expected a whole number (1 or more), got {value!r}"
            )
    saved_bytes = _verify_once(call)
    if chunk_size is None:
        states = sum(s.nbytes for s in call.state)
        sizes = Sizes(max(saved_bytes, 1.0), states / call.rows)
        chunk_size = chunk_size_on(call.device, sizes, call.rows, call.seqlen, checkpoints)
    return call.by_chunks(min(chunk_size, call.seqlen), Storage(checkpoints=checkpoints))


@uncompiled
def run_by_chunks(
    function: Callable[[X, S], tuple[Y, S]],
    x: X,
    state: S,
    spec: EngineSpec,
    reverse: bool = False,
    setting: RecurrenceSetting | None = None,
) -> tuple[Y, S]:
    """Run one of many recurrences of a model as `checkpoint_sequence` does, and keep no chunk's tape.

    The last chunk is computed again, too: a tape in each of many layers would take as much memory as plain
    autograd does for that chunk.

    Args:
        spec: of which the chunk size and the number of stored states count.
        reverse: whether the sequence is read from its last token to its first. The function then gets each
            chunk's tokens in reverse order; y is in the order of x, and the state that is returned is the one
            after the first token.
        setting: what else is known of the function; None for a function by itself.
    """
    setting = RecurrenceSetting() if setting is None else setting
    call = _SequenceCall.of_arguments(function, x, state, None, None, reverse, setting.owner)
    if setting.verify_for is not None:
        _verify_once(call, setting.verify_for)
    on_host = setting.on_host
    storage = Storage(tapes=0, checkpoints=spec.storage.checkpoints, offload=on_host is not None)
    return cast(tuple[Y, S], call.by_chunks(min(spec.chunk_size, call.seqlen), storage, on_host))


@dataclasses.dataclass(frozen=True)
class RecurrenceSetting:
    """The modules and the storage of one of many recurrences of a model.

    Attributes:
        owner: the modules that the function runs, in one; by default the function, if it is a module or a
            method of one.
        verify_for: the object for which the function is compared with the whole on first use, once for each
            name of a function; None if it is known to keep nothing but its state.
        on_host: where the inputs that get gradients are stored for the backward, with the states at edges, if
            the device is a GPU; None leaves both on the device.
    """

    owner: nn.Module | None = None
    verify_for: object = None
    on_host: HostInputs | None = None


class HostInputs:
    """Copies of whole inputs in host memory, which recurrences that read the same tensor share.

    Make one for the recurrences that run while their inputs live: a tensor is stored once, under its id."""

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}

    def slab_of(self, x: Tensor, chunk_size: int) -> Slab:
        """Return the copy of x (batch, seqlen, …); it is made a chunk at a time."""
        if id(x) not in self.slabs:
            nothing = x.new_empty(x.shape[0], 0, *x.shape[2:])  # x[:, :0] would keep the memory of x
            slab = self.slabs[id(x)] = Slab(nothing, 1, x.shape[1], host=True)
            for start in range(0, x.shape[1], chunk_size):
                slab.write(x.detach()[:, start : start + chunk_size], start)
        return self.slabs[id(x)]


@dataclasses.dataclass(frozen=True)
class _SequenceCall:
    """A call's arguments, their tensors in flat lists.

    Attributes:
        inputs: the tensors of x, then those of the target.
        x_spec, target_spec, state_spec: how the arguments are nested.
        reverse: whether the function reads the last token first.
        owner: the function, or the object that it is a method of: if that is a module, it is trained.
    """

    function: Function
    loss: Loss | None
    inputs: list[Tensor]
    state: list[Tensor]
    x_spec: TreeSpec
    target_spec: TreeSpec
    state_spec: TreeSpec
    reverse: bool
    owner: object

    @staticmethod
    def of_arguments(
        function: Function,
        x: object,
        state: object,
        loss: Loss | None,
        target: object,
        reverse: bool = False,
        owner: object = None,
    ) -> _SequenceCall:
        """Flatten and check the arguments.

        Raises:
            UserError: one is not of the kind that `checkpoint_sequence` says.
        """
        if not callable(function):
            raise UserError(f"checkpoint_sequence: function is a {type(function).__name__}, not callable")
        if loss is None and target is not None:
            raise UserError("checkpoint_sequence: target is for loss: give a loss too, or leave target out")
        x_tensors, x_spec = tree_flatten(x)
        targets, target_spec = tree_flatten(target if loss is not None else ())
        states, state_spec = tree_flatten(state)
        for name, tensors in (("x", x_tensors), ("target", targets), ("state", states)):
            for t in tensors:
                if not isinstance(t, Tensor):
                    hint = "; give zeros in its place" if name == "state" and t is None else ""
                    raise UserError(f"checkpoint_sequence: {name} has a {type(t).__name__}, no tensor{hint}")
        shapes = [tuple(t.shape) for t in (*x_tensors, *targets)]
        if not x_tensors or any(len(shape) < 2 or shape[:2] != shapes[0][:2] for shape in shapes):
            raise UserError(
                "checkpoint_sequence: x and target are tensors (batch, seqlen, …) with the same batch and "
                f"seqlen; got {', '.join(map(str, shapes)) or 'no tensor'}"
            )
        if not shapes[0][0] or not shapes[0][1]:
            raise UserError(f"checkpoint_sequence: x is empty, {shapes[0]}")
        if any(t.is_complex() for t in x_tensors):
            raise UserError("checkpoint_sequence: x has complex numbers; give torch.view_as_real(x)")
        inputs, specs = [*x_tensors, *targets], (x_spec, target_spec, state_spec)
        owner = getattr(function, "__self__", function) if owner is None else owner
        return _SequenceCall(function, loss, inputs, states, *specs, reverse, owner)

    @property
    def rows(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def seqlen(self) -> int:
        return self.inputs[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The modules of the function's owner, if that is one."""
        return list(self.owner.named_modules()) if isinstance(self.owner, nn.Module) else []

    @property
    def subject(self) -> str:
        """The function's name, for errors."""
        owner = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"checkpoint_sequence of {owner}"

    def run(
        self, inputs: Sequence[Tensor], state: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], TreeSpec]:
        """Call the function, and the loss of its output.

        Inputs and outputs are in the order of the sequence, also where the function reads it in reverse.

        Returns:
            The tensors of the output, those of the state after it, and how the output is nested.
        """
        count = self.x_spec.num_leaves
        inputs = self._in_order_of_reading(inputs)
        x = tree_unflatten(list(inputs[:count]), self.x_spec)
        result = self.function(x, tree_unflatten(list(state), self.state_spec))
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(f"{self.subject}: expected (y, state), it returned a {type(result).__name__}")
        y, after = result
        after_tensors, after_spec = tree_flatten(after)
        shapes = [tuple(getattr(s, "shape", ())) for s in after_tensors]
        if after_spec != self.state_spec or shapes != [tuple(s.shape) for s in state]:
            raise UserError(
                f"{self.subject}: the state that it returned has the shapes {shapes}, the one before it "
                f"{[tuple(s.shape) for s in state]}: it must be the same after every chunk"
            )
        if self.loss is not None:
            total = self.loss(y, tree_unflatten(list(inputs[count:]), self.target_spec))
            if not isinstance(total, Tensor) or total.dim():
                raise UserError(f"{self.subject}: loss must return a scalar, the sum over the chunk's tokens")
            return [total], after_tensors, tree_flatten(total)[1]
        outputs, y_spec = tree_flatten(y)
        tokens = inputs[0].shape[:2]
        for t in outputs:
            if not isinstance(t, Tensor) or t.shape[:2] != tokens:
                shape = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
                raise UserError(f"{self.subject}: y must be (batch, tokens, …), {tuple(tokens)}, got {shape}")
        return self._in_order_of_reading(outputs), after_tensors, y_spec

    def _in_order_of_reading(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors (batch, tokens, …) in the function's order; or what it wrote in the sequence's."""
        return [t.flip(1) for t in tensors] if self.reverse else [*tensors]

    def tokens_of(self, chunk: Batch) -> slice:
        """Return the chunk's place in the sequence: chunks are counted from where the function begins."""
        start, stop = chunk.start, chunk.start + chunk.seqlen
        return slice(self.seqlen - stop, self.seqlen - start) if self.reverse else slice(start, stop)

    def first_tokens(self, count: int) -> _SequenceCall:
        """Return the call on the first tokens, of leaves that require gradients where tensors can.

        A shorter sequence is repeated: its few tokens may fit in one chunk, which proves nothing."""
        places = torch.arange(count, device=self.device) % self.seqlen

        def leaf(t: Tensor) -> Tensor:
            t = t.clone() if t.is_inference() else t  # autograd saves no tensor made in inference mode
            return t.detach().requires_grad_(t.is_floating_point())

        inputs = [leaf(t[:, places.to(t.device)]) for t in self.inputs]
        return dataclasses.replace(self, inputs=inputs, state=[leaf(s) for s in self.state])

    def _sweep(self) -> Sweep:
        """Return a sweep whose backward runs with the weights that the owner had in the forward.

        A caller may replace them for the forward alone, as `torch.func.functional_call` does."""
        if not isinstance(self.owner, nn.Module):
            return Sweep()
        return Sweep(ModuleTensors(self.owner).restored)

    def by_chunks(
        self, chunk_size: int, storage: Storage, on_host: HostInputs | None = None
    ) -> tuple[object, object]:
        """Return (y, state), differentiable.

        Args:
            on_host: as in `RecurrenceSetting`.
        """
        stage = _RecurrenceStage(self)
        tokens = torch.zeros((), dtype=torch.long, device=self.device).expand(self.rows, self.seqlen)
        state = tuple(map(_encoded, self.state))
        batch = Batch(tokens, tokens, states=[state])
        spec = EngineSpec(chunk_size, storage=storage)
        step = ChunkedStep([stage], batch, spec, width=0, sweep=self._sweep())
        total, final = step.forward()
        outputs = [total] if self.loss is not None else stage.take_outputs()
        count, has_loss = len(outputs), self.loss is not None

        def backward(*cotangents: Tensor | None) -> tuple[Gradients, Sequence[Tensor | None]]:
            d_outputs, d_final = cotangents[:count], cotangents[count:]
            stage.begin_backward(() if has_loss else d_outputs)
            gradients, d_initial = step.backward(d_outputs[0] if has_loss else None, d_final)
            return gradients, [*d_initial, *stage.d_inputs]

        outputs += final
        moved = list[Tensor]()
        if on_host is not None and stores_on_host(spec, self.device):
            moved = stage.move_inputs(on_host, chunk_size)
        # empties `outputs`: the graph keeps no y
        results = step.differentiable(outputs, backward, self.inputs, copied_inputs=moved)
        after = [_decoded(s, like) for s, like in zip(results[count:], self.state, strict=True)]
        y = results[0] if self.loss is not None else tree_unflatten(list(results[:count]), stage.y_spec)
        return y, tree_unflatten(after, self.state_spec)


class _RecurrenceStage(Stage):
    """A function of a call as the only stage of a step.

    Its output for the engine is a scalar: the chunk's loss, or a norm of y, by which a recomputed chunk is
    compared with its first run.

    Attributes:
        outputs: the tensors of y, whole, once the forward has run, until they are taken. y_spec: how they are
            nested.
        d_inputs: cotangents of the inputs after the backward; None for those without.
        slabs: for each input its copy in host memory, from which the backward reads it; or None.
    """

    outputs: list[Tensor]
    y_spec: TreeSpec

    def __init__(self, call: _SequenceCall) -> None:
        self.call, self.outputs = call, []
        self.generators = ChunkGenerators(generators_in(module for _, module in call.modules))
        self.d_outputs: Sequence[Tensor | None] = ()
        self.d_inputs: list[Tensor | None] = [None] * len(call.inputs)
        self.slabs: list[Slab | None] = [None] * len(call.inputs)
        self.device = call.device
        self.stateful, self.grows = bool(call.state), (None,) * len(call.state)

    @property
    def precisions(self) -> Set[torch.dtype]:
        return {t.dtype for t in (*self.call.inputs, *self.call.state) if t.is_floating_point()}

    def parameters(self) -> Iterable[Tensor]:
        return [p for _, module in self.call.modules[:1] for p in module.parameters() if p.requires_grad]

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.call.modules

    def take_outputs(self) -> list[Tensor]:
        """Return the tensors of y; this object, which lives as long as the graph, keeps them no longer."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def begin_backward(self, d_outputs: Sequence[Tensor | None]) -> None:
        """Set the cotangents of the tensors of y."""
        self.d_outputs = d_outputs
        self.d_inputs = [
            torch.zeros_like(t, device=self.device) if t.requires_grad else None for t in self.call.inputs
        ]

    def move_inputs(self, on_host: HostInputs, chunk_size: int) -> list[Tensor]:
        """Keep copies in host memory in the place of the inputs that get gradients; return these inputs."""
        inputs, moved = list(self.call.inputs), list[Tensor]()
        for i, t in enumerate(inputs):
            if t.requires_grad:
                self.slabs[i] = on_host.slab_of(t, chunk_size)
                inputs[i] = torch.empty_like(t, device="meta").requires_grad_()
                moved.append(t)
        self.call = dataclasses.replace(self.call, inputs=inputs)
        return moved

    def _pieces(self, tensors: Iterable[Tensor], chunk: Batch) -> list[Tensor]:
        tokens = self.call.tokens_of(chunk)
        return [
            t[:, tokens] if slab is None else slab.read(tokens.start, tokens.stop)
            for t, slab in zip(tensors, self.slabs, strict=True)
        ]

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        with self.generators.at_chunk(chunk.start):
            y, after = self._run(self._pieces(self.call.inputs, chunk), state)
            return self._summary(y, chunk), after

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        with self.generators.at_chunk(chunk.start, chunk.start + chunk.seqlen):
            y, after = self._run(self._pieces(self.call.inputs, chunk), state)
            return _norm(y), after

    def forget(self, start: int) -> None:
        self.generators.states_by_chunk.pop(start, None)

    def _run(self, inputs: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
        """Call the function on a chunk; return the tensors of y, and the state as the engine stores it."""
        # clones: what the function writes to in place must not be what is stored at the edge
        states = [_decoded(s, like).clone() for s, like in zip(state, self.call.state, strict=True)]
        y, after, self.y_spec = self.call.run(inputs, states)
        return y, tuple(map(_encoded, after))

    def _summary(self, y: Sequence[Tensor], chunk: Batch) -> Tensor:
        """Store the chunk's y; return its scalar."""
        if self.call.loss is not None:
            return y[0]
        if not chunk.start:
            seqlen = self.call.seqlen
            self.outputs = [t.new_empty(t.shape[0], seqlen, *t.shape[2:], requires_grad=False) for t in y]
        for output, t in zip(self.outputs, y, strict=True):
            output[:, self.call.tokens_of(chunk)] = t.detach()
        return _norm(y)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        inputs = self._pieces((t.detach() for t in self.call.inputs), chunk)
        first_run = self.call.loss is None and not self.d_outputs
        count, has_loss = len(state), self.call.loss is not None

        def call(_: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            y, after = self._run(state[count:], state[:count])
            if has_loss:
                return y[0], after
            return self._summary(y, chunk) if first_run else _norm(y), (*after, *y)

        with self.generators.at_chunk(chunk.start):
            total, results, pull = tile.linearize(call, [], x, (*state, *inputs), gradients)

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            d_outputs = () if has_loss else self._d_pieces(chunk)
            _, d = pull(dy if has_loss else None, (*dstate, *d_outputs))
            for d_input, piece in zip(self.d_inputs, d[count:], strict=True):
                if d_input is not None and piece is not None:
                    d_input[:, self.call.tokens_of(chunk)] = piece
            return None, d[:count]

        return total, results[:count], pullback

    def _d_pieces(self, chunk: Batch) -> list[Tensor | None]:
        tokens = self.call.tokens_of(chunk)
        return [None if d is None else d[:, tokens] for d in self.d_outputs]


def _norm(y: Sequence[Tensor]) -> Tensor:
    """Return the norm of a chunk's y, in the place of a loss."""
    norms = [torch.linalg.vector_norm(_encoded(t.detach())) for t in y]
    return torch.stack([norm.to(torch.float64) for norm in norms]).sum()


def _encoded(t: Tensor) -> Tensor:
    """Return a tensor of floating point with the same values, as the engine stores states.

    Whole numbers are exact up to 2**53."""
    if t.is_complex():
        return torch.view_as_real(t)
    return t if t.is_floating_point() else t.to(torch.float64)


def _decoded(stored: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that `_encoded` has stored, of `like`'s dtype."""
    if like.is_complex():
        return torch.view_as_complex(stored.to(accumulate_dtype(like.real.dtype)).contiguous()).to(like.dtype)
    return stored.to(like.dtype)


# ---------------------------------------------------------------------------------- verification on first use


def _verify_once(call: _SequenceCall, subject: object = None) -> float:
    """Verify a kind of call on first use; return the bytes per token and row that autograd saves in it.

    Args:
        subject: for which it is noted; by default the call's function.
    """
    objects, settings = parts_of(call.function if subject is None else subject)
    loss_objects, loss_settings = parts_of(call.loss)
    kinds = _verified.with_objects([*objects, *loss_objects]).kinds
    autocast = dispatch.autocast_dtype(call.device)
    tensors = [(t.dtype, t.shape[2:]) for t in call.inputs] + [(s.dtype, s.shape) for s in call.state]
    training = tuple(module.training for _, module in call.modules)
    kind = (
        getattr(call.function, "__name__", ""),
        tuple(settings),
        tuple(loss_settings),
        call.reverse,
        *tensors,
        *training,
        autocast,
        call.device.type,
        call.x_spec,
    )
    if kind not in kinds:
        kinds[kind] = _verify(call)
    return kinds[kind]


def _verify(call: _SequenceCall) -> float:
    """Compare a few tokens in chunks with the whole; return the bytes per token and row that autograd saves.

    Raises:
        Refused: they differ.
    """
    count = min(TOKENS, call.seqlen) if call.seqlen > CHUNK_SIZE else TOKENS
    generators = _RecurrenceStage(call).generators
    modules = [module for _, module in call.modules]
    has_gradients = torch.is_grad_enabled()
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            saved[t.data_ptr()] = t.nbytes
        return t

    def run_whole() -> tuple[list[Tensor], list[Tensor]]:
        inputs = [t.clone() for t in first.inputs]  # a function may not write to leaves
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y, after, _ = first.run(inputs, [s.clone() for s in first.state])
        if has_gradients and any(t.is_floating_point() and version_of(t) for t in inputs):
            raise UserError(
                f"{call.subject}: it writes to its input in place, which the backward would repeat when it "
                "computes chunks again: let it begin with x = x.clone()"
            )
        return y, after

    unchanged = UntrainedTensors(call.modules, frozen=False).restored()
    gradients = outside_inference_mode(), torch.enable_grad()
    with full_float32(), gradients[0], gradients[1], generators.undone(), unchanged:
        first = call.first_tokens(count)
        before = generators.states()
        try:
            y, after = run_whole()
            with in_evaluation(modules if generators.have_drawn(before) else ()):
                if generators.have_drawn(before):
                    before = generators.states()
                    y, after = run_whole()
                if generators.have_drawn(before):
                    return _not_compared(call, saved, count, "it draws random numbers")
                reference, leaves = _results(call, y, after, first)
                trial = Trial(
                    call.subject,
                    RECURRENCE if call.loss is None else RECURRENCE_AND_LOSS,
                    lambda: _results_by_chunks(first, leaves),
                    tolerance([t.dtype for t in (*y, *after) if t.is_floating_point()] or [torch.float32]),
                )
                verify(trial, reference)
        except UserError:
            raise
        except Exception as error:  # such as a function that needs a multiple of 8 tokens
            return _not_compared(call, saved, count, f"it fails on {count} tokens: {error}")
    return sum(saved.values()) / (count * call.rows)


def _not_compared(call: _SequenceCall, saved: dict[int, int], count: int, reason: str) -> float:
    """Warn that a function is not verified; return the bytes per token and row that autograd saves."""
    warnings.warn(
        f"{call.subject}: {reason}; its gradients by chunks are not compared with those of the whole",
        stacklevel=6,
    )
    return sum(saved.values()) / (count * call.rows)


def _results(
    call: _SequenceCall, y: Sequence[Tensor], after: Sequence[Tensor], first: _SequenceCall
) -> tuple[Results, dict[str, Tensor]]:
    """Return the outputs, and the gradients of a weighted sum of them, by readable names; and the leaves."""
    outputs = [*y, *after]
    names: dict[Tensor, str] = {
        p: name for _, module in call.modules[:1] for name, p in module.named_parameters()
    }
    names |= {t: f"x {i}" for i, t in enumerate(first.inputs)}
    names |= {s: f"the initial state {i}" for i, s in enumerate(first.state)}
    reached = [t for t in dict.fromkeys(leaves_of(outputs)) if t.requires_grad]
    leaves = {names.get(t, f"tensor {i} that it reads"): t for i, t in enumerate(reached)}
    return _results_of(outputs, leaves), leaves


def _results_by_chunks(first: _SequenceCall, leaves: dict[str, Tensor]) -> Results:
    y, after = first.by_chunks(CHUNK_SIZE, Storage())
    return _results_of([*tree_flatten(y)[0], *tree_flatten(after)[0]], leaves)


def _results_of(outputs: Sequence[Tensor], leaves: dict[str, Tensor]) -> Results:
    weighted = [
        (_encoded(t).double() * some_numbers(*_encoded(t).shape, seed=i).to(t.device)).sum()
        for i, t in enumerate(outputs)
        if t.requires_grad
    ]
    gradients: Sequence[Tensor | None] = ()
    if leaves and weighted:
        with suspend_hooks([*leaves.values()]):  # graphs from before the call stay for the caller's backward
            value, inputs = torch.stack(weighted).sum(), [*leaves.values()]
            gradients = torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True)
    named_outputs = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return Results(dict(zip(leaves, gradients, strict=True)), outputs=named_outputs)
