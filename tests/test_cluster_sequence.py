"""A sequence split over workers: loss and gradients as in one process, messages of a fixed size."""

from __future__ import annotations

import collections
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cluster_helpers import TRAINING, disturbed_shards, disturbed_stack, together, train_shards, train_stack
from model_helpers import ALL_MIXERS, SIZES, VARIANTS, assert_same, gradients, make_ids, make_model
from torch import Tensor

from adjoint import Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.cluster import sequence
from adjoint.cluster.part import Part
from adjoint.cluster.schedule import Recv, Run, Send, check
from adjoint.cluster.simulate import simulate
from adjoint.cluster.stretch import SequenceWork, carry, carry_back, chain
from adjoint.cluster.transport import local_transports
from adjoint.errors import UserError
from adjoint.loss import count_valid, shift_labels
from adjoint.train.machine import autocast

Names = dict[str, Tensor]


class Split:
    """A model over a batch split among workers in threads: their loss, summed gradients, bytes sent, work."""

    def __init__(
        self,
        model: Stack,
        ids: Tensor,
        workers: int,
        chunk_size: int = 7,
        exchange: str = "affine",
        every: int = 2,
        backward: bool = True,
        precision: str = "float64",
    ) -> None:
        shape = model.config, ids.shape[1], workers, chunk_size
        self.cuts, made = sequence.plan(*shape, exchange, every, backward)
        check(made)
        transports = local_transports(workers)
        self.sent: collections.Counter[str] = collections.Counter()
        self.works: dict[int, SequenceWork] = {}
        self.held: collections.Counter[int] = (
            collections.Counter()
        )  # inputs of so many layers, in the backward
        targets, weights = shift_labels(ids), dict(model.named_parameters())

        def part_of_one() -> Part:
            part = Part(model.config, range(model.config.n_layer), None, dtype=model.embedding.weight.dtype)
            part.load_weights(weights.__getitem__)
            return part

        def run(worker: int) -> None:
            with torch.set_grad_enabled(backward), autocast(precision, ids.device):
                arguments = part_of_one(), ids, targets, int(count_valid(targets)), chunk_size
                how = {"worker": worker, "exchange": exchange, "every": every}
                work = SequenceWork(*arguments, cuts=self.cuts, **how)  # type: ignore[arg-type]
                self.works[worker] = work
            for action in made.programs[worker]:
                if isinstance(action, Run):
                    work.run(action)
                    if action.kind in ("again", "suffix", "backward"):
                        self.held[worker] = max(self.held[worker], len(work.inputs))
                elif isinstance(action, Send):
                    message = work.outgoing(action)
                    self.sent[action.what] += message.numel() * message.element_size()
                    transports[worker].send(action, message)
                elif isinstance(action, Recv):
                    work.incoming(action, transports[worker].post(action, work.room(action))())
            work.settle()

        def guarded(worker: int) -> None:
            try:
                run(worker)
            except BaseException:
                transports[worker].broken.set()
                raise

        with ThreadPoolExecutor(workers) as pool:
            done = [pool.submit(guarded, worker) for worker in range(workers)]
        failed = [f.exception() for f in done if f.exception() is not None]
        own = [e for e in failed if "another shard has failed" not in str(e)]
        if failed:
            raise (own or failed)[0]  # type: ignore[misc]
        parts = [self.works[worker] for worker in sorted(self.works)]
        self.loss = sum(float(work.total) / work.valid for work in parts if work.total is not None)
        self.gradients: Names = {}
        for work in parts:
            for name, parameter in work.part.named_weights().items():
                if parameter.grad is not None:
                    so_far = self.gradients.get(name)
                    self.gradients[name] = parameter.grad if so_far is None else so_far + parameter.grad


# --------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("workers, exchange", [*((n, "affine") for n in (1, 2, 3, 4)), (3, "wavefront")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_are_those_of_one_process(
    variant: str, workers: int, exchange: str, one_thread: None
) -> None:
    model = make_model(variant)
    # stretches of several lengths; chunks shorter than d_conv
    for seqlen, chunk_size in ((31, 7), (22, 2)) if workers > 1 else ((31, 7),):
        ids = make_ids(2, seqlen)
        loss, expected = gradients(model, ids, ids, Exact(chunk_size=5))
        found = Split(model, ids, workers, chunk_size, exchange)
        assert len(found.cuts) == workers
        assert found.loss == pytest.approx(loss.item(), rel=1e-12)
        assert_same(found.gradients, expected, 1e-12)


