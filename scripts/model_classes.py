"""Write the tables of docs/models_classes.md: try every class of tests/hf/hf_models.py and
multimodal_models.py, and all other causal LMs that transformers has. Takes some minutes; less with
`--multimodal`, which writes the table of multimodal classes alone.

python -m scripts.model_classes
"""

from __future__ import annotations

import copy
import signal
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import adjoint
from benchmarks.report import ROOT, put_table
from tests.hf.hf_models import (
    FAMILIES,
    MODELS,
    REFUSED,
    VOCAB,
    cache_contents,
    errors,
    float64_throughout,
    loss_and_gradients,
    make,
    make_batch,
    perturb_weights,
    refusal_reason,
)
from tests.hf.multimodal_models import MULTIMODAL, make_multimodal, make_multimodal_batch

PAGE = ROOT / "docs" / "models_classes.md"
HEAD = ["family", "class", "its cache holds", "gradient by chunks"]
LIMIT = 1e-10
UNTRIED = "not tried, because no small configuration of them was found or they do not run in float64"
SECONDS = 60  # for each class that is in no table of the tests
# Options that make a configuration small; each class gets those of them that it has.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "vocab_size": VOCAB},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "rotary_dim": 4},
    **{"max_position_embeddings": 256, "n_positions": 256, "index_topk": 6, "index_n_heads": 16},
    **{"index_head_dim": 8, "is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


# All options of the classes for which a guess is not enough.
TINY: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY |= {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB}
GEMMA4 = {
    **TEXT,
    **PER_LAYER,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
BY_HAND: dict[str, dict[str, Any]] = {
    "BigBirdForCausalLM": {**TINY, "is_decoder": True, "attention_type": "original_full"},
    "DbrxForCausalLM": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Dots1ForCausalLM": {
        **TEXT,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "FuyuForCausalLM": {
        "text_config": {**TINY, "model_type": "persimmon"},
        "hidden_size": 32,
        "vocab_size": VOCAB,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "Gemma3nForCausalLM": {
        **TEXT,
        **PER_LAYER,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4, "vision_config": VISION, "audio_config": None},
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "GotOcr2ForConditionalGeneration": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 16,
            "output_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "mlp_dim": 16,
            "window_size": 2,
            "global_attn_indexes": [0],
        },
    },
    "GPTNeoForCausalLM": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 5,
        "max_position_embeddings": 64,
    },
    "LongcatFlashForCausalLM": {
        **TINY,
        "num_layers": 2,
        "ffn_hidden_size": 40,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 6,
    },
    "XmodForCausalLM": {**TINY, "is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
}


def try_model(model: Any, inputs: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return what the cache holds, and the largest relative error of a parameter's gradient, or the reason of
    the refusal."""
    wrapped = copy.deepcopy(model)  # before the first run: some classes keep tensors of it
    inputs = inputs or make_batch(29)
    with float64_throughout():
        expected = loss_and_gradients(model, **inputs)
        try:
            adjoint.wrap(wrapped, adjoint.Exact(chunk_size=8))
            worst = errors(loss_and_gradients(wrapped, **inputs), expected).worst
        except ValueError as error:
            return "", f"refused: {refusal_reason(error)}".replace("<", "&lt;")
    return cache_contents(wrapped), f"{worst:.0e}"


def make_small(cls: Any) -> Any:
    """Return a small model of a class, by `BY_HAND` or by guessed options, in evaluation mode."""
    if cls.__name__ in BY_HAND:
        return perturb_weights(cls(cls.config_class(**BY_HAND[cls.__name__]))).to(torch.float64).eval()
    config = cls.config_class().get_text_config()
    options = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    options = {n: v for n, v in options.items() if not isinstance(getattr(type(config), n, None), property)}
    if "qk_rope_head_dim" in options:
        del options["head_dim"]
        options["num_key_value_heads"] = 4
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or ())):
        options["layer_types"] = (kinds * 3)[: max(3, len(kinds))]
        options["num_hidden_layers"] = len(options["layer_types"])
    torch.manual_seed(0)
    model = perturb_weights(cls(type(config)(**options)))
    if sum(p.numel() for p in model.parameters()) > 3e7:
        raise ValueError("some other option keeps it large")
    return model.to(torch.float64).eval()


def try_other_classes() -> dict[str, list[str]]:
    """Return the names of all classes that the tests do not have, by outcome."""
    outcomes: dict[str, list[str]] = {"exact": [], "off": [], "refused": [], UNTRIED: []}
    for name in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        if name in MODELS or name in REFUSED or not hasattr(transformers, name):
            continue
        print(name, flush=True)
        signal.alarm(SECONDS)
        try:
            _, error = try_model(make_small(getattr(transformers, name)))
        except Exception:
            outcomes[UNTRIED].append(name)
        else:
            refused = error.startswith("refused: ")
            outcomes["refused" if refused else "exact" if float(error) <= LIMIT else "off"].append(name)
        finally:
            signal.alarm(0)
    return outcomes


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError


def multimodal_table() -> str:
    """Return the table of classes with images, video or sound."""
    rows = [["class", "inputs beside ids", "its cache holds", "gradient by chunks"], ["---"] * 4]
    for name in MULTIMODAL:
        print(name, flush=True)
        inputs = make_multimodal_batch(name)
        extra_inputs = [n for n in inputs if n not in ("input_ids", "labels", "attention_mask")]
        names = ", ".join(f"`{n}`" for n in extra_inputs)
        rows.append([f"`{name}`", names, *try_model(make_multimodal(name), inputs)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _raise_timeout)
    put_table(PAGE, "multimodal table", multimodal_table())
    if "--multimodal" in sys.argv:
        return
    classes = [(family, name) for family, names in FAMILIES.items() for name in names]
    rows = [HEAD, ["---"] * len(HEAD)]
    for family, name in [*classes, *(("refused", name) for name in REFUSED)]:
        print(name, flush=True)
        rows.append([family, f"`{name}`", *try_model(make(name))])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    lines = (f"- {o} ({len(n)}): {', '.join(n)}\n" for o, n in try_other_classes().items() if n)
    put_table(PAGE, "classes table", table)
    put_table(PAGE, "others table", "".join(lines))


if __name__ == "__main__":
    main()
