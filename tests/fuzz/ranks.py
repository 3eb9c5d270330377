"""Sequence groups, FSDP2 and tensor parallelism over gloo processes, against the same calls in one process.

All ranks have the same gradients as one process, or all refuse. Ranks that differ in what they must have in
common are refused. The processes live from case to case; each case has a process group of its own."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import random
import select
import signal
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import adjoint
from adjoint.cluster.recovery import is_collateral
from adjoint.hf.model_parts import backbone_of, layers_of
from adjoint.hf.transformers_api import RELEASE
from adjoint.methods import RECOMPUTE
from tests.fuzz import stacks
from tests.fuzz.oracle import (
    Case,
    Deviation,
    Refusal,
    Vacuous,
    documents,
    method_of,
    raised_by_us,
    same,
    some,
    where,
)
from tests.hf.hf_models import VOCAB, float64_throughout, make

ANSWER, COLLECTIVE = 50.0, 20.0  # seconds until a case, or a message of it, has failed
WRAPPED = (
    "LlamaForCausalLM",
    "BambaForCausalLM",
    "Mamba2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
)
SPLIT = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")  # by transformers' tensor parallelism
LOST = "another rank is lost"
SPLIT_SINCE = (5, 21)  # release of transformers
# What a rank has otherwise than rank 0; all must refuse.
DIFFERENCES = ("tokens", "labels", "length", "chunk_size", "setting", "buffer", "hook", "weight", "gradients")


def draw(rng: random.Random) -> Case:
    way, is_stack = rng.choice(("sequence", "sequence", "fsdp", "tensor")), rng.random() < 0.5
    ranks = rng.choice((2, 2, 3, 4)) if is_stack or way != "tensor" else 2
    seqlen = rng.choice((1, 2, 3, 5, 8, 13, 21, 34))
    case: Case = {
        "kind": "ranks",
        "way": way,
        "ranks": ranks,
        "seed": rng.randrange(10**6),
        "batch": rng.randint(1, 2),
        "seqlen": seqlen,
    }
    exact = {"name": "Exact", "chunk_size": rng.randint(1, seqlen + 2)}
    case["method"] = exact | some(rng, 0.25, {"recompute": lambda: rng.choice(RECOMPUTE), "offload": True})
    if is_stack:
        case["config"] = stacks.draw_config(rng)
        if way == "sequence" and rng.random() < 0.4:
            case["method"] = stacks.draw_method(rng, adjoint.StackConfig(**case["config"]), seqlen)
    else:
        case["model"] = rng.choice(SPLIT if way == "tensor" else WRAPPED)
        if way == "sequence" and rng.random() < 0.3:
            case["method"] = {
                "name": "Truncated",
                "window": rng.randint(1, seqlen + 2),
                "chunk_size": exact["chunk_size"],
            }
    options = {
        "documents": lambda: rng.choice((0.1, 0.4)),
        "ignored": lambda: rng.choice((0.2, 0.6)),
        "calls": 2,  # their gradients are added up
        "scale": 3.0,
        "frozen": lambda: rng.choice((0.3, 0.7)),
    }
    if way == "fsdp":
        options |= {
            "shard first": True,
            "replicas": True,
            "held back": True,  # set_requires_gradient_sync(False)
            "finer": True,  # units inside of layers
            "lengths": True,  # ranks have rows of different lengths
        }
    elif rng.random() < 0.25:
        case["difference"] = rng.choice(DIFFERENCES)
        case["other rank"] = rng.randint(1, ranks - 1)
    return case | some(rng, 0.3, options)


# ---------------------------------------------------------------------------------------------- one rank


def model_of(case: Case) -> Any:
    """Return the case's model in float64, the same on all ranks."""
    if "model" not in case:
        return stacks.make({"seed": 0, **case}).double()
    model = make(case["model"], seed=case["seed"] % 7)
    generator = torch.Generator().manual_seed(case["seed"])
    for p in model.parameters():
        p.requires_grad_(torch.rand((), generator=generator).item() >= case.get("frozen", 0))
    next(model.parameters()).requires_grad_()
    return model


def inputs_of(case: Case, call: int, rank: int) -> dict[str, Any]:
    """Return the arguments of a rank's call. With FSDP2 each rank has other rows."""
    rows = rank if case["way"] == "fsdp" else 0
    generator = torch.Generator().manual_seed(case["seed"] + 10 * call + rows)
    shorter = call + (3 * rank if "lengths" in case else 0)
    batch, seqlen = case.get("batch", 1), max(min(2, case["seqlen"]), case["seqlen"] - shorter)
    words = VOCAB if "model" in case else stacks.config_of(case).vocab_size
    ids = torch.randint(min(3, words - 1), words, (batch, seqlen), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < case.get("ignored", 0), -100)
    packed = documents({**case, "batch": batch, "seqlen": seqlen}, generator)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if packed is not None and "model" in case:
        begins = torch.ones_like(packed, dtype=torch.bool)
        begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
        place = torch.arange(seqlen).expand(begins.shape)
        inputs["position_ids"] = place - torch.where(begins, place, 0).cummax(1).values
    elif packed is not None:
        inputs["seq_idx"] = packed
    return inputs


