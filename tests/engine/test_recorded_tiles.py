"""Recorded tiles (`Exact(cuda_graphs=True)`) give the gradients of tiles that run by themselves, to the bit.

On a CPU `OperatorRecorder` stands in for CUDA graphs: everything else is the code that a GPU would run."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import logging
import math
import pickle
from typing import Any

import pytest
import torch

from adjoint import Exact
from adjoint.engine import programs
from adjoint.engine.autocast import CastWeights
from adjoint.engine.recorded_past import RecordedPast
from adjoint.engine.recorder import CUDAGraphs
from adjoint.engine.stage import Layer
from adjoint.errors import UserError
from adjoint.kernels import recorded
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from tests.both_kinds import STACKS, ModelOfEitherKind
from tests.engine.operator_recorder import OperatorRecorder
from tests.model_helpers import make_model

LENGTH, CHUNK = 27, 8
# Models, and how: options of their method beside the chunk size.
QUICK = ["hybrid", "BambaForCausalLM"]
SLOW_STACKS = [name for name in STACKS if name not in QUICK]
SLOW_CLASSES = [
    *("MambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM", "FalconH1ForCausalLM", "LlamaForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "RecurrentGemmaForCausalLM"),
    *("KimiLinearForCausalLM", "MiniMaxForCausalLM", "Lfm2ForCausalLM", "Gemma3ForCausalLM"),
    *("GraniteForCausalLM", "NemotronHForCausalLM"),
]
# Their experts read on the host which tokens they get: such layers run by themselves.
WITH_EXPERTS = ("JambaForCausalLM", "Qwen3NextForCausalLM", "KimiLinearForCausalLM", "MiniMaxForCausalLM")

# A recurrence and attention: what a step needs that is compared several times.
TWO_LAYERS: dict[str, Any] = {"mixer": ["mamba", "attention"], "n_layer": 2}
# Of `MAX_PAST_SHARE`, by which some lengths of the past are recorded and some are not.
PAST_SHARES = {"hybrid": 0.3, "BambaForCausalLM": 0.2}


@pytest.fixture(autouse=True)
def cpu_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that can be recorded be so: weights of small models are few beside keys."""
    monkeypatch.setitem(programs.RECORDERS, "cpu", OperatorRecorder)
    monkeypatch.setattr(programs, "MAX_PAST_SHARE", math.inf)


class Twins:
    """Two copies of a model, one of them with recordings, and their steps.

    Args:
        name: as in `ModelOfEitherKind`.
        config: its options.
        options: of `Exact`.
    """

    def __init__(self, name: str, config: dict[str, Any] | None = None, **options: Any) -> None:
        options = {"chunk_size": CHUNK, "segment_layers": 1} | options
        self.methods = Exact(**options), Exact(**options, cuda_graphs=True)
        self.models = [ModelOfEitherKind(name, **config or {}) for _ in range(2)]
        self.models[1].model.load_state_dict(self.models[0].model.state_dict())
        self.step_number = 0

    @property
    def programs(self) -> programs.Programs:
        model = self.models[1].model
        return model._programs if self.models[1].is_stack else model._adjoint.programs

    @property
    def recorder(self) -> OperatorRecorder:
        recorder = self.programs.recorder
        assert isinstance(recorder, OperatorRecorder)
        return recorder

    def step(self, length: int = LENGTH, rows: int = 2, documents: bool = False) -> None:
        """Compare a step of both, and change their weights."""
        self.step_number += 1
        generator = torch.Generator().manual_seed(self.step_number)
        ids = torch.randint(17, (rows, length), generator=generator)
        seq_idx = (torch.arange(length) // 11).expand(rows, -1) if documents else None
        results = []
        for model, method in zip(self.models, self.methods, strict=True):
            results.append(model.results(method, model.inputs(ids, ids, seq_idx)))
        expected, replayed = results
        assert expected.keys() == replayed.keys()
        for name, value in expected.items():
            assert torch.equal(replayed[name], value), f"step {self.step_number}, {name}"
        for model in self.models:
            with torch.no_grad():
                for name, p in model.model.named_parameters():
                    if name in expected:
                        p -= 0.05 * expected[name]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_STACKS + SLOW_CLASSES)]
)
def test_replayed_tiles_have_the_gradients_of_tiles_that_run(name: str) -> None:
    twins = Twins(name)
    twins.step()
    assert twins.recorder.recordings == 0
    twins.step()
    recordings, replays = twins.recorder.recordings, twins.recorder.replays
    assert recordings > 0 and replays > 0
    for _ in range(2):  # some had to be compared first, or needed more memory
        twins.step()
    recordings = twins.recorder.recordings
    twins.step()
    assert twins.recorder.replays > 2 * replays and twins.recorder.recordings == recordings
    assert any(kind.failed for kind in twins.programs.kinds.values()) == (name in WITH_EXPERTS)


