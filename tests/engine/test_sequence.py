"""Sequences that the ranks of a process group share: loss, states and gradients are those of one process.

Keys and values stay where they were made; recurrent states go on to the next rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import adjoint
from adjoint import Backprop, Exact, LayerLocal, Truncated
from adjoint.engine.grid import make_grid
from adjoint.engine.schedule import Owners, Send, make_schedule
from adjoint.errors import UserError
from adjoint.layers import WINDOWED
from adjoint.parallel import agreement, kv
from adjoint.parallel.handoff import StateHandoff
from adjoint.parallel.transport import Alone, GroupTransport
from tests.both_kinds import STACKS, ModelOfEitherKind
from tests.cluster.test_layouts import Spare
from tests.model_helpers import (
    RECURRENT,
    assert_same,
    current_gradients,
    draw_states,
    make_ids,
    make_model,
    nothing_held,
    random_from,
)
from tests.ranks import RANKS, THOROUGH, on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
IDS = make_ids(2, 31)
METHODS: list[Any] = [
    *(Exact(5, keep="inputs"), Exact(6, recompute="full"), Exact(), Exact(5, offload=True)),
    *(Truncated(11, 3), LayerLocal(None, 8), LayerLocal(5, 8)),
]
# Of stacks with attention, beside recurrences.
HYBRIDS: list[tuple[list[str], dict[str, Any]]] = [
    (["attention", "attention"], {}),
    (["mamba", "attention", "mamba2", "attention"], {}),
    (["attention", "gated_deltanet", "mamba3"], {}),
    (["mamba2", "attention", "attention"], {"attention_d_conv": 3}),  # states cross inside of attention, too
    (["mamba", "attention", "diagonal"], {"sliding_window": 4}),
    (["attention", "mamba"], {"sliding_window": 20}),  # reaches over several chunks
]
WRAPPED = "BambaForCausalLM"  # a recurrence and attention
NAMES = [f"{n}ForCausalLM" for n in ("Mamba", "Mamba2", "Llama", "Bamba", "Gemma3", "Zamba")]
ROUTED = ["MixtralForCausalLM", "Qwen3NextForCausalLM"]
RAGGED = torch.tensor([[0] * 9 + [1] * 22, [0] * 4 + [1] * 1 + [2] * 26])


def world() -> Any:
    return dist.group.WORLD


def hybrid(mixer: list[str], **more: Any) -> ModelOfEitherKind:
    return ModelOfEitherKind("attention", mixer=mixer, n_layer=len(mixer), **more)


def compare(
    case: ModelOfEitherKind,
    method: Any,
    ids: Tensor = IDS,
    group: Any = None,
    options: dict[str, Any] | None = None,
    **batch: Any,
) -> None:
    """Compare loss and gradients over a group with those of one process.

    Args:
        options: of each call.
        batch: labels, documents and attention mask.
    """
    inputs = case.inputs(ids, **{"labels": ids, **batch}) | (options or {})
    is_reference = isinstance(method, Exact) and ids is IDS and (case.is_stack or "documents" not in batch)
    expected = case.results(None if is_reference else method, inputs)
    got = case.results(method, inputs, group=group or world())
    assert got["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-12)
    assert got.keys() == expected.keys()
    sizes, limit = ({n: float(g.norm()) for n, g in each.items()} for each in (got, expected)), 1e-13
    zeros = [{n for n, size in of.items() if size < limit * max(of.values())} for of in sizes]  # but rounding
    assert zeros[0] == zeros[1]
    assert_same(*({n: each[n] for n in each.keys() - zeros[0]} for each in (got, expected)), 1e-10)
    case.model.zero_grad(set_to_none=True)


# -------------------------------------------------------------------------------- the same gradients


def every_mixer(thorough: bool) -> None:
    for variant in (*RECURRENT, "mamba, MLP, untied", "mamba3, mimo") if thorough else ("mamba2", "kda"):
        case = ModelOfEitherKind(variant)
        compare(case, Exact(7))
        if variant in WINDOWED:
            compare(case, Truncated(5, 8))
    case = ModelOfEitherKind("mixed, untied")
    for method in METHODS if thorough else METHODS[::4]:
        compare(case, method)
    methods = [Exact(5, recompute="selective"), Exact(7, keep="inputs"), Exact(), Exact(4, recompute="full")]
    for mixer, more in HYBRIDS if thorough else HYBRIDS[1:2]:
        case = hybrid(mixer, **more)
        for method in methods if thorough else methods[:2]:
            compare(case, method)
    compare(hybrid(*HYBRIDS[1][:1]), LayerLocal(None, 8))


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_mixer_and_method(ranks: int, thorough: bool, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, every_mixer, thorough)


def batches(case: ModelOfEitherKind, thorough: bool) -> None:
    mask, options = torch.arange(31)[None] < torch.tensor([[31], [22]]), {}
    if case.model.__class__.__name__ in ROUTED:
        options = {"output_router_logits": True}
    compare(case, Exact(5), documents=RAGGED[:1], ids=IDS[:1], labels=IDS[:1], options=options)
    compare(case, Exact(5), labels=IDS.masked_fill(~mask, -100), mask=mask.long(), options=options)
    # ranks without a chunk, and with one more than others
    for seqlen in (1, 2, 6, 11) if thorough and case.is_stack else (11,):
        compare(case, Exact(5), IDS[:, :seqlen], labels=IDS[:, :seqlen], options=options)
    if case.is_stack:
        compare(case, Exact(5), documents=RAGGED)
        compare(case, Exact(5), documents=torch.arange(31).expand(2, -1) // 3)
        compare(case, Exact(5), IDS[:1], labels=IDS[:1], options={"cu_seqlens": torch.tensor([0, 9, 12, 31])})
    elif thorough:
        for method in (Exact(), Exact(9, recompute="full"), Truncated(16, 8)):
            compare(case, method, options=options)


ATTENDING = {"mixer": HYBRIDS[3][0], "n_layer": 3, **HYBRIDS[3][1]}


@pytest.mark.parametrize(("name", "options"), [("attention", ATTENDING), (WRAPPED, {})])
def test_documents_short_sequences_padding(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(3, tmp_path, batches, ModelOfEitherKind(name, **options), False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["mixed, untied", *NAMES, *ROUTED])
def test_batches_of_each_model(name: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, batches, ModelOfEitherKind(name), True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("mixer", "more"), HYBRIDS, ids=str)
def test_batches_of_hybrids(mixer: list[str], more: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, batches, hybrid(mixer, **more), True)


def frozen() -> None:
    """Layers below a trained one need not be backpropagated through in the first chunk, but in later
    ones; a weight that nothing reads has no gradient; a frozen model has a loss alone."""
    case = hybrid(HYBRIDS[1][0])
    case.model.requires_grad_(False)
    for trained in (case.model.layers[1].mixer.out_proj, case.model.layers[2]):
        trained.requires_grad_(True)
        compare(case, Exact(5))
    compare(ModelOfEitherKind("mamba", mixer=f"{Spare.__module__}:Spare"), Exact(5))
    for case in (ModelOfEitherKind("mixed, untied"), ModelOfEitherKind("LlamaForCausalLM")):
        case.model.requires_grad_(False)
        inputs = case.inputs(IDS, IDS)
        with torch.no_grad(), case.double():
            alone, shared = (case.call(m, inputs, g).loss for m, g in ((None, None), (Exact(5), world())))
        assert shared.item() == pytest.approx(alone.item(), rel=1e-12)


def test_frozen_layers(tmp_path: Path) -> None:
    ModelOfEitherKind("LlamaForCausalLM")  # imported once, before the ranks are there
    on_ranks(2, tmp_path, frozen)


def in_turns() -> None:
    compare(hybrid(*HYBRIDS[1][:1]), Exact(3))


def test_ranks_ask_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more ranks are asked than are at a time, and some have no chunk in the first round."""
    monkeypatch.setattr(kv, "QUERIES_AHEAD", 1)
    on_ranks(4, tmp_path, in_turns)