def extreme(variant: str) -> Stack:
    """Decays of 1 - 1e-13 in one half of the channels and of 1e-300 a token in the other."""
    model = make_model(variant)
    with torch.no_grad():
        for block in model.blocks():
            mixer = block.mixer
            if variant in ("mamba", "mamba2"):
                mixer.A_log.zero_()
                bias = mixer.dt_proj.bias if variant == "mamba" else mixer.dt_bias
            else:
                bias = mixer.A_proj.bias[: 1 if variant == "scalar" else mixer.d_state]
            bias[::2], bias[1::2] = -30.0, 690.0
    return model


@pytest.mark.parametrize("n_layer, every", [(1, 1), (4, 2), (5, 3), (7, 3), (6, 1)])
def test_inputs_computed_again_are_the_same(n_layer: int, every: int, one_thread: None) -> None:
    mixers = (ALL_MIXERS * 2)[:n_layer]
    model, ids = make_model("mamba", n_layer=n_layer, mixer=mixers), make_ids(2, 31)
    whole, found = (Split(model, ids, 3, 5, every=spacing) for spacing in (1, every))
    assert found.loss == whole.loss
    assert all(torch.equal(found.gradients[name], whole.gradients[name]) for name in whole.gradients)
    most = sequence.stretches_held(n_layer, every) - 2
    assert most - 1 <= min(found.held.values()) and max(found.held.values()) <= most
    assert most <= n_layer and (every == 1 or n_layer < 5 or most < n_layer)


@pytest.mark.parametrize("variant", ALL_MIXERS)
def test_decays_near_one_and_near_nothing(variant: str, one_thread: None) -> None:
    model, ids = extreme(variant), make_ids(2, 29)
    loss, expected = gradients(model, ids, ids, Exact(chunk_size=8))
    assert all(gradient.isfinite().all() for gradient in expected.values())
    found = Split(model, ids, 3)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    assert_same(found.gradients, expected, 1e-12)


