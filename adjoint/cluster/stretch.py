"""What a worker computes of its stretch of the sequence: the tiles that `adjoint.cluster.sequence` puts into
order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.engine import tile
from adjoint.cluster.part import Part
from adjoint.cluster.schedule import Recv, Run, Send
from adjoint.cluster.sequence import kept, reach
from adjoint.cluster.tasks import flat, pieces
from adjoint.cluster.work import Work
from adjoint.layers import Block
from adjoint.windowed import Task, vjp


class SequenceWork(Work):
    """What one worker computes of its stretch.

    Layers' inputs are kept, (batch, stretch, d_model) each: all workers are at one layer at a time, and its
    backward needs its inputs on all of the stretch. `every` says of which layers; those between are computed
    again. `keep="offload"` has them and the states at the edges in host memory.

    Args:
        part: the whole model.
        input_ids, targets: (batch, seqlen) int64 of the whole sequence, the targets already shifted; `valid`
            of them count.
        cuts: the tokens of each worker, as `stretches` gives them.
        worker: which of them this is; one too many has no tokens, and nothing to do.
    """

    def __init__(
        self,
        part: Part,
        input_ids: Tensor,
        targets: Tensor,
        valid: int,
        chunk_size: int,
        batches: int = 1,
        keep: str = "edges",
        *,
        cuts: Sequence[slice],
        worker: int,
        exchange: str = "affine",
        every: int = 1,
    ) -> None:
        seqlen = cuts[-1].stop
        own = cuts[worker] if worker < len(cuts) else slice(seqlen, seqlen)
        super().__init__(part, input_ids[:, own], targets[:, own], valid, chunk_size, batches, keep)
        self.worker, self.last, self.affine, self.every = worker, len(cuts) - 1, exchange == "affine", every
        self.reaches = reach(part.config)
        # inputs of other workers in front of the own ones; there are none in front of the head's
        self.lead = [*(self.reaches if worker else [0] * len(self.reaches)), 0]
        self.inputs: dict[int, Tensor] = {}  # of each layer and of the head, (batch, lead + stretch, d_model)
        self.leads: dict[int, Tensor] = {}  # of each layer, the inputs that came from the left
        self.embedded_ids = input_ids[:, own.start - self.lead[0] : own.stop]
        self.h_edges: dict[int, Tensor] = {}  # of each layer, the recurrent state before each chunk
        self.decays: dict[int, Tensor] = {}  # of each layer, over the stretch
        zeros = self.states[0][-1]
        self.h, self.h_ext = zeros, zeros  # the true state and that from zero, of the layer at work
        self.mu: Tensor | None = None  # the true adjoint state and that from zero; None is zero
        self.mu_ext: Tensor | None = None
        self.dy = self.d_inputs = zeros  # cotangents of the layer's outputs and (lead included) inputs

    # ----------------------------------------------------------------------------------------- messages

    def room(self, action: Recv) -> Tensor:
        """An empty tensor for a message."""
        layer = layer_of(action)
        shape: Sequence[int] = (self.ids.shape[0], self.reaches[layer], self.part.config.d_model)
        if action.what in ("state", "d_state"):
            shape = (sum(s.numel() for s in self._shapes(layer, action.source, action.what)),)
        return torch.empty(*shape, dtype=self.wide, device=self.ids.device)

    def _shapes(self, layer: int, source: int, what: str) -> list[torch.Size]:
        """Of a state message of worker `source`. There is nothing that the outermost worker's a would carry
        on."""
        h = self.states[layer][-1]
        if not self.affine or source == (0 if what == "state" else self.last):
            return [h.shape]
        return [self._unit_decay(layer).shape, h.shape]

    def _unit_decay(self, layer: int) -> Tensor:
        return self.part.block(layer).mixer.unit_decay(self.ids.shape[0], self.wide, self.ids.device)

    def incoming(self, action: Recv, tensor: Tensor) -> None:
        """Takes a message in. States come from the outermost worker first."""
        layer = layer_of(action)
        if action.what == "y":
            self.leads[layer] = tensor
            self.inputs[layer][:, : self.lead[layer]] = tensor
        elif action.what == "dy":
            self.dy[:, -self.reaches[layer] :] += tensor
        else:
            *decay, ext = pieces(tensor, self._shapes(layer, action.source, action.what))
            if action.what == "state":
                self.h = ext + carry(decay[0], self.h) if decay else ext
            elif decay:
                assert self.mu is not None
                self.mu = ext + carry_back(decay[0], self.mu)
            else:
                self.mu = ext

    def outgoing(self, action: Send) -> Tensor:
        """Gives a message out; it is not written to afterwards."""
        layer = layer_of(action)
        if action.what == "y":
            return self.inputs[layer][:, -self.reaches[layer] :].contiguous()
        if action.what == "dy":
            return self.d_inputs[:, : self.lead[layer]].contiguous()
        if action.what == "state":
            state = self.h_ext if self.affine else self.h
        else:
            found = self.mu_ext if self.affine else self.mu
            state = torch.zeros_like(self.states[layer][-1]) if found is None else found
        with_decay = len(self._shapes(layer, self.worker, action.what)) == 2
        return flat([self.decays[layer], state] if with_decay else [state])

    # -------------------------------------------------------------------------------------------- tiles

    def run(self, action: Run) -> None:
        """Carries one tile out."""
        with self.precision(), torch.no_grad():
            if action.kind == "head":
                self.head_tile(action.chunk)
            elif action.kind == "embedding":
                self.embedding_tile(action.chunk)
            else:
                tiles = {
                    "prefix": self.prefix_tile,
                    "forward": self.layer_tile,
                    "again": self.again_tile,
                    "suffix": self.suffix_tile,
                    "backward": self.task_tile,
                }
                tiles[action.kind](layer_of(action), action.chunk)

    def _begin_layer(self, layer: int) -> None:
        """The layer's inputs, where they are not there yet: those of the first."""
        if layer == 0 and not self.inputs:
            self.inputs[0] = self.part.embed(self.embedded_ids).to(self.wide)

    def prefix_tile(self, layer: int, chunk: int) -> None:
        """Moves h_ext, and a if anybody is on the left, over a chunk."""
        self._begin_layer(layer)
        mixer = self.part.block(layer).mixer
        if chunk == 0:
            self.h_ext = self.states[layer][-1]
            if self.worker:
                self.decays[layer] = self._unit_decay(layer)
        inputs = self._scan_inputs(layer, chunk)
        if self.worker:
            decay = mixer.total_decay(inputs).to(self.wide)
            self.decays[layer] = chain(decay, self.decays[layer], decay.dim() > self.h_ext.dim())
        _, self.h_ext = mixer.scan(inputs, self.h_ext)

    def _scan_inputs(self, layer: int, chunk: int) -> tuple[Tensor, ...]:
        block = self.part.block(layer)
        return block.mixer.scan_inputs(block.norm(self._own(layer, chunk)), *self._tail(layer, chunk))[0]

    def _own(self, layer: int, chunk: int) -> Tensor:
        """A layer's inputs on a chunk."""
        lead, tokens = self.lead[layer], self.chunks[chunk]
        return self.inputs[layer][:, lead + tokens.start : lead + tokens.stop]

    def _left(self, layer: int, chunk: int) -> int:
        """Where the inputs begin that a chunk's convolution reads; less than 0 is another worker's."""
        return max(-self.lead[layer], self.chunks[chunk].start - self.reaches[layer])

    def _tail(self, layer: int, chunk: int) -> tuple[Tensor, ...]:
        """The state of the convolution before a chunk; none where there is no convolution."""
        *zeros, _ = self.states[layer]
        block, lead, start = self.part.block(layer), self.lead[layer], self.chunks[chunk].start
        before = self.inputs[layer][:, lead + self._left(layer, chunk) : lead + start]
        if not zeros or not before.shape[1]:
            return tuple(zeros)
        tail = block.mixer.conv_tail(block.norm(before)).to(self.wide)
        missing = zeros[0].shape[2] - tail.shape[2]  # from before the sequence
        return (torch.cat([zeros[0][:, :, :missing], tail], dim=2),)

    def layer_tile(self, layer: int, chunk: int) -> None:
        """A layer's outputs on a chunk, which are the next one's inputs."""
        self._begin_layer(layer)
        if chunk == 0:
            if self.worker == 0:
                self.h = self.states[layer][-1]
            if self.backward_follows:
                self.h_edges[layer] = self.h.new_empty(len(self.chunks), *self.h.shape)
        if self.backward_follows:
            self.h_edges[layer][chunk] = self.h
        self.h = self._apply(layer, chunk, self.h)
        if chunk == len(self.chunks) - 1:
            if self.backward_follows:
                self.h_edges[layer] = self.edges.stow(self.h_edges[layer])
            if self.backward_follows and kept(layer, len(self.reaches), self.every):
                self.inputs[layer] = self.edges.stow(self.inputs[layer])
            else:
                del self.inputs[layer]

    def again_tile(self, layer: int, chunk: int) -> None:
        """The same once more, from the states that are kept."""
        self._fetch(layer)
        self._apply(layer, chunk, self.h_edges[layer][chunk])

    def _apply(self, layer: int, chunk: int, h: Tensor) -> Tensor:
        """Writes a layer's outputs on a chunk to the inputs of the next one; the state after the chunk."""
        if chunk == 0:
            x, above = self.inputs[layer], self.lead[layer + 1]
            self.inputs[layer + 1] = x.new_empty(x.shape[0], above + self.ids.shape[1], x.shape[2])
            if layer + 1 in self.leads:
                self.inputs[layer + 1][:, :above] = self.leads[layer + 1]
        state = (*self._tail(layer, chunk), h)
        y, (*_, h) = tile.forward(self.part.block(layer), self._own(layer, chunk), state)
        self._own(layer + 1, chunk).copy_(y)
        return h

    def head_tile(self, chunk: int) -> None:
        """The loss on a chunk, and dL/dy_K in the place of y_K."""
        y, targets = self._own(len(self.reaches), chunk), self.targets[:, self.chunks[chunk]]
        losses: list[Tensor] = []

        def head(h: Tensor, parameters: list[Tensor]) -> Tensor:
            losses.append(self.part.head_loss(h, targets, parameters))
            return losses[0]

        if self.backward_follows:
            y.copy_(tile.head_pullback(head, self.part.head_parameters(), y, self.scale, self.gradients))
            if chunk == len(self.chunks) - 1:
                self.dy = self.inputs.pop(len(self.reaches))
        else:
            head(y, self.part.head_parameters())
        loss = losses[0].detach()
        self.total = loss if self.total is None else self.total + loss

    def suffix_tile(self, layer: int, chunk: int) -> None:
        """Moves μ_ext over a chunk, to its left edge: no parameter's gradient, no input's cotangent."""
        self._fetch(layer)
        if chunk == len(self.chunks) - 1:
            self.mu_ext = None
        block, inputs = self.part.block(layer), self._scan_inputs(layer, chunk)
        h, dy = self.h_edges[layer][chunk].detach().requires_grad_(), self.dy[:, self.chunks[chunk]]
        self.mu_ext = adjoint_state(block, self._own(layer, chunk), inputs, h, dy, self.mu_ext)

    def task_tile(self, layer: int, chunk: int) -> None:
        """The vjp of a layer on a chunk. What its convolution reads of other chunks and of the left neighbour
        it computes itself, and hands their cotangents over."""
        self._fetch(layer)
        lead, tokens, left = self.lead[layer], self.chunks[chunk], self._left(layer, chunk)
        if chunk == len(self.chunks) - 1:
            self.d_inputs = torch.zeros_like(self.inputs[layer])
            self.mu = None if self.worker == self.last else self.mu
        task = Task(layer, chunk, left, tokens.start, tokens.stop, tokens.stop)
        *zeros, _ = self.states[layer]
        dx, (*_, self.mu) = vjp(
            self.part.block(layer),
            task,
            self.inputs[layer][:, lead + left : lead + tokens.stop],
            (*zeros, self.h_edges[layer][chunk]),
            self.dy[:, tokens],
            (*(None for _ in zeros), self.mu),
            None,
            self.gradients,
        )
        self.d_inputs[:, lead + left : lead + tokens.stop] += dx
        if chunk == 0:
            del self.inputs[layer], self.h_edges[layer]
            self.leads.pop(layer, None)
            self.dy = self.d_inputs[:, lead:]

    def _fetch(self, layer: int) -> None:
        """Brings what was put into host memory back, a layer at a time."""
        for held in (self.inputs, self.h_edges):
            held[layer] = self.edges.fetch(held[layer], self.ids.device)

    def embedding_tile(self, chunk: int) -> None:
        """The embedding's gradient on a chunk; on the first also that of the tokens in front of it."""
        lead, tokens = self.lead[0], self.chunks[chunk]
        rows = slice(lead + tokens.start if chunk else 0, lead + tokens.stop)
        ids, gradient = self.embedded_ids[:, rows], self.d_inputs[:, rows]
        self.gradients.add_rows(self.part.table.weight, ids.flatten(), gradient.flatten(0, 1))


