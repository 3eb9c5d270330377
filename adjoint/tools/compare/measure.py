"""A point of `adjoint compare`, measured in a process of its own: a model run one way at one length, or its
gradients both ways."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from adjoint import memory
from adjoint.hf.quantized import rounds_by_chunk
from adjoint.hf.transformers_api import use_float64_experts
from adjoint.hf.wrap import wrap
from adjoint.methods import METHODS, Method
from adjoint.tools.measure.passes import Passes, gradients_apart, measured, repeated
from adjoint.tools.measure.process import Point
from adjoint.train.config import LoraConfig
from adjoint.train.peft_adapters import adapted
from adjoint.train.pretrained import configuration, unwrapped

KEY = "adjoint compare"
FIRST = 64  # tokens of the pass before those that count


def measure(point: Point) -> Point:
    """Measure a point, which has `model`, `random`, `dtype`, `device`, `batch`, `length`, `method` and `way`.

    The way "gradients" compares them; the other ways are timed `repeat` times in `limit` bytes.
    """
    vocabulary = _configuration(point).get_text_config().vocab_size
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (point["batch"], point["length"])).to(point["device"])
    if point["way"] == "gradients":
        return _gradients(point, ids)
    _limit(point["limit"], ids.device)
    try:
        if point["way"] == "pilot":
            return _pilot(point, ids)
        repeat = functools.partial(repeated, device=point["device"], repeat_s=math.inf, most=point["repeat"])
        return measured(lambda: _passes(point), ids, min(FIRST, point["length"]), repeat)
    except Exception as error:
        # the stack of another thread is memory too, whoever asks for it
        if "can't start new thread" in f"{error}":
            return {"out_of_memory": "no memory is left for another thread"}
        raise


def _pilot(point: Point, ids: Tensor) -> Point:
    """Return the seconds of a pass of each of the point's `ways` at each of its `lengths`."""
    passes = dict[str, list[float]]()
    for way in point["ways"]:
        model, loss = _passes(point | {"way": way})
        loss(ids[:, : min(FIRST, point["length"])]).backward()
        passes[way] = []
        for length in point["lengths"]:
            step = functools.partial(_step, loss, ids[:, :length])
            passes[way] += repeated(step, point["device"], math.inf, most=1)
        del model, loss
    return {"passes": passes}


def _step(loss: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    loss(ids).backward()


def _passes(point: Point) -> Passes:
    """Return the model and its loss, run in the point's way."""
    model = _model(point).train()
    if point["way"] == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _loss(wrap(model, _method(point)) if point["way"] == "wrapped" else model)


def _gradients(point: Point, ids: Tensor) -> Point:
    """Return the largest relative L2 difference of a parameter's gradient between the model wrapped and not;
    without dropout, which would draw other numbers."""

    rounds = False

    def ways() -> Iterator[tuple[str, Passes]]:
        nonlocal rounds
        model = _model(point).eval()
        rounds = rounds_by_chunk(model) is not None
        yield "transformers", _loss(model)
        yield "wrapped", _loss(wrap(model, _method(point)))

    comparison = gradients_apart(ways(), ids)
    unwrapped_row, wrapped = comparison["transformers"], comparison["wrapped"]
    return {
        "length": point["length"],
        **wrapped,
        "rounds_by_chunk": rounds,
        "loss": unwrapped_row["loss"],
        "wrapped_loss": wrapped["loss"],
    }


def _configuration(point: Point) -> PreTrainedConfig:
    return configuration(point["model"], point["trust_remote_code"], KEY)


def _model(point: Point) -> PreTrainedModel:
    dtype = getattr(torch, point["dtype"])
    torch.manual_seed(0)
    trusted = point["trust_remote_code"]
    if point["random"]:
        config = _configuration(point)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusted)
    else:
        model = unwrapped(point["model"], dtype, trusted, KEY, point["quantization"], point["device"])
    model.config.use_cache = False  # of which training has no use
    if point["quantized"] is None:
        model.to(point["device"])
    use_float64_experts(model)
    if (rank := point["lora_rank"]) is None:
        return model
    return adapted(model, dataclasses.asdict(LoraConfig(rank=rank)))


def _method(point: Point) -> Method:
    return METHODS[point["method"]["name"]](**{k: v for k, v in point["method"].items() if k != "name"})


def _loss(model: PreTrainedModel) -> Passes:
    return Passes(model, lambda ids: model(input_ids=ids, labels=ids).loss)


def _limit(size: float, device: torch.device) -> None:
    """Let allocations fail that go beyond `size` bytes, on top of what is there."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
        return
    torch.ones(1 << 20).sum()  # starts the threads, whose stacks are none of the model's memory
    with contextlib.suppress(ImportError, KeyError, OSError, ValueError):  # not Linux
        import resource

        data_bytes = int(memory.proc_fields("self/status")["VmData"].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + int(size), resource.RLIM_INFINITY))
