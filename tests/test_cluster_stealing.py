"""Work stealing: the units of a pool, in every order of taking them, and what happens when someone fails."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_helpers import (
    TRAINING,
    disturb,
    disturbed_shards,
    disturbed_stack,
    together,
    train_shards,
    train_stack,
)
from model_helpers import SIZES, assert_same, make_ids

from adjoint import LayerLocal, StackConfig
from adjoint.cluster import stealing, tasks
from adjoint.cluster.pool import UNITS_EACH, Bag, Pool, Unit, in_turn, units_of
from adjoint.cluster.schedule import Run
from adjoint.cluster.shard import Shard
from adjoint.cluster.spec import ShardSpec
from adjoint.cluster.stealing import Desk
from adjoint.cluster.tasks import HelperWork, TaskWork
from adjoint.cluster.transport import LocalTransport, join

MIXERS = ["mamba", "mamba2", "dense", "mamba", "scalar"]
CONFIG = StackConfig(**{**SIZES, "n_layer": 5, "mixer": MIXERS})
BATCHES = [make_ids(2, 45, seed=step) for step in range(2)]
TASKS = 5 * 6  # of a batch, in chunks of 8


# --------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize("own", [range(5), range(3, 7), range(1), range(9, 10)], ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 40])
@pytest.mark.parametrize("crew", [2, 5])
def test_units_are_all_tasks_once(own: range, chunks: int, crew: int) -> None:
    windowed = units_of(own, chunks, crew, windowed=True)
    found = [(unit.layer, chunk) for unit in windowed for chunk in unit.chunks]
    assert found == list(itertools.product(own, range(chunks)))
    shared = [unit for unit in windowed if unit.stealable]
    layers = len([layer for layer in own if layer])
    if layers:
        assert min(layers * chunks, UNITS_EACH * crew) <= len(shared) < UNITS_EACH * crew + layers
    assert len(windowed) - len(shared) == (own.start == 0)  # the embedding's layer, in one piece
    whole = units_of(own, chunks, crew, windowed=False)
    assert [unit.layer for unit in whole] == list(own)
    assert all(list(unit.chunks) == list(reversed(range(chunks))) for unit in whole)


def test_owner_and_helpers_take_from_two_ends() -> None:
    units = units_of(range(3), 4, 1, windowed=True)
    assert [str(unit) for unit in units] == [
        "layer 0 chunks 0 to 3", "layer 1 chunks 0 to 1", "layer 1 chunks 2 to 3",
        "layer 2 chunks 0 to 1", "layer 2 chunks 2 to 3",
    ]  # fmt: skip
    bag = Bag(units)
    stolen = [bag.steal() for _ in range(3)]
    assert stolen == [units[3], units[4], units[1]]  # the last layer first, each in order
    assert [bag.take() for _ in range(3)] == [units[0], units[2], None]
    assert bag.steal() is None
    left = Bag(units)
    assert [left.steal() for _ in range(5)][4] is None, "the first layer was stolen"
    assert left.take() == units[0]


# ---------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_added_in_order_however_they_come(seed: int) -> None:
    """Numbers whose sum depends on the order, and of which another order would show."""
    draw = random.Random(seed)
    pool = Pool(units_of(range(1, 4), 8, 3, windowed=True), (1, 2))
    values = {unit: torch.tensor(draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8)) for unit in pool.units}
    expected = dict.fromkeys(range(1, 4), torch.zeros(()))
    for unit in pool.units:
        expected[unit.layer] = expected[unit.layer] + values[unit]
    found = dict.fromkeys(range(1, 4), torch.zeros(()))

    def add(layer: int, sums: Any) -> None:
        found[layer] = found[layer] + sums[0]

    desk = Desk(pool, 0, add)
    for unit in draw.sample(pool.units, len(pool.units)):
        desk.hand_in(unit, [values[unit]])
    desk.wait()
    assert all(torch.equal(found[layer], expected[layer]) for layer in expected)
    assert not desk.early
    in_order = Desk(pool, 0, add)
    for unit in pool.units:
        in_order.hand_in(unit, [values[unit]])
        assert not in_order.early, "held though it was its turn"


@pytest.mark.parametrize("helpers", [1, 2, 6])
@pytest.mark.parametrize("chunks", [5, 64])
@pytest.mark.parametrize("own", [range(4), range(7, 9)], ids=str)
def test_few_sums_are_held(helpers: int, chunks: int, own: range) -> None:
    """Workers who take a unit each and then are done in any order: never all of their sums."""
    pool = Pool(units_of(own, chunks, 1 + helpers, windowed=True), tuple(range(1, 1 + helpers)))
    desk, chance = Desk(pool, 0, lambda layer, sums: None), random.Random(helpers)
    taken, most = in_turn(0, pool), 0
    while batch := list(itertools.islice(taken, 1 + helpers)):
        for _, unit in chance.sample(batch, len(batch)):
            desk.hand_in(unit, [])
            most = max(most, len(desk.early))
        assert not desk.early
    desk.wait()
    assert most <= helpers


# -------------------------------------------------------------------------------------- orders of taking


Order = tuple[Callable[[Bag], Unit | None], Callable[[Bag], Unit | None]]  # what `take` and `steal` do


def by_chance(seed: int) -> Order:
    """Whoever comes gets any unit; a helper is at times told that there are no more."""
    chance = random.Random(seed)

    def pick(bag: Bag, stealing: bool) -> Unit | None:
        left = [u for u in bag.front if u not in bag.taken and (u.stealable or not stealing)]
        if not left or (stealing and chance.random() < 0.2):
            return None
        bag.taken.add(unit := chance.choice(left))
        return unit

    return lambda bag: pick(bag, False), lambda bag: pick(bag, True)


def owner_alone() -> Order:
    return Bag.take, lambda bag: None


def helpers_alone() -> Order:
    """The owner carries out what it has to, and no more."""

    def take(bag: Bag) -> Unit | None:
        left = [unit for unit in bag.front if unit not in bag.taken and not unit.stealable]
        bag.taken.update(left[:1])
        return left[0] if left else None

    return take, Bag.steal


def carried_out(shards: list[Shard]) -> list[int]:
    return [sum(tile.action.startswith("task") for tile in shard.timings()) for shard in shards]


def gradients_with(
    method: LayerLocal,
    shards: int,
    helpers: tuple[int, ...],
    precision: str = "float64",
    batches: list[torch.Tensor] = BATCHES,
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses, gradients, and how many tasks each worker carried out."""
    made = disturbed_shards(CONFIG, shards, method, TRAINING, precision, helpers=helpers)
    losses, gradients = train_shards(made, TRAINING, batches)
    return losses, gradients, carried_out(made)


