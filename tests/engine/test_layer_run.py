"""Layers of a worker as one stage: by which methods, and that only the number of tiles depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint import Backprop, Exact, LayerLocal, Truncated
from adjoint.batch import Batch, State
from adjoint.engine.budget import LiveBytes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.layer_run import LayerRun
from adjoint.engine.schedule import Owners, Recv, Run, Send
from adjoint.engine.stage import Stage
from adjoint.engine.tile import Gradients, Pullback
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.stack import StackCall
from adjoint.stack.sharded_stack import ShardedStack
from tests.cluster.threads import split
from tests.model_helpers import assert_same, current_gradients, make_ids, make_model, random_from

LAYERS = [
    Exact(5, keep="inputs"),
    Exact(5, keep="offload"),
    Truncated(4, 5),
    Truncated("auto", 5),
    Truncated(10, 5, unbiased=True),
    LayerLocal(chunk_size=5),
    Backprop(checkpoint=True),
]
RUNS = [Exact(5), Exact(5, offload=True), Exact(5, checkpoints=2), Truncated(100, 5), Backprop()]


@pytest.mark.parametrize("method", [*LAYERS, *RUNS], ids=str)
def test_a_layer_is_a_stage_where_the_method_s_tasks_are_layers(method: Any) -> None:
    model, ids = make_model("mamba"), make_ids(1, 23)
    batch = Batch.from_labels(ids, ids, states=model.stage_states(model.initial_state(1)))
    step = model.step(StackCall(batch, method), batch, method.engine_spec(23, 5))
    assert len(step.stages) == (model.config.n_layer + 2 if method in LAYERS else 1)


@pytest.fixture
def results() -> Any:
    """A function: loss, gradients and final state of a call by chunks, and the peak of its bytes.

    `layers`: whether each layer is a stage whatever the method says."""

    def run(model: Any, method: Any, layers: bool, **call: Any) -> tuple[dict[str, torch.Tensor], int]:
        with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
            if layers:
                patch.setattr(EngineSpec, "tasks_are_layers", True)
            model.zero_grad()
            before = live.begin()
            out = model(method=method, return_state=True, **call)
            (out.loss + sum(s.square().sum() for state in out.state for s in state)).backward()
            peak = live.peak - before
        tensors = current_gradients(model) | {"loss": out.loss.detach()}
        states = {
            f"state {k}.{i}": s.detach() for k, state in enumerate(out.state) for i, s in enumerate(state)
        }
        return tensors | states, peak

    return run


@pytest.mark.sampled(7)
@pytest.mark.parametrize("variant", ["mixed, untied", "hybrid"])
@pytest.mark.parametrize("method", [Exact(5), Exact(5, checkpoints=2), Exact(5, recompute="full")], ids=str)
def test_results_are_those_of_layers_bit_for_bit(results: Any, variant: str, method: Any) -> None:
    """So they are with documents, an initial state, gradients of the final one, and keys that grow."""
    model, ids = make_model(variant), make_ids(2, 23)
    state = model(ids[:, :4], return_state=True).state
    state = [tuple(s.detach() for s in layer) for layer in state]
    call = {"input_ids": ids, "labels": ids, "state": state, "seq_idx": (torch.arange(23) // 9).expand(2, 23)}
    run, layers = (results(model, method, layers, **call)[0] for layers in (False, True))
    assert run.keys() == layers.keys()
    assert all(torch.equal(run[name], layers[name]) for name in run)


def test_memory_is_that_of_layers(results: Any) -> None:
    """Each layer's tape is freed once it is pulled back, and views keep no layer's activations."""
    config = adjoint.StackConfig(vocab_size=64, d_model=32, n_layer=6, mixer=["mamba", "mamba2"] * 3)
    ids = make_ids(1, 1024, 64)
    model = adjoint.Stack(config, seed=0)
    for _ in range(2):  # the first call makes what stays
        peaks = [results(model, Exact(128), layers, input_ids=ids, labels=ids)[1] for layers in (False, True)]
    assert peaks[0] < 1.01 * peaks[1]


class LastToken(Stage):
    """A stage y = 2 x whose state is the last token: a view of all, as is the cotangent of the first one."""

    stateful = True
    grows = (None,)

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return 2 * x, (x[:, -1:],)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return *self.forward(x, state, chunk), lambda dy, d_state: (dy, (dy[:, :1],))


def test_states_keep_no_layer_s_activations_while_the_others_run() -> None:
    run, x, chunk = (
        LayerRun([LastToken(), LastToken()]),
        torch.randn(1, 64, 8),
        Batch(*make_ids(2, 64)[:, None]),
    )
    state = (torch.zeros(1, 1, 8),) * 2
    with torch.no_grad():
        _, after = run.forward(x, state, chunk)
    _, _, pullback = run.linearize(x, state, chunk, Gradients())
    _, before = pullback(torch.ones_like(x), (None, None))
    for tensors, expected in ((after, (x[:, -1:], 2 * x[:, -1:])), (before, (torch.ones(1, 1, 8),) * 2)):
        for tensor, value in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, value)
            assert tensor.untyped_storage().nbytes() == value.nelement() * value.element_size()


def test_tensors_that_two_layers_of_a_run_read_besides_their_input() -> None:
    """A layer whose second run finds what it reads leaves the other layers' to theirs."""
    model, ids, tensors = make_model("mamba"), make_ids(2, 23), []
    for seed, layer in enumerate(model.layers):
        v = nn.Parameter(0.3 * random_from(seed)(model.config.d_model))
        layer.register_forward_hook(lambda _, __, out, v=v: (out[0] * (1 + v), *out[1:]))
        tensors.append(v)
    by_method = []
    for method in (Backprop(), Exact(5)):
        loss = model(ids, labels=ids, method=method).loss
        by_method.append(dict(enumerate(torch.autograd.grad(loss, tensors))))
    assert_same(by_method[1], by_method[0], 1e-10)


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_layer_shards_run_a_plain_loop_over_chunks(shards: int) -> None:
    """Forward chunk by chunk, then back; receives and sends stand at a chunk's ends."""
    chunks, spec = 11, EngineSpec(4)
    config, owners = adjoint.StackConfig(n_layer=shards), Owners.from_spans(split(shards, shards))
    grid = grid_of(ShardedStack(config), spec, 4 * chunks, owners)
    assert grid.stages == shards
    for w, program in enumerate(step_plan(spec, grid, owners).programs):
        expected: list[str] = []
        for c in range(chunks):
            kind = "linearize" if c + 1 == chunks else "forward"
            expected += [str(Recv(("y", w - 1, c), w - 1))] * (w > 0) + [f"{kind}({w},{c})"]
            expected += [str(Send(("y", w, c), w + 1))] * (w + 1 < shards)
        for c in reversed(range(chunks)):
            expected += [f"recompute({w},{c})"] * (c + 1 < chunks)
            expected += [str(Recv(("dy", w, c), w + 1))] * (w + 1 < shards) + [f"backward({w},{c})"]
            expected += [str(Send(("dy", w - 1, c), w - 1))] * (w > 0)
        # receives may come earlier, as far as channels hold messages
        tiles = [str(action) for action in program if isinstance(action, Run)]
        assert tiles == [entry for entry in expected if "(" in entry]
        assert sorted(map(str, program)) == sorted(expected)


@pytest.mark.parametrize("mixer, stages", [("mamba2", 6), (["mamba2", "attention"] * 2, 2)])
def test_recurrent_layers_stay_stages_where_workers_share_a_sequence(mixer: Any, stages: int) -> None:
    """Their states cross between tiles, by any transport; keys and values are asked for within tiles."""
    config, owners = adjoint.StackConfig(n_layer=4, mixer=mixer), Owners.from_spans(split(4, 2), 2)
    grid = grid_of(ShardedStack(config), EngineSpec(4), 40, owners)
    assert (grid.stages, grid.exchanges_within_tiles) == (stages, stages == 2)
