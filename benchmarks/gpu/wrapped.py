"""Random-weight models of transformers of 1 to 2 billion parameters, wrapped and with checkpointing."""

from __future__ import annotations

import importlib.util
from typing import Any

from adjoint.tools.points.process import Point
from benchmarks import steps

WAYS: dict[str, Point] = {
    "checkpointing": {"checkpointing": True},
    "wrapped": {"method": "Exact"},
    "wrapped, offload": {"method": "Exact", "offload": True},
}
_WIDTHS = {"hidden_size": 2048, "vocab_size": 65536, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1 << 21}
_SSD = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
_DELTA = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16) | {"head_dim": 64}
MODELS: dict[str, Point] = {
    "Bamba-like": {"class": "BambaForCausalLM", **_WIDTHS, **_ATTENTION, **_SSD, "num_hidden_layers": 24,
                   "intermediate_size": 5632, "attn_layer_indices": [5, 11, 17, 23]},
    "Qwen3.5-like": {"class": "Qwen3_5ForCausalLM", **_WIDTHS, **_ATTENTION, **_DELTA,
                     "num_hidden_layers": 24, "intermediate_size": 5632,
                     "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6},
    "Llama": {"class": "LlamaForCausalLM", **_WIDTHS, **_ATTENTION, "num_hidden_layers": 16,
              "intermediate_size": 8192},
}  # fmt: skip


def tiny(model: Point) -> Point:
    """The same classes for a try on a CPU: as few layers as have one of each kind."""
    layers = 4 if "layer_types" in model else 6 if "attn_layer_indices" in model else 2
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    small |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "head_dim": 16}
    small |= {name: size for name, size in _DELTA.items() if name != "head_dim"}
    cut = {"layer_types": model.get("layer_types", [])[:4], "attn_layer_indices": [5]}
    return {name: cut.get(name, small.get(name, value)) for name, value in model.items()}


def wrapped(point: Point) -> Point:
    """Bytes at the peak, seconds of each pass, and the loss."""
    if importlib.util.find_spec("transformers") is None:
        return {"missing": "transformers is not installed"}
    found = steps.measure(
        {**point, "way": WAYS[point["way"]], "above": "imports", "first": 64, "repeat_s": 0.0}
    )
    return found | {"tokens_per_second": point["length"] / min(found["seconds"])}
