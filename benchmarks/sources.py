"""The figures of the sources beside this package's, counted on fake tensors: `python -m benchmarks.sources`.

Nothing is run, nothing is measured: the code that trains is called on tensors that have shapes and no
memory, and every storage is noted while it lives (`adjoint.plan`). The sources are

- adjoint sharding (arXiv 2501.00692): figure 1 (memory by context of five models), the longest context of the
  largest, table 1 (memory and operations of one vjp);
- Korthikanti et al. (arXiv 2205.05198): bytes of activations that a layer of a Transformer keeps.

What the sources measured stands in the tables as theirs. Their other claims are in `benchmarks.claims`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.plan.layouts import candidates
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import needs
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from adjoint.tools.plan.command import read_arguments, request_of
from adjoint.train.config import load_config
from adjoint.train.gpus import GPUS
from adjoint.train.layout import Layout
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

GIB = 2**30

# ------------------------------------------------------------------------------------------ adjoint sharding

MODELS = ("mamba-32m", "mamba-63m", "mamba-127m", "mamba-225m", "mamba-1.27b")
LENGTHS = [4096 * 4**k for k in range(5)]
GPU, BATCH, CHUNK = "a100-40gb", 2, 1024  # figure 1's batch; the GPUs of the paper's P4 instances
_PLAIN = "--method.chunk_size null --method.recompute null --method.name backprop"
METHODS = {  # flags of `adjoint plan`
    "Backprop": _PLAIN,
    "Backprop, checkpointing": f"{_PLAIN} --method.checkpoint true",
    "LayerLocal": f"--method.recompute null --method.name layer-local --method.chunk_size {CHUNK}",
    "Exact": f"--method.name exact --method.recompute selective --method.chunk_size {CHUNK}",
}
FIGURE_1 = ("Backprop", "Backprop, checkpointing", "Exact")
# What the paper's own method stores, by its formula (section 4.5), and by what the formula is of.
PRINTED, STORED = "the paper's method, by its formula", "the paper's method, {A, C, h, y} counted"
DEVICES = (1, 40)  # five instances of eight
P, N, SAMPLES = 128, 225, 8  # table 1's widths in the paper's example (section 4.5)


def _request(model: str, method: str, seqlen: int, gpus: int = 1) -> Any:
    words = f"--config configs/{model}.yaml --device {GPU} --data.batch {BATCH} {METHODS[method]}"
    return request_of(*read_arguments(f"{words} --seqlen {seqlen} --devices {gpus}".split()))


def stored_by_the_paper(method: str) -> int:
    """Bytes per token that the paper's method stores of the 1.27B model and batch: FP16 numbers, of each
    layer {A, C, h, y}, which are 3N + P for a diagonal A and 2N + P in its formula, and dl/dy_K once."""
    config = load_config(["--config", f"configs/{MODELS[-1]}.yaml"]).model
    assert config.d_state is not None
    states, width = config.d_inner * config.d_state, config.d_model
    each = (2 if method == PRINTED else 3) * states + width
    return 2 * BATCH * (config.n_layer * each + width)


def figure_1(model: str, method: str, lengths: Sequence[int]) -> Iterator[Row]:
    """Bytes of a training step on one GPU by context, whether or not the GPU has them."""
    if method in (PRINTED, STORED):
        for seqlen in lengths:
            yield {"model": model, "method": method, "tokens": seqlen,
                   "bytes": seqlen * stored_by_the_paper(method)}  # fmt: skip
        return
    task = _request(model, method, min(lengths))
    for seqlen in lengths:
        fit = task.fit(Layout()).with_changes(seqlen=seqlen)
        (need,) = needs(fit.setup, fit.fastest())
        yield {"model": model, "parameters": fit.setup.model.num_parameters, "method": method,
               "tokens": seqlen, "bytes": need.total}  # fmt: skip


def longest(method: str, gpus: int) -> Iterator[Row]:
    """The longest context of the 1.27B model, over all layouts of one replica. Of the paper's method: what
    its stored tensors alone leave room for, spread evenly."""
    if method in (PRINTED, STORED):
        tokens = GPUS[GPU].memory * gpus // stored_by_the_paper(method)
        yield {"method": method, "gpus": gpus, "tokens": tokens, "shards": gpus, "sequence": 1}
        return
    task, fits = _request(MODELS[-1], method, 1 << 20, gpus), []
    for layout in candidates(gpus, None):  # whole weights
        with contextlib.suppress(UserError):  # what the method cannot be spread over
            if layout.replicas == 1:
                fits.append((task.fit(layout).longest(), layout))
    tokens, layout = max(fits, key=lambda fit: fit[0])
    yield {"method": method, "gpus": gpus, "tokens": tokens, "shards": layout.shards,
           "sequence": layout.sequence}  # fmt: skip


def table_1() -> Iterator[Row]:
    """Yield the cost of a vjp of a network with P inputs for a batch, in 16 bits: formula and count."""
    shapes = {"unstructured": (N * N, N * P), "diagonal": (N, N), "scalar": (1, N)}
    for structure, outputs in shapes.items():
        for network, out in zip(("𝒜", "ℬ, 𝒞"), outputs, strict=True):

            def make(out: int = out) -> tuple[Any, Tensor]:
                return nn.Linear(P, out), torch.zeros(SAMPLES, P)

            def run(inputs: tuple[Any, Tensor]) -> None:
                network, x = inputs
                y = network(x)
                torch.autograd.grad(y, list(network.parameters()), torch.zeros_like(y))

            peak, operations = peak_and_operations(make, run)
            parameters = P * out + out
            yield {
                "structure": structure, "network": network,
                "formula_bytes": 2 * (SAMPLES * (out + P * out) + parameters), "bytes": peak,
                "formula_operations": SAMPLES * out * (2 * P + 1), "operations": operations,
            }  # fmt: skip


# ------------------------------------------------------------------------------------- Korthikanti et al.

S, B, H, HEADS = 2048, 4, 6144, 64  # of their 22B model
UNIT, SCORES = S * B * H, HEADS * S / H  # bytes of sbh; as/h


def kept_by(
    module: Callable[[], Any],
    call: Callable[[Any, Tensor], Any],
    shape: tuple[int, int, int] = (B, S, H),
) -> int:
    """Bytes that a layer's forward in 16 bits keeps for its backward, its input included, its output not.
    shape: of the input, (batch, tokens, width)."""
    with fake_tensors(torch.bfloat16) as fake:
        with fake:
            layer = module()
        with counting(Conditions(*shape[:2], device="cuda"), fake) as live:
            call(layer, torch.zeros(shape))  # notes the weights
            before = live.begin()
            graph = call(layer, torch.zeros(shape, requires_grad=True)).grad_fn
            saved_bytes = live.live - before
            del graph
            return saved_bytes


def _gpt2(implementation: str, dropout: float, activation: str, recomputed: bool = False) -> int:
    from torch.utils.checkpoint import checkpoint
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=H, n_head=HEADS, n_positions=S, activation_function=activation,
                        attn_pdrop=dropout, resid_pdrop=dropout,
                        attn_implementation=implementation)  # fmt: skip

    def call(layer: Any, x: Tensor) -> Any:
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return y[0] if isinstance(y, tuple) else y

    return kept_by(lambda: GPT2Block(config, layer_idx=0).train(), call)


def _llama() -> int:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=H, num_attention_heads=HEADS, intermediate_size=4 * H,
                         num_hidden_layers=1, attn_implementation="sdpa")  # fmt: skip

    def make() -> Any:
        return LlamaDecoderLayer(config, 0).train(), LlamaRotaryEmbedding(config)

    def call(layer: Any, x: Tensor) -> Any:
        turns = layer[1](x, torch.arange(S).unsqueeze(0))
        y = layer[0](x, position_embeddings=turns)
        return y[0] if isinstance(y, tuple) else y

    return kept_by(make, call)


def _ours(mixer: str, recompute: str) -> int:
    config = StackConfig(d_model=H, n_layer=1, mixer=mixer, num_attention_heads=HEADS,
                         d_intermediate=4 * H if mixer == "attention" else 0)  # fmt: skip
    return model_of(config).piece(0, Conditions(B, S, 0, "bfloat16", "cuda", recompute)).saved


# name: (count, the formula's bytes over sbh or None, why they differ)
LAYERS: dict[str, tuple[Callable[[], int], float | None, str]] = {
    "GPT-2, attention written out": (
        functools.partial(_gpt2, "eager", 0.1, "gelu"), 34 + 5 * SCORES,
        "on a CPU dropout's masks have 2 bytes an element, in the formula and on a GPU 1: + as/h + 2"),
    "GPT-2, fused attention, no dropout": (
        functools.partial(_gpt2, "sdpa", 0.0, "gelu"), 34,
        "two masks of 1 byte that are not there; means, variances and normalizers add 0.04"),
    "GPT-2 with gelu_new, fused attention, no dropout": (
        functools.partial(_gpt2, "sdpa", 0.0, "gelu_new"), 34,
        "its tanh approximation is written out and keeps three more tensors of 4h: + 24"),
    "GPT-2, recomputed": (functools.partial(_gpt2, "eager", 0.1, "gelu", True), 2, "the input alone"),
    "Llama, gated MLP of 4h": (
        _llama, 34,
        ("the gated MLP keeps four tensors of 4h, not two: + 16; RMSNorm in float32: + 8; "
         "a copy in attention: + 2; no dropout: − 2")),
    "Stack, attention, gated MLP of 4h": (
        functools.partial(_ours, "attention", "none"), 34,
        ("the gated MLP: + 8; residual stream in float32: + 4; copies of queries, keys and values: + 10; "
         "no dropout: − 2")),
    "Stack, attention, recompute selective": (
        functools.partial(_ours, "attention", "selective"), 34,
        "keeps the outputs of two projections, 6 + 16, attention's, 2, and the residual sum, 4"),
    "Stack, Mamba": (
        functools.partial(_ours, "mamba", "none"), None, "in_proj's output is 8 of it"),
    "Stack, Mamba, recompute selective": (
        functools.partial(_ours, "mamba", "selective"), None,
        "one tensor of d_inner and one of d_model are made again"),
}  # fmt: skip


def layer(name: str) -> Iterator[Row]:
    """Bytes that a layer keeps, over sbh."""
    count, formula, why = LAYERS[name]
    saved_per_unit = count() / UNIT
    yield {"layer": name, "formula": formula, "counted": saved_per_unit, "why": why,
           "ratio": None if formula is None else saved_per_unit / formula}  # fmt: skip


# -------------------------------------------------------------------------------------------------- counting


def peak_and_operations(make: Callable[[], Any], run: Callable[[Any], object]) -> tuple[int, int]:
    """Bytes at the peak of `run` in 16 bits, what `make` made included, and operations of its products."""
    from torch.utils.flop_counter import FlopCounterMode

    adds = {torch.ops.adjoint.add_product: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with fake_tensors(torch.bfloat16) as fake, counting(Conditions(1, 1, device="cuda"), fake) as live:
        run(make())
        peak = live.peak
    # by itself, as it holds on to tensors
    operations = FlopCounterMode(display=False, custom_mapping=adds)
    with fake_tensors(torch.bfloat16) as fake, fake, operations:
        run(make())
    return peak, operations.get_total_flops()


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    "figure-1": figure_1, "longest": longest, "table-1": table_1, "layer": layer,
}  # fmt: skip


def measure(point: Point) -> Point:
    """The rows of a point: the table's function with the other values of the point."""
    arguments = {key: value for key, value in point.items() if key != "table"}
    return {"rows": list(TABLES[point["table"]](**arguments))}


