"""`TileValues`: what the tiles of one worker read and write."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.attention_outputs import AttentionOutputs
from adjoint.engine.grid import EngineSpec, Grid, Key, Tile
from adjoint.engine.offload import HostCopies
from adjoint.engine.stage import Stage
from adjoint.engine.storage import (
    Edges,
    Increment,
    Packing,
    Slab,
    allocate,
    recurrent_part,
    stores_on_host,
)
from adjoint.engine.tile import Cotangents
from adjoint.errors import UserError
from adjoint.kernels import checks
from adjoint.kernels.collectives import local_tokens
from adjoint.layers import State


class Chunks:
    """The chunks of a batch, made when they are asked for: there may be very many.

    The last one stays: to shift its labels takes launches."""

    def __init__(self, batch: Batch, grid: Grid) -> None:
        self.batch, self.grid = batch, grid
        self.latest: tuple[int, Batch] | None = None
        self.last: Batch | None = None

    def __getitem__(self, c: int) -> Batch:
        is_last = c + 1 == self.grid.chunks
        if is_last and self.last is not None:
            return self.last
        latest = self.latest
        if latest is None or latest[0] != c:
            start, stop = self.grid.cuts[c : c + 2]
            self.latest = latest = c, self.batch.chunk(start, stop, *self.grid.documents[c])
        if is_last:
            self.last = latest[1]
        return latest[1]


class Documents:
    """Document boundaries of a batch, in the form that a chunk's `Past` takes them."""

    def __init__(self, seq_idx: Tensor | None) -> None:
        self.seq_idx = seq_idx

    def __call__(self, start: int, stop: int, before: int) -> tuple[list[int], list[list[int]]] | tuple[()]:
        """Return `Past.visible` and `Past.starts` of the chunk [start, stop); () without `seq_idx`.

        The initial state's `before` tokens belong to each row's first document."""
        if self.seq_idx is None:
            return ()
        visible, starts = [], []
        for row in self._starts_by_row:
            last = row[bisect.bisect_right(row, start) - 1]
            visible.append(start - last + (before if last == 0 else 0))
            starts.append([at - start for at in row if start < at < stop])
        return visible, starts

    @functools.cached_property
    def _starts_by_row(self) -> list[list[int]]:
        """First tokens of each row's documents, on the host."""
        assert self.seq_idx is not None
        return checks.starts_in(self.seq_idx)


