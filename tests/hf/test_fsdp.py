"""Models under `fully_shard` (FSDP2), and under DDP, on two processes, against one process with all rows."""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

import adjoint
from adjoint.batch import Batch
from adjoint.engine import verification
from adjoint.engine.grid import EngineSpec
from adjoint.errors import UserError
from adjoint.hf.model_parts import backbone_of, layers_of
from adjoint.parallel.fsdp import align_chunks
from tests.engine.test_leaves import in_a_hook, made_by_another_network, read_through_a_closure
from tests.hf.hf_models import (
    VOCAB,
    current_gradients,
    errors,
    float64_throughout,
    make,
    transformers,
)

pytestmark = pytest.mark.xdist_group("fsdp")
RANKS, METHOD = 2, adjoint.Exact(chunk_size=16)
LLAMA, BAMBA = "LlamaForCausalLM", "BambaForCausalLM"
NAMES = ["MixtralForCausalLM", "Mamba2ForCausalLM", BAMBA, "Qwen3NextForCausalLM", LLAMA]
CASES: dict[str, Callable[..., None]] = {}


# ------------------------------------------------------------------------------------------ two processes


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start the other process, which runs the cases that it is sent."""
    folder = str(tmp_path_factory.mktemp("fsdp"))
    fork = mp.get_context("fork")
    tasks, replies = fork.Queue(), fork.Queue()
    other = fork.Process(target=listen, args=(folder, tasks, replies), daemon=True)
    other.start()
    threads = torch.get_num_threads()
    join(0, folder)
    yield tasks, replies
    tasks.put(None)
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    other.join(60)
    assert other.exitcode == 0


def join(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=100)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, **init)


def listen(folder: str, tasks: Any, replies: Any) -> None:
    join(1, folder)
    while (task := tasks.get()) is not None:
        name, args = task
        try:
            CASES[name](1, *args)
            replies.put("")
        except BaseException:
            replies.put(traceback.format_exc())
    dist.destroy_process_group()


def on_both(peer: Any, name: str, *args: Any) -> None:
    """Run a case on both processes."""
    tasks, replies = peer
    tasks.put((name, args))
    try:
        CASES[name](0, *args)
    finally:
        problem = replies.get(timeout=120)
    assert not problem, problem


def case(run: Callable[..., None]) -> Callable[..., None]:
    CASES[run.__name__] = run
    return run


# -------------------------------------------------------------------------------------------------- models


def mesh(*shape: int) -> Any:
    names = ("replicate", "shard")[-len(shape or (RANKS,)) :]
    return dist.init_device_mesh("cpu", shape or (RANKS,), mesh_dim_names=names)


def shard(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": mesh(), **options}
    layers = model.layers if isinstance(model, adjoint.Stack) else layers_of(backbone_of(model)).values()
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded(name: str, first: str = "wrap", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = make(name, dtype)
    if first == "wrap":
        return shard(adjoint.wrap(model, METHOD), **options)
    return adjoint.wrap(shard(model, **options), METHOD)


def rows(seed: int = 5, seqlen: int = 53) -> Tensor:
    """Return ids, one row for each process."""
    return torch.randint(3, VOCAB, (RANKS, seqlen), generator=torch.Generator().manual_seed(seed))


def whole_gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(gradients: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-12) -> None:
    unit_loss = torch.ones(())
    difference = errors((unit_loss, gradients), (unit_loss, expected))
    assert difference.worst <= limit, difference


def unsharded(model: Any, *losses: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Return the gradients of one process."""
    for loss in losses:
        loss(model).backward()
    return current_gradients(model)


# ------------------------------------------------------------------------------------------------- gradients


@case
def equal(rank: int, name: str, first: str, each_chunk: bool) -> None:
    """Two accumulated batches; Mixtral's routers have a loss, which belongs to one sequence."""
    routed = {"output_router_logits": True} if "Mixtral" in name else {}
    with float64_throughout():
        batches = [rows(1), rows(2)]
        model = sharded(name, first)
        model.set_requires_gradient_sync(each_chunk)
        for ids in batches:
            own_rows = ids[rank : rank + 1]
            (model(input_ids=own_rows, labels=own_rows, **routed).loss / 2).backward()
        each = [ids[i : i + 1] for ids in batches for i in range(RANKS)]
        losses = [lambda m, ids=ids: m(input_ids=ids, labels=ids, **routed).loss / 4 for ids in each]
        assert_same(whole_gradients(model), unsharded(make(name), *losses))