def check_call(case: ModelOfEitherKind) -> None:
    compare(case, Exact(7))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "Mamba2ForCausalLM"])
def test_processes_that_were_started_apart_agree(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_call, ModelOfEitherKind(name), start="spawn")


def test_attention_of_another_kind(tmp_path: Path) -> None:
    """A model's own attention needs all keys in one process."""
    case = ModelOfEitherKind("LlamaForCausalLM")
    case.model.set_attn_implementation("eager")
    on_ranks(2, tmp_path, check_call, case)


# Lengths of documents as in flash-linear-attention's tests of context parallelism, a 16th of theirs: ranks
# begin in the middle of documents, at their ends, and one or two tokens before these.
CUTS = {
    2: [[19, 25, 20], [32, 32], [6, 9, 13, 16, 8, 6, 6], [33, 31], [34, 30], [13, 20, 31], [32, 1, 31]],
    4: [[44, 20], [64], [17, 15, 17, 15], [17, 13, 17, 17], [17, 1, 13, 17, 1, 13, 2]],
}


def cut_documents(variants: list[str]) -> None:
    """Packed documents over ranks have the loss and gradients of each document alone, in one process."""
    ranks = dist.get_world_size()
    for variant in variants:
        model = make_model(variant)
        for lengths in CUTS[ranks]:
            ids = make_ids(1, sum(lengths), seed=len(lengths))
            model.zero_grad(set_to_none=True)
            losses = [
                model(row, labels=row, method=Backprop()).loss * (row.shape[1] - 1)
                for row in ids.split(lengths, dim=1)
                if row.shape[1] > 1
            ]
            total = torch.stack(losses).sum() / (sum(lengths) - len(lengths))
            total.backward()
            expected = current_gradients(model)
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            for chunk_size in (sum(lengths) // ranks, 5):
                model.zero_grad(set_to_none=True)
                loss = model(
                    ids, labels=ids, method=Exact(chunk_size), cu_seqlens=bounds, sequence_group=world()
                ).loss
                loss.backward()
                assert loss.item() == pytest.approx(total.item(), rel=1e-12), (variant, lengths)
                assert_same(current_gradients(model), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_documents_cut_by_ranks(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, cut_documents, RECURRENT)


def states(mixers: list[tuple[list[str], dict[str, Any]]]) -> None:
    """States before the sequence, also keys and values, have the whole's gradients; final ones are
    everybody's, also backpropagated from."""
    for mixer, more in mixers:
        model, ids, rand = hybrid(mixer, **more).model, IDS[:, :23], random_from(2)
        given, ends = draw_states(model, 2, rand, tokens=3), draw_states(model, 2, rand, tokens=26)
        for documents in (None, RAGGED[:, :23]):
            results = []
            for group in (None, world()):
                model.zero_grad()
                state = [tuple(s.clone().requires_grad_() for s in each) for each in given]
                out = model(
                    ids, ids, Exact(5), state, return_state=True, seq_idx=documents, sequence_group=group
                )
                final, seeds = ([s for layer in of_layers for s in layer] for of_layers in (out.state, ends))
                total = 3 * out.loss + sum((s * d).sum() for s, d in zip(final, seeds, strict=True))
                total.backward(retain_graph=True)  # the second backward computes all chunks again
                total.backward()
                initial = {f"{k}.{i}": s.grad for k, each in enumerate(state) for i, s in enumerate(each)}
                finals = {f"final {i}": s.detach() for i, s in enumerate(final)}
                results.append(initial | finals | current_gradients(model))
            assert_same(results[1], results[0], 1e-10)


MIXED: tuple[list[str], dict[str, Any]] = STACKS["mixed, untied"]["mixer"], {"tie_embeddings": False}


def pasts_of_two_lengths() -> None:
    model, ids = hybrid(["attention", "attention"]).model, make_ids(2, 9)
    first, second = draw_states(model, 2, random_from(2), tokens=3)
    shorter = tuple(s[:, :, 1:] for s in second)
    with refused("initial states have keys of [2, 3] tokens"):
        model(ids, ids, Exact(5), [first, shorter], sequence_group=world())


@pytest.mark.parametrize(
    ("ranks", "mixers"),
    [
        (3, [HYBRIDS[4]]),
        *(pytest.param(n, [HYBRIDS[1], MIXED], marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
def test_initial_and_final_states(ranks: int, mixers: Any, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, states, mixers)


def test_initial_keys_are_of_one_length(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, pasts_of_two_lengths)


def random_cuts() -> None:
    """Whatever a rank's generator is at, the cuts are those that rank 0 has drawn."""
    model, gradients = make_model("mixed, untied"), []
    for group in (None, world()):
        torch.manual_seed(7 if group is None else 7 + dist.get_rank())
        model.zero_grad()
        model(IDS, IDS, Truncated(8, 2, unbiased=True), sequence_group=group).loss.backward()
        gradients.append(current_gradients(model))
    assert_same(gradients[1], gradients[0], 1e-10)


def test_random_cuts_are_one_ranks(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, random_cuts)


def loop() -> None:
    """Two steps of accumulation, hooks, clipping and AdamW: as in one process, the same bits on all ranks."""
    weights = []
    for group in (None, world()):
        model = make_model("mamba2")
        optimizer, calls = torch.optim.AdamW(model.parameters(), lr=0.05), [0]
        model.lm_head.weight.register_hook(lambda g, calls=calls: calls.__setitem__(0, calls[0] + 1))
        for step in range(2):
            optimizer.zero_grad()
            for part in make_ids(4, 21, seed=step).chunk(2):
                (model(part, part, Exact(4), sequence_group=group).loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert calls == [4], "a hook is called once a backward, with the whole gradient"
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    assert_same(weights[1], weights[0], 1e-9)
    flat = torch.cat([p.flatten() for p in weights[1].values()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


def test_a_loop_around_it_sees_the_whole(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, loop)


def full_gradients(model: Any) -> dict[str, Tensor]:
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


def meshes(name: str, thorough: bool) -> None:
    """Rows over one dimension of a mesh, sequences over the other; DDP or FSDP2 reduces gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    row, reference = mesh.get_local_rank("data"), ModelOfEitherKind(name)
    expected = reference.results(None, reference.inputs(IDS, IDS))
    expected.pop("loss")
    kinds = "ddp of a static graph over data", "fully_shard", "ddp", "fully_shard over data"
    for kind in kinds if thorough else kinds[:2]:
        case, data = ModelOfEitherKind(name), mesh["data"] if kind.endswith("data") else None
        model, inputs = case.model, case.inputs(IDS[row : row + 1], IDS[row : row + 1])
        if case.is_stack:
            inputs |= {"method": Exact(7), "sequence_group": mesh["sequence"]}
        else:
            model = case.prepare(Exact(7), mesh["sequence"])
        called: Any = model
        if kind.startswith("ddp"):
            is_static = "static" in kind
            called = DistributedDataParallel(
                model, process_group=data and data.get_group(), static_graph=is_static
            )
        else:
            called = fully_shard(model, mesh=data or dist.init_device_mesh("cpu", (4,)))
        with case.double():
            called(**inputs).loss.backward()
        assert_same(full_gradients(model), expected, 1e-10)


MESHES = ["mixed, untied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", WRAPPED))]


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("name", MESHES)
def test_replicas_and_sequences_on_a_mesh(name: str, thorough: bool, tmp_path: Path) -> None:
    ModelOfEitherKind(name)  # imported once, before the ranks are there
    on_ranks(4, tmp_path, meshes, name, thorough)


def sharded_layers(name: str, options: dict[str, Any], seqlens: list[int]) -> None:
    """FSDP reduces gradients of layers over rows, and they are summed over the sequence once.

    Layers that are sharded over everything are refused: ranks of a sequence may not share them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    row, group = mesh.get_local_rank("data"), mesh["sequence"]

    def shard(mesh: Any) -> ModelOfEitherKind:
        case = ModelOfEitherKind(name, **options)
        layers = case.model.layers if case.is_stack else case.prepare(Exact(7), group).model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(case.model, mesh=mesh)
        return case

    case, reference = shard(mesh["data"]), ModelOfEitherKind(name, **options)
    for seqlen in seqlens:  # also where ranks have no chunk
        ids = IDS[:, :seqlen]
        expected = reference.results(None, reference.inputs(ids, ids))
        expected.pop("loss")
        inputs = case.inputs(ids[row : row + 1], ids[row : row + 1])
        with case.double():
            for factor in (0.25, 0.75):  # accumulated
                (factor * case.call(Exact(7), inputs, group).loss).backward()
        assert_same(full_gradients(case.model), expected, 1e-10)
        case.model.zero_grad()
    inputs = case.inputs(IDS, IDS)
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("row", "shard"))["shard"]
    for other, words in (
        (dist.init_device_mesh("cpu", (4,)), r'layers under fully_shard.*mesh\["data"\]'),
        (crossed, "the same rank in their groups"),
    ):
        case = shard(other)
        with pytest.raises(UserError, match=f"sequence_group: .*{words}"):
            case.call(Exact(7), inputs, group)


@pytest.mark.parametrize(
    ("name", "options", "seqlens"),
    [
        ("mamba", {"mixer": ["mamba", "mamba2"]}, [23, 4]),
        pytest.param(WRAPPED, {}, [31, 5], marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {}, [31, 5], marks=pytest.mark.slow),
        pytest.param(  # states cross inside of attention
            "attention",
            {"mixer": ["mamba2", "attention", "mamba"], "n_layer": 3, "attention_d_conv": 3},
            [23, 4, 9],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_under_fully_shard(
    name: str, options: dict[str, Any], seqlens: list[int], tmp_path: Path
) -> None:
    ModelOfEitherKind(name, **options)  # imported once, before the ranks are there
    on_ranks(4, tmp_path, sharded_layers, name, options, seqlens)


def precisions() -> None:
    """Errors in float32 and bfloat16 are about those of one process, though each rank rounds its part
    once more; every run has the same bits."""
    exact, ids = hybrid(["mamba", "attention", "attention"]).model, IDS
    exact(ids, ids, Exact(31)).loss.backward()
    expected = current_gradients(exact)
    model = hybrid(["mamba", "attention", "attention"]).model.float()
    for dtype in (torch.float32, torch.bfloat16):
        results: dict[str, Any] = {}
        for name, group in (("alone", None), ("shared", world()), ("again", world())):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(ids, ids, Exact(7), sequence_group=group).loss
            loss.backward()
            results[name] = current_gradients(model)
        distances = {
            name: max(float((g[n] - e).norm() / e.norm()) for n, e in expected.items())
            for name, g in results.items()
        }
        assert distances["shared"] <= 2 * distances["alone"], (dtype, distances)
        assert all(torch.equal(results["shared"][n], results["again"][n]) for n in expected)


def test_other_precisions(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, precisions)


# -------------------------------------------------------------------------------- messages and memory


def check_nothing_held(group: Any) -> None:
    """Assert that a step leaves no tensors behind: after a backward, without one, and without gradients."""
    for name in ("hybrid", WRAPPED):
        for recompute in ("none", "selective", "full"):
            case, method = ModelOfEitherKind(name), Exact(7, recompute=recompute)
            inputs = case.inputs(IDS, IDS, RAGGED if case.is_stack and recompute == "full" else None)
            if case.is_stack:  # what PyTorch imports at first may hold frames
                case.call(method, inputs, group).loss.backward()
            with case.double(), nothing_held():
                case.call(method, inputs, group).loss.backward()
                case.call(method, inputs, group)
                with torch.no_grad():
                    case.call(method, inputs, group)


@pytest.mark.slow
def test_a_step_is_gone_when_it_is_done(tmp_path: Path) -> None:
    check_nothing_held(None)
    on_ranks(2, tmp_path, lambda: check_nothing_held(world()))


def counted(seqlen: int, chunk: int) -> None:
    """What is sent are states and their cotangents, one per edge and layer; what stays, one state an edge."""
    sent: list[int] = []
    send = GroupTransport.send

    def noted(self: Any, to: int, tensor: Tensor) -> None:
        sent.append(tensor.nbytes)
        send(self, to, tensor)

    GroupTransport.send = noted  # type: ignore[method-assign]
    try:
        model, ids = make_model("mamba2"), make_ids(2, seqlen)
        out = model(ids, ids, Exact(chunk), sequence_group=world())
        steps = out.loss.grad_fn.back.__closure__[0].cell_contents
        rows = [edges.capacity for edges in steps.executor.edges if edges.memory is not None]
        out.loss.backward()
    finally:
        GroupTransport.send = send  # type: ignore[method-assign]
    ranks, chunks = dist.get_world_size(), -(-seqlen // chunk)
    state = steps.executor.packing[1].size * 8
    total = torch.tensor([sum(sent)])
    dist.all_reduce(total)
    assert total.item() == 2 * (chunks - 1) * model.config.n_layer * state
    assert rows and max(rows) <= -(-chunks // ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_and_kept_states(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, counted, 61, 5)


def test_no_message_is_left_to_the_backward_that_may_not_come() -> None:
    """The forward receives all that it has sent, for every spec."""
    for method in (Exact(5), Exact(5, keep="inputs"), LayerLocal(None, 5)):
        spec = method.engine_spec(31, 5)
        grid = make_grid(spec, 31, [False, True, True, False], 0)
        made = make_schedule(grid, Owners((0,) * 4, 3), tapes=spec.storage.tapes)
        names = {a.key[0] for program in made.programs for a in program if isinstance(a, Send)}
        assert names <= {"S", "dS"}


def test_a_state_that_is_written_twice_is_refused() -> None:
    """The next rank has got it by then; a forward that runs again in the backward sends nothing."""
    handoff = StateHandoff(Alone(), 16, torch.zeros(2), torch.empty(0), 0, None, None)
    handoff.send(torch.ones(2))
    with refused("writes its state more than once in a chunk"):
        handoff.send(torch.ones(2))
    handoff.end_forward()
    handoff.send(torch.ones(2))
    assert [len(messages) for messages in handoff.messages.sent.values()] == [1]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ refused by name


def disagreement() -> None:
    rank, model = dist.get_rank(), make_model("mamba")
    ids = make_ids(2, 24 + rank)
    with refused("rank 1 and rank 0", "the number of tokens: 25 and 24"):
        model(ids, ids, Exact(5), sequence_group=world())
    ids = make_ids(2 + rank, 24)
    with refused("the number of rows: 3 and 2"):
        model(ids, ids, Exact(5), sequence_group=world())
    ids = make_ids(2, 24)
    with refused("the chunk size: 6 and 5"):
        model(ids, ids, Exact(5 + rank), sequence_group=world())
    with refused("the method"):
        model(ids, ids, [Exact(5), Truncated(9, 5)][rank], sequence_group=world())
    with refused("input_ids"):
        other = make_ids(2, 24, seed=rank)
        model(other, ids, Exact(5), sequence_group=world())
    with refused("labels"):
        model(ids, make_ids(2, 24, seed=rank), Exact(5), sequence_group=world())
    with refused("documents"):
        seq_idx = torch.arange(24).ge(9 + rank).long().expand(2, -1)
        model(ids, ids, Exact(5), seq_idx=seq_idx, sequence_group=world())
    with refused("whether gradients are on"), torch.set_grad_enabled(bool(rank)):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("what is trained"):
        model.embedding.requires_grad_(bool(rank))
        model(ids, ids, Exact(5), sequence_group=world())
    model.requires_grad_()
    with refused("precision"), torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("the initial state"):
        state = draw_states(model, 2, random_from(rank))
        model(ids, ids, Exact(5), state, sequence_group=world())
    with refused("the model's weights"):
        model = make_model("mamba", seed=rank)
        model(ids, ids, Exact(5), sequence_group=world())
    model = make_model("mamba")
    model.norm_f.eps *= 1 + rank
    with refused("every rank must have the same model", "rank 1 and rank 0", "norm_f.eps"):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("multiplied by 1 on rank 0 and by 2 on rank 1"):
        model = make_model("mamba")
        (model(ids, ids, Exact(5), sequence_group=world()).loss * (1 + rank)).backward()
    model(ids, ids, Exact(5), sequence_group=world()).loss.backward()  # nothing of it is left


def test_ranks_that_disagree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, disagreement)


def wrong() -> None:
    rank, model, ids = dist.get_rank(), make_model("mamba"), make_ids(1, 24)
    alone = [dist.new_group([r]) for r in range(2)]
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    for group, words in [
        ("world", "a process group of torch.distributed or a DeviceMesh of one dimension; got 'world'"),
        (2, "got 2"),
        (alone[1 - rank], f"rank {rank} is not in the group"),
        (mesh, 'a DeviceMesh of 2 dimensions; give one of them, such as mesh["sequence"]'),
    ]:
        with refused(words):
            model(ids, ids, Exact(5), sequence_group=group)
    for group in (mesh["sequence"], alone[rank]):  # one process is a group, too
        compare(ModelOfEitherKind("mamba"), Exact(5), ids, group, labels=ids)
    for given, words in [
        ({"method": None}, "give method=adjoint.Exact()"),
        ({"method": Backprop(checkpoint=True)}, "one chunk"),
        ({"labels": None, "method": Exact(5)}, "give labels"),
        ({"return_logits": True}, "leave return_logits out"),
        ({"method": Exact(5, memory="1GB")}, "give chunk_size instead"),
        ({"method": Exact(5, checkpoints=4)}, "each rank stores the states before its own chunks"),
        ({"method": Truncated("auto", 5)}, "give a number"),
    ]:
        grad = torch.set_grad_enabled("labels" not in given)
        with grad, refused(words):
            model(ids, **{"labels": ids, "method": Exact(5), **given}, sequence_group=world())
    from torch.distributed.fsdp import fully_shard

    sharded = make_model("mamba")
    for layer in sharded.layers:
        fully_shard(layer)
    with refused("fully_shard"):
        fully_shard(sharded)(ids, labels=ids, method=Exact(5), sequence_group=world())


def test_what_cannot_be_shared(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, wrong)


def test_without_a_process_group() -> None:
    ids = make_ids(1, 9)
    with refused("init_process_group"):
        make_model("mamba")(ids, ids, Exact(5), sequence_group="any")


def one_dies(how: str) -> None:
    rank, model, ids = dist.get_rank(), make_model("mamba"), make_ids(1, 24)
    loss = model(ids, ids, Exact(5), sequence_group=world()).loss
    begin = time.monotonic()
    if rank == 1:
        if how == "dies":
            os._exit(0)
        time.sleep(6)
        return
    said = r"sequence_group: (a rank|rank 1) of the group has ended, failed"
    with pytest.raises(RuntimeError, match=said) as e:
        loss.backward()
    assert "\n" not in str(e.value) and time.monotonic() - begin < 10


@pytest.mark.parametrize("how", ["dies", pytest.param("waits elsewhere", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_ends_the_others(how: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, one_dies, how, timeout=3)


def unlisted() -> None:
    model, ids = make_model("mamba"), make_ids(1, 24)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    model.layers[0].mixer.register_forward_hook(lambda module, x, out: (out[0] * scale, *out[1:]))
    said = "requires a gradient and is no parameter of a module|has ended, failed or did not come"
    with pytest.raises(RuntimeError if dist.get_rank() else UserError, match=said):
        model(ids, ids, Exact(12), sequence_group=world())


def test_tensors_that_no_module_lists_are_refused(tmp_path: Path) -> None:
    """By the rank that meets them; the others end as of one that has failed."""
    on_ranks(2, tmp_path, unlisted, timeout=10)


def one_refuses(name: str) -> None:
    """One rank's call is refused before the ranks compare calls; the next call of both is right."""
    rank, group, ids = dist.get_rank(), world(), IDS[:1]
    case = ModelOfEitherKind(name)
    inputs, begin = case.inputs(ids, ids), time.monotonic()
    with case.double():
        expected = case.call(Exact(7), inputs, group).loss
        for faulty in (1, 0):
            wrong = {**inputs, "labels": ids[:, 1:]} if rank == faulty else inputs
            with pytest.raises(ValueError) as e:
                case.call(Exact(7), wrong, group)
            told = f"sequence_group: rank {faulty} of the group has ended its call with an error of its own"
            assert str(e.value).startswith(told) == (rank != faulty), e.value
            assert "\n" not in str(e.value)
            assert float(case.call(Exact(7), inputs, group).loss) == float(expected)
    assert time.monotonic() - begin < 60  # nobody has waited for the group's timeout


@pytest.mark.parametrize("name", ["mamba", "Mamba2ForCausalLM"])
def test_a_rank_that_refuses_its_call_ends_that_of_the_others(name: str, tmp_path: Path) -> None:
    ModelOfEitherKind(name)  # imported once, before the ranks are there
    on_ranks(2, tmp_path, one_refuses, name, timeout=100)


def check_refusals() -> None:
    group, ids = world(), IDS[:1]
    inputs = {"input_ids": ids, "labels": ids}
    model = ModelOfEitherKind("Mamba2ForCausalLM").model
    for method in (adjoint.MiniSequence(), adjoint.Backprop()):
        with refused("has no chunks to share"):
            adjoint.wrap(model, method, sequence_group=group)
    adjoint.wrap(model, adjoint.Exact(7), sequence_group=group)
    with pytest.raises(
        ValueError, match="sequence_group: no rank has the hidden states of the whole sequence"
    ):
        model.backbone(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="sequence_group: logits beside a loss"):
        model(**inputs, logits_to_keep=3)
    with refused("num_items_in_batch"):
        model(**inputs, num_items_in_batch=10 + dist.get_rank())
    reads_types = adjoint.wrap(
        ModelOfEitherKind("GPT2LMHeadModel").model.eval(), adjoint.Exact(7), sequence_group=group
    )
    with refused("further inputs"):
        reads_types(**inputs, token_type_ids=torch.full_like(ids, dist.get_rank()))


def test_what_a_wrapped_model_cannot_share(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_refusals)


DEEPSEEK = "DeepseekV3ForCausalLM"
BIAS, ROTARY, NORM = (
    "layers.1.mlp.gate.e_score_correction_bias",
    "rotary_emb.inv_freq",
    "layers.1.input_layernorm",
)


def scaled_by(factor: float) -> Any:
    return lambda module, inputs, output: output * factor


def change_hook(model: Any, factor: float) -> None:
    handle = vars(model).pop("handle", None)
    if handle is not None:
        handle.remove()
    vars(model)["handle"] = model.model.layers[1].mlp.register_forward_hook(scaled_by(factor))


def test_hooks_are_told_apart_by_what_they_capture() -> None:
    def hook(factor: float, *, offset: float = 0.0) -> Any:
        if factor > 1:
            unset = factor
        return lambda x, *, offset=offset: x * factor + offset + (unset if x is None else 0)

    descriptions = [agreement.describe(each) for each in (hook(1.0), hook(2.0), hook(1.0, offset=1.0))]
    assert len({*descriptions}) == 3 and agreement.describe(hook(1.0)) == descriptions[0]


# By what is said of it: (model, 1.0 or another number) → None, which makes a difference of the number.
DIFFERENCES: dict[str, Any] = {
    f"model.{BIAS}": lambda model, x: model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(x),
    f"model.{ROTARY}": lambda model, x: model.model.rotary_emb.inv_freq.fill_(x),
    f"model.{NORM}.variance_epsilon": lambda model, x: setattr(
        model.get_submodule(f"model.{NORM}"), "variance_epsilon", 1e-3 * x
    ),
    "config.routed_scaling_factor": lambda model, x: setattr(model.config, "routed_scaling_factor", x),
    "a hook of model.layers.1.mlp": change_hook,
    "model.embed_tokens.weight": lambda model, x: model.model.embed_tokens.weight[0].fill_(x),
}


def check_differences(names: list[str]) -> None:
    """Refuse ranks whose models differ, at the first call and later, on all ranks; else go on."""
    inputs = {"input_ids": IDS[:1], "labels": IDS[:1]}
    model: Any = ModelOfEitherKind(DEEPSEEK, first_k_dense_replace=1).model
    model.model.embed_tokens.requires_grad_(False)
    vars(model.model.layers[0].mlp)["longest"] = 0
    lengths = model.model.layers[0].mlp.register_forward_hook(  # which differ from rank to rank
        lambda module, args, output: vars(module).update(longest=args[0].shape[1] + 100 * dist.get_rank())
    )
    for name in names:
        change = DIFFERENCES[name]
        for is_first_use in (True, False):
            with torch.no_grad():
                change(model, 1.0 + dist.get_rank())
            if is_first_use:
                adjoint.wrap(model, adjoint.Exact(7), sequence_group=world())
            with refused("every rank must have the same model", "rank 1 and rank 0", f"differ in {name}:"):
                model(**inputs)
            with torch.no_grad():
                change(model, 1.0)
            for _ in range(2):
                model(**inputs).loss.backward()
    lengths.remove()


@pytest.mark.parametrize(
    "names",
    [list(DIFFERENCES)[:1], pytest.param([*DIFFERENCES], marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_ranks_whose_models_differ(names: list[str], tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_differences, names)
