"""Tiny transformers models with random weights, and float64 throughout in them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
# Tables of precisions, ours and PyTorch's, are made before float32 is float64.
pytest.importorskip("adjoint.hf.wrap")
pickle.dumps(torch.zeros(1))

VOCAB = 61
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
WIDTHS: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 3}
HEADS: dict[str, Any] = {
    **WIDTHS,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NARROW = {**HEADS, "head_dim": 6}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {  # MLA
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
}
GROUPS: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SSD: dict[str, Any] = {  # Mamba-2, by the names most hybrids use
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {  # gated delta rule
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
    "layer_types": LAYERS,
}
QSA: dict[str, Any] = {  # sparse attention of many heads: with few, keys often share a score
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
}
DSA: dict[str, Any] = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8}
INKLING: dict[str, Any] = {
    **NARROW,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "sliding_window_size": 5,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 6,
    "d_rel": 4,
    "rel_extent": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "unpadded_vocab_size": VOCAB,
}
CONV = {**HEADS, "layer_types": ["conv", "full_attention", "conv"]}

# Family → class → its configuration's options; vocabulary and special tokens come from `make`.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "Mamba": {
        "MambaForCausalLM": {**WIDTHS, "state_size": 8},
        "FalconMambaForCausalLM": {**WIDTHS, "state_size": 8},
    },
    "Mamba-2": {
        "Mamba2ForCausalLM": {
            **WIDTHS,
            "state_size": 8,
            "head_dim": 12,
            "num_heads": 4,
            "n_groups": 2,
            "chunk_size": 16,
        },
    },
    "hybrids of Mamba and attention": {
        "JambaForCausalLM": {
            **HEADS,
            "num_hidden_layers": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
        },
        "ZambaForCausalLM": {
            **HEADS,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        },
    },
    "hybrids of Mamba-2 and attention": {
        "BambaForCausalLM": {**HEADS, **SSD, "attn_layer_indices": [1]},
        "FalconH1ForCausalLM": {**NARROW, **SSD, "mamba_d_ssm": 48},
        "GraniteMoeHybridForCausalLM": {
            **HEADS,
            **SSD,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
        },
        "NemotronHForCausalLM": {
            **NARROW,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "attention", "mlp"],
        },
        "Zamba2ForCausalLM": {
            **HEADS,
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 8,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
    },
    "delta rules and attention": {
        "Qwen3NextForCausalLM": {**NARROW, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
        "Qwen3_5ForCausalLM": {**NARROW, **DELTA},
        "Qwen3_5MoeForCausalLM": {**NARROW, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
        "OlmoHybridForCausalLM": {**HEADS, **DELTA, "linear_num_key_heads": 4},
        "KimiLinearForCausalLM": {
            **HEADS,
            **LATENT,
            **EXPERTS,
            "linear_num_heads": 4,
            "linear_head_dim": 6,
            "layer_types": LAYERS,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "BailingHybridForCausalLM": {
            **HEADS,
            **LATENT,
            **GROUPS,
            "num_local_experts": 4,
            "head_dim": 6,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "layer_types": LAYERS,
        },
        "Qwen4ExpForCausalLM": {  # attention is sparse; n-grams of the ids are a state too
            **NARROW,
            **DELTA,
            **EXPERTS,
            **QSA,
            "head_dim": 8,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "shared_expert_intermediate_size": 16,
            "hc_lowrank": 4,
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 2,
            "split_ngram_parts": 1,
        },
    },
    "other recurrences": {
        "RecurrentGemmaForCausalLM": {**HEADS, "lru_width": 24, "attention_window_size": 8},
        "MiniMaxForCausalLM": {**NARROW, "num_local_experts": 4, "block_size": 8, "layer_types": LAYERS},
        # with a cache its own training fails: it writes states over those that the backward needs
        "xLSTMForCausalLM": {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "chunk_size": 8,
            "use_cache": False,
        },
    },
    "short convolutions and attention": {
        "Lfm2ForCausalLM": CONV,
        "Lfm3ForCausalLM": CONV,
        "Lfm2MoeForCausalLM": {**CONV, **EXPERTS, "num_dense_layers": 1},
        "ZayaForCausalLM": NARROW,
        "InklingForCausalLM": INKLING,
        "Inkling2ForCausalLM": INKLING,
    },
    "attention": {
        "LlamaForCausalLM": NARROW,
        "Qwen3ForCausalLM": NARROW,
        "Qwen3MoeForCausalLM": {**NARROW, **EXPERTS},
        "MistralForCausalLM": {**NARROW, "sliding_window": 5},
        "MixtralForCausalLM": {**NARROW, "num_local_experts": 4},
        "DeepseekV3ForCausalLM": {
            **HEADS,
            **LATENT,
            **GROUPS,
            "n_routed_experts": 4,
            "q_lora_rank": 12,
            "first_k_dense_replace": 1,
        },
        "DeepseekV32ForCausalLM": {
            **HEADS,
            **LATENT,
            **GROUPS,
            **DSA,
            "q_lora_rank": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
        },
        "Gemma2ForCausalLM": {**NARROW, "sliding_window": 5},
        "Gemma3ForCausalLM": {**NARROW, "sliding_window": 5},
        "GptOssForCausalLM": {
            **NARROW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
        "CohereForCausalLM": HEADS,
        "GraniteForCausalLM": {**HEADS, "logits_scaling": 3.0},
        "Olmo2ForCausalLM": HEADS,
        "Olmo3ForCausalLM": {**HEADS, "sliding_window": 5},
        "Ernie4_5ForCausalLM": HEADS,
        "Cohere2ForCausalLM": {**HEADS, "sliding_window": 5},
        "Gemma4ForCausalLM": {
            **NARROW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 5,
            "global_head_dim": 6,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
        },
        "Llama4ForCausalLM": {
            **NARROW,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
        },
        "FalconForCausalLM": {**HEADS, "alibi": True},
        "BloomForCausalLM": {"hidden_size": 24, "n_layer": 3, "n_head": 4},
        "MptForCausalLM": {"d_model": 24, "n_layers": 3, "n_heads": 4},
        "OPTForCausalLM": {
            **WIDTHS,
            "num_attention_heads": 4,
            "ffn_dim": 40,
            "word_embed_proj_dim": 24,
            "dropout": 0.0,
        },
        "GPTNeoXForCausalLM": HEADS,
        "GPT2LMHeadModel": {
            "n_embd": 24,
            "n_layer": 3,
            "n_head": 4,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
        "Phi3ForCausalLM": HEADS,
    },
}

MODELS = {name: options for classes in FAMILIES.values() for name, options in classes.items()}

# Tried and refused, each for a reason of its own.
REFUSED: dict[str, dict[str, Any]] = {"DeepseekV4ForCausalLM": HEADS}

# For tests of what they alone have.
OTHERS: dict[str, dict[str, Any]] = {
    "JetMoeForCausalLM": {
        **WIDTHS,
        "intermediate_size": 40,
        "num_key_value_heads": 2,
        "kv_channels": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "ErnieForCausalLM": {**HEADS, "num_hidden_layers": 2, "is_decoder": True, "use_task_id": True},
    "RoCBertForCausalLM": {
        **HEADS,
        "num_hidden_layers": 2,
        "is_decoder": True,
        "shape_vocab_size": 4,
        "pronunciation_vocab_size": 4,
    },
}

SINGLE, TO_SINGLE = torch.float32, torch.Tensor.float


@contextlib.contextmanager
def _float32_is(dtype: torch.dtype, method: Any) -> Iterator[None]:
    before = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = dtype
    torch.Tensor.float = method
    try:
        yield
    finally:
        torch.float32 = torch.float = before[0]
        torch.Tensor.float = before[1]


def float64_throughout() -> contextlib.AbstractContextManager[None]:
    """transformers casts norms, scan and loss to float32, even in float64: here float32 *is* float64."""
    return _float32_is(torch.float64, torch.Tensor.double)


@_float32_is(
    SINGLE, TO_SINGLE
)  # for modules of transformers are imported on first use, and would stay that way
def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """A model of the class `name`, in training mode, its weights away from their initial values, at which
    biases are zero and norms one."""
    torch.manual_seed(seed)
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name} yet")
    cls = getattr(transformers, name)
    tokens = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = cls(cls.config_class(**{**tokens, **{**MODELS, **REFUSED, **OTHERS}[name], **options}))
    model = disturbed(model).to(dtype).train()
    return in_double(model) if dtype == torch.float64 else model


def in_double(model: Any) -> Any:
    """The model, what it fixes to float32 when its code is read being float64."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # MiniMax's tables
            tables = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = tables
        if hasattr(module, "_rnn_scan"):  # RecurrentGemma's
            module._rnn_scan = functools.partial(module._rnn_scan, acc_dtype=torch.float64)
        if hasattr(module, "_inference_fn"):  # xLSTM's
            for name in ("mlstm_sequence_kernel", "mlstm_step_kernel"):
                module._inference_fn.keywords[name].keywords["dtype_state"] = torch.float64
    return model


