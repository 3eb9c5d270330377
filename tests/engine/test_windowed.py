"""Windows: tasks in any order and what they need; those that are picked (`window="auto"`) and the bound that
must hold; cuts that are drawn (`unbiased=True`) and the expectation that must be exact."""

import itertools
import math
import random

import pytest
import torch

import adjoint
from adjoint.engine import distribution
from adjoint.engine.decay import BLOCK, Decays
from adjoint.engine.grid import Grid, Tile, make_grid
from adjoint.engine.schedule import make_schedule
from adjoint.layers import WINDOWED
from tests.fuzz import stacks
from tests.fuzz.oracle import Windowed, same
from tests.model_helpers import gradients, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

MIXERS = [*WINDOWED, ["mamba", "dense"]]
KINDS = adjoint.Truncated, adjoint.LayerLocal
SIZES = {"vocab_size": 31, "d_model": 16, "n_layer": 2, "headdim": 8, "ngroups": 2, "d_intermediate": 12}


def case_of(mixer, seqlen, batch=2):
    """From states, of a loss that also looks at the final ones."""
    config = {**SIZES, "d_state": 4, "mixer": mixer}
    return {"seed": 0, "config": config, "batch": batch, "seqlen": seqlen, "states": 1.0, "final": True}


def slow_model(case):
    """Layers that forget at different speeds, within the sequence."""
    model = stacks.make(case).double()
    with torch.no_grad():
        for k, block in enumerate(model.layers):
            for name, parameter in block.named_parameters():
                if name.endswith(("dt_bias", "dt_proj.bias")):
                    parameter.fill_(-1.0 + 2 * k)
                if name.endswith("A_log"):
                    parameter.fill_(
                        0.0 if "mixer.residues" not in dict(block.named_parameters()) else -3.0 + 2 * k
                    )
                if name.endswith("A_proj.bias"):
                    parameter[: 1 if parameter.numel() == 1 else 4] = -1.0 + 2 * k
    return model


def results(case, model, method):
    return stacks.run(case, model, method, torch.float64)[0]


@pytest.mark.parametrize("method", [adjoint.Truncated(6, 5), adjoint.LayerLocal(6, 5)], ids=lambda m: m.name)
def test_tasks_of_a_layer_may_run_in_any_order(method, monkeypatch):
    case = case_of("mamba", 43)
    model = stacks.make(case).double()
    in_order = results(case, model, method)
    ordered = Grid.order

    def shuffled(grid, stream=False):
        """Layer by layer, the chunks of each in a random order."""
        found = ordered(grid, stream)
        random.Random(0).shuffle(found)
        forward = [t for t in ordered(grid, stream) if t.kind == "forward"]
        return forward + sorted(
            (t for t in found if t.kind != "forward"), key=lambda t: (-t.stage, t.kind == "backward")
        )

    monkeypatch.setattr(Grid, "order", shuffled)
    make_schedule.cache_clear()
    same(results(case, model, method), in_order)
    make_schedule.cache_clear()


def test_a_task_needs_no_more_than_its_halo():
    grid = make_grid(adjoint.Truncated(6, 10).engine_spec(43, 10), 43, [False, True, True, False], reach=3)
    tasks = [t for t in grid.backward_tiles() if t.kind == "windowed"]
    assert len(tasks) == 2 * 5
    assert tasks[1] == Tile("windowed", 2, 1) and grid.extent(tasks[1]) == (7, 10, 20, 25)
    assert tasks[4] == Tile("windowed", 2, 4) and grid.extent(tasks[4]) == (37, 40, 43, 43)
    assert grid.reads(tasks[1]) == [
        *(("y", 1, c) for c in (0, 1, 2)),
        ("S", 2, 0),
        ("dy", 2, 1),
        ("dy", 2, 2),
    ]
    assert grid.writes(tasks[1]) == [("dy", 1, 1), ("spill", 1, 0, 1)]


# ------------------------------------------------------------------------------------------------------ auto


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_auto_equals_autograd_with_the_windows_it_reports(mixer):
    case = case_of(mixer, 151)
    model = slow_model(case)
    got, out = stacks.run(case, model, adjoint.Truncated("auto", 20, tolerance=1e-3), torch.float64)
    assert len(out.windows) == 2 and all(1 <= w <= 151 for w in out.windows)
    assert out.windows[0] > out.windows[1] or "dense" in mixer  # the first layer forgets more slowly
    same(got, results(case, model, Windowed(tuple(out.windows))))


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_auto_drops_nothing_where_nothing_decays_that_far(mixer):
    case = case_of(mixer, 43)
    model = stacks.make(case).double()
    got, out = stacks.run(case, model, adjoint.Truncated("auto", 10, tolerance=1e-300), torch.float64)
    assert out.windows == [43, 43]
    same(got, results(case, model, adjoint.Exact(10)))


def adjoint_states(a, g, window):
    """The accumulated adjoint state of each token, every sum written out: a, g (batch, seqlen, channels)."""
    mu = torch.zeros_like(g)
    for i in range(g.shape[1]):
        product = torch.ones_like(g[:, 0])
        for t in range(i, min(i + window, g.shape[1])):
            product = product * a[:, t] if t > i else product
            mu[:, i] += product * g[:, t]
    return mu


