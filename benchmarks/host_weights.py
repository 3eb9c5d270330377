"""Two hybrids on one GPU with weights in host memory: `python -m benchmarks.host_weights` plans, it measures
nothing.

One sequence of 128K or 1M tokens a step, by `Exact` with `--model.offload weights`, of Bamba-9B and of a
mixture of 30B parameters of which a token uses 3B, Qwen3-Next's layers with fewer experts. Memory is counted
on fake tensors as `adjoint plan` does it. What times rest on is assumed: 30% of the GPU's peak in bfloat16,
80% of its link's, and how fast the host adds. The optimizer's step on the host is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from adjoint.methods import Exact
from adjoint.plan.estimate import estimate, roofline
from adjoint.plan.host_traffic import SUSTAINED_HOST, SUSTAINED_LINK, hiding_chunk, in_host_memory, link_bytes
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup, needs
from adjoint.plan.worker_devices import Machine
from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from adjoint.tools.plan.command import REACHED
from adjoint.train.gpus import GPUS, LINKS
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark

MODELS: dict[str, dict[str, Any]] = {  # config.json
    "Bamba-9B": {
        "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_expand": 2, "tie_word_embeddings": False,
    },
    "30B-A3B hybrid": {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 192,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
GPU, TOKENS, CHUNK = "h100", [1 << 17, 1 << 20], 1 << 14


_models: dict[str, Any] = {}  # by name: what is counted of one at one point serves the next


def model_sizes(name: str) -> Any:
    """Return the planner's view of a model."""
    from adjoint.plan.outline import outlined

    if name not in _models:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODELS[name]))
            _models[name] = model_of(outlined(folder))
    return _models[name]


def measure(point: Point) -> Point:
    """Memory and time of a step with weights in host memory, and its time if the GPU could hold them."""
    model, gpu = model_sizes(point["model"]), GPUS[GPU]
    machine = Machine("cuda", "bfloat16", gpu.memory)
    on_gpu = Setup(model, Exact(CHUNK, recompute="full"), 1, point["tokens"], machine=machine)
    setup, spans = in_host_memory(on_gpu, SUSTAINED_LINK * LINKS[gpu.link]), [range(model.n_layer)]
    costs = roofline(setup, gpu, "assumed").slower_by(1 / REACHED)
    (need,), (need_on_gpu,) = needs(setup, spans), needs(on_gpu, spans)
    moved = link_bytes(setup)
    return {
        "parameters": model.num_parameters, "memory_bytes": need.total, "parts_bytes": need.parts,
        "whole_bytes": need_on_gpu.total, "host_bytes": need.host,
        "seconds": estimate(setup, spans, costs, 1.0).seconds,
        "whole_seconds": estimate(dataclasses.replace(setup, host_link=None), spans, costs, 1.0).seconds,
        "link_bytes": moved.to_device + moved.to_host,
        "hiding_chunks": {
            name: hiding_chunk(setup, costs.forward, costs.backward, SUSTAINED_LINK * peak)
            for name, peak in LINKS.items()
        },
    }  # fmt: skip


class HostWeights(Benchmark):
    name = "host_weights"
    module = "benchmarks.host_weights"
    limiting_options = ("models", "tokens")
    document = "docs/host_weights.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", MODELS)
        runner.add_counts(parser, tokens=(TOKENS, "tokens"))

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [{"model": model, "tokens": tokens} for model in options.models for tokens in options.tokens]

    def shared(self, point: Point) -> str:
        return "all"

    def markdown(self, result: Row) -> str:
        gpu = GPUS[GPU]
        memory, link = f"{gpu.memory / 1e9:.1f} GB", f"{gpu.link} at {SUSTAINED_LINK:.0%}"
        head = (
            f"Planned, nothing measured: an {GPU.upper()} of {memory} at {REACHED:.0%} of its rates in "
            f"bfloat16, {link}, chunks of {CHUNK:,} tokens; the host adds gradients at "
            f"{SUSTAINED_HOST / 1e9:.0f} GB/s. The last columns: tokens of a chunk from which copies and "
            "additions hide."
        )
        heads = ["model", "tokens", "GB on the GPU", "if it held the weights", "GB on the host",
                 "TB over the link", "a step", "if it held the weights", *LINKS]  # fmt: skip
        lines = [
            [
                f"{row['model']}, {row['parameters'] / 1e9:.1f}B", show.tokens(row["tokens"]),
                f"{row['memory_bytes'] / 1e9:.1f}", f"{row['whole_bytes'] / 1e9:.0f}",
                f"{row['host_bytes'] / 1e9:.0f}", f"{row['link_bytes'] / 1e12:.1f}",
                f"{row['seconds'] / 60:.1f} min", f"{row['whole_seconds'] / 60:.1f} min",
                *(f"{tokens:,}" for tokens in row["hiding_chunks"].values()),
            ]
            for row in result["rows"]
        ]  # fmt: skip
        return f"{head}\n\n{report.markdown_table(heads, lines, left=(0, 1))}"


if __name__ == "__main__":
    raise SystemExit(HostWeights().main())