@pytest.mark.parametrize(
    "window, shards, helpers",
    [(None, 1, (0,)), (7, 1, (0, 0, 0)), (None, 2, (1, 1, 0)), (7, 2, (1, 1, 0)), (45, 1, (0, 0))],
)
def test_whoever_takes_what_the_result_is_the_same(
    window: int | None,
    shards: int,
    helpers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    method = LayerLocal(window, 8)
    losses, expected = train_stack(disturbed_stack(CONFIG), method, TRAINING, BATCHES)
    orders = [owner_alone(), helpers_alone(), (Bag.take, Bag.steal), *map(by_chance, range(2))]
    found = []
    for take, steal in orders:
        with monkeypatch.context() as patched:
            patched.setattr(Bag, "take", take)
            patched.setattr(Bag, "steal", steal)
            found.append(gradients_with(method, shards, helpers))
    alone, helped = found[0][2], found[1][2]
    assert sum(alone[:shards]) == sum(helped) == TASKS and not any(alone[shards:])
    assert helped[0] == 6, "the owner of the embedding's layer carried out more than that"
    for got_losses, got, done in found:
        assert sum(done) == TASKS
        assert got_losses == found[0][0] == pytest.approx(losses, rel=1e-12)
        assert_same(got, expected, 1e-12)
        assert all(torch.equal(got[name], found[0][1][name]) for name in expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_owner_and_helpers_round_alike(
    precision: str, batch: int, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Where the sums of products are short of digits, whoever carries out a task finds the same ones."""
    found = []
    for take, steal in (owner_alone(), helpers_alone()):
        with monkeypatch.context() as patched:
            patched.setattr(Bag, "take", take)
            patched.setattr(Bag, "steal", steal)
            found.append(gradients_with(LayerLocal(7, 8), 1, (0, 0), precision, [make_ids(batch, 61)]))
    (losses, gradients, _), (again_losses, again, done) = found
    assert sum(done[1:]) > 0 and losses == again_losses
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


def test_tasks_read_aligned_memory_of_their_own(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Products of views that begin anywhere may round otherwise than those of whole tensors (BLAS picks its
    kernels by alignment), too seldom at these sizes to be seen in the results."""
    seen = []
    run_task = tasks.run_task

    def noting(block: torch.nn.Module, task: Any, window: Any, reads: tasks.Reads, *more: Any) -> Any:
        seen.extend([reads[0], *reads[1], reads[2], *block.parameters()])
        return run_task(block, task, window, reads, *more)

    monkeypatch.setattr(tasks, "run_task", noting)
    monkeypatch.setattr(Bag, "take", helpers_alone()[0])
    _, _, done = gradients_with(LayerLocal(7, 9), 1, (0,), "float32", [make_ids(1, 45)])
    assert all(done)
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in seen)


def test_a_slow_helper_is_left_behind(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """One helper is not through with its first task before all units are taken: it has that unit, and may
    have asked for one more. The result is that of workers who are equally fast."""
    method = LayerLocal(7, 8)
    _, expected, _ = gradients_with(method, 1, (0, 0), batches=BATCHES[:1])
    made = disturbed_shards(CONFIG, 1, method, TRAINING, helpers=(0, 0))
    bags: list[Bag] = []
    steal, run, own_tile, begun = Bag.steal, HelperWork.run, TaskWork.unit_tile, threading.Event()

    def steal_noted(bag: Bag) -> Unit | None:
        bags.append(bag)
        return steal(bag)

    def slowly(work: HelperWork, action: Run) -> None:
        begun.set() if work.part is made[2].part else begun.wait(60)
        while work.part is made[2].part and not all(unit in bags[0].taken for unit in bags[0].front):
            time.sleep(0.01)
        run(work, action)

    def unit_tile(work: TaskWork, *arguments: Any) -> None:
        begun.wait(60)
        own_tile(work, *arguments)

    monkeypatch.setattr(TaskWork, "unit_tile", unit_tile)
    monkeypatch.setattr(Bag, "steal", steal_noted)
    monkeypatch.setattr(HelperWork, "run", slowly)
    _, found = train_shards(made, TRAINING, BATCHES[:1])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    owner, quick, slow = carried_out(made)
    most = max(len(unit.chunks) for unit in bags[0].taken if unit.stealable)
    assert 0 < slow <= 2 * most < owner + quick == TASKS - slow


def over_gloo(rank: int, meeting: str, found: str, method: LayerLocal, workers: int) -> None:
    torch.set_num_threads(1)
    transport = join(f"file://{meeting}", rank, workers, "gloo", 60.0)
    helpers = (0,) * (workers - 1)
    spec = ShardSpec(CONFIG, TRAINING, method, (range(5),), rank, helpers, precision="float64")
    shard = Shard(spec, transport)
    if not shard.helps:
        disturb(shard.part.named_weights())
    for ids in BATCHES:
        shard.accumulate(ids)
    if not shard.helps:
        torch.save({name: p.grad for name, p in shard.part.named_weights().items()}, found)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_several_helpers_of_a_shard_between_processes(
    window: int | None, tmp_path: Path, one_thread: None
) -> None:
    """A thread for each helper, all of which use gloo at once."""
    method, workers, found = LayerLocal(window, 8), 4, tmp_path / "found.pt"
    arguments = (str(tmp_path / "meeting"), str(found), method, workers)
    torch.multiprocessing.spawn(over_gloo, arguments, workers)
    made = disturbed_shards(CONFIG, 1, method, TRAINING, helpers=(0,) * (workers - 1))
    for ids in BATCHES:
        together(made, lambda shard, ids=ids: shard.accumulate(ids))
    expected = {name: p.grad for name, p in made[0].part.named_weights().items()}
    got = torch.load(found)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------ failures


def stuck_threads() -> list[str]:
    """Threads for helpers that are still there after a while."""
    until = time.monotonic() + 10
    while (left := [t.name for t in threading.enumerate() if t.name.startswith("for helper")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    return left


def fail_after(tiles: int, function: Callable[..., Any]) -> Callable[..., Any]:
    count = itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(count) >= tiles:
            raise ArithmeticError("out of luck")
        return function(*arguments)

    return failing


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "who, name",
    [(HelperWork, "run"), (TaskWork, "unit_tile"), (TaskWork, "sums_in"), (HelperWork, "incoming")],
)
def test_who_fails_leaves_nobody_waiting(
    window: int | None, who: type, name: str, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """A helper, the owner, or the owner's thread for a helper: everyone's call ends with an error, and the
    cause is among them."""
    monkeypatch.setattr(who, name, fail_after(1, getattr(who, name)))
    made = disturbed_shards(CONFIG, 1, LayerLocal(window, 8), TRAINING, helpers=(0, 0))
    with pytest.raises(ArithmeticError, match="out of luck"):
        together(made, lambda shard: shard.accumulate(BATCHES[0]))
    assert not stuck_threads()


def test_an_error_of_the_transport_reaches_the_owner(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """As when a helper's process is gone: its thread finds out, and the owner stops instead of waiting."""
    send = LocalTransport.send

    def broken(transport: LocalTransport, action: Any, tensor: torch.Tensor) -> None:
        if transport.rank == 0 and action.what == "unit" and action.to == 2:
            raise ConnectionError("connection closed by peer")
        send(transport, action, tensor)

    monkeypatch.setattr(LocalTransport, "send", broken)
    made = disturbed_shards(CONFIG, 1, LayerLocal(7, 8), TRAINING, helpers=(0, 0))
    with pytest.raises(ConnectionError, match="closed by peer"):
        together(made, lambda shard: shard.accumulate(BATCHES[0]))
    assert not stuck_threads()


def test_questions_are_numbered_within_a_tag(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(stealing, "NUMBERS", 2)
    _, expected, _ = gradients_with(LayerLocal(7, 8), 1, (0,))
    monkeypatch.undo()
    _, found, _ = gradients_with(LayerLocal(7, 8), 1, (0,))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