class Sources(Benchmark):
    name = "sources"
    module = "benchmarks.sources"
    limiting_options = ("tables", "lengths")
    document = "docs/paper.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--tables", TABLES)
        runner.add_counts(parser, lengths=(LENGTHS, "contexts of figure 1"))

    def points(self, options: argparse.Namespace) -> list[Point]:
        groups: dict[str, list[Point]] = {
            "figure-1": [{"model": model, "method": method, "lengths": options.lengths}
                         for model in MODELS for method in FIGURE_1]
            + [{"model": MODELS[-1], "method": method, "lengths": options.lengths}
               for method in (PRINTED, STORED)],
            "longest": [{"method": method, "gpus": gpus}
                        for method in (PRINTED, STORED, *METHODS) for gpus in DEVICES],
            "table-1": [{}],
            "layer": [{"name": name} for name in LAYERS],
        }  # fmt: skip
        return [{"table": table, **point} for table in options.tables for point in groups[table]]

    def shared(self, point: Point) -> str:
        return "all"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{"table": p["table"], **row} for p, r in measurements for row in r.get("rows", ())]

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        for mark, make_table in SHOWN.items():
            rows = [row for row in result["rows"] if row["table"] == mark]
            if rows:
                yield self.document, mark, make_table(rows)

    def markdown(self, result: Row) -> str:
        return "\n".join(f"{mark}:\n\n{table}" for _, mark, table in self.tables(result))

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        rows = [row for row in result["rows"] if row["table"] == "figure-1"]
        if rows:
            conditions = f"counted, not measured: batch {BATCH}, AdamW, bfloat16 autocast, one GPU"
            yield "", draw(rows), report.footer(result["environment"], conditions)


