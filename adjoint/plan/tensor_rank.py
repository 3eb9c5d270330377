"""A rank of tensor and sequence parallelism (Korthikanti et al. 2022, section 4) as the planner sees it.

Of t ranks each has a share of every layer's heads or channels, of the vocabulary, and, between layers, of the
tokens: weights, activations, states, keys and operations are divided by t. What is not divided is the input
of a mixer or an MLP, which is gathered from all ranks while it is used."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adjoint.engine.grid import EngineSpec
from adjoint.layers import MIXERS, StackConfig
from adjoint.layers.weight_splits import check_splits
from adjoint.methods import Method
from adjoint.plan.model_sizes import Model
from adjoint.plan.stage_memory import Conditions, Counted
from adjoint.plan.worker_devices import Machine
from adjoint.train.layout import Layout

GATHERED = 2  # tensors of all tokens that exist at a time: a gathered input, and what is scattered


class Collectives(NamedTuple):
    """Collectives of a layer on one chunk, each of which moves the chunk's residual stream.

    Attributes:
        forward, backward: all-gathers and reduce-scatters of the pass; the backward without the forward that
            it recomputes.
    """

    forward: int
    backward: int


def collectives_of(config: StackConfig) -> Collectives:
    """Return the collectives of each of a stack's layers.

    Before mixer and MLP there is an all-gather, after them a reduce-scatter; the backward has the reverse of
    each, and gathers the input once more for the weights' gradients."""
    split_parts = 1 + (config.d_intermediate > 0)
    return Collectives(2 * split_parts, 3 * split_parts)


def why_not_split(source: object, ranks: int) -> str | None:
    """Return why a model is not planned with weights split over so many ranks; None if it is."""
    if ranks == 1:
        return None
    if not isinstance(source, StackConfig):
        return "tensor parallelism is planned for Stacks alone; leave cluster.tensor out"
    for kind in dict.fromkeys(source.mixers):
        if kind not in MIXERS:
            return f"a layer of your own ({kind}) is not split; leave cluster.tensor out"
        with torch.device("meta"):
            splits = MIXERS[kind](source).splits()
        if splits is None:
            return f"{kind} layers are not split; leave cluster.tensor out"
        try:
            check_splits(splits, ranks)
        except ValueError as error:
            return f"{kind} layers: {error}"
    if source.d_intermediate % ranks:
        return f"{ranks} ranks cannot share the {source.d_intermediate} channels of an MLP evenly"
    return None


class RankModel(Model):
    """The share of a complete model that each of some ranks has."""

    def __init__(self, model: Model, ranks: int) -> None:
        vars(self).update(vars(model))
        self.model, self.ranks = model, ranks
        self.layers = tuple(layer.divided(ranks) for layer in model.layers)
        self.first, self.last, self.others = (n // ranks for n in (model.first, model.last, model.others))
        self.table, self.largest_end = model.table // ranks, model.largest_end // ranks
        self.num_parameters, self.head_flops = model.num_parameters // ranks, model.head_flops / ranks
        self.parameter_sizes = tuple(-(-n // ranks) for n in model.parameter_sizes)
        self.d_model = -(-model.d_model // ranks)  # of the residual stream: a share of the tokens

    def engine_spec(
        self, method: Method, size: tuple[int, int], layout: Layout, machine: Machine, has_state: bool
    ) -> EngineSpec:
        return self.model.engine_spec(method, size, layout, machine, has_state)

    def described(self) -> dict[str, object]:
        return self.model.described()

    def piece(self, piece: int, on: Conditions) -> Counted:
        counted = {name: -(-size // self.ranks) for name, size in vars(self.model.piece(piece, on)).items()}
        gathered = GATHERED * on.batch * on.tokens * self.model.d_model * on.dtype.itemsize
        for peak in ("forward", "linearized", "pulled"):
            counted[peak] += gathered
        return Counted(**counted)

    def task(self, k: int, on: Conditions, tokens: int, halo: int, window: int) -> int:
        """Return the bytes that a windowed task takes at most: those of the whole layer."""
        return self.model.task(k, on, tokens, halo, window)


def bytes_per_token(model: Model, ranks: int, batch: int, machine: Machine) -> float:
    """Return the bytes that a rank sends in one collective, per token of every sequence of the batch."""
    element = 2 if machine.precision == "bfloat16" else machine.element
    return (ranks - 1) / ranks * batch * model.d_model * element