@pytest.mark.sampled(37)
@pytest.mark.parametrize("each_chunk", [True, False])
@pytest.mark.parametrize("first", ["wrap", "shard"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(name: str, first: str, each_chunk: bool, peer: Any) -> None:
    on_both(peer, "equal", name, first, each_chunk)


def unequal_batches() -> list[list[dict[str, Tensor]]]:
    """Return each rank's inputs of two calls.

    One rank has a long row, the other two short ones: documents, then rows padded at the left."""
    long, ids = {"input_ids": rows(4)[:1], "labels": rows(4)[:1]}, rows(3, 12)
    labels, positions = ids.clone(), torch.arange(12).expand(2, 12).clone()
    positions[0, 5:] -= 5
    labels[0, 5] = -100
    packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.cumsum(1) < 2, -100)}
    batches: tuple[Any, ...] = (packed, {}), (padded, {"num_items_in_batch": torch.tensor(40)})
    return [[{**long, **counted}, {**short, **counted}] for short, counted in batches]


@case
def lengths(rank: int) -> None:
    with float64_throughout():
        model, reference = sharded(BAMBA), adjoint.wrap(make(BAMBA), METHOD)
        for inputs_by_rank in unequal_batches():
            model.zero_grad()
            reference.zero_grad()
            model(**inputs_by_rank[rank]).loss.backward()
            # transformers' own forward does not keep documents apart
            losses = [lambda m, inputs=inputs: m(**inputs).loss / 2 for inputs in inputs_by_rank]
            assert_same(whole_gradients(model), unsharded(reference, *losses))