class TileValues:
    """Inputs of a batch, its states at chunk edges, keys and values, cotangents, and values under way.

    Args:
        stages: all of the model's stages; None for those that other workers have.
        batch: with a state for each stage, also for others' stages (zeros of the right sizes).
        spec: read for host memory.
        width: last dimension of the tensors between stages, (batch, tokens, width); only used with a
            transport.

    Raises:
        UserError: a state of complex numbers.

    Attributes:
        host: whether what is stored for the whole sequence is in host memory.
        host_copies: copies of stored states and inputs to and from there; None if nothing is there.
        fetched: values of host memory that the running tile will read, on the device.
        accumulate_dtype: dtype of sums and messages: float64 in a float64 model, else float32.
        chunks: the batch's chunks. documents: their boundaries.
        grows: `Stage.grows` of each stage; all None for those of other workers.
        edges, packing: storage of each stage's recurrent state at chunk edges, and its layout.
        slabs: storage of append-only states, by stage; made by the executor's `Exchange`.
        attention_outputs: outputs of attention that are not computed again; None if all are.
        store: values that tiles and messages have written and later actions read, by their keys (`value`).
        passed_on: states that leave for another worker and are not read here.
        freed_by_tile: keys that nobody needs after the running tile.
        final, d_initial: final states, and cotangents of the initial states, one tuple per stage.
        d_final: cotangents of the final states.
        d_ids: the cotangent of the batch's embeddings, if it has them in place of ids.
        token_ranks: as in `executor.Connections`.
        return_final_kv: whether `final` has append-only states; else these are empty.
    """

    def __init__(
        self, stages: Sequence[Stage | None], grid: Grid, batch: Batch, spec: EngineSpec, width: int = 0
    ) -> None:
        self.stages, self.grid, self.batch, self.width = stages, grid, batch, width
        self.device, initial = batch.ids.device, batch.states
        state_dtypes = {s.dtype for state in initial for s in state}  # where all parameters are frozen
        if any(dtype.is_complex for dtype in state_dtypes):
            raise UserError(
                "a layer's state has complex numbers; keep it as real numbers (torch.view_as_real)"
            )
        is_double = torch.float64 in self.parameter_dtypes() | state_dtypes
        self.accumulate_dtype = torch.float64 if is_double else torch.float32
        self.host = stores_on_host(spec, self.device)
        self.host_copies = HostCopies(self.device) if self.host else None
        self.fetched: dict[Key, Tensor] = {}
        self.chunks = Chunks(batch, grid)
        self.documents = Documents(batch.seq_idx)
        self.grows: list[tuple[int | None, ...]] = [
            (None,) * len(s) if stage is None else stage.grows
            for s, stage in zip(initial, stages, strict=True)
        ]
        self.packing = [
            Packing(recurrent_part(s, g), self.accumulate_dtype)
            for s, g in zip(initial, self.grows, strict=True)
        ]
        self.edges = [Edges(packing, self.host) for packing in self.packing]
        self.slabs: dict[int, list[Slab]] = {}
        self.attention_outputs: AttentionOutputs | None = None
        if spec.storage.attention_bytes:
            slabs = sum([dim is not None for dims in self.grows for dim in dims])  # keys and values
            room = spec.storage.attention_bytes / max(1, slabs // 2)
            self.attention_outputs = AttentionOutputs(room, grid.cuts[-1])
        self.store: dict[Key, Any] = {}
        self.passed_on: Set[Key] = frozenset()
        self.freed_by_tile: Collection[Key] = ()
        self.final: list[State] = list(initial)
        self.d_final, self.d_initial = list[Cotangents](), list[Cotangents]()
        self.d_ids: Tensor | None = None
        self.return_final_kv, self.token_ranks = True, 1

    def parameter_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the parameters of this worker's stages."""
        return {p.dtype for stage in self.stages if stage is not None for p in stage.parameters()}

    def stage(self, k: int) -> Stage:
        """Return stage k, which is this worker's."""
        stage = self.stages[k]
        assert stage is not None, f"stage {k} is another worker's"
        return stage

    def state_bytes(self) -> int:
        """Return the bytes on the device of all stages' states at a chunk edge."""
        return 0 if self.host else sum(p.size for p in self.packing) * self.accumulate_dtype.itemsize

    def input_bytes(self) -> int:
        """Return the bytes on the device of what is stored between segments."""
        values = [value for key, value in self.store.items() if key[0] in ("y", "dy")]
        return sum(
            v.nbytes
            for v in values
            if isinstance(v, Increment) or (isinstance(v, Tensor) and v.device == self.device)
        )

    def slab_bytes(self) -> int:
        """Return the bytes on the device of append-only states with their cotangents."""
        if self.host:
            return 0
        return sum(slab.max_bytes() for slabs in self.slabs.values() for slab in slabs)

    def stage_input(self, name: str, k: int, c: int) -> tuple[Tensor, Batch]:
        """Return stage k's input on chunk c, on the device, and the chunk.

        The input is the chunk's ids, or key `name` of the stage below."""
        chunk = self.chunks[c]
        return self.fetch((name, k - 1, c)) if k else chunk.ids, chunk

    # -------------------------------------------------------------------------------------- in host memory

    def is_on_host(self, value: object) -> bool:
        """Whether a value is stored in host memory instead of on the device."""
        return self.host and isinstance(value, Tensor) and value.device.type == "cpu"

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, which `fetch` may read."""
        assert self.host_copies is not None
        out = allocate(tensor.shape, tensor.dtype, self.device, host=True)
        return self.host_copies.store(out, lambda buffer: buffer.copy_(tensor))

    def fetch(self, key: Key) -> Tensor:
        """Return a value of the store, on the device."""
        if self.host_copies is None:
            return self.value(key)
        fetched = self.fetched.pop(key, None)
        if fetched is not None:
            return fetched
        value = self.value(key)
        return self.host_copies.fetch(key, value) if self.is_on_host(value) else value

    def fetch_inputs(self, t: Tile, following: Tile | None) -> None:
        """Fetch what a tile reads of host memory, and start to copy what the following tile reads.

        A copy that is started when it is needed would have the device wait for it."""
        assert self.host_copies is not None
        self.fetched = {key: self.fetch(key) for key in self._stored_inputs(t)}
        self.host_copies.forget_fetches()
        for key in () if following is None else self._stored_inputs(following):
            self.host_copies.start_fetch(key, self.value(key))

    def _stored_inputs(self, t: Tile) -> list[Key]:
        """Return the keys of a tile's inputs and state that are in host memory now."""
        if t.kind == "backward":  # its tape has them
            return []
        keys = [key for key in self.grid.reads(t) if key[0] in ("y", "z", "S") and key in self.store]
        return [key for key in keys if self.is_on_host(self.value(key))]

    def reserve_edges(self, rows: Mapping[int, int], passed_on: Set[Key] = frozenset()) -> None:
        """Set how many states are stored at a time; no change for a stage that has stored one.

        Args:
            rows: numbers of states, by stage.
            passed_on: as in the attributes.
        """
        self.passed_on = passed_on
        for k, count in rows.items():
            if self.edges[k].memory is None:
                self.edges[k].capacity = count

    def clear(self) -> None:
        """Drop all values of the store, states at edges included."""
        self.store = {}
        for edges in self.edges:
            edges.clear()

    def drop(self, key: Key) -> None:
        """Drop a value, if it is there; with checkpoints another state may take its place."""
        value = self.store.pop(key, None)
        if self.grid.checkpoints is not None and isinstance(value, int):
            _, k, c = key
            self.edges[k].release(value)
            self.stage(k).forget(self.grid.cuts[c + 1])

    def make_place(self, k: int, c: int) -> None:
        """Drop stage k's state before chunk c, if the running tile is the last that needs it.

        It is for grids with checkpoints, where the state after the chunk takes its place."""
        key = ("S", k, c - 1)
        if key in self.freed_by_tile:
            self.drop(key)

    # ------------------------------------------------------------------------------------------- messages

    def value(self, key: Key) -> Any:
        """Return a value of the store; for a state stored as a row's number, that row of `Edges`."""
        value = self.store[key]
        if isinstance(value, Increment):
            return value.read()
        return self.edges[key[1]].view(value) if isinstance(value, int) else value

    def wait_until_stored(self, key: Key) -> None:
        """Wait for a value's copy to host memory, if it is there, so that the host may read it at once."""
        if self.is_on_host(self.value(key)):
            assert self.host_copies is not None
            self.host_copies.wait_on_host()

    def destination(self, key: Key) -> tuple[int | Tensor, Tensor]:
        """Return the store's entry for a value that will be written, and the tensor to write to.

        They are the same tensor, except for a state that stays here: its entry is the number of a row of
        `Edges`."""
        name, k = key[:2]
        if name != "S" or key in self.passed_on:
            out = self.room(key)
            return out, out
        row = self.edges[k].take_row()
        return row, self.edges[k].view(row)

    def room(self, key: Key) -> Tensor:
        """Return an empty tensor for a message."""
        name, k, c = key[:3]
        if name in ("S", "dS"):
            return self.packing[k].empty()
        start, stop = self.grid.cuts[c : c + 2]
        if name == "spill":
            start = max(start, self.grid.cuts[key[3]] - self.grid.reach)
        shape = self.batch.rows, local_tokens(stop - start, self.token_ranks), self.width
        return torch.empty(shape, dtype=self.accumulate_dtype, device=self.device)

    def message(self, key: Key) -> Tensor:
        """Return a value of the store as one tensor, as a message carries it."""
        self.wait_until_stored(key)
        value = self.value(key)
        if isinstance(value, tuple):
            return self.packing[key[1]].pack(value, self.room(key))
        if value is None:  # no cotangent
            return self.room(key).zero_()
        return value.to(self.accumulate_dtype).contiguous()
