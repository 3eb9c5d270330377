"""Tiny transformers models with random weights, computing in float64 throughout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")
# Tables of precisions, ours and PyTorch's, are made before float32 is float64.
pytest.importorskip("adjoint.hf.wrap")
from adjoint.hf.cache import why_no_recurrence  # noqa: E402
from adjoint.hf.transformers_api import RELEASE, cache_argument  # noqa: E402

pickle.dumps(torch.zeros(1))

VOCAB = 61
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
# What configurations call their sizes, and how small each is here, where the class's row says nothing else.
SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        1: "topk_group first_k_dense_replace indexer_kv_heads num_dense_layers split_ngram_parts",
        2: "num_key_value_heads swa_num_key_value_heads linear_num_key_heads n_groups mamba_n_groups "
        "mamba_ngroups n_group layer_group_size indexer_compress_ratio heads_per_ngram "
        "make_ngram_vocab_size_divisible_by",
        3: "num_hidden_layers n_layer n_layers",
        4: "num_attention_heads swa_num_attention_heads n_head n_heads num_heads mamba_n_heads n_mamba_heads "
        "mamba_num_heads linear_num_heads linear_num_value_heads qk_rope_head_dim mamba_dt_rank d_rel "
        "hc_lowrank hidden_size_per_layer_input n_routed_experts shape_vocab_size pronunciation_vocab_size",
        5: "sliding_window_size",
        6: "head_dim swa_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim qk_nope_head_dim "
        "v_head_dim kv_channels",
        8: "state_size ssm_state_size mamba_d_state kv_lora_rank block_size attention_window_size "
        "attention_chunk_size indexer_head_dim indexer_budget",
        12: "mamba_d_head mamba_head_dim",
        16: "chunk_size mamba_chunk_size moe_intermediate_size shared_expert_intermediate_size rel_extent "
        "indexer_n_heads",
        20: "shared_intermediate_size",
        24: "hidden_size d_model n_embd lru_width word_embed_proj_dim",
        40: "intermediate_size ffn_dim",
        48: "mamba_d_ssm",
        50: "ngram_vocab_size_base",
        VOCAB: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    }.items()
    for name in names.split()
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # MLA
DELTA: dict[str, Any] = {"layer_types": LAYERS}  # gated delta rule
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
INKLING: dict[str, Any] = {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
INKLING |= {"num_experts_per_tok": 2}
WINDOW: dict[str, Any] = {"sliding_window": 5}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
JAMBA: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 1}

# Family → class → its configuration's options besides `SIZES`; special tokens come from `make`.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "Mamba": {"MambaForCausalLM": {}, "FalconMambaForCausalLM": {}},
    "Mamba-2": {"Mamba2ForCausalLM": {"head_dim": 12}},
    "hybrids of Mamba and attention": {
        "JambaForCausalLM": {**EXPERTS, **JAMBA, "num_hidden_layers": 4},
        "ZambaForCausalLM": {
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        },
    },
    "hybrids of Mamba-2 and attention": {
        "BambaForCausalLM": {"attn_layer_indices": [1]},
        "FalconH1ForCausalLM": {},
        "GraniteMoeHybridForCausalLM": {
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention", "mamba"],
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
        },
        "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "mlp"]},
        "Zamba2ForCausalLM": {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    },
    "delta rules and attention": {
        "Qwen3NextForCausalLM": {**DELTA, **EXPERTS},
        "Qwen3_5ForCausalLM": DELTA,
        "Qwen3_5MoeForCausalLM": {**DELTA, **EXPERTS},
        "OlmoHybridForCausalLM": {**DELTA, "linear_num_key_heads": 4},
        "KimiLinearForCausalLM": {
            **DELTA,
            **LATENT,
            **EXPERTS,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "BailingHybridForCausalLM": {**DELTA, **LATENT, **LOCAL_EXPERTS, "num_mtp_layers": 0},
        "Qwen4ExpForCausalLM": {  # attention is sparse; n-grams of the ids are a state too
            **EXPERTS,
            "head_dim": 8,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "ple_layer_ids": [1],
            "rope_parameters": ROPE,
        },
    },
    "other recurrences": {
        "RecurrentGemmaForCausalLM": {},
        "MiniMaxForCausalLM": {**LOCAL_EXPERTS, **DELTA},
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
        "Lfm2MoeForCausalLM": {**CONV, **EXPERTS},
        "ZayaForCausalLM": {},
        "InklingForCausalLM": INKLING,
        "Inkling2ForCausalLM": INKLING,
    },
    "looped depth": {  # some layers run again, each time with keys, values and tails of their own
        "Inkling2LoopForCausalLM": {
            **{
                "num_hidden_layers": 6,
                "layer_types": ["hybrid_sliding", "hybrid"] * 3,
                "num_experts_per_tok": 2,
            },
            **{
                "loop_layer_index_start": 2,
                "loop_layer_index_end": 4,
                "loop_num_passes": 3,
                "loop_gate_rank": 4,
            },
            "n_layers_per_attn_res_block": 2,
        },
        "DoryForCausalLM": {
            **WINDOW,
            **{"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "n_recurrent_loops": 3},
        },
    },
    "attention": {
        "LlamaForCausalLM": {},
        "Qwen3ForCausalLM": {},
        "Qwen3MoeForCausalLM": EXPERTS,
        "MistralForCausalLM": WINDOW,
        "MixtralForCausalLM": LOCAL_EXPERTS,
        "DeepseekV3ForCausalLM": {**LATENT, "num_experts_per_tok": 2, "q_lora_rank": 12},
        "DeepseekV32ForCausalLM": {  # sparse attention of many heads: with few, keys often share a score
            **LATENT,
            "num_experts_per_tok": 2,
            "q_lora_rank": 8,
            "index_topk": 6,
            "index_n_heads": 16,
            "index_head_dim": 8,
        },
        "MiniMaxM3VLForCausalLM": {  # blocks of 3 tokens, 3 of which are picked
            **LOCAL_EXPERTS,
            "head_dim": 8,
            "rotary_dim": 4,
            "dense_intermediate_size": 40,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 3,
            "index_topk_blocks": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        "DeepseekV4ForCausalLM": {  # windows of 2 and of 5 tokens
            "head_dim": 64,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
            "sliding_window": 6,
            "index_topk": 3,
        },
        "Gemma2ForCausalLM": WINDOW,
        "Gemma3ForCausalLM": WINDOW,
        "GptOssForCausalLM": {**LOCAL_EXPERTS, **WINDOW},
        "CohereForCausalLM": {},
        "GraniteForCausalLM": {"logits_scaling": 3.0},
        "Olmo2ForCausalLM": {},
        "Olmo3ForCausalLM": WINDOW,
        "Ernie4_5ForCausalLM": {},
        "Cohere2ForCausalLM": WINDOW,
        "Gemma4ForCausalLM": {
            **WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 6,
            "num_kv_shared_layers": 2,
        },
        "Llama4ForCausalLM": {"num_hidden_layers": 4, "num_local_experts": 2},
        "FalconForCausalLM": {"alibi": True},
        "BloomForCausalLM": {},
        "MptForCausalLM": {},
        "OPTForCausalLM": {"dropout": 0.0},
        "GPTNeoXForCausalLM": {},
        "GPT2LMHeadModel": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "Phi3ForCausalLM": {},
    },
}

MODELS = {name: options for classes in FAMILIES.values() for name, options in classes.items()}

# Classes that earlier releases gave no cache that chunks can go on from, or no backbone, or could not run.
EXACT_SINCE = {
    "GraniteSpeechForConditionalGeneration": (5, 15),
    "Granite4VisionForConditionalGeneration": (5, 20),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (5, 21),
    "DeepseekV32ForCausalLM": (5, 18),
    "Qwen4ExpForCausalLM": (5, 21),
    "Qwen4ExpForConditionalGeneration": (5, 21),
}
# Tried and refused, each for a reason of its own.
REFUSED: dict[str, dict[str, Any]] = {
    "OpenAIGPTLMHeadModel": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
}

# For tests of what they alone have.
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}
QUIET = {"num_hidden_layers": 2, "is_decoder": True}
QUIET |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OTHERS: dict[str, dict[str, Any]] = {
    "JetMoeForCausalLM": LOCAL_EXPERTS,
    "Mistral4ForCausalLM": {**LATENT, "num_experts_per_tok": 2, "q_lora_rank": 12},
    "ErnieForCausalLM": {**QUIET, "use_task_id": True},
    "RoCBertForCausalLM": QUIET,
    "DogeForCausalLM": {"keep_window_size": 40},
    "HrmTextForCausalLM": {"prefix_lm": True},
    "Llama4ForConditionalGeneration": {
        "text_config": {
            **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
            **{name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads")},
            **{
                "num_hidden_layers": 4,
                "num_local_experts": 2,
                "intermediate_size_mlp": 40,
                "pad_token_id": 0,
            },
        },
        "vision_config": {
            **IMAGES,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
        },
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {
            **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
            **{name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads")},
            **{"num_hidden_layers": 3, "sliding_window": 5},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": IMAGES,
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
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
    """Make float32 mean float64: transformers casts norms, scan and loss to float32, even in float64."""
    return _float32_is(torch.float64, torch.Tensor.double)


@_float32_is(
    SINGLE, TO_SINGLE
)  # for modules of transformers are imported on first use, and would stay that way
def make(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, skips: bool = True, **options: Any
) -> Any:
    """Return a model of the class `name`, in training mode; skip the test where the release has none to wrap.

    Its weights are away from their initial values, at which biases are zero and norms one."""
    torch.manual_seed(seed)
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name} yet")
    cls = getattr(transformers, name)
    options_taken = inspect.signature(cls.config_class).parameters
    model_options = {size: SIZES[size] for size in SIZES if size in options_taken} | {
        **MODELS,
        **REFUSED,
        **OTHERS,
    }[name]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = cls(cls.config_class(**{**tokens, **model_options, **options}))
    reason = refused_by_release(name) or why_no_recurrence(model.config.get_text_config())
    if skips and reason:
        pytest.skip(reason)
    model = perturb_weights(model).to(dtype).train()
    return to_float64(model) if dtype == torch.float64 else model


def refused_by_release(name: str) -> str:
    """Return why a class is refused under this release alone, or an empty text."""
    is_refused = EXACT_SINCE.get(name, (0, 0)) > RELEASE
    return f"{name} is refused before transformers {EXACT_SINCE[name]}" if is_refused else ""


def skip_if_broken(name: str) -> None:
    """Skip a test of text where a class fails by itself under this release."""
    if name == "Llama4ForConditionalGeneration" and RELEASE == (5, 24):
        pytest.skip("transformers 5.24's own code of this class fails without images")


def since(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Return a mark for a test of what transformers has only since a release."""
    return pytest.mark.skipif(
        (major, minor) > RELEASE, reason=f"before transformers {major}.{minor}: {reason}"
    )