@pytest.mark.sampled(17)
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds(tolerance, seed):
    torch.manual_seed(seed)
    # channels of very different memory, the decays of each changing all the time; one forgets at once
    rate = torch.tensor([0.02, 0.2, 1.0, 30.0])
    log_decay = -rate * torch.rand(2, 333, 4, dtype=torch.float64) * 2
    log_decay[:, 100:110, 1] = -math.inf
    decays = Decays()
    for part in log_decay.split([7, 100, 16, 1, 209], dim=1):
        decays.add(part)
    window = decays.window(tolerance, 333)
    g = torch.randn(2, 333, 4, dtype=torch.float64)
    whole, cut = (adjoint_states(log_decay.exp(), g, w) for w in (333, window))
    dropped = (whole - cut).abs().amax((0, 1)) / whole.abs().amax((0, 1))
    assert dropped.max() <= tolerance, (window, dropped)
    if window < 333:  # and the window is no longer than it must be, but for whole blocks
        short = window - 2 * BLOCK
        run = log_decay.clamp_min(-1e4).cumsum(1)
        assert short < 1 or (run[:, short:] - run[:, :-short]).max() > math.log(tolerance)


def test_the_bound_holds_for_dense_matrices_in_the_sum_norm():
    torch.manual_seed(0)
    mixer = slow_model(case_of("dense", 200)).layers[1].mixer
    inputs, _ = mixer.scan_inputs(torch.randn(1, 200, 16, dtype=torch.float64))
    decays = Decays()
    decays.add(mixer.log_decay(inputs))
    window = decays.window(1e-2, 200)
    assert window < 150
    a, g = inputs.a[0].mT, torch.randn(200, 4, dtype=torch.float64)
    mu = torch.zeros(201, 4, dtype=torch.float64)
    for i in reversed(range(200)):
        mu[i] = g[i] + (a[i + 1] @ mu[i + 1] if i < 199 else 0)
    for i in range(200 - window):
        dropped = mu[i + window]
        for j in range(i + window, i, -1):
            dropped = a[j] @ dropped
        assert dropped.abs().sum() <= 1e-2 * mu[i + window].abs().sum()


WHOLE, SHARE = "must be a whole number of tokens", "tolerance must be a number between 0 and 1"
REFUSED = [
    *((kind, {"window": w}, f"window {WHOLE}") for kind in KINDS for w in (0, -1, 1.5, True, "all")),
    *((kind, {"window": 4, "chunk_size": 0}, f"chunk_size {WHOLE}") for kind in KINDS),
    *((adjoint.Exact, {"chunk_size": size}, f"chunk_size {WHOLE}") for size in (0, -1, 2.0, True, "8")),
    (adjoint.Exact, {"keep": "all"}, "keep must be one of edges, inputs, offload; got 'all'"),
    *((adjoint.Exact, {"memory": x}, "memory") for x in ("much", 0, True)),
    (adjoint.Exact, {"checkpoints": 2, "keep": "inputs"}, "checkpoints"),
    *(
        (adjoint.Truncated, {"window": "auto", "tolerance": x}, SHARE)
        for x in (0, 1, -0.1, math.nan, math.inf, "much", True)
    ),
    (adjoint.Truncated, {"window": 5, "tolerance": 1e-3}, 'tolerance goes with window="auto"'),
    (adjoint.Truncated, {"window": "auto", "unbiased": True}, "unbiased needs a window in tokens"),
    (adjoint.Truncated, {"window": 8, "chunk_size": 8, "unbiased": True}, "needs chunk_size below window"),
    (adjoint.Truncated, {"window": 1, "unbiased": True}, "needs chunk_size below window"),
    (adjoint.Truncated, {"window": "all"}, "or \"auto\"; got 'all'"),
]


@pytest.mark.parametrize("kind, arguments, message", REFUSED)
def test_wrong_arguments_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


# -------------------------------------------------------------------------------------------------- unbiased


def small():
    model = slow_model(case_of("mamba", 16))
    return model, make_ids(1, 16, 31), adjoint.Truncated(12, chunk_size=6, unbiased=True)


def flat(model, method, ids):
    return torch.cat([g.flatten() for g in gradients(model, ids, ids, method)[1].values()])


def test_the_expectation_over_all_cuts_is_the_exact_gradient(monkeypatch):
    """Two layers and two inner edges: all 16 outcomes, each with its probability."""
    model, ids, method = small()
    drawn, expectation = [], 0
    for outcome in itertools.product((0.0, 2.0), repeat=4):
        adjoint_scale = tuple((math.nan, *outcome[2 * k : 2 * k + 2]) for k in range(2))
        monkeypatch.setattr(
            distribution, "draw_adjoint_scale", lambda n_layer, n_chunks, cut, p=adjoint_scale: p
        )
        drawn.append(flat(model, method, ids))
        expectation += drawn[-1] / 16  # cut = 6 / 12
    truth = flat(model, adjoint.Exact(6), ids)
    assert (expectation - truth).norm() <= 1e-12 * truth.norm()
    assert (drawn[0] - truth).norm() > 1e-3 * truth.norm()  # cutting everywhere is far from exact


def test_draws_differ_between_calls_and_repeat_with_the_seed():
    model, ids, method = small()
    torch.manual_seed(0)
    first = [flat(model, method, ids) for _ in range(4)]
    torch.manual_seed(0)
    again = [flat(model, method, ids) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], other) for other in first[1:])
    adjoint_scale = torch.tensor(distribution.draw_adjoint_scale(100, 1000, 0.25))
    assert (
        adjoint_scale.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        and abs(adjoint_scale.mean() - 1) < 0.02
    )
    whole = adjoint.Truncated(22, chunk_size=6, unbiased=True)  # a window over everything cuts nothing
    assert torch.equal(flat(model, whole, ids), flat(model, adjoint.Exact(6), ids))
