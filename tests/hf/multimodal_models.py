"""Tiny multimodal models of transformers with random weights, and calls of them with images or sound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.hf_models import LAYERS, SIZES, VOCAB, perturb_weights, refused_by_release, to_float64

transformers = pytest.importorskip("transformers")

IMAGE, VIDEO, AUDIO, START, END = 58, 59, 57, 55, 56  # tokens
WIDTH = 24
TEXT: dict[str, Any] = {
    name: SIZES[name]
    for name in ("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
}
TEXT |= {"vocab_size": VOCAB, "hidden_size": WIDTH, "head_dim": 8}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
DELTA = {"layer_types": LAYERS, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
QWEN_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
QWEN_VISION |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": WIDTH}
QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_TOKENS |= {"vision_start_token_id": START, "vision_end_token_id": END}
GLM_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
GLM_TOKENS |= {"image_start_token_id": START, "image_end_token_id": END}
GLM_TOKENS |= {"video_start_token_id": 53, "video_end_token_id": 54}

Inputs = Callable[[Tensor, torch.Generator], dict[str, Tensor]]


def pixels(*shape: int, images: str = "pixel_values") -> Inputs:
    """Return a function that makes `images` images of a shape."""
    return lambda ids, draw: {images: torch.randn(len(STARTS), *shape, generator=draw, dtype=torch.float64)}


def patches(features: int, kind: str = "image") -> Inputs:
    """Return a function that makes images of 4 × 6 patches as Qwen-VL has them, or videos of one frame."""
    pixel_name = "pixel_values" if kind == "image" else "pixel_values_videos"

    def make(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
        values = torch.randn(24 * len(STARTS), features, generator=draw, dtype=torch.float64)
        types = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
        grid = torch.tensor([[1, 4, 6]] * len(STARTS))
        return {pixel_name: values, f"{kind}_grid_thw": grid, "mm_token_type_ids": types}

    return make


def sized(make: Inputs, **sizes: Any) -> Inputs:
    """Return a function that adds tensors of sizes, one row per image."""
    return lambda ids, draw: {
        **make(ids, draw),
        **{name: torch.tensor([row] * len(STARTS)) for name, row in sizes.items()},
    }


def token_typed(make: Inputs, name: str = "token_type_ids") -> Inputs:
    """Return a function that adds token types, 1 for images."""
    return lambda ids, draw: {**make(ids, draw), name: (ids == IMAGE).long()}


def untyped(make: Inputs) -> Inputs:
    """Return a function that leaves out token types."""
    return lambda ids, draw: {n: v for n, v in make(ids, draw).items() if n != "mm_token_type_ids"}


STARTS = ((0, 4), (0, 15), (1, 9))  # row and first token of each image
Row = tuple[dict[str, Any], int, Inputs]
THREE = {"rope_parameters": {**M_ROPE, "mrope_section": [1, 1, 1]}}
SHARED: dict[str, Any] = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}
QWEN4: dict[str, Any] = {
    name: SIZES[name] for name in SIZES if name.startswith(("indexer_", "hc_", "split_"))
}
QWEN4 |= {name: SIZES[name] for name in SIZES if "ngram" in name}
QWEN4 |= {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "ple_layer_ids": [1]}
GLM5: dict[str, Any] = {"num_key_value_heads": 4, "num_hidden_layers": 4, "hc_mult": 2}
GLM5 |= {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 6, "qk_nope_head_dim": 6}
GLM5 |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
GLM5 |= {"linear_head_dim": 6, "linear_num_heads": 4}
# pools of 3 tokens, 2 of which are picked: chunks of 8 end inside one
GLM5 |= {"index_topk": 6, "index_kpool": 3, "index_head_dim": 8, "index_n_heads": 16}
GLM5 |= {"layer_types": ["linear_attention", "indexed_attention"] * 2}
GLM5 |= {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
GEMMA4: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 5, "hidden_size_per_layer_input": 4}
GEMMA4 |= {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 8}
GEMMA4 |= {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_bidirectional_attention": "vision",
}
GEMMA4_VISION = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 8,
}
GEMMA4_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
SOUND = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SOUND |= {"num_mel_bins": 8, "max_source_positions": 16}


def patched(text: dict[str, Any], vision: dict[str, Any], tokens: dict[str, int] = QWEN_TOKENS) -> Row:
    """Return the row of a class whose images are patches, as Qwen-VL has them."""
    config = {"text_config": {**TEXT, **text}, "vision_config": vision, **tokens}
    return config, 6, patches(96)


def qwen(text: dict[str, Any], **vision: Any) -> Row:
    return patched({"rope_parameters": M_ROPE, **text}, {**QWEN_VISION, **vision})


def viewed(make: Inputs, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Row:
    """Return the row of a class whose images are pixels."""
    return {"text_config": {**TEXT, **text}, "vision_config": {**VISION, **vision}, **more}, 4, make


def of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **more}


def images_of_lfm(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(len(STARTS), 16, dtype=torch.long)
    return {**sized(pixels(16, 48), spatial_shapes=(4, 4))(ids, draw), "pixel_attention_mask": mask}


def images_of_gemma4(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(len(STARTS), -1, -1)
    values = torch.rand(len(STARTS), 16, 48, generator=draw, dtype=torch.float64)
    types = (ids == IMAGE).long()
    return {"pixel_values": values, "image_position_ids": positions, "mm_token_type_ids": types}


def images_of_idefics(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 2, 3, 16, 16, generator=draw).double()}


def images_of_kimi(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(24 * len(STARTS), 3, 4, 4, generator=draw, dtype=torch.float64)
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 4, 6]] * len(STARTS))}


def images_of_inkling2(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    """Return images of 2 × 3 tokens, each of 2 × 2 patches."""
    values = torch.randn(6 * len(STARTS), 8, 8, 3, generator=draw, dtype=torch.float64)
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 2, 3]] * len(STARTS))}


def images_of_nemotron(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(16 * len(STARTS), 48, generator=draw, dtype=torch.float64)
    return {"pixel_values": values, "image_grid_hw": torch.tensor([[4, 4]] * len(STARTS))}


def sounds_of_granite(ids: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(len(STARTS), 20, 8, generator=draw, dtype=torch.float64)
    mask = torch.ones(len(STARTS), 6, dtype=torch.bool)
    return {"input_features": values, "input_features_mask": mask}


GRID = {
    name: VISION[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "patch_size")
}
GRID |= {"num_hidden_layers": 2}
DEEP: dict[str, Any] = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
SPEECH: dict[str, Any] = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2}
SPEECH |= {"encoder_ffn_dim": 16, "d_model": 16, "output_dim": WIDTH, "max_source_positions": 32}
SPEECH |= {"n_window": 4, "n_window_infer": 8, "downsample_hidden_size": 8}
QFORMER: dict[str, Any] = {"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1}
QFORMER |= {"num_attention_heads": 2, "intermediate_size": 16, "cross_attention_frequency": 1}
QFORMER |= {"encoder_hidden_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LATENT: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "head_dim"}
LATENT |= {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 6, "n_group": 2}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1}
BLOCKS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}
BLOCKS |= {"dense_intermediate_size": 40, "shared_intermediate_size": 16, "index_n_heads": 2}
BLOCKS |= {"index_head_dim": 8, "index_block_size": 3, "index_topk_blocks": 3}
BLOCKS |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
BLOCKS |= {"mlp_layer_types": ["dense", "sparse", "dense"]}
INKLING: dict[str, Any] = {"unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_head_dim": 6}
INKLING |= {"swa_num_key_value_heads": 2, "head_dim": 6, "sliding_window_size": 5, "d_rel": 4}
INKLING |= {"rel_extent": 16, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
INKLING2: dict[str, Any] = {**INKLING, "n_layers_per_attn_res_block": 2}
INKLING2_VISION = {**GRID, "text_hidden_size": WIDTH, "posemb_grid_size": 8, "projection_hidden_dim": 16}
LOOPS = {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 4}
MAMBA2: dict[str, Any] = {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4}
MAMBA2 |= {"mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SQUARES = pixels(3, 16, 16)
# Class → its configuration, tokens of an image, and a function that makes the images' inputs.
MULTIMODAL: dict[str, Row] = {
    "Qwen3_5ForConditionalGeneration": qwen(DELTA, num_position_embeddings=16),
    "Qwen3_5MoeForConditionalGeneration": qwen(SHARED, num_position_embeddings=16),
    # attention is sparse, by an indexer that keeps positions
    "Qwen4ExpForConditionalGeneration": qwen({**SHARED, **QWEN4}, num_position_embeddings=16),
    "Qwen3VLForConditionalGeneration": qwen({}, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    "Qwen2_5_VLForConditionalGeneration": qwen(
        {"head_dim": 6, **THREE}, window_size=16, fullatt_block_indexes=[1]
    ),
    "Qwen2VLForConditionalGeneration": patched(
        {"head_dim": 6, **THREE},
        {"depth": 2, "embed_dim": 16, "hidden_size": WIDTH, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4},
    ),
    "Glm4vForConditionalGeneration": patched(
        {"head_dim": 12, "rope_parameters": {**THREE["rope_parameters"], "partial_rotary_factor": 0.5}},
        {**QWEN_VISION, "image_size": 16},
        GLM_TOKENS,
    ),
    "Glm5NextForConditionalGeneration": (
        {
            "text_config": {**{name: value for name, value in TEXT.items() if name != "head_dim"}, **GLM5},
            "vision_config": {**QWEN_VISION, "image_size": 16, "projection_intermediate_size": 16},
            **GLM_TOKENS,
        },
        6,
        untyped(patches(96)),
    ),
    "Gemma3ForConditionalGeneration": viewed(
        token_typed(SQUARES),
        WINDOWS,
        of_type("siglip_vision_model"),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    ),
    "Mistral3ForConditionalGeneration": viewed(
        sized(SQUARES, image_sizes=(16, 16)),
        of_type("mistral", sliding_window=None),
        of_type("pixtral", head_dim=8),
        image_token_index=IMAGE,
    ),
    "Lfm2VlForConditionalGeneration": viewed(
        images_of_lfm,
        of_type("lfm2", layer_types=["conv", "full_attention", "conv"], block_ff_dim=40),
        of_type("siglip2_vision_model", num_patches=16),
        projector_hidden_size=16,
        image_token_id=IMAGE,
    ),
    "InternVLForConditionalGeneration": viewed(
        SQUARES,
        of_type("qwen3"),
        {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=4,
    ),
    "Cohere2VisionForConditionalGeneration": viewed(
        SQUARES,
        of_type("cohere2", sliding_window=5),
        of_type("siglip_vision_model", vision_use_head=False),
        image_token_id=IMAGE,
        alignment_intermediate_size=16,
    ),
    "LlavaForConditionalGeneration": viewed(
        pixels(3, 8, 8), of_type("llama"), of_type("clip_vision_model", image_size=8), image_token_index=IMAGE
    ),
    "Idefics3ForConditionalGeneration": viewed(
        images_of_idefics, of_type("llama"), {}, image_token_id=IMAGE, scale_factor=2
    ),
    "Gemma4ForConditionalGeneration": viewed(
        images_of_gemma4, GEMMA4, GEMMA4_VISION, audio_config=None, **GEMMA4_TOKENS
    ),
    "VoxtralForConditionalGeneration": (
        {"text_config": {**TEXT, **of_type("llama")}, "audio_config": SOUND, "audio_token_id": IMAGE},
        4,
        pixels(8, 32, images="input_features"),
    ),
    "Qwen3VLMoeForConditionalGeneration": qwen(EXPERTS, **DEEP),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (
        {
            "text_config": {**TEXT, **EXPERTS, "rope_parameters": M_ROPE},
            "vision_config": {**QWEN_VISION, **DEEP},
            "audio_config": SPEECH,
            **{"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO},
            "vision_start_token_id": START,
        },
        6,
        untyped(patches(96)),
    ),
    "Lfm3VlForConditionalGeneration": (
        {
            "text_config": {**TEXT, **of_type("lfm3", layer_types=["conv", "full_attention", "conv"])},
            "vision_config": {**GRID, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
            **{"projector_hidden_size": 16, "image_token_id": IMAGE, "video_token_id": VIDEO},
        },
        6,
        untyped(patches(96)),
    ),
    "Kimi_K25ForConditionalGeneration": (
        {
            "text_config": {**LATENT, **of_type("deepseek_v3")},
            "vision_config": {**GRID, "pos_emb_height": 8, "pos_emb_width": 8},
            **{"projection_hidden_size": 16, "image_token_id": IMAGE, "video_token_id": VIDEO},
        },
        6,
        images_of_kimi,
    ),
    "MiniMaxM3SparseForConditionalGeneration": (
        {
            "text_config": {**TEXT, **BLOCKS},
            "vision_config": {**GRID, "image_size": 16},
            **{"projector_hidden_size": 16, "image_token_index": IMAGE, "video_token_index": VIDEO},
        },
        6,
        untyped(patches(96)),
    ),
    "InklingForConditionalGeneration": (
        {
            "text_config": {**TEXT, **INKLING, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
            "vision_config": {**GRID, "text_hidden_size": WIDTH, "num_hidden_layers": 6},
            "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": WIDTH},
            **{"image_token_id": IMAGE, "audio_token_id": AUDIO},
        },
        4,
        lambda ids, draw: {"pixel_values": torch.randn(12, 2, 4, 4, 3, generator=draw).double()},
    ),
    "Inkling2ForConditionalGeneration": (
        {
            "text_config": {
                **{**TEXT, **INKLING2, "num_hidden_layers": 4},
                "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            },
            "vision_config": {**INKLING2_VISION, **of_type("inkling2_vision")},
            "image_token_id": IMAGE,
        },
        6,
        images_of_inkling2,
    ),
    "Inkling2LoopForConditionalGeneration": (
        {
            "text_config": {
                **{**TEXT, **INKLING2, **LOOPS, "num_hidden_layers": 6},
                "layer_types": ["hybrid_sliding", "hybrid"] * 3,
            },
            "vision_config": {**INKLING2_VISION, **of_type("inkling2_vision")},
            "image_token_id": IMAGE,
        },
        6,
        images_of_inkling2,
    ),
    "Granite4VisionForConditionalGeneration": (
        {
            "text_config": {**TEXT, "num_hidden_layers": 4},
            "vision_config": {**VISION, **of_type("siglip_vision_model", hidden_size=64)},
            "qformer_config": {**QFORMER, "use_qformer_text_input": False},
            **{"image_token_index": IMAGE, "image_grid_pinpoints": [[16, 16]], "downsample_rate": "1/2"},
            **{"deepstack_layer_map": [[-1, 0], [-2, 1]], "spatial_target_layers": [0, 1, 2, 3]},
            **{"vision_feature_select_strategy": "full", "projector_dropout": 0.0},
        },
        10,
        sized(pixels(2, 3, 16, 16), image_sizes=(16, 16)),
    ),
    "NemotronH_Omni_Reasoning_V3": (
        {
            "text_config": {**TEXT, **MAMBA2, **of_type("nemotron_h")},
            "vision_config": {**GRID, **of_type("radio", video_temporal_patch_size=2, image_size=16)},
            **{"audio_config": None, "projector_hidden_size": 16, "vision_hidden_size": 16},
            **{"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO},
        },
        4,
        images_of_nemotron,
    ),
    "GraniteSpeechForConditionalGeneration": (
        {
            "text_config": {**TEXT, **of_type("granite")},
            "encoder_config": {
                **{"input_dim": 8, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "output_dim": 6},
                **{"context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3, "dropout": 0.0},
            },
            "projector_config": QFORMER,
            **{
                "audio_token_index": IMAGE,
                "has_lora_adapter": False,
                "downsample_rate": 5,
                "window_size": 15,
            },
        },
        6,
        sounds_of_granite,
    ),
}


@functools.cache
def _imported(name: str) -> Any:
    return getattr(transformers, name, None)


def make_multimodal(name: str, seed: int = 1, **text: Any) -> Any:
    """Return a model of the class `name` in float64 and training mode, away from its initial weights.

    `text` are further options of its language model."""
    torch.manual_seed(seed)
    if (cls := _imported(name)) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name} yet")
    if reason := refused_by_release(name):
        pytest.skip(reason)
    options = MULTIMODAL[name][0]
    options = {**options, "text_config": {**options["text_config"], **text}}
    model = cls(cls.config_class(**options))
    # grouped products of experts have no float64
    model.config.get_text_config()._experts_implementation = "eager"
    model = to_float64(perturb_weights(model).double().train())
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval()  # refused in training
    return model


def make_multimodal_batch(name: str, seqlen: int = 29, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of two rows with three images, labels that ignore them, and padding at the right."""
    _, tokens, make_images = MULTIMODAL[name]
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (2, seqlen), generator=draw)
    for row, start in STARTS:
        ids[row, start : start + tokens] = IMAGE
    if name.startswith("Idefics3"):  # the same number of images in each row
        ids[1, 21 : 21 + tokens] = IMAGE
    labels = ids.masked_fill((ids == IMAGE) | (torch.rand(ids.shape, generator=draw) < 0.2), -100)
    mask, padded = torch.ones_like(ids), 3
    mask[-1, -padded:], labels[-1, -padded:], ids[-1, -padded:] = 0, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, **make_images(ids, draw)}
