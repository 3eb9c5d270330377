"""Workers that share a hybrid's sequence, in processes of their own: messages inside of tiles go by gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from adjoint import Exact
from adjoint.cluster.process_group import DistributedTransport, meet
from adjoint.cluster.shard import Microbatch, PipelineWorker
from adjoint.cluster.spec import ShardSpec
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.layout import Layout
from tests.cluster.test_layouts import HYBRID
from tests.cluster.threads import TRAINING, disturb, disturbed_stack, split
from tests.model_helpers import assert_same, make_ids

METHOD = Exact(5)


def worker(rank: int, layout: Layout, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting, groups = f"file://{folder}/meeting", layout.groups
    transport = DistributedTransport(*meet(meeting, rank, layout.world, 60), rank, "gloo", 60, groups)
    spans = tuple(split(HYBRID.n_layer, layout.shards))
    shard = PipelineWorker(
        ShardSpec(ShardedStack(HYBRID), TRAINING, METHOD, layout, spans, rank, precision="float64"), transport
    )
    disturb(shard.named_weights())
    shard.share_table()
    loss = shard.accumulate(make_ids(2, 31), step=Microbatch())
    gradients = {name: p.grad for name, p in shard.named_weights().items()}
    torch.save((loss, gradients), folder / str(rank))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.xdist_group("sequence")
def test_processes_share_attention(tmp_path: Path, one_thread: None) -> None:
    layout, fork = Layout(2, 2), multiprocessing.get_context("fork")
    started = [fork.Process(target=worker, args=(rank, layout, tmp_path)) for rank in range(layout.world)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * layout.world
    stack, ids = disturbed_stack(HYBRID), make_ids(2, 31)
    out = stack(ids, ids, METHOD)
    out.loss.backward()
    expected = {name: p.grad for name, p in stack.named_parameters()}
    each = [torch.load(tmp_path / str(rank)) for rank in range(layout.world)]
    assert sum(loss for loss, _ in each if loss is not None) == pytest.approx(out.loss.item(), rel=1e-12)
    for turn in range(2):
        assert_same({n: g for rank in (turn, 2 + turn) for n, g in each[rank][1].items()}, expected, 1e-10)