@pytest.mark.parametrize(
    "options",
    [
        {"segment_layers": 2},
        {"segment_layers": None},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"segment_layers": None, "checkpoints": 2},
    ],
    ids=str,
)
def test_storage_of_the_method(options: dict[str, Any]) -> None:
    twins = Twins("mixed, untied" if options.get("segment_layers") == 2 else "mamba2", **options)
    for _ in range(3):
        twins.step()
    assert twins.recorder.replays > 0


def test_autocast() -> None:
    """Casts of weights are other tensors in each step, also of a layer that is the only one of its kind."""
    twins = Twins("hybrid", TWO_LAYERS)
    for model in twins.models:
        model.model.float()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            twins.step()
    assert twins.recorder.replays > 0
    assert not any(kind.failed for kind in twins.programs.kinds.values())


def test_replayed_tiles_cast_weights_where_recordings_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts beside the arena would have their memory twice."""
    twins, casts, cast_weights = Twins("mamba2"), list[int](), CastWeights.cast_weights

    def counting(self: CastWeights, *arguments: Any) -> dict[torch.Tensor, torch.Tensor]:
        casts.append(1)
        return cast_weights(self, *arguments)

    monkeypatch.setattr(CastWeights, "cast_weights", counting)
    for model in twins.models:
        model.model.float()
    ids = torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            twins.step()
        assert casts
        casts.clear()
        twins.models[1].model(ids, labels=ids, method=twins.methods[1]).loss.backward()
    assert not casts


def test_one_recording_serves_all_layers_of_a_kind() -> None:
    numbers = []
    for layers in (3, 6):
        twins = Twins("mamba2")
        for model in twins.models:
            model.model = make_model("mamba2", n_layer=layers)
        for _ in range(3):
            twins.step(length=4 * CHUNK)
        numbers.append(twins.recorder.recordings)
        weights = sum(p.nbytes for p in twins.models[1].model.layers[0].parameters())
        assert twins.programs.memory is not None
        assert twins.programs.memory.numel() < 8 * weights
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("name", ["hybrid", pytest.param("BambaForCausalLM", marks=pytest.mark.slow)])
def test_sums_of_a_head_stay_in_the_arena(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's sums are stored once, after all chunks have run forward."""
    stored, store_sums = list[bool](), programs.Programs.store_sums

    def noting(self: programs.Programs, *arguments: Any, **options: Any) -> None:
        if self.summing is not None:
            stored.append(self.summing.stage.is_loss)
        store_sums(self, *arguments, **options)

    twins = Twins(name, TWO_LAYERS if name == "hybrid" else None)
    for _ in range(4):
        twins.step()
    monkeypatch.setattr(programs.Programs, "store_sums", noting)
    twins.step()
    assert stored.count(True) == 1 and stored[0]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=() if (name, share) == ("hybrid", some) else pytest.mark.slow)
        for name, some in PAST_SHARES.items()
        for share in (0.0, some, math.inf)
    ],
)
def test_attention_is_recorded_for_each_length_of_its_past(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each length is recorded once for all layers and steps, unless the past takes too much memory."""
    lengths = collections.Counter[int]()

    class Noting(RecordedPast):
        def __init__(self, values: torch.Tensor, dim: int) -> None:
            super().__init__(values, dim)
            lengths[len(self)] += 1

    monkeypatch.setattr(programs, "RecordedPast", Noting)
    monkeypatch.setattr(programs, "MAX_PAST_SHARE", share)
    twins = Twins(name)
    for _ in range(3):
        twins.step()
    before = lengths.copy()
    twins.step()
    assert lengths == before and max(lengths.values()) <= 4  # keys and values, two recordings
    longest = max(lengths)
    assert set(lengths) == set(range(0, longest + 1, CHUNK))
    assert {0.0: longest == 0, math.inf: longest == 24}.get(share, 0 < longest < LENGTH - CHUNK)


def test_kinds_of_tiles_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with more of them than are remembered records no others again; those of another length do."""
    monkeypatch.setattr(programs, "MAX_KINDS", 5)
    twins, recordings = Twins("hybrid", TWO_LAYERS), []
    for length in (LENGTH, LENGTH, LENGTH, LENGTH, 4, 4, 4):
        twins.step(length=length)
        recordings.append(twins.recorder.recordings)
        assert len(twins.programs.kinds) <= 5
    assert 0 < recordings[1] <= recordings[2] == recordings[3] < recordings[-1]


def test_keys_that_a_recording_refuses() -> None:
    """Keys that several layers read, that nobody reads, that have too few digits, a window or a mask."""
    past = RecordedPast(torch.ones(1, 1, 4, 2), dim=2)
    past.join_unread(torch.ones(1, 1, 3, 2))
    assert past.is_unread
    past.add_cotangent(torch.ones(1, 1, 4, 2, dtype=torch.bfloat16), 0)
    assert past.has_cotangent
    with pytest.raises(RuntimeError, match="several layers"):
        past.add_cotangent(torch.ones(1, 1, 4, 2), 0)
    with pytest.raises(RuntimeError, match="more digits"):
        RecordedPast(past.values, dim=2).add_cotangent(torch.ones(1, 1, 4, 2, dtype=torch.float64), 0)
    with pytest.raises(RuntimeError, match="a window"):
        past.join(torch.ones(1, 1, 3, 2))
    with pytest.raises(RuntimeError, match="a mask"):
        past.read_joined(torch.ones(1, 1, 3, 2))


def test_what_changes_between_steps() -> None:
    """Shapes, settings, what is trained, and weights that are other tensors."""
    twins = Twins("hybrid", TWO_LAYERS)
    for _ in range(2):
        twins.step()
    twins.step(length=29, rows=1)
    twins.step(length=29, rows=1)
    for model in twins.models:
        model.model.layers[0].norm.eps = 0.1
        model.model.layers[0].mixer.in_proj.weight.requires_grad_(False)
    twins.step()
    twins.step()
    for model in twins.models:
        for p in model.model.parameters():
            p.data = p.data.clone()
        model.model.lm_head.weight = torch.nn.Parameter(model.model.lm_head.weight.detach().clone())
    twins.step()
    twins.step()
    for model in twins.models:
        model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    twins.step()
    twins.step()


def test_documents_run_by_themselves() -> None:
    twins = Twins("mamba2")
    for _ in range(2):
        twins.step(documents=True)
    assert twins.recorder.replays <= 4 * twins.recorder.recordings  # the head's alone


def test_gradients_are_accumulated_and_a_backward_is_repeated() -> None:
    twins = Twins("mamba2")
    for _ in range(2):
        twins.step()
    ids = torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    gradients = []
    for model, method in zip(twins.models, twins.methods, strict=True):
        model.model.zero_grad()
        losses = [model.model(i, labels=i, method=method).loss for i in (ids, ids.flip(1))]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        gradients.append({name: p.grad for name, p in model.model.named_parameters()})
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


def test_states_and_their_gradients() -> None:
    twins = Twins("hybrid", TWO_LAYERS)
    for _ in range(2):
        twins.step()
    ids = torch.randint(17, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(8))
    gradients = []
    for model, method in zip(twins.models, twins.methods, strict=True):
        model.model.zero_grad()
        first, second = ids.chunk(2, dim=1)
        for _ in range(2):
            output = model.model(first, labels=first, method=method, return_state=True)
            rest = model.model(second, labels=second, method=method, state=output.state)
            (output.loss + rest.loss).backward()
        gradients.append({name: p.grad for name, p in model.model.named_parameters()})
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


def test_steps_without_gradients() -> None:
    """A loss without a backward is recorded, too, and the same after training has begun."""
    twins = Twins("hybrid", TWO_LAYERS)
    ids = torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(9))

    def losses() -> list[torch.Tensor]:
        with torch.no_grad():
            pairs = zip(twins.models, twins.methods, strict=True)
            return [model.model(ids, labels=ids, method=method).loss for model, method in pairs]

    for _ in range(3):
        expected, replayed = losses()
        assert torch.equal(replayed, expected)
    assert twins.recorder.replays > 0
    for _ in range(3):
        twins.step()
        expected, replayed = losses()
        assert torch.equal(replayed, expected)


