"""Wrapped models whose sequences the ranks of a process group share, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import adjoint
from tests.hf.hf_models import VOCAB, current_gradients, errors, float64_throughout, make
from tests.ranks import on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
RECURRENT = ["MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"]


def rows(batch: int = 2, seqlen: int = 53) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(5))


def over(model: Any, method: Any, group: Any, **given: Any) -> tuple[float, Any]:
    adjoint.wrap(model, method, sequence_group=group)
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def recurrent() -> None:
    ids = rows()
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    for name in RECURRENT:
        model, group = make(name), dist.group.WORLD
        for method, given in [
            (adjoint.Exact(7), {}),
            (adjoint.Exact(), {}),
            (adjoint.Truncated(16, 8), {}),
            (adjoint.Exact(7), {"attention_mask": torch.arange(53)[None] < torch.tensor([[53], [40]])}),
            (adjoint.Exact(7), {"position_ids": positions, "input_ids": ids[:1], "labels": ids[:1]}),
        ]:
            given = {"input_ids": ids, "labels": ids, **given}
            if "attention_mask" in given:
                given["labels"] = ids.masked_fill(~given["attention_mask"], -100)
            with float64_throughout():
                apart = errors(over(model, method, group, **given), over(model, method, None, **given))
            assert apart.worst <= 1e-10, (name, method, apart)


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_without_attention(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, recurrent)


def wrong() -> None:
    group, ids = dist.group.WORLD, rows(1)
    given = {"input_ids": ids, "labels": ids}
    for name in ("LlamaForCausalLM", "BambaForCausalLM"):
        with refused("attention"):
            adjoint.wrap(make(name), adjoint.Exact(7), sequence_group=group)(**given)
    model = make("Mamba2ForCausalLM")
    for method in (adjoint.MiniSequence(), adjoint.Backprop()):
        with refused("has no chunks to share"):
            adjoint.wrap(model, method, sequence_group=group)
    with refused("got 'world'"):
        adjoint.wrap(model, sequence_group="world")
    adjoint.wrap(model, adjoint.Exact(7), sequence_group=group)
    with pytest.raises(ValueError, match="sequence_group: hidden states are those of the whole sequence"):
        model.backbone(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="sequence_group: logits beside a loss"):
        model(**given, logits_to_keep=3)
    with refused("the number of tokens: 53 and 52"):
        mine = ids[:, : 52 + dist.get_rank()]
        model(input_ids=mine, labels=mine)
    with refused("num_items_in_batch"):
        model(**given, num_items_in_batch=10 + dist.get_rank())


def test_what_a_wrapped_model_cannot_share(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, wrong)