# --------------------------------------------------------------------------------------------- what is shown


def _figure_1(rows: Sequence[Row]) -> str:
    shown = [r for r in rows if r["method"] != "Backprop, checkpointing" or r["model"] == MODELS[-1]]
    heads, line = ["planned, GB", "method"], ("model", "method")
    return report.pivot(heads, shown, line, "tokens", lambda row: f"{row['bytes'] / 1e9:,.1f}", show.tokens)


def _longest(rows: Sequence[Row]) -> str:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for row in (row for row in rows if row["method"] == method):
            layout = f"{row['shards']} × {row['sequence']}" if row["gpus"] > 1 else ""
            cells += [f"{row['tokens']:,}", *[layout] * (row["gpus"] > 1)]
        lines.append([method, *cells])
    heads = ["planned longest context, tokens"]
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        heads += ["1 GPU"] if gpus == 1 else [f"{gpus} GPUs", "shards × sequence"]
    return report.markdown_table(heads, lines)


def _table_1(rows: Sequence[Row]) -> str:
    heads = ["A", "network", "formula, MB", "counted, MB", "formula, operations", "counted"]
    return report.markdown_table(
        heads,
        [
            [row["structure"], row["network"], *(f"{row[k] / 1e6:.3g}" for k in ("formula_bytes", "bytes")),
             *(f"{row[k]:,}" for k in ("formula_operations", "operations"))]
            for row in rows
        ],
        left=(0, 1),
    )  # fmt: skip


