"""Distribution of a run over workers, and checks of settings that it excludes; made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from adjoint.errors import UserError
from adjoint.methods import Method
from adjoint.settings import NotNegative, Positive, check_fields


class LayeredModel(Protocol):
    """A `StackConfig`, or `engine.worker_rules.CutModel`, which imports torch."""

    @property
    def n_layer(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """The distribution of a run over workers.

    Workers have ranks: replica by replica, in each of them shard by shard, the helpers last. In a shard the
    workers of a sequence come one after the other, in each of them those that share its weights.

    Args:
        shards: into which the layers are cut.
        sequence: workers of a shard, each with all of its layers, to whom chunks are dealt out in turn.
        replicas: each with all shards; they share the rows of every batch out.
        helpers: of each replica; they own no layers, and share the layer-local tasks of the shards, to which
            they are dealt out in turn.
        tensor: workers that share each weight and compute each token together, in place of one worker.
    """

    shards: NotNegative = 1
    sequence: Positive = 1
    replicas: Positive = 1
    helpers: NotNegative = 0
    tensor: Positive = 1

    def __post_init__(self) -> None:
        check_fields("cluster", self)
        ray, torchrun = "set --cluster.shards to 1 or more", "start them with torchrun"
        for key, alone, remedy in (
            ("replicas", 1, ray),
            ("sequence", 1, f"{ray}, or {torchrun}"),
            ("helpers", 0, ray),
            ("tensor", 1, f"{ray}, or {torchrun}"),
        ):
            number = getattr(self, key)
            if self.shards == 0 and number > alone:
                raise UserError(f"cluster.{key}: {number} needs worker processes; {remedy}")

    # ------------------------------------------------------------------------------------ workers and ranks

    @property
    def owning(self) -> int:
        """Workers of a replica that own layers: all but its helpers."""
        return self.shards * self.sequence * self.tensor

    @property
    def workers(self) -> int:
        """Workers of a replica."""
        return self.owning + self.helpers

    @property
    def world(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas

    @property
    def helped(self) -> tuple[int, ...]:
        """The shard whose tasks each helper of a replica shares."""
        return tuple(i % self.shards for i in range(self.helpers))

    def replica(self, rank: int) -> int:
        """Return the replica of a worker."""
        return rank // self.workers

    def worker(self, rank: int) -> int:
        """Return a worker's number within its replica, which is what programs know."""
        return rank % self.workers

    def helps(self, rank: int) -> bool:
        """Whether a worker is a helper."""
        return self.worker(rank) >= self.owning

    def shard(self, rank: int) -> int:
        """Return the shard whose layers a worker has, or helps with."""
        worker = self.worker(rank)
        per_shard = self.sequence * self.tensor
        return self.helped[worker - self.owning] if self.helps(rank) else worker // per_shard

    def ranks(self, shard: int) -> list[int]:
        """Return the workers that own a shard's layers, in all replicas."""
        return [rank for rank in range(self.world) if not self.helps(rank) and self.shard(rank) == shard]

    def with_same_weights(self, shard: int, tensor_rank: int) -> list[int]:
        """Return the workers of a shard that have the same part of its weights, in all replicas."""
        return [rank for rank in self.ranks(shard) if self.tensor_rank(rank) == tensor_rank]

    def tensor_rank(self, rank: int) -> int:
        """Return a worker's rank among those that share each weight with it."""
        return self.worker(rank) % self.tensor

    @property
    def of_each_shard(self) -> list[list[int]]:
        """The first replica's first workers of each shard, which together have its weights once."""
        per_shard = self.sequence * self.tensor
        return [self.tensor_ranks(shard * per_shard) for shard in range(self.shards)]

    def helpers_of(self, rank: int) -> list[int]:
        """Return the helpers that share a worker's tasks."""
        first = self.workers * self.replica(rank) + self.owning
        return [first + i for i, shard in enumerate(self.helped) if shard == self.shard(rank)]

    def tensor_ranks(self, rank: int) -> list[int]:
        """Return the workers that share each weight with a worker: tensor parallelism's group."""
        first = rank - self.worker(rank) % self.tensor
        return list(range(first, first + self.tensor))

    def sequence_ranks(self, rank: int) -> list[int]:
        """Return the workers that share each sequence with a worker, and have the same parts of weights."""
        per_shard = self.sequence * self.tensor
        first = rank - self.worker(rank) % per_shard + self.worker(rank) % self.tensor
        return list(range(first, first + per_shard, self.tensor))

    def data_ranks(self, rank: int) -> list[int]:
        """Return the workers with a worker's place in the other replicas, with whom it sums gradients."""
        return list(range(self.worker(rank), self.world, self.workers))

    @property
    def everyone(self) -> list[int]:
        """Ranks of the workers that are not helpers."""
        return [rank for rank in range(self.world) if not self.helps(rank)]

    def tied(self, tensor_rank: int) -> list[int]:
        """Return the workers with the same part of a tied table, which the first and the last shard have."""
        first, last = (self.with_same_weights(shard, tensor_rank) for shard in (0, self.shards - 1))
        return sorted({*first, *last})

    @property
    def groups(self) -> list[list[int]]:
        """The ranks between which there are collectives."""
        tensor_ranks, shards = range(self.tensor), range(self.shards)
        alike = [self.with_same_weights(shard, number) for shard in shards for number in tensor_ranks]
        split = [self.tensor_ranks(rank) for rank in self.everyone if self.tensor_rank(rank) == 0]
        return [*alike, *map(self.tied, tensor_ranks), *split, self.everyone]

    # --------------------------------------------------------------------------------------------- batches

    def rows(self, batch: int) -> int:
        """Rows of a batch that a replica has, of the one that has most."""
        return -(-batch // self.replicas)

    def at_most(self, chunk_size: int, seqlen: int) -> int:
        """Return the tokens of a chunk, fewer where else some worker of a sequence would not have two of
        them, or a pipeline of shards fewer than two for each: shards wait while it fills."""
        from adjoint.engine.chunk_size import at_most

        return at_most(chunk_size, seqlen, max(self.sequence, self.shards))

    # ------------------------------------------------------------------------------ what does not go together

    def check(self, model: LayeredModel, method: Method) -> None:
        """Raise a UserError where a model (a StackConfig, or what is known of a pretrained one) or a method
        cannot be spread so."""
        from adjoint.layers import MIXERS, Mixer

        if self.shards > model.n_layer:
            raise UserError(
                f"cluster.shards: {self.shards} shards for {model.n_layer} layers; each needs one"
            )
        mixers = (MIXERS.get(kind, Mixer) for kind in getattr(model, "mixers", ()))
        attends = any(mixer.attended_channels(model) for mixer in mixers)
        attends |= any(slot.grows is not None for slot in getattr(model, "slots", ()))
        if attends and self.helpers:
            raise UserError(
                "cluster.helpers: this model has attention, whose keys and values stay with one worker; use "
                "--cluster.shards instead"
            )
        if self.helpers and not method.has_independent_layers:
            raise UserError(f"cluster.helpers: {method.name} has no tasks to share; use layer-local")
        if getattr(model, "bidirectional", None) is not None:
            for key in ("shards", "sequence", "tensor"):
                if getattr(self, key) > 1:
                    raise UserError(
                        f"cluster.{key}: layers that read in both directions (model.bidirectional) read the "
                        "whole sequence in one process; leave it out"
                    )
        self.check_sequence(method)

    def check_sequence(self, method: Method) -> None:
        """Raise a UserError for a method whose sequences several workers cannot share."""
        if self.sequence == 1:
            return
        if self.helpers:
            raise UserError("cluster.helpers: do not work with cluster.sequence; leave one of them out")
        if not method.has_chunks:
            raise UserError(f"cluster.sequence: {method.name} has no chunks to share; use exact")
        if method.picks_windows:
            raise UserError(
                'cluster.sequence: window "auto" needs the whole sequence in one place; give a number'
            )
        if method.storage.checkpoints is not None:
            raise UserError(
                "cluster.sequence: method.checkpoints computes states again from chunks before them, which "
                "other workers have; leave it out: each worker stores the states before its own chunks alone"
            )

    def check_tensor(self, method: Method, optimizer: str) -> None:
        """Raise a UserError for what needs whole weights, or ranks that decide by themselves."""
        if self.tensor == 1:
            return
        if self.helpers:
            raise UserError("cluster.helpers: do not work with cluster.tensor; leave one of them out")
        if method.storage.memory is not None:
            raise UserError(
                "method.memory: ranks that split weights must keep the same chunks, and each measures its "
                "own memory; leave it out"
            )
        if optimizer != "adamw":
            raise UserError(
                f"cluster.tensor: training.optimizer {optimizer} needs whole matrices; use adamw, or leave "
                "cluster.tensor out"
            )

    def check_rows(self, batch: int) -> None:
        """Raise a UserError where some replica would have no row of a batch."""
        if batch < self.replicas:
            raise UserError(
                f"cluster.replicas: {self.replicas} replicas for a data.batch of {batch}, and each needs a "
                f"row; give --data.batch {self.replicas}, or more"
            )

    def check_chunks(self, method: Method, seqlen: int, chunk_size: int | None = None) -> None:
        """Raise a UserError where some worker of a sequence would have no chunk, of the shortest length there
        may be where it is not known yet."""
        size = chunk_size or method.engine_spec(seqlen, self.at_most(seqlen, seqlen)).chunk_size
        chunks = -(-seqlen // size)
        if chunks < self.sequence:
            raise UserError(
                f"cluster.sequence: {self.sequence} workers for {chunks} chunks of {size} tokens; lower "
                f"--method.chunk_size to {max(1, seqlen // self.sequence)} or less, or use at most {chunks} "
                "workers"
            )

    def check_run(self, method: Method, training: Any) -> None:
        """Raise a UserError for what only one process can do."""
        if training.optimizer_in_backward:
            raise UserError("training.optimizer_in_backward: works in one process only; leave it out")
        if method.storage.memory is not None:
            raise UserError("method.memory: works in one process only; leave it out")
        if method.cuda_graphs:
            raise UserError("method.cuda_graphs: works in one process only; leave it out")
        if training.carries_states and self.workers * self.replicas > self.shards:
            raise UserError(
                "training.carry_state: a layer's states stay with one worker; leave out cluster.replicas, "
                "cluster.sequence and cluster.helpers"
            )