def layer_of(action: Run | Send | Recv) -> int:
    """The layer of an action that has one."""
    assert action.layer is not None
    return action.layer


def adjoint_state(
    block: Block, y: Tensor, inputs: tuple[Tensor, ...], h: Tensor, dy: Tensor, mu: Tensor | None
) -> Tensor | None:
    """The adjoint state before a chunk, and nothing else of its vjp.

    Args:
        y: (batch, chunk, d_model), the layer's inputs; `inputs` what its scan reads.
        h: the true state before the chunk, a leaf.
        dy: the cotangents of the layer's outputs.
        mu: the adjoint state after the chunk; None for zero.
    """
    with torch.enable_grad():
        scanned, h_end = block.mixer.scan(inputs, h)
        out = block.feed_forward(block.mixer.scan_outputs(scanned, inputs), residual=y)
    given = [(out, dy)] if mu is None else [(out, dy), (h_end, mu)]
    return tile.vjp(given, [h])[0]


# Products of matrices are written out below: autocast would take bfloat16 for them.


def carry(decay: Tensor, h: Tensor) -> Tensor:
    """a · h, of a decay as the mixers' `total_decay` gives it: broadcast, or a matrix a sequence."""
    return (decay * h.unsqueeze(1)).sum(2) if decay.dim() > h.dim() else decay * h


def carry_back(decay: Tensor, mu: Tensor) -> Tensor:
    """aᵀ · μ."""
    return (decay * mu.unsqueeze(2)).sum(1) if decay.dim() > mu.dim() else decay * mu


def chain(later: Tensor, earlier: Tensor, dense: bool) -> Tensor:
    """The decay over two stretches from those over each."""
    return (later.unsqueeze(3) * earlier.unsqueeze(1)).sum(2) if dense else later * earlier