def _layers(rows: Sequence[Row]) -> str:
    number = lambda value: "–" if value is None else f"{value:.1f}"  # noqa: E731
    lines = [
        [row["layer"], number(row["formula"]), number(row["counted"]),
         "–" if row["ratio"] is None else f"{row['ratio']:.2f}", row["why"]]
        for row in rows
    ]  # fmt: skip
    return report.markdown_table(["bytes over sbh", "formula", "counted", "ratio", "why"], lines, left=(0, 4))


SHOWN: dict[str, Callable[[Sequence[Row]], str]] = {
    "figure-1": _figure_1, "longest": _longest, "table-1": _table_1, "layer": _layers,
}  # fmt: skip


def draw(rows: Sequence[Row]) -> Any:
    """Figure 1: memory against context, a panel a method, a line a model."""
    plt = report.pyplot()
    figure, panels = plt.subplots(1, len(FIGURE_1), figsize=(9, 4.6), sharey=True)
    shades = plt.get_cmap("viridis")
    for axes, method in zip(panels, FIGURE_1, strict=True):
        for place, model in enumerate(MODELS):
            curve = [(r["tokens"], r["bytes"] / 1e9) for r in rows
                     if (r["model"], r["method"]) == (model, method)]  # fmt: skip
            label = model.removeprefix("mamba-").upper() if axes is panels[0] else None
            axes.plot(*zip(*curve, strict=True), color=shades(0.9 - 0.22 * place), linewidth=2, marker="o",
                      markersize=4, label=label)  # fmt: skip
        limit = GPUS[GPU].memory / 1e9
        axes.axhline(limit, color="black", linewidth=0.8, linestyle=":",
                     label=f"memory of an {GPU.upper()}" if axes is panels[0] else None)  # fmt: skip
        show.ticks_of_lengths(axes, sorted({row["tokens"] for row in rows}))
        axes.set(xlabel="context, tokens", yscale="log")
        axes.set_title(method, fontsize=11)
    curve = [(r["tokens"], r["bytes"] / 1e9) for r in rows if r["method"] == PRINTED]
    if curve:
        panels[0].plot(*zip(*curve, strict=True), color=report.ORANGE, linestyle="--", marker="o",
                       markersize=4, label=f"{PRINTED}, 1.27B")  # fmt: skip
    show.plain_ticks(panels[0], " GB")
    figure.legend(loc="outside upper center", ncols=4,
                  title="memory of a training step: planned, not measured")  # fmt: skip
    return figure


if __name__ == "__main__":
    raise SystemExit(Sources().main())