@pytest.mark.parametrize("what", ["state", "d_state"])
def test_what_crosses_the_edges_matters(what: str, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The tolerance above is one that a state lost on its way would not pass."""
    model, ids = make_model("mixed, untied"), make_ids(2, 31)
    right = Split(model, ids, 3).gradients
    outgoing = SequenceWork.outgoing

    def lost(work: SequenceWork, action: Send) -> Tensor:
        message = outgoing(work, action)
        return torch.zeros_like(message) if action.what == what else message

    monkeypatch.setattr(SequenceWork, "outgoing", lost)
    with pytest.raises(AssertionError):
        assert_same(Split(model, ids, 3).gradients, right, 1e-6)


@pytest.mark.parametrize("exchange", sequence.EXCHANGES)
def test_a_run_can_be_repeated_bit_for_bit(exchange: str, one_thread: None) -> None:
    model, ids = make_model("mixed, untied"), make_ids(2, 37)
    first, again = (Split(model, ids, 3, 5, exchange) for _ in range(2))
    assert first.loss == again.loss
    assert all(torch.equal(first.gradients[name], again.gradients[name]) for name in first.gradients)


@pytest.mark.parametrize("precision, tolerance", [("float32", 2e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("variant", ALL_MIXERS)
def test_lower_precisions_are_as_near_as_they_can_be(
    variant: str, precision: str, tolerance: float, one_thread: None
) -> None:
    model, ids = make_model(variant), make_ids(2, 40)
    loss, expected = gradients(model, ids, ids, Exact(chunk_size=8))
    found = Split(model.float(), ids, 3, 8, precision=precision)
    assert found.loss == pytest.approx(loss.item(), rel=tolerance)
    whole = [
        torch.cat([g[name].double().flatten() for name in expected]) for g in (found.gradients, expected)
    ]
    assert (whole[0] - whole[1]).norm() <= tolerance * whole[1].norm()


def test_evaluation_keeps_two_layers_inputs_at_most(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model("mixed, untied"), make_ids(2, 31)
    most: list[int] = []
    tile = SequenceWork.layer_tile

    def watched(work: SequenceWork, layer: int, chunk: int) -> None:
        tile(work, layer, chunk)
        most.append(len(work.inputs))

    monkeypatch.setattr(SequenceWork, "layer_tile", watched)
    found = Split(model, ids, 3, backward=False)
    with torch.no_grad():
        assert found.loss == pytest.approx(model(ids, labels=ids, method=Exact(7)).loss.item(), rel=1e-12)
    assert max(most) == 2 and not found.gradients


# ----------------------------------------------------------------------------------------------- as shards


@pytest.mark.parametrize("exchange", sequence.EXCHANGES)
@pytest.mark.parametrize("replicas, workers, tied", [(1, 3, True), (2, 2, False)])
def test_training_is_that_of_one_process(
    replicas: int, workers: int, tied: bool, exchange: str, one_thread: None
) -> None:
    config = StackConfig(**{**SIZES, **VARIANTS["mixed, untied"], "tie_embeddings": tied})
    training = dataclasses.replace(TRAINING, grad_accumulation=2)
    batches = [make_ids(6, 24 + step, seed=step) for step in range(2)]  # 3 rows a batch, over 2 replicas
    losses, expected = train_stack(disturbed_stack(config), Exact(5), training, batches)
    split = {"replicas": replicas, "sequence": workers, "exchange": exchange}
    runs = []
    for _ in range(2):
        made = disturbed_shards(config, 1, Exact(5), training, **split)
        runs.append((made, *train_shards(made, training, batches)))
    (made, found_losses, found), (again, again_losses, _) = runs
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, expected, 1e-12)
    assert again_losses == found_losses
    weights = made[0].part.named_weights()
    for other in (*made, *again):
        assert all(torch.equal(p, weights[name]) for name, p in other.part.named_weights().items())


def test_the_loss_of_any_length_adds_up(one_thread: None) -> None:
    config = StackConfig(**SIZES)
    made = disturbed_shards(config, 1, Exact(7), TRAINING, replicas=2, sequence=3)
    for rows, seqlen in ((3, 31), (1, 31), (2, 5)):  # a replica without rows; workers without tokens
        ids = make_ids(rows, seqlen)
        found = together(made, lambda shard, ids=ids: shard.evaluate(ids))
        with torch.no_grad():
            loss = disturbed_stack(config)(ids, labels=ids, method=Exact(7)).loss.item()
        assert sum(part for part in found if part is not None) == pytest.approx(loss, rel=1e-12)
    assert all(p.grad is None for shard in made for p in shard.part.parameters())


def test_what_cannot_be_split_is_refused() -> None:
    config = StackConfig(**SIZES)
    for method in (Truncated(5, 8), LayerLocal(None, 8)):
        with pytest.raises(UserError, match=r"cluster\.sequence: .* use --method\.name exact"):
            disturbed_shards(config, 1, method, TRAINING, sequence=2)
    with pytest.raises(UserError, match=r"cluster\.sequence: .* use --cluster\.shards 1"):
        disturbed_shards(config, 2, Exact(7), TRAINING, sequence=2)
    made = disturbed_shards(config, 1, Exact(7), TRAINING, sequence=4)
    with pytest.raises(UserError, match=r"cluster\.sequence: .* take at most 3"):
        made[0].accumulate(make_ids(2, 11))


# ---------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("exchange", sequence.EXCHANGES)
@pytest.mark.parametrize("variant", ["mixed, untied", "mamba"])
def test_messages_do_not_grow_with_the_sequence(variant: str, exchange: str, one_thread: None) -> None:
    model = make_model(variant)
    short, long = (Split(model, make_ids(1, seqlen), 3, 40, exchange).sent for seqlen in (30, 300))
    assert short == long
    assert set(short) == {"y", "dy", "state", "d_state"}
    layers, (h, d_model) = [block.mixer for block in model.blocks()], (12 * 2 * 4, 12)
    if variant == "mamba":
        # the outermost worker sends h alone, the one between also a: 3 messages of a state, and 1 of a decay
        states = 3 * h + h if exchange == "affine" else 2 * h
        assert short["state"] == short["d_state"] == len(layers) * states * 8
        # two pairs of neighbours; the tokens below the first layer need no message
        assert short["y"] == short["dy"] == 2 * (len(layers) - 1) * 3 * d_model * 8


@pytest.mark.parametrize("variant", ALL_MIXERS)
def test_a_stretch_maps_the_state_affinely(variant: str) -> None:
    model = make_model(variant)
    block, x = model.blocks()[1], torch.randn(2, 13, SIZES["d_model"], dtype=torch.float64)
    mixer = block.mixer
    *tail, h = (torch.randn_like(s) for s in model.initial_state(2)[1])
    with torch.no_grad():
        inputs, _ = mixer.scan_inputs(x, *tail)
        early, after = mixer.scan_inputs(x[:, :6], *tail)
        late, _ = mixer.scan_inputs(x[:, 6:], *([after] if tail else []))
        a = mixer.total_decay(inputs)
        unit = mixer.unit_decay(2, torch.float64, x.device)
        assert unit.shape == a.shape
        assert torch.equal(carry(unit, h), h) and torch.equal(carry_back(unit, h), h)
        dense = a.dim() > h.dim()
        joined = chain(mixer.total_decay(late), mixer.total_decay(early), dense)
        torch.testing.assert_close(joined, a, rtol=1e-13, atol=1e-15)
        assert torch.equal(chain(a, unit, dense), a)
        _, from_h = mixer.scan(inputs, h)
        _, from_zero = mixer.scan(inputs, torch.zeros_like(h))
        torch.testing.assert_close(carry(a, h) + from_zero, from_h, rtol=1e-13, atol=1e-13)
        mu = torch.randn_like(h)
        assert (mu * carry(a, h)).sum().item() == pytest.approx(
            (carry_back(a, mu) * h).sum().item(), rel=1e-12
        )


# --------------------------------------------------------------------------------- stretches and schedules


@pytest.mark.parametrize("mixer, shortest", [("mamba", 3), ("dense", 1)])
def test_stretches_cover_the_sequence(mixer: str, shortest: int) -> None:
    config = StackConfig(**{**SIZES, "mixer": mixer})
    for seqlen in range(1, 40):
        for workers in range(1, 8):
            cuts = sequence.stretches(config, seqlen, workers)
            assert [t for cut in cuts for t in range(cut.start, cut.stop)] == list(range(seqlen))
            lengths = [cut.stop - cut.start for cut in cuts]
            assert max(lengths) - min(lengths) <= 1
            assert len(cuts) == 1 or min(lengths) >= shortest
            refused = len(cuts) < workers
            assert refused == (workers > 1 and seqlen < workers * shortest)
            if refused:
                with pytest.raises(UserError, match=f"take at most {len(cuts)}") as raised:
                    sequence.check_stretches(config, seqlen, workers)
                assert "\n" not in str(raised.value)
            else:
                sequence.check_stretches(config, seqlen, workers)


@pytest.mark.parametrize("exchange", sequence.EXCHANGES)
@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_schedules_end_and_do_every_tile_once(exchange: str, workers: int) -> None:
    config = StackConfig(**{**SIZES, **VARIANTS["mixed, untied"]})
    cuts, made = sequence.plan(config, 83, workers, 4, exchange)
    execution = check(made)
    assert max(execution.fullest.values(), default=0) <= made.buffers
    for worker, cut in enumerate(cuts):
        counts = collections.Counter(made.runs(worker))
        assert set(counts.values()) == {1}
        tiles = collections.Counter(run.kind for run in counts)
        chunks = -(-(cut.stop - cut.start) // 4)
        affine = exchange == "affine"
        assert tiles["forward"] == tiles["backward"] == config.n_layer * chunks
        assert tiles["prefix"] == (config.n_layer * chunks if affine and worker < workers - 1 else 0)
        assert tiles["suffix"] == (config.n_layer * chunks if affine and worker else 0)
        assert tiles["head"] == tiles["embedding"] == chunks


def test_workers_without_tokens_have_nothing_to_do(one_thread: None) -> None:
    config = StackConfig(**SIZES)
    _, made = sequence.plan(config, 7, 4, 4)
    check(made)
    assert [bool(program) for program in made.programs] == [True, True, False, False]
    model, ids = make_model(), make_ids(2, 7)
    loss, expected = gradients(model, ids, ids, Exact(chunk_size=5))
    found = Split(model, ids, 4, 4)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    assert_same(found.gradients, expected, 1e-12)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="affine, wavefront"):
        sequence.schedule([0], [1], 1, "magic")


def test_the_exchange_picked_is_the_faster_one() -> None:
    # costs of tiles in forwards of a layer, as measured (docs/method.md)
    costs = {"prefix": 0.85, "forward": 1.0, "head": 0.1, "suffix": 1.75, "backward": 3.25, "again": 1.0}
    costs["embedding"] = 0.0

    def seconds(n_layer: int, workers: int, exchange: str, every: int) -> float:
        made = sequence.schedule([3] * n_layer, [2] * workers, workers, exchange, every)
        return simulate(made, lambda _, run: costs[run.kind]).seconds

    for n_layer in (1, 2, 4, 12, 24, 48):
        for workers in (2, 3, 4, 8, 16, 32):
            for every in {1, sequence.spacing(n_layer, "edges")}:
                times = {x: seconds(n_layer, workers, x, every) for x in sequence.EXCHANGES}
                picked = sequence.pick_exchange(workers, n_layer)
                assert times[picked] <= 1.02 * min(times.values()), (n_layer, workers, every, times)