@case
def embeddings(rank: int) -> None:
    """Embeddings instead of ids; the routers' loss cannot be backpropagated by itself."""
    name, ids = "MixtralForCausalLM", rows()[rank : rank + 1]
    with float64_throughout():
        gradients = []
        for model in (sharded(name), make(name)):
            embeds = torch.randn(1, 53, 24, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            model(inputs_embeds=embeds, labels=ids).loss.backward()
            gradients.append({"given": embeds.grad})
        assert_same(*gradients)
        out = sharded(name)(input_ids=ids, labels=ids, output_router_logits=True)
        with pytest.raises(ValueError, match="not aux_loss by itself"):
            (out.loss + out.aux_loss).backward()


@case
def stacks(rank: int) -> None:
    config = adjoint.StackConfig(VOCAB, 16, 3, ["mamba", "mamba2", "attention"], d_state=4, headdim=8)
    ids = rows()
    model, reference = (adjoint.Stack(config, seed=0).double() for _ in range(2))
    shard(model)
    model(ids[rank : rank + 1], labels=ids[rank : rank + 1], method=METHOD).loss.backward()
    assert_same(whole_gradients(model), unsharded(reference, lambda m: m(ids, labels=ids).loss))
    for stack in (model, reference):
        stack.zero_grad()
    model.set_requires_gradient_sync(False)
    for factor, method in ((2, None), (3, METHOD)):  # what the plain call leaves is not scaled by the other
        (factor * model(ids[rank : rank + 1], labels=ids[rank : rank + 1], method=method).loss).backward()
    assert_same(whole_gradients(model), unsharded(reference, lambda m: 5 * m(ids, labels=ids).loss))
    with pytest.raises(ValueError, match="LayerLocal do not run on a stack under"):
        model(ids, labels=ids, method=adjoint.LayerLocal(chunk_size=16))
    model = adjoint.Stack(config, seed=0).double()
    model.layers[0].mixer.in_proj.register_forward_hook(lambda _, __, y: y - y.mean(1, keepdim=True))
    with pytest.raises(ValueError, match=r"layers\.\S+ differs .* \(first in layers.0, from token 0 on"):
        shard(model)(ids, labels=ids, method=METHOD)


@case
def other_options_of_a_stack(rank: int) -> None:
    """Ranks that would not meet are refused in one line on each; what may differ does."""
    config = adjoint.StackConfig(VOCAB, 16, 2, ["mamba", "attention"], d_state=4, headdim=8)
    ids = rows()
    model, reference = (adjoint.Stack(config, seed=0).double() for _ in range(2))
    shard(model)
    inputs = {"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1], "method": METHOD}
    methods = [None, adjoint.Backprop(checkpoint=True), adjoint.LayerLocal(chunk_size=16)]
    methods += [adjoint.Exact(4, checkpoints=2), adjoint.Exact(memory=1 << 20)]
    differing: list[tuple[str, dict[str, Any]]] = [("method", {"method": method}) for method in methods]
    differing += [("labels", {"labels": None}), ("return_logits", {"return_logits": True})]
    for k, (name, argument) in enumerate(differing):
        with pytest.raises(UserError, match=f"^Stack under fully_shard: .* differ in {name}: give") as e:
            model(**inputs | (argument if rank == k % 2 else {}))
        assert "\n" not in str(e.value)
    with torch.set_grad_enabled(bool(rank)), pytest.raises(UserError, match="whether gradients are on"):
        model(**inputs)
    model(
        **inputs | {"method": adjoint.Exact(chunk_size=8 + 5 * rank), "return_state": bool(rank)}
    ).loss.backward()
    assert_same(whole_gradients(model), unsharded(reference, lambda m: m(ids, labels=ids).loss))


@case
def on_another_rank(rank: int) -> None:
    """A difference in one process's shards is refused by all, which else would wait for it."""
    stack, ids = shard(adjoint.Stack(adjoint.StackConfig(VOCAB, 16, 2, "mamba", d_state=4))), rows()
    message = "the gradient of norm_f.weight differs" if rank else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "difference", lambda *arguments: message)
        for run in (lambda: stack(ids, labels=ids, method=METHOD), lambda: sharded(LLAMA)(ids, labels=ids)):
            with pytest.raises(UserError, match=message or "in the shards of another process"):
                run()


@case
def precision(rank: int) -> None:
    """bfloat16 by FSDP's policy, against float64."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ids, own_rows = rows(), rows()[rank : rank + 1]
    with float64_throughout():
        exact = make(BAMBA, torch.float32).double()
        expected = unsharded(exact, lambda m: m(input_ids=ids, labels=ids).loss)
    distances = []
    for wrapped in (True, False):
        model = sharded(BAMBA, "shard", torch.float32, mp_policy=policy)
        model = model if wrapped else adjoint.unwrap(model)
        model(input_ids=own_rows, labels=own_rows).loss.backward()
        gradients = {n: g.double() for n, g in whole_gradients(model).items()}
        distances.append(errors((torch.ones(()), gradients), (torch.ones(()), expected)).total)
    assert distances[1] > 1e-3  # it is bfloat16 that is measured
    assert distances[0] <= 1.05 * distances[1], distances


@case
def replicas_are_summed_once(rank: int) -> None:
    """HSDP: a call with more chunks sends no more over replicas, and has the same gradients."""
    ids, sent = rows()[rank : rank + 1], list[int]()
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent[-1] += tensor.numel()
        return all_reduce(tensor, *arguments, **options)

    config = adjoint.StackConfig(VOCAB, 16, 2, "mamba", d_state=4)
    model, gradients = shard(adjoint.Stack(config, seed=0).double(), mesh=mesh(RANKS, 1)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        for chunk_size in (27, 27, 7):  # the first call compares gradients, too
            sent.append(0)
            model.zero_grad()
            model(ids, labels=ids, method=adjoint.Exact(chunk_size)).loss.backward()
            gradients.append(whole_gradients(model))
    elements = sum(p.numel() for p in model.parameters())
    assert elements <= sent[1] < 1.1 * elements and sent[2] == sent[1]
    assert_same(gradients[2], gradients[1])
    reference = adjoint.Stack(config, seed=0).double()
    assert_same(gradients[2], unsharded(reference, lambda m: m(rows(), labels=rows()).loss))


@case
def module_of_later_chunks(rank: int) -> None:
    """A unit that the first chunk does not run would keep its sum for itself: it is refused."""
    from torch.distributed.fsdp import fully_shard

    config = adjoint.StackConfig(VOCAB, 16, 2, "mamba", d_state=4)
    model, ids = adjoint.Stack(config, seed=0), rows()[rank : rank + 1]
    model.layers[0].extra = torch.nn.Linear(16, 16)
    chunks = [0]

    def in_later_chunks(layer: Any, _: object, output: Any) -> Any:
        chunks[0] += 1
        y, state = output
        return (y + layer.extra(y), state) if chunks[0] % 2 == 0 else output

    model.layers[0].register_forward_hook(in_later_chunks)
    fully_shard(model.layers[0].extra, mesh=mesh(RANKS, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adjoint.parallel.fsdp.GatheredSweep.verify", lambda *arguments: None)
        with pytest.raises(
            UserError, match=r"fully_shard of layers.0.extra over replicas: it has run in some"
        ):
            shard(model, mesh=mesh(RANKS, 1))(ids, labels=ids, method=adjoint.Exact(27))


@case
def training(rank: int) -> None:
    """Clipping, a hook, AdamW, and a checkpoint that goes on in one process."""
    from torch.distributed.checkpoint import state_dict as dcp

    full_state = dcp.StateDictOptions(full_state_dict=True)
    with float64_throughout():
        models = sharded(LLAMA), make(LLAMA)
        fired: list[Tensor] = []
        next(models[0].parameters()).register_post_accumulate_grad_hook(fired.append)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                ids = rows(step) if model is models[1] else rows(step)[rank : rank + 1]
                model(input_ids=ids, labels=ids).loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert norm > 0.1
                optimizer.step()
                optimizer.zero_grad()
        assert len(fired) == 3
        saved = dcp.get_model_state_dict(models[0], options=full_state)
        if rank == 0:  # the others get nothing
            expected = models[1].state_dict()
            assert saved.keys() == expected.keys()
            assert all((saved[n] - expected[n]).norm() <= 1e-9 * expected[n].norm() for n in expected)
        dcp.set_model_state_dict(models[0], models[1].state_dict(), options=full_state)
        ids = rows(7)
        loss = models[0](input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss, models[1](input_ids=ids, labels=ids).loss)
        loss.backward()
        plain = type(adjoint.unwrap(models[0]))
        assert plain.__name__ == f"FSDP{LLAMA}" and plain.forward is transformers.LlamaForCausalLM.forward


@case
def replicated(rank: int) -> None:
    """HSDP, of one process a shard group."""
    ids = rows()
    with float64_throughout():
        model = sharded(LLAMA, mesh=mesh(RANKS, 1))
        model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss.backward()
        assert_same(
            whole_gradients(model), unsharded(make(LLAMA), lambda m: m(input_ids=ids, labels=ids).loss)
        )


@case
def shards_in_host_memory(rank: int) -> None:
    """`CPUOffloadPolicy`; `DistributedConfig(fsdp_cpu_offload=True)` of transformers sets it."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    ids, policy = rows(), CPUOffloadPolicy(pin_memory=False)
    with float64_throughout():
        model = sharded(LLAMA, offload_policy=policy)
        model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss.backward()
        assert_same(
            whole_gradients(model), unsharded(make(LLAMA), lambda m: m(input_ids=ids, labels=ids).loss)
        )
        with pytest.raises(UserError, match="give it offload_policy=CPUOffloadPolicy"):
            adjoint.offload_weights(model, "cpu")


@case
def finer(rank: int) -> None:
    """Units inside layers, and beside them; MiniSequence; logits."""
    from torch.distributed.fsdp import fully_shard

    ids = rows()
    with float64_throughout():
        reference = make(LLAMA)
        expected = unsharded(reference, lambda m: m(input_ids=ids, labels=ids).loss)
        for method in (METHOD, adjoint.MiniSequence(2, 2)):
            model = make(LLAMA)
            for layer in model.model.layers:
                fully_shard(layer.mlp, mesh=mesh())
            if method is METHOD:
                fully_shard(model.model.embed_tokens, mesh=mesh())
                fully_shard([model.model.norm, model.lm_head], mesh=mesh())
            adjoint.wrap(shard(model), method)
            model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss.backward()
            assert_same(whole_gradients(model), expected)
        with torch.no_grad():
            adjoint.wrap(model, METHOD)
            logits = model(input_ids=ids, labels=ids, logits_to_keep=5).logits
            torch.testing.assert_close(logits, reference(input_ids=ids).logits[:, -5:])


@case
def both_ways(rank: int) -> None:
    """A call of transformers' own forward, its gradients held back, and one by chunks."""
    ids = rows()
    inputs = {"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1]}
    with float64_throughout():
        model = sharded(LLAMA)
        model.set_requires_gradient_sync(False)
        with pytest.warns(UserWarning, match="as if not wrapped"):
            (model(**inputs, output_hidden_states=True).loss / 4).backward()
        model.set_requires_gradient_sync(True)
        (model(**inputs).loss * 3 / 4).backward()
        assert_same(
            whole_gradients(model), unsharded(make(LLAMA), lambda m: m(input_ids=ids, labels=ids).loss)
        )


@case
def adapters(rank: int) -> None:
    """PEFT's model is the root."""
    from torch.distributed.fsdp import fully_shard

    peft = pytest.importorskip("peft")
    ids = rows()

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=3, init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(make(LLAMA), config)

    with float64_throughout():
        model = adjoint.wrap(adapted(), METHOD)
        for layer in layers_of(backbone_of(model.get_base_model())).values():
            fully_shard(layer, mesh=mesh())
        fully_shard(model, mesh=mesh())
        model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss.backward()
        expected = unsharded(adapted(), lambda m: m(input_ids=ids, labels=ids).loss)
        assert_same(whole_gradients(model), expected)
        # wrapped again, of which FSDP's root knows nothing
        adjoint.wrap(model.get_base_model(), METHOD)
        with pytest.raises(ValueError, match="for a module around it: give that"):
            model(input_ids=ids, labels=ids)


@case
def data_parallel(rank: int) -> None:
    """DDP, whose buckets each have a few of the gradients; hooks of parameters fire once per pass."""
    from torch.nn.parallel import DistributedDataParallel

    ids = rows()
    labels = ids.masked_fill(rows(1) < 20, -100)
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": (labels[:, 1:] != -100).sum()}
    own_inputs, fired = {n: t[rank : rank + 1] if t.dim() else t for n, t in inputs.items()}, []
    with float64_throughout():
        lm = adjoint.wrap(make(BAMBA), METHOD)
        model = DistributedDataParallel(lm, bucket_cap_mb=0.01)
        for name, p in lm.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        with model.no_sync():
            model(**own_inputs).loss.backward()
        model(**own_inputs).loss.backward()
        expected = unsharded(make(BAMBA), lambda m: m(**inputs).loss)
    # twice the gradient of each half, of which DDP has taken the mean: their sum
    assert_same(current_gradients(lm), expected)
    assert sorted(fired) == sorted([*expected, *expected])


@case
def read_logits(rank: int) -> None:
    """Both return another loss than the model's; neither computes logits that nobody reads."""
    from torch.nn.parallel import DistributedDataParallel

    ids = rows()[rank : rank + 1]
    with float64_throughout():
        expected = make(LLAMA)(input_ids=ids).logits
        for distribute in (shard, functools.partial(DistributedDataParallel, find_unused_parameters=True)):
            model = distribute(adjoint.wrap(make(LLAMA), METHOD))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="out.logits was used")
                output = model(input_ids=ids, labels=ids)
                output.loss.backward()
            with pytest.warns(UserWarning, match="out.logits was used"):
                torch.testing.assert_close(output.logits, expected)
            output = model(input_ids=ids, labels=ids)
            loss = output.loss + output.logits.square().mean()
            if distribute is shard:
                with pytest.raises(UserError, match="which has none under fully_shard: wrap the"):
                    loss.backward()
                continue
            model.zero_grad()
            loss.backward()
            reference = make(LLAMA)
            for row in rows().split(1):
                out = reference(input_ids=row, labels=row)
                ((out.loss + out.logits.square().mean()) / RANKS).backward()
            gradients = (current_gradients(m) for m in (model.module, reference))
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@case
def log_probabilities(rank: int) -> None:
    """`token_logprobs` by DDP, under fully_shard in two passes, and of an untouched model under it."""
    from torch.nn.parallel import DistributedDataParallel

    ids, mask = rows(), torch.arange(rows().shape[1]).expand(RANKS, -1) >= 20
    row = slice(rank, rank + 1)
    with float64_throughout():
        reference = make(LLAMA)
        expected = adjoint.token_logprobs(reference, ids, mask)
        expected.exp().sum().backward()
        model = DistributedDataParallel(adjoint.wrap(make(LLAMA), METHOD))
        logprobs = adjoint.token_logprobs(model, ids[row], mask[row])
        torch.testing.assert_close(logprobs, expected[row])
        (logprobs.exp().sum() * RANKS).backward()
        assert_same(current_gradients(model.module), current_gradients(reference))
        for name in (LLAMA, BAMBA):
            reference = make(name)
            expected = adjoint.token_logprobs(reference, ids, mask)
            expected.exp().sum().backward()
            for model in (shard(adjoint.wrap(make(name), METHOD)), shard(make(name))):
                with torch.no_grad():
                    again = adjoint.token_logprobs(model, ids[row], mask[row])
                logprobs = adjoint.token_logprobs(model, ids[row], mask[row])
                for values in (again, logprobs):
                    torch.testing.assert_close(values, expected[row])
                (logprobs.exp().sum() * RANKS).backward()
                assert_same(whole_gradients(model), current_gradients(reference))
        model = shard(adjoint.wrap(make(LLAMA), METHOD))
        shards = dict(model.named_parameters())
        logprobs = adjoint.token_logprobs(model, ids[row], mask[row])
        with torch.no_grad():
            shards["model.norm.weight"].mul_(2)
        with pytest.raises(RuntimeError, match="log-probabilities summed to"):
            logprobs.sum().backward()


def fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("seqlen", [1, 16])
def test_a_process_with_one_token_has_one_chunk(seqlen: int) -> None:
    class Ranks:
        """Two processes, the other of which has one token."""

        def largest(self, chunks: float, negative_limit: float) -> tuple[float, float]:
            return max(chunks, 1), max(negative_limit, -1)

    ids = torch.zeros(2, seqlen, dtype=torch.long)
    spec = align_chunks(Ranks(), Batch(ids, ids), METHOD.engine_spec(seqlen, 16, (0,)))
    assert spec.cuts(seqlen) == (0, seqlen)


@pytest.mark.parametrize("least", [1, 2, 5])
@pytest.mark.parametrize("documents", [(0,), (0, 3, 16)])
def test_no_chunk_is_shorter_than_the_least(documents: tuple[int, ...], least: int) -> None:
    """However many chunks another process has: a single token would be decoded, which writes to the cache."""

    class Ranks:
        """Two processes, the other of which has a number of chunks, or as many as this one can have."""

        def __init__(self, chunks: int) -> None:
            self.chunks = chunks

        def largest(self, chunks: float, negative_limit: float) -> tuple[float, float]:
            self.chunks = min(max(int(chunks), self.chunks), int(-negative_limit))
            return self.chunks, negative_limit

    spec, ids = EngineSpec(13, documents=documents, least=least), torch.zeros(1, 41, dtype=torch.long)
    for chunks in range(1, 42):
        ranks = Ranks(chunks)
        cuts = align_chunks(ranks, Batch(ids, ids), spec).cuts(41)
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        assert len(sizes) == ranks.chunks and sum(sizes) == 41
        assert min(sizes) >= min(least, 3), "a document of 3 tokens is one chunk, or more"


@case
def refused(rank: int) -> None:
    """Each refusal has a model of its own, as an error leaves FSDP in an undefined state."""
    from torch.distributed.fsdp import fully_shard

    ids, model = rows(), sharded(LLAMA, dtype=torch.float32)
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(ValueError, match="multiplied by 1 on one process and by 2 on another"):
        (loss * (1 + rank)).backward()
    with pytest.raises(RuntimeError, match="be backpropagated only once"):
        loss.backward()
    short = ids[:, : 1 if rank else 53]
    inputs_of_batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(ValueError, match="FSDP1"):
        fsdp1(adjoint.wrap(make(LLAMA, torch.float32), METHOD))(**inputs_of_batch)
    model = make(LLAMA, torch.float32)
    fully_shard(model.model.layers[1].mlp.up_proj, mesh=mesh())
    with pytest.raises(ValueError, match=r"fully_shard for layers\.1\.mlp, not for parts of it"):
        adjoint.wrap(shard(model), adjoint.MiniSequence(2, 2))(**inputs_of_batch)
    packed = {**inputs_of_batch, "position_ids": (torch.arange(53) % 30).expand(2, -1)}
    for message, method, inputs in (
        ("give labels to the causal LM", METHOD, {"input_ids": ids}),
        ("give one document per row", adjoint.Exact(16, checkpoints=2), packed),
        ("give chunk_size instead", adjoint.Exact(16, memory="1GB"), inputs_of_batch),
        ("into 1 at most: give .* more similar lengths", METHOD, {"input_ids": short, "labels": short}),
    ):
        with pytest.raises(ValueError, match=message):
            adjoint.wrap(sharded(LLAMA, dtype=torch.float32), method)(**inputs)
    stack = shard(adjoint.Stack(adjoint.StackConfig(VOCAB, 24, 2, "mamba", d_state=4)))
    for head, message in (
        (sharded(LLAMA, dtype=torch.float32), "under fully_shard the head's weight is whole"),
        (shard(make(LLAMA, torch.float32)), "under fully_shard the head's weight is whole"),
        (stack, "under fully_shard the head's weight is whole"),
        (stack.lm_head, "passes over hooks, adapters and shards"),
    ):
        with pytest.raises(UserError, match=f"multi_token_loss: .*{message}"):
            adjoint.multi_token_loss(head, [torch.zeros(2, 53, 24)], ids)


@case
def refused_as_gradients_come_early(rank: int) -> None:
    """Refuse a GradScaler's factor and the gradient of a final state, which come with the backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ids, policy = rows()[rank : rank + 1], MixedPrecisionPolicy(param_dtype=torch.float16)
    with pytest.raises(UserError, match="float16 under fully_shard"):
        sharded(LLAMA, dtype=torch.float32, mp_policy=policy)(input_ids=ids, labels=ids)
    stack = shard(adjoint.Stack(adjoint.StackConfig(VOCAB, 16, 2, "mamba", d_state=4)))
    output = stack(ids, labels=ids, method=METHOD, return_state=True)
    with pytest.raises(UserError, match="detach the final state"):
        (output.loss + output.state[0][0].sum()).backward()


@case
def leaves(rank: int) -> None:
    """Each process has its own gradient of such tensors, as FSDP2 does not know them."""
    ids = rows()[rank : rank + 1]
    with float64_throughout():
        for make_leaves in (in_a_hook, read_through_a_closure, made_by_another_network):
            gradients_of_models = []
            for wrapped in (False, True):
                torch.manual_seed(0)
                model = make(LLAMA)
                tensors = make_leaves(model)
                shard(adjoint.wrap(model, METHOD) if wrapped else model)
                for _ in range(2):
                    tensors.begin()
                    model(input_ids=ids, labels=ids).loss.backward()
                others = {f"other {name}": t.grad for name, t in tensors.others.items() if t.grad is not None}
                assert len(others) == len(tensors.others)
                gradients_of_models.append(whole_gradients(model) | others)
            assert_same(gradients_of_models[1], gradients_of_models[0])


@case
def left_gathered(rank: int) -> None:
    """`set_reshard_after_backward(False)`."""
    ids, gradients_of_models = rows()[rank : rank + 1], []
    with float64_throughout():
        for wrapped in (False, True):
            model = shard(adjoint.wrap(make(LLAMA), METHOD) if wrapped else make(LLAMA))
            model.set_reshard_after_backward(False)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            model.state_dict()  # which shards them again
            gradients_of_models.append(whole_gradients(model))
    assert gradients_of_models[0]
    assert_same(gradients_of_models[1], gradients_of_models[0])


def ways_without_labels() -> dict[str, dict[str, Tensor]]:
    """Return inputs of one row: plain, packed documents, and padding at the left."""
    ids, positions, mask = rows(6, 40)[:1], torch.arange(40)[None].clone(), torch.ones(1, 40).long()
    positions[:, 17:] -= 17
    mask[:, :6] = 0
    return {
        "plain": {"input_ids": ids},
        "packed": {"input_ids": ids, "position_ids": positions},
        "padded": {"input_ids": ids, "attention_mask": mask},
    }


@case
def without_labels(rank: int, name: str, training: bool) -> None:
    """Logits under no_grad, of ranks whose rows have documents or padding in turn; the first call is one."""
    ways = ways_without_labels()
    # a wrapped model in one process keeps documents apart, and hides padding
    reference = adjoint.wrap(make(name), METHOD).train(training)
    model = shard(adjoint.wrap(make(name), METHOD)).train(training)
    pairs = [("packed", "plain"), ("plain", "packed"), ("plain", "padded"), ("packed", "padded")]
    with float64_throughout(), torch.no_grad():
        for way in (pair[rank] for pair in [*pairs, ("plain", "plain"), *pairs]):
            first = 6 if way == "padded" else 0  # logits at padding are nobody's
            logits = [m(**ways[way]).logits[:, first:] for m in (model, reference)]
            torch.testing.assert_close(*logits)
        if training:
            return
        for pair in (("packed", "plain"), ("plain", "packed"), ("packed", "packed")):  # as if not wrapped
            inputs = ways[pair[rank]] | {"output_hidden_states": True}
            torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits)
        copied = shard(copy.deepcopy(adjoint.wrap(make(name), METHOD)))
        torch.testing.assert_close(copied(**ways["packed"]).logits, reference(**ways["packed"]).logits)
    ids = ways["plain"]["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()  # the next step has its weights and gradients
    reference(input_ids=ids, labels=ids).loss.backward()
    assert_same(whole_gradients(model), current_gradients(reference), 1e-6)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        (LLAMA, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((BAMBA, False), (LLAMA, True))),
    ],
)
def test_calls_without_labels_are_those_of_one_process(name: str, training: bool, peer: Any) -> None:
    on_both(peer, "without_labels", name, training)


@case
def other_arguments(rank: int) -> None:
    """An argument that ranks do not share is named in one line on each rank, whatever was tried before."""
    ids, model = rows()[rank : rank + 1], sharded("MixtralForCausalLM")
    inputs = {"input_ids": ids, "labels": ids}
    model(**inputs).loss.backward()
    differing: dict[str, dict[str, Any]] = {
        "num_items_in_batch": {"num_items_in_batch": torch.tensor(40)},
        "output_router_logits": {"output_router_logits": True},
        "arguments that its forward does not name": {"sample_ids": ids},
        "use_cache": {"use_cache": True},
    }
    for name, argument in differing.items():
        for other in (0, 1):
            with pytest.raises(UserError, match=f"under fully_shard.*differ in {name}.*: give the same") as e:
                model(**inputs, **(argument if rank == other else {}))
            assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="differ in labels"):
        model(**(inputs if rank else {"input_ids": ids}))
    with torch.set_grad_enabled(bool(rank)), pytest.raises(UserError, match="whether gradients are on"):
        model(**inputs)
    with pytest.raises(UserError, match="training or evaluation mode"):
        model.train(bool(rank))(**inputs)
    model.train()(**inputs).loss.backward()
    for labels in ({}, {"labels": ids}):
        for other in (0, 1):
            with torch.no_grad():
                cache = model.eval()(ids, use_cache=True).past_key_values
            length = 1 if rank == other else 5
            after = {name: value[:, :length] for name, value in {"input_ids": ids, **labels}.items()}
            with pytest.raises(
                UserError, match="differ in how many tokens come after a cache: give the same"
            ):
                model.train()(**after, past_key_values=cache, use_cache=True)
    model(**inputs).loss.backward()


@case
def other_methods(rank: int) -> None:
    """A rank whose model runs its own forward and one whose model runs by chunks are refused, in one line.

    Where both run their own, arguments may differ."""
    ids = rows()[rank : rank + 1]
    for plain_rank in (0, 1):
        method = adjoint.Backprop() if rank == plain_rank else METHOD
        model, backbone = (shard(adjoint.wrap(m, method)) for m in (make(LLAMA), make(LLAMA).model))
        for each, labels in ((model, {"labels": ids}), (model, {}), (backbone, {})):
            with pytest.raises(UserError, match=r"under fully_shard: .* differ in the method: give the") as e:
                each(input_ids=ids, **labels)
            assert "\n" not in str(e.value)
    with float64_throughout():
        model = shard(adjoint.wrap(make(LLAMA), adjoint.Backprop()))
        output = model(input_ids=ids, **({"labels": ids} if rank else {}))
        by_hand = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (output.loss if rank else by_hand).backward()
        reference = make(LLAMA)
        each_row = [lambda m, i=i: m(rows()[i : i + 1], labels=rows()[i : i + 1]).loss / 2 for i in range(2)]
        assert_same(whole_gradients(model), unsharded(reference, *each_row))


@case
def generation(rank: int) -> None:
    """Ranks that gather weights generate in step; those that hold all may differ in the number of tokens."""
    with float64_throughout():
        model, reference = sharded(LLAMA).eval(), make(LLAMA).eval()
        prompt, length = rows()[rank : rank + 1, :9], 3 + 4 * rank
        for in_step in (True, False):
            options = {"max_new_tokens": length, "do_sample": False, "synced_gpus": in_step}
            tokens = [each.generate(prompt, **options) for each in (model, reference)]
            assert torch.equal(*tokens)
            for unit in (*layers_of(backbone_of(model)).values(), model):
                unit.set_reshard_after_forward(False)
                unit.unshard()


SLOW = ("replicated", "finer", "adapters", "log_probabilities", "embeddings", "read_logits", "precision")
SLOW += (
    "leaves",
    "left_gathered",
    "stacks",
    "on_another_rank",
    "module_of_later_chunks",
    "shards_in_host_memory",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in SLOW else ())
        for n in CASES
        if n not in ("equal", "without_labels")
    ],
)
def test_under_fully_shard(name: str, peer: Any) -> None:
    on_both(peer, name)
