"""One step of models of real sizes, wrapped and not: `python -m benchmarks.real_size`.

Forward + backward of random tokens, float32, batch 1, random weights, each point in a fresh process: Mamba-2
of 130M parameters (the sizes of state-spaces/mamba2-130m) and a model of Qwen3.5-0.8B's sizes, 24 layers of
which 6 are attention. Compared are transformers with gradient checkpointing, `adjoint.MiniSequence`, which
has the logits in slices besides, and `adjoint.wrap(model)`. Their gradients are compared before.

A short length each tells how long 32,768 tokens will take, and what would not fit is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from benchmarks import steps
from benchmarks.report import Row
from benchmarks.wrapped import WAYS, Wrapped

_MAMBA2 = {
    **{"class": "Mamba2ForCausalLM", "vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24},
    **{"state_size": 128, "expand": 2, "head_dim": 64, "num_heads": 24, "n_groups": 1},
    "tie_word_embeddings": True,
}
_QWEN = {
    **{"class": "Qwen3_5ForCausalLM", "vocab_size": 248320, "hidden_size": 1024, "num_hidden_layers": 24},
    **{"intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "tie_word_embeddings": True,
}


class RealSize(Wrapped):
    name = "real_size"
    uses = ("wrapped", "real_size", "segments")
    limiting_options = ("ways", "allocators")
    models: ClassVar = {"Mamba-2 130M": (_MAMBA2, 0, 32768), "Qwen3.5-like 0.8B": (_QWEN, 6, 32768)}
    ways: ClassVar = {
        "checkpointing": WAYS["checkpointing"][0],
        "MiniSequence": {"method": "MiniSequence"},
        "wrapped": WAYS["wrapped"][0],
    }
    lengths: ClassVar = [1024, 2048, 32768]
    repeats = 1
    ratios = (("memory_bytes", "ms_per_token"), {"way": "MiniSequence"}, ("model", "allocator", "length"))
    compared = (1500, {"checkpointing": True})
    checked = ()
    caption = ""

    rows = steps.StepBenchmark.rows

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        return iter(())

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        return iter(())  # shown nowhere: the models take an hour


if __name__ == "__main__":
    raise SystemExit(RealSize().main())