class Failing(OperatorRecorder):
    def record(self, function: Any) -> Any:
        if self.recordings == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return super().record(function)


def test_a_recording_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(programs.RECORDERS, "cpu", Failing)
    twins = Twins("mamba2")
    for _ in range(3):
        twins.step()
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) >= 1
    assert set(warnings) <= {
        f"cuda_graphs: tiles of {name} cannot be recorded and run as without it: operation not permitted "
        "when stream is capturing"
        for name in ("Layer", "Head")
    }
    assert any(kind.failed for kind in twins.programs.kinds.values())


def test_a_recording_that_knows_its_chunk_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Launches with numbers of the recorded chunk: a comparison with the next chunk finds them."""
    for name in ("forward", "linearize", "linearize_again"):
        method = getattr(Layer, name)

        def with_position(
            self: Layer, x: torch.Tensor, state: Any, chunk: Any, *rest: Any, method: Any = method
        ) -> Any:
            return method(self, x + 0.01 * chunk.start, state, chunk, *rest)

        monkeypatch.setattr(Layer, name, with_position)
    twins = Twins("mamba2", segment_layers=2)
    for _ in range(3):
        twins.step()
    assert (
        "cuda_graphs: tiles of Layer cannot be recorded and run as without it: its launches depend on "
        in str(caplog.messages)
    )


def test_without_a_gpu_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(programs.RECORDERS, "cpu")
    caplog.set_level(logging.INFO, "adjoint")
    twins = Twins("mamba2")
    twins.step()
    twins.step()
    assert twins.programs.recorder is None and not twins.programs.kinds
    said = [line for line in caplog.messages if line.startswith("cuda_graphs")]
    assert said == ["cuda_graphs: on cpu nothing is recorded, and every tile runs as without it"]


def test_a_model_that_is_one_stage_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "adjoint")
    twins = Twins("BambaForCausalLM", segment_layers=None)
    twins.step()
    twins.step()
    said = [line for line in caplog.messages if line.startswith("cuda_graphs")]
    assert len(said) == 1 and "no layer of this step is recorded" in said[0]
    assert twins.recorder.recordings == 0


def test_copies_have_no_recordings() -> None:
    twins = Twins("mamba2")
    for _ in range(2):
        twins.step()
    for model in (copy.deepcopy(twins.models[1].model), pickle.loads(pickle.dumps(twins.models[1].model))):
        assert model._programs.recorder is None and not model._programs.kinds


@pytest.mark.parametrize("options", [{"memory": "1GB"}, {"offload": True}, {"keep": "offload"}], ids=str)
def test_options_that_do_not_go_with_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cuda_graphs has memory of its own for each chunk"):
        Exact(cuda_graphs=True, **options)


def test_modes_that_refuse_it() -> None:
    method, ids = Exact(cuda_graphs=True), torch.zeros(1, 8, dtype=torch.int64)
    both_directions = make_model("mamba2", bidirectional="tied")
    with pytest.raises(UserError, match="cuda_graphs is for chunks that pass through layers"):
        both_directions(ids, labels=ids, method=method)
    with pytest.raises(UserError, match=r"method\.cuda_graphs: works in one process only"):
        Layout().check_run(method, TrainingConfig())
    with pytest.raises(UserError, match="cuda_graphs: ranks that share a sequence"):
        programs.refuse_graphs(programs.PLAIN_WEIGHTS, shares_sequence=True)
    with pytest.raises(UserError, match="these are held as fully_shard: drop it"):
        programs.refuse_graphs("fully_shard", shares_sequence=False)


class Allocator:
    """Rules of torch's allocator and generators for captures (CUDAGraph.cpp, CUDACachingAllocator.cpp).

    Attributes:
        uses: graphs of each pool. underway: pools to which a capture allocates.
        is_invalid: whether CUDA has given the capture up. generator_captures: as the generator has been told.
    """

    def __init__(self) -> None:
        self.uses, self.underway = collections.Counter[int](), set[int]()
        self.pools, self.is_invalid, self.generator_captures = 0, False, False

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def empty_cache(self) -> None:
        self.uses = +self.uses

    def end(self, device: int | None, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int | None, pool: int) -> None:
        self.uses[pool] -= 1


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    allocator: Allocator
    has_ended = False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "relaxed"  # another thread may end it
        if pool in self.allocator.uses and not self.allocator.uses[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if pool in self.allocator.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pool = pool
        self.allocator.uses[pool] += 1
        self.allocator.underway.add(pool)
        self.allocator.generator_captures = True

    def capture_end(self) -> None:
        if self.allocator.is_invalid:
            self.allocator.is_invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.underway.remove(self.pool)
        self.allocator.generator_captures = False
        self.has_ended = True

    def replay(self) -> None: ...

    def __del__(self) -> None:
        if self.has_ended:
            self.allocator.release(None, self.pool)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CUDAGraphs:
    gc.freeze()  # each recording collects garbage: not that of other tests
    allocator = Graph.allocator = Allocator()
    cuda: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device: None,
        "empty_cache": allocator.empty_cache,
        "graph_pool_handle": allocator.new_pool,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    return CUDAGraphs(torch.device("cpu"))


def test_recordings_share_a_pool_as_long_as_one_of_them_is_there(graphs: CUDAGraphs) -> None:
    replays = [graphs.record(lambda: None) for _ in range(3)]
    assert Graph.allocator.uses == {graphs.pool: 3}
    del replays[1:]
    pool = graphs.pool
    replays.append(graphs.record(lambda: None))
    assert graphs.pool == pool and Graph.allocator.uses == {pool: 2}
    replays.clear()
    replays.append(graphs.record(lambda: None))
    assert graphs.pool != pool and Graph.allocator.uses == {graphs.pool: 1}


@pytest.mark.parametrize("is_invalid", [False, True])
def test_what_a_recording_that_fails_leaves(graphs: CUDAGraphs, is_invalid: bool) -> None:
    """The first error is the one that is raised, and recordings go on, as do random numbers."""
    before = graphs.record(lambda: None)

    def fail() -> None:
        Graph.allocator.is_invalid = is_invalid
        raise ValueError("the host reads a value")

    with pytest.raises(ValueError, match="the host reads a value"):
        graphs.record(fail)
    assert not Graph.allocator.underway and not Graph.allocator.generator_captures
    after = graphs.record(lambda: None)
    del before, after
    gc.collect()
    graphs.record(lambda: None)
    assert not any(Graph.allocator.uses.values())


def test_another_device_has_recordings_of_its_own() -> None:
    twins = Twins("mamba2")
    for _ in range(2):
        twins.step()
    recorder = twins.recorder
    twins.programs.arrange([], torch.device("meta"))
    assert twins.programs.recorder is None and not twins.programs.kinds and twins.programs.memory is None
    twins.step()
    twins.step()
    assert twins.recorder is not recorder and twins.recorder.replays > 0


def test_a_tape_holds_no_result_that_is_cheap_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and convolutions are computed again, once for all that has saved a part of one."""
    computed, unpacked = [], recorded._Recording.unpack

    def counting(self: Any, packed: Any) -> torch.Tensor:
        before = self.latest
        result = unpacked(self, packed)
        if isinstance(packed, recorded._View):
            computed.append(self.latest is not before)
        return result

    monkeypatch.setattr(recorded._Recording, "unpack", counting)
    twins = Twins("mamba2")
    for _ in range(3):
        twins.step()
    assert 0 < sum(computed) < len(computed)