def disturbed(model: Any) -> Any:
    """The model with other weights than its initial ones, and experts that compute in its own precision."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    if model._can_set_experts_implementation():  # the others compute in float32
        model.set_experts_implementation("eager")
    return model


def make_batch(seqlen: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Labels are ignored here and there, the last row is padded at the right."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, seqlen), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -100)
    mask, padded = torch.ones_like(ids), seqlen // 4
    mask[-1, -padded:], labels[-1, -padded:], ids[-1, -padded:] = 0, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def current_gradients(model: Any) -> dict[str, Tensor]:
    """By name; parameters that have none are absent."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def assert_slope(model: Any, loss: Callable[[], Tensor], gradients: dict[str, Tensor]) -> None:
    """Gradients are the loss's, by finite differences in a random direction; the loss draws what it drew."""
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    slope = sum(float((gradients[name] * d).sum()) for name, d in direction.items())
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for name, p in model.named_parameters():
                p.add_(direction[name], alpha=step)
            values.append(loss().item())
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative L2 errors of a wrapped model against the untouched one.

    Attributes:
        loss, total: of the loss, and of all gradients as one vector.
        worst: of one parameter's gradient, `parameter`'s, apart from those that are nothing but rounding.
    """

    loss: float
    total: float
    worst: float
    parameter: str


def errors(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> Errors:
    """Of two results of `loss_and_gradients`; a parameter that has a gradient in one only is an assertion."""
    loss, gradients = expected
    assert got[1].keys() == gradients.keys()
    sizes = {name: gradient.norm().item() for name, gradient in gradients.items()}
    distances = {name: (got[1][name] - gradient).norm().item() for name, gradient in gradients.items()}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    each = {name: distances[name] / size for name, size in sizes.items() if size > 1e-10 * whole}
    worst = max(each, key=each.__getitem__)
    total = sum(distance**2 for distance in distances.values()) ** 0.5 / whole
    return Errors(float((got[0] - loss).abs() / loss.abs()), total, each[worst], worst)


def assert_exact(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Of two results of `loss_and_gradients`, in float64."""
    found = errors(got, expected)
    assert found.loss <= 1e-12 and found.total <= 1e-10 and found.worst <= 1e-10, found


@contextlib.contextmanager
def one_line(message: str) -> Iterator[None]:
    """A ValueError with this message is raised, in one line."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        yield
    assert "\n" not in str(caught.value)


def held(model: Any) -> str:
    """What the cache of a wrapped model holds, once it has been used."""
    known, *_ = model.__dict__["_adjoint"].known
    grows = {slot.grows is not None for slot in known.slots}
    return {(True,): "keys and values", (False,): "recurrent"}.get(tuple(grows), "both")


def reason(error: ValueError) -> str:
    """Why a model was refused, without what differs from model to model."""
    said = str(error).removesuffix("; adjoint.wrap(model, adjoint.Backprop()) works")
    said = said.split(" cannot be trained by chunks: ")[-1]
    return re.sub(r" \([^)]* differs from the whole's, [^)]*\)", "", said)
