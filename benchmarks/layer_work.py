"""What a chunk of a layer costs beside its arithmetic: `python -m benchmarks.layer_work`.

Counted, not timed, on fake tensors of the real sizes (d_model 2048, a chunk of 4,096 tokens, bfloat16
autocast), so that it runs anywhere in seconds: the operators that a chunk calls, views left out, which on a
GPU are launches of a kernel or a few; the memory traffic of the layer's weights and of their gradients, in
bytes per parameter; the bytes per token that stay for the backward, beside the formula by which chunk sizes
are picked (`adjoint.engine.chunk_size.kept_bytes`).

"autocast alone" is the layer as plain PyTorch runs it, chunk by chunk: autocast casts its weights each time,
and each chunk's gradients are added to a float32 sum. The others are what `Exact` does, by `recompute`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint.engine.chunk_size import kept_bytes
from adjoint.engine.stage import Layer
from adjoint.engine.tile import Gradients
from adjoint.layers import StackConfig
from adjoint.methods import RECOMPUTE
from adjoint.plan.planned_stack import StackModel
from adjoint.plan.stage_memory import Conditions, Example, counting, example
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

MIXERS = ("mamba", "mamba2", "mamba3", "gated_deltanet", "attention")
SINGLE_RANK = "autocast alone"
D_MODEL, TOKENS = 2048, 4160  # no width of a weight, by which weights are told from activations


class Work(TorchDispatchMode):
    """Counts operators that write memory, and the bytes of matrices of the given shapes that they read and
    write."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes | {shape[::-1] for shape in shapes}
        self.operators = self.weight_bytes = 0
        self.summed = False  # a CPU adds each small gradient to its sum at once, a GPU all by one launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = self._tensors((args, kwargs)), self._tensors(result)
        places = {t.untyped_storage()._cdata for t in inputs}
        written = [t for t in outputs if t.untyped_storage()._cdata not in places]
        changed = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if (written or changed) and "empty" not in func._opname:
            sums = "_foreach_add_" in func._opname
            self.operators += not (sums and self.summed)
            self.summed |= sums
            self.weight_bytes += sum(
                t.nbytes for t in (*inputs, *written, *self._tensors(changed)) if self._is_weight(t)
            )
        return result

    def _is_weight(self, t: Tensor) -> bool:
        return tuple(t.shape) in self.shapes

    @staticmethod
    def _tensors(tree: Any) -> list[Tensor]:
        return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def measure(point: Point) -> Row:
    """A layer of one mixer, a chunk in the middle of a step."""
    mixer, how = point["mixer"], point["recompute"]
    config = StackConfig(vocab_size=256, d_model=D_MODEL, n_layer=1, mixer=mixer)
    recompute = "none" if how == SINGLE_RANK else how
    model, on = StackModel(config), Conditions(1, TOKENS, TOKENS, "bfloat16", "cuda", recompute)
    mode, stage, initial = model.stage(0, on)
    with counting(on, mode):
        chunk_example = example(stage, initial, on, D_MODEL)
        assert isinstance(chunk_example.stage, Layer)
        matrices = [m.weight for m in chunk_example.stage.block.modules() if isinstance(m, torch.nn.Linear)]
        shapes, sums = {tuple(w.shape) for w in matrices}, Gradients()
        forward, backward = (
            _alone(chunk_example, sums)
            if how == SINGLE_RANK
            else (chunk_example.forward, lambda: chunk_example.pull(sums))
        )
        forward()  # the first time weights are cast and the sums made
        backward()
        with Work(shapes) as in_forward:
            forward()
        with Work(shapes) as in_backward:
            backward()
    traffic = in_forward.weight_bytes + in_backward.weight_bytes
    row = {
        **point,
        "forward_operators": in_forward.operators,
        "backward_operators": in_backward.operators,
        "weight_bytes": round(traffic / sum(w.numel() for w in matrices), 1),
    }
    if how == SINGLE_RANK:
        return row
    counted = model.piece(0, on._replace(start=0)).saved
    for d, dim in zip(chunk_example.d_state, chunk_example.stage.grows, strict=True):
        counted -= 0 if dim is None or d is None else d.nbytes  # keys and values are kept elsewhere
    return {**row, "kept_bytes": counted // TOKENS, "formula_bytes": kept_bytes(config, 2, how)}


def _alone(one: Example, sums: Gradients) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward, and forward with backward, as plain PyTorch has them."""
    assert isinstance(one.stage, Layer)
    block, parameters = one.stage.block, list(one.stage.parameters())

    def forward() -> Any:
        with torch.no_grad():
            return block(one.x, one.state)

    def backward() -> None:
        x = one.x.detach().requires_grad_()
        state = tuple(s.detach().requires_grad_() if isinstance(s, Tensor) else s for s in one.state)
        y, after = block(x, state)
        inputs = [x, *(s for s in state if isinstance(s, Tensor)), *parameters]
        outputs, cotangents = (y, *after), (one.dy, *one.d_state)
        gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients[-len(parameters) :], strict=True):
            sums.add(parameter, gradient)

    return forward, backward


class LayerWork(Benchmark):
    name = "layer_work"
    module = "benchmarks.layer_work"
    limiting_options = ("mixers",)
    document, mark = "docs/which_method.md", "layer work"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--mixers", MIXERS)

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [
            {"mixer": m, "recompute": recompute}
            for m in options.mixers
            for recompute in (SINGLE_RANK, *RECOMPUTE)
        ]

    def shared(self, point: Point) -> str:
        return "all"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [result for _, result in measurements if "weight_bytes" in result]

    def markdown(self, result: Row) -> str:
        """A line a mixer and way."""
        heads = [
            f"a layer on a chunk of {TOKENS:,} tokens, d_model {D_MODEL:,}",
            "operators, forward",
            "recomputing and backward",
            "weights' traffic, bytes per parameter",
            "kept for the backward, bytes per token",
            "by the formula",
        ]
        lines = [
            [f"{row['mixer']}, {row['recompute']}",
             *(str(row[name]) for name in ("forward_operators", "backward_operators", "weight_bytes")),
             *(f"{row[name]:,}" if name in row else "–" for name in ("kept_bytes", "formula_bytes"))]
            for row in result["rows"]
        ]  # fmt: skip
        return report.markdown_table(heads, lines)


if __name__ == "__main__":
    raise SystemExit(LayerWork().main())