def to_float64(model: Any) -> Any:
    """Convert to float64 what a model fixes to float32 when its code is read, and return the model."""
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


def perturb_weights(model: Any) -> Any:
    """Move a model's weights away from their initial values, and let experts compute in its own precision.

    Time steps become as short as in trained models. In Bamba, Falcon-H1, Granite, Jamba and Qwen's delta rule
    they begin at dt_bias = 1 or 0, where states are gone after a few tokens: a fault in what chunks hand on
    would hardly show, and gradients of A_log and dt_bias are the remainder of terms that cancel."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
            if name.endswith(("dt_bias", "dt_proj.bias")) and p.mean() > -1:
                p -= 5
    if model._can_set_experts_implementation():  # the others compute in float32
        model.set_experts_implementation("eager")
    return model


def make_batch(seqlen: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch whose labels are ignored here and there, and whose last row is padded at the right."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, seqlen), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -100)
    mask, padded = torch.ones_like(ids), seqlen // 4
    mask[-1, -padded:], labels[-1, -padded:], ids[-1, -padded:] = 0, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def current_gradients(model: Any) -> dict[str, Tensor]:
    """Return gradients by name; parameters without one are absent."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a call and the gradients of its backward."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def by_spans(model: Any, ids: Tensor, targets: Tensor, span: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss over all targets and the sum of gradients of the untouched model, span by span.

    Each span continues from transformers' own cache of all tokens before it, which is a constant."""
    model.zero_grad()
    total = torch.zeros(())
    name = cache_argument(inspect.signature(model.forward).parameters)
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    for start in range(0, ids.shape[1], span):
        cache = transformers.DynamicCache(config=model.config)
        cache_arguments = {name: cache, "use_cache": True}
        if start:
            with torch.no_grad():
                model(input_ids=ids[:, :start], **cache_arguments)
        if has_positions:
            cache_arguments["position_ids"] = torch.arange(start, min(start + span, ids.shape[1]))[None]
        for layer in cache.layers:  # new recurrent states go over the old, which the backward still needs
            layer.update_recurrent_state = lambda state, *_, **__: state
        logits = model(input_ids=ids[:, start : start + span], **cache_arguments).logits
        target = targets[:, start : start + span].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / targets.numel()
        loss.backward()
        total = total + loss.detach()
    return total, current_gradients(model)


def assert_slope(model: Any, loss: Callable[[], Tensor], gradients: dict[str, Tensor]) -> None:
    """Assert that gradients are the loss's, by finite differences in a random direction.

    The loss must draw the same random numbers each time."""
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
        loss: of the loss.
        total: of all gradients as one vector.
        worst: the largest of one parameter's gradient, apart from those that are rounding alone.
        parameter: name of that parameter.
    """

    loss: float
    total: float
    worst: float
    parameter: str


def errors(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> Errors:
    """Return the errors of one result of `loss_and_gradients` against another.

    Both must have gradients of the same parameters."""
    loss, gradients = expected
    assert got[1].keys() == gradients.keys()
    sizes = {name: gradient.norm().item() for name, gradient in gradients.items()}
    distances = {name: (got[1][name] - gradient).norm().item() for name, gradient in gradients.items()}
    total_size = sum(size**2 for size in sizes.values()) ** 0.5
    each = {name: distances[name] / size for name, size in sizes.items() if size > 1e-10 * total_size}
    worst = max(each, key=each.__getitem__)
    total = sum(distance**2 for distance in distances.values()) ** 0.5 / total_size
    return Errors(float((got[0] - loss).abs() / loss.abs()), total, each[worst], worst)


def assert_exact(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Assert that two results of `loss_and_gradients` agree to float64's precision."""
    difference = errors(got, expected)
    assert difference.loss <= 1e-12 and difference.total <= 1e-10 and difference.worst <= 1e-10, difference


@contextlib.contextmanager
def one_line(message: str) -> Iterator[None]:
    """Expect a ValueError with this message, in one line."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        yield
    assert "\n" not in str(caught.value)


def cache_contents(model: Any) -> str:
    """Describe what the cache of a wrapped model holds, once the model has been used."""
    wrapped = next(module for module in model.modules() if "_adjoint" in vars(module))
    verification, *_ = vars(wrapped)["_adjoint"].verifications
    grows = {slot.grows is not None for slot in verification.slots}
    return {(True,): "keys and values", (False,): "recurrent"}.get(tuple(grows), "both")


def refusal_reason(error: ValueError) -> str:
    """Return why a model was refused, without the numbers that differ from model to model."""
    message = str(error).removesuffix("; adjoint.wrap(model, adjoint.Backprop()) works")
    message = message.split(" cannot be trained by chunks: ")[-1]
    return re.sub(r" \([^)]* differs from the whole's, [^)]*\)", "", message)
