"""Splits of a layer's weights under tensor parallelism: by units, such as heads or channels.

A rank has the same share of the units of every section. Where several heads read the same unit, as the heads
of a group read B and C, and there are fewer such units than ranks, several ranks have the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.layers.config import StackConfig
from adjoint.settings import Positive, option


class Section(NamedTuple):
    """Consecutive rows of a weight: `units` units of `width` rows.

    Attributes:
        unit: the setting or words for their number, for error messages.
        shared: whether ranks may have the same unit, if there are fewer units than ranks.
    """

    unit: str
    units: int
    width: int = 1
    shared: bool = False


def every_rank_has(width: int) -> Section:
    """Return a section of `width` rows that every rank has."""
    return Section("", 1, width, shared=True)


class Split(NamedTuple):
    """Split of one weight.

    Attributes:
        dim: the dimension that is split. sections: along it.
    """

    dim: int
    sections: list[Section]

    def rows(self, rank: int, ranks: int) -> Tensor:
        """Return the indices along `dim` that a rank has, ascending.

        Raises:
            ValueError: the number of ranks does not divide a section's units.
        """
        pieces, start = [], 0
        for section in self.sections:
            first, count = share_of(section, rank, ranks)
            begin = start + first * section.width
            pieces.append(torch.arange(begin, begin + count * section.width))
            start += section.units * section.width
        return torch.cat(pieces)


Splits = dict[str, Split]  # by the name of a parameter, or of a linear layer or convolution


def share_of(section: Section, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's first unit of a section, and how many it has.

    Raises:
        ValueError: the number of ranks does not divide the units.
    """
    if section.units % ranks == 0:
        count = section.units // ranks
        return rank * count, count
    if section.shared and ranks % section.units == 0:
        return rank * section.units // ranks, 1
    fits = "divide" if not section.shared or section.units > ranks else "be a multiple of"
    raise ValueError(f"{ranks} ranks must {fits} {section.unit}, which is {section.units}")


def check_splits(splits: Splits, ranks: int) -> None:
    """Raise a ValueError if the number of ranks does not divide the units of a section."""
    for split in splits.values():
        for section in split.sections:
            share_of(section, 0, ranks)


def local_units(unit: str, units: int, ranks: int, shared: bool = False) -> int:
    """Return how many units each rank has; arguments as in `Section`, errors as in `share_of`."""
    return share_of(Section(unit, units, shared=shared), 0, ranks)[1]


def by_rows(**sections: Iterable[Section]) -> Splits:
    """Return splits of the rows of parameters, or of a module's weight and bias, by name."""
    return {name: Split(0, list(pieces)) for name, pieces in sections.items()}


def by_columns(**sections: Iterable[Section]) -> Splits:
    """Return splits of the columns of linear layers, by name: ranks' outputs have to be added up."""
    return {name: Split(1, list(pieces)) for name, pieces in sections.items()}


class RowParallelLinear(nn.Linear):
    """A linear layer with a share of the columns, whose output is a term of the whole's.

    Its bias is not in the output: it is added once, to the sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclasses.dataclass(frozen=True)
class RankConfig(StackConfig):
    """Sizes of one rank's part of a layer. d_model stays that of the residual stream."""

    ranks: Positive = option(1, "ranks that the layer is split over.")
    ranks_per_group: Positive = option(1, "ranks that share a group of heads, of mamba2 and mamba3.")

    def __post_init__(self) -> None:
        """Leave out the checks: they hold for the whole, and `share_of` has made the parts even."""

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model // self.ranks


def rank_config(config: StackConfig, ranks: int, **sizes: int) -> RankConfig:
    """Return the configuration of a rank's part; `sizes` replace those of the whole."""
    names = (field.name for field in dataclasses.fields(StackConfig))
    return RankConfig(**{**{name: getattr(config, name) for name in names}, **sizes}, ranks=ranks)


def rank_config_by_groups(config: StackConfig, ranks: int) -> RankConfig:
    """Return `rank_config` of a layer whose heads are in `ngroups` groups."""
    ngroups = local_units("ngroups", config.ngroups, ranks, shared=True)
    return rank_config(config, ranks, ngroups=ngroups, ranks_per_group=max(1, ranks // config.ngroups))