def call_model(case: Case, model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    if "model" in case:
        return model(**inputs).loss
    ids = inputs.pop("input_ids")
    return model(ids, method=method_of(case), **inputs, **options).loss


def alone(case: Case, ranks: int, folder: str) -> dict[str, Any]:
    """Return losses and gradients in one process: with FSDP2 the means over ranks."""
    is_loaded = case["way"] == "tensor" and "model" in case
    model, results = loaded(case, folder) if is_loaded else model_of(case), {}
    if "model" in case:
        adjoint.wrap(model, method_of(case))
    for call in range(case.get("calls", 1)):
        each = range(ranks) if case["way"] == "fsdp" else [0]
        losses = [
            call_model(case, model, inputs_of(case, call, rank)) * case.get("scale", 1.0) for rank in each
        ]
        total = torch.stack(losses).mean()
        total.backward()
        results[f"loss {call}"] = losses[dist.get_rank() if len(losses) > 1 else 0].detach()
    return results | {name: p.grad for name, p in model.named_parameters()}


def complete(t: Any) -> Any:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def together(case: Case, ranks: int, folder: str) -> dict[str, Any]:
    """Return losses and gradients of this rank."""
    rank, way, options = dist.get_rank(), case["way"], {}
    differs = case.get("difference") if rank == case.get("other rank") else None
    case = {**case, "method": {**case["method"]}}
    if differs == "chunk_size":
        case["method"]["chunk_size"] = 3 if case["method"].get("chunk_size") == 2 else 2
    if way == "tensor" and "model" in case:
        from transformers.distributed.configuration_utils import DistributedConfig

        model = loaded(case, folder, DistributedConfig(tp_size=ranks))
    else:
        model = model_of(case)
    if differs in CHANGES:
        with torch.no_grad():
            CHANGES[differs](model)
    if way == "sequence" and "model" in case:
        adjoint.wrap(model, method_of(case), sequence_group=dist.group.WORLD)
    elif way == "sequence":
        options["sequence_group"] = dist.group.WORLD
    elif way == "fsdp":
        shard(case, model, ranks)
    elif "model" in case:
        adjoint.wrap(model, method_of(case))
    else:
        model.parallelize(dist.group.WORLD)
        if differs in CHANGES and differs != "weight":  # it has made modules of its own
            with torch.no_grad():
                CHANGES[differs](model)
    results = {}
    for call in range(case.get("calls", 1)):
        inputs = inputs_of(case, call, rank)
        if differs in ("tokens", "labels"):
            name = {"tokens": "input_ids", "labels": "labels"}[differs]
            inputs[name] = inputs[name].clone()
            inputs[name][0, -1] = 1 if inputs[name][0, -1] == 0 else 0
        if differs == "length":
            inputs = {name: t[:, 1:] for name, t in inputs.items()}
        with torch.set_grad_enabled(differs != "gradients"):
            loss = call_model(case, model, inputs, **options) * case.get("scale", 1.0)
        if loss.requires_grad:
            loss.backward()
        results[f"loss {call}"] = complete(loss.detach())
    if way == "tensor" and "model" not in case:
        gather = model.tensor_parallel.gather
        return results | {
            n: None if p.grad is None else gather(n, p.grad) for n, p in model.named_parameters()
        }
    return results | {name: complete(p.grad) for name, p in model.named_parameters()}


def shard(case: Case, model: Any, ranks: int) -> None:
    from torch.distributed.fsdp import fully_shard

    shape = (
        (2, 2) if case.get("replicas") and ranks == 4 else (ranks, 1) if case.get("replicas") else (ranks,)
    )
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if "model" in case and "shard first" not in case:
        adjoint.wrap(model, method_of(case))
    layers = model.layers if "model" not in case else layers_of(backbone_of(model)).values()
    for layer in layers:
        inner = [m for m in layer.children() if case.get("finer") and [*m.parameters()]]
        for module in inner[:1]:
            fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if "model" in case and "shard first" in case:
        adjoint.wrap(model, method_of(case))
    if case.get("held back"):
        model.set_requires_gradient_sync(False)


def loaded(case: Case, folder: str, config: Any = None) -> Any:
    """Return the case's model from a folder that rank 0 writes; with a configuration, split over ranks."""
    from tests.hf.test_tensor_parallel import load

    if dist.get_rank() == 0:
        make(case["model"], seed=case["seed"] % 7).save_pretrained(folder)
    dist.barrier()
    model = load(folder, config)
    for p, other in zip(model.parameters(), model_of(case).parameters(), strict=True):
        p.requires_grad_(other.requires_grad)
    return model


def _norm(model: Any) -> Any:
    """Return the last module that has an epsilon."""
    return [m for m in model.modules() if {"eps", "variance_epsilon"} & {*vars(m)}][-1]


def _change_setting(model: Any) -> None:
    norm = _norm(model)
    name = "eps" if "eps" in vars(norm) else "variance_epsilon"
    setattr(norm, name, 0.1 + getattr(norm, name))


def _change_buffer(model: Any) -> None:
    buffer = next((b for b in model.buffers() if b.is_floating_point() and b.numel()), None)
    if buffer is None:
        raise Vacuous("no buffer")
    buffer += 0.1


def _add_hook(model: Any) -> None:
    _norm(model).register_forward_hook(lambda module, inputs, output: 1.1 * output)


def _change_weight(model: Any) -> None:
    next(p for p in model.parameters() if p.requires_grad).flatten()[:1].add_(0.1)


CHANGES = {"setting": _change_setting, "buffer": _change_buffer, "hook": _add_hook, "weight": _change_weight}


def on_rank(case: Case, folder: str) -> tuple[str, str]:
    """Return the outcome of a case on this rank: its kind, and a line."""
    ranks = dist.get_world_size()
    try:
        with float64_throughout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = {} if case.get("difference") else alone(copy.deepcopy(case), ranks, folder)
            results = together(case, ranks, folder)
            if not case.get("difference"):
                same(results, expected)
    except Vacuous as nothing:
        return "vacuous", str(nothing)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if raised_by_us(error) and not isinstance(error, Deviation):
            return "refused", line
        return LOST if is_collateral(error) else where(error), line
    return "", ""


# ---------------------------------------------------------------------------------------------- all ranks


def run_forked(case: Case) -> list[tuple[str, str]]:
    """Return each rank's outcome; the ranks are forks of this process, which has imported everything.

    `multiprocessing` starts none here: the fuzzer's worker is a daemon."""
    with tempfile.TemporaryDirectory(prefix="adjoint-ranks-") as folder:
        children, until = [], time.monotonic() + ANSWER
        for rank in range(case["ranks"]):
            read, write = os.pipe()
            if not (pid := os.fork()):
                with contextlib.suppress(BaseException):
                    os.write(write, json.dumps(in_group(case, rank, folder)).encode())
                os._exit(0)
            os.close(write)
            children.append((pid, read))
        outcomes = []
        for pid, read in children:
            is_ready = select.select([read], [], [], max(0.0, until - time.monotonic()))[0]
            answer = os.read(read, 1 << 16) if is_ready else b""
            outcomes.append(tuple(json.loads(answer)) if answer else ("hangs", "no answer"))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
    return outcomes


def in_group(case: Case, rank: int, folder: str) -> tuple[str, str]:
    """Return the outcome of a case on one rank of a new process group."""
    torch.set_num_threads(1)
    init: dict[str, Any] = {
        "init_method": f"file://{folder}/meeting",
        "timeout": timedelta(seconds=COLLECTIVE),
    }
    dist.init_process_group("gloo", rank=rank, world_size=case["ranks"], **init)
    return on_rank(case, f"{folder}/model")


def prepare() -> None:
    """Import what cases need, and load the kernels."""
    if RELEASE >= SPLIT_SINCE:
        importlib.import_module("tests.hf.test_tensor_parallel")
    importlib.import_module("torch.distributed.fsdp")
    ids = torch.arange(6)[None]
    for name in ("LlamaForCausalLM", "BambaForCausalLM"):
        adjoint.wrap(make(name), adjoint.Exact(3))(input_ids=ids, labels=ids).loss.backward()


def check(case: Case) -> None:
    case = {"ranks": 2, "way": "sequence", "seqlen": 5, "seed": 0, **case}
    case |= {"ranks": max(2, case["ranks"]), "method": case.get("method", {"name": "Exact", "chunk_size": 3})}
    if case["way"] == "tensor" and "model" in case and RELEASE < SPLIT_SINCE:
        raise Vacuous("this release of transformers splits no such weights")
    if "difference" in case and "other rank" not in case:
        raise Vacuous("no rank differs")
    if case.get("difference") == "labels" and (case["seqlen"] == 1 or "documents" in case):
        raise Vacuous("nothing may predict the label that differs")
    if case.get("difference") == "weight" and case["way"] == "tensor":
        raise Vacuous("weights of ranks that split a model are not compared; a stack has the first rank's")
    if case.get("difference") == "chunk_size" and (
        case["seqlen"] < 4 or case["method"]["name"] == "Backprop"
    ):
        raise Vacuous("one chunk either way")
    outcomes = run_forked(case)
    early = [outcome for outcome in outcomes if outcome[0] in ("refused", "vacuous")]
    if early:  # before the others knew
        outcomes = [early[0] if outcome[0] == LOST else outcome for outcome in outcomes]
    for rank, (outcome, said) in enumerate(outcomes):
        if outcome not in ("", "vacuous", "refused"):
            raise Deviation(f"rank {rank}: {outcome}: {said}")
    each = {outcome for outcome, _ in outcomes}
    if "vacuous" in each:
        raise Vacuous(next(said for outcome, said in outcomes if outcome == "vacuous"))
    if len(each) > 1 or (each == {""} and "difference" in case):
        raise Deviation(f"not refused by all: {outcomes}"[:300])
    if each == {"refused"} and "difference" not in case:
        raise Refusal(outcomes[0][1][:120])
