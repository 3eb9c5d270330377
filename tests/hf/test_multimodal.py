"""Models with images, video or sound: loss and gradients, towers' included, against the untouched model's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import (
    RELEASE,
    assert_exact,
    current_gradients,
    errors,
    loss_and_gradients,
    one_line,
    since,
)
from tests.hf.multimodal_models import IMAGE, MULTIMODAL, make_multimodal, make_multimodal_batch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]

QWEN, GEMMA, LLAVA = (f"{name}ForConditionalGeneration" for name in ("Qwen3_5", "Gemma3", "Llava"))
QWEN_VL = "Qwen3VLForConditionalGeneration"
TABLE = Path(__file__).parents[2] / "docs" / "models_classes.md"


def wrapped_copy(model: Any, method: Any = None) -> Any:
    return adjoint.wrap(copy.deepcopy(model), method or adjoint.Exact(chunk_size=8))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    """Two rows of 29 tokens with three images, one row padded; chunks end inside images or, where an image's
    tokens see each other, behind them."""
    if name.startswith("Gemma") and RELEASE < (5, 18):
        pytest.skip("masks of image tokens are made for whole sequences alone")
    model, inputs = make_multimodal(name), make_multimodal_batch(name)
    expected = loss_and_gradients(model, **inputs)
    assert_exact(loss_and_gradients(wrapped_copy(model), **inputs), expected)
    in_towers = [n for n in expected[1] if "language_model" not in n and "lm_head" not in n]
    assert sum(bool(expected[1][n].norm() > 0) for n in in_towers) > 5


def test_the_table_lists_what_is_tried() -> None:
    text = TABLE.read_text().partition("<!-- multimodal table -->")[2].partition("<!-- end")[0]
    assert sorted(re.findall(r"`(\w+)` \de-\d\d", text)) == sorted(MULTIMODAL)


def as_video(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are videos of one frame."""
    renamed = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
    ids = inputs["input_ids"]
    types = 2 * inputs["mm_token_type_ids"]
    inputs = {renamed.get(name, name): value for name, value in inputs.items()}
    return {**inputs, "input_ids": ids + (ids == IMAGE), "mm_token_type_ids": types}


def packed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return text in two documents whose positions have four components, the first of which counts tokens."""
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 7)
    count = torch.cat([torch.arange(12), torch.arange(17)]).expand(2, -1)
    positions = torch.stack([count, count, count // 2, count // 3])
    return {
        "input_ids": ids,
        "labels": ids.index_fill(1, torch.tensor([12]), -100),
        "position_ids": positions,
    }


def with_components(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return text whose positions have three components."""
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 7)
    index = torch.arange(29)
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.stack([index, index // 2, index // 3])[:, None],
    }


def with_position_ids(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with images and explicit positions of three components."""
    index = torch.arange(29).expand(2, -1)
    return {**inputs, "position_ids": torch.stack([index, index // 2, index // 3])}


def padded_left(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose first row is padded at the left, so that its rows become documents."""
    mask, labels = torch.ones_like(inputs["input_ids"]), inputs["labels"].clone()
    mask[0, :3], labels[0, :4] = 0, -100
    return {**inputs, "attention_mask": mask, "labels": labels}


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "videos": (QWEN, as_video),
    "text alone, positions of components": (QWEN, with_components),
    "images and positions of components": (QWEN_VL, with_position_ids),
    "text alone, token types": (
        QWEN,
        lambda i: {n: i[n] for n in ("input_ids", "labels", "mm_token_type_ids")},
    ),
    "padding at the left": (QWEN, padded_left),
    "an indexer, layers recomputed": ("Qwen4ExpForConditionalGeneration", lambda i: i),
    "embeddings and images": (LLAVA, lambda i: i),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CHANGES)
def test_an_input_is_honoured(case: str) -> None:
    name, change = CHANGES[case]
    model, inputs = make_multimodal(name), change(make_multimodal_batch(name))
    if case.startswith("embeddings"):  # placeholders are recognised by their embedding
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    expected = loss_and_gradients(model, **inputs)
    method = adjoint.Exact(chunk_size=8, recompute="full" if "recomputed" in case else "none")
    assert_exact(loss_and_gradients(wrapped_copy(model, method), **inputs), expected)


@since(5, 18, "num_items_in_batch is not read by this class")
def test_documents_of_positions_with_four_components() -> None:
    """Packed documents are as one by one."""
    model = make_multimodal(QWEN)
    inputs = packed(make_multimodal_batch(QWEN))
    model.zero_grad()
    total = torch.zeros(())
    for tokens in (slice(0, 12), slice(12, 29)):
        ids, labels = inputs["input_ids"][:, tokens], inputs["labels"][:, tokens]
        positions = inputs["position_ids"][..., tokens]
        loss = model(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=54).loss
        loss.backward()
        total = total + loss.detach()
    expected = total, current_gradients(model)
    with pytest.warns(UserWarning, match="lets documents attend to earlier ones"):
        assert_exact(loss_and_gradients(wrapped_copy(model), **inputs), expected)


METHODS: dict[str, Any] = {
    "layers recomputed": adjoint.Exact(chunk_size=8, recompute="selective"),
    "inputs kept": adjoint.Exact(chunk_size=5, keep="inputs"),
    "one chunk": adjoint.Exact(),
    "a window of the whole": adjoint.Truncated(64, chunk_size=8),
    "mini-sequences": adjoint.MiniSequence(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", METHODS)
def test_methods(case: str) -> None:
    model, inputs = make_multimodal(QWEN_VL), make_multimodal_batch(QWEN_VL)
    expected = loss_and_gradients(model, **inputs)
    assert_exact(loss_and_gradients(wrapped_copy(model, METHODS[case]), **inputs), expected)


def hidden_loss(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of the backbone's hidden states of real tokens, and its gradients."""
    model.zero_grad()
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    hidden = model.model(**inputs).last_hidden_state
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (hidden * weight * inputs["attention_mask"][..., None]).sum()
    loss.backward()
    return loss.detach(), current_gradients(model)


def test_hidden_states() -> None:
    """Trainers that call the backbone get its hidden states; the towers get their gradients."""
    model, inputs = make_multimodal(QWEN_VL), make_multimodal_batch(QWEN_VL)
    assert_exact(hidden_loss(wrapped_copy(model), inputs), hidden_loss(model, inputs))


def test_frozen_and_checkpointed_towers() -> None:
    """A frozen tower gets no gradient and keeps no graph; a checkpointed one is recomputed as it asks."""
    model, inputs = make_multimodal(QWEN), make_multimodal_batch(QWEN)
    model.model.visual.requires_grad_(False)
    wrapped = wrapped_copy(model)
    got = loss_and_gradients(wrapped, **inputs)
    assert_exact(got, loss_and_gradients(model, **inputs))
    assert not any("visual" in name for name in got[1])
    for changed in (model, wrapped):
        changed.model.visual.requires_grad_(True)
        changed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = []
    wrapped.model.visual.blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
    wrapped(**inputs)  # the comparison on first use
    runs.clear()
    assert_exact(loss_and_gradients(wrapped, **inputs), loss_and_gradients(model, **inputs))
    assert len(runs) == 2


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    targets = r".*(q_proj|v_proj|in_proj_qkv|attn\.qkv|attn\.proj)"
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model, inputs = peft.get_peft_model(make_multimodal(QWEN), config), make_multimodal_batch(QWEN)
    expected = loss_and_gradients(model, **inputs)
    assert any("visual" in name for name in expected[1])
    assert_exact(loss_and_gradients(wrapped_copy(model), **inputs), expected)


def test_logits_and_what_a_call_leaves_behind() -> None:
    """Logits beside a loss and those computed later; generation still works, and settings are as before."""
    model, inputs = make_multimodal(QWEN), make_multimodal_batch(QWEN)
    wrapped = wrapped_copy(model)
    real = inputs["attention_mask"][..., None]
    out = wrapped(**inputs)
    assert wrapped.model.rope_deltas is None
    with pytest.warns(UserWarning, match="out.logits was used"):
        logits = out.logits * 1
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.allclose(logits * real, expected * real, atol=1e-12)
        last_logits = wrapped(**inputs, logits_to_keep=5).logits
        assert torch.allclose(last_logits * real[:, -5:], expected[:, -5:] * real[:, -5:], atol=1e-12)
    prompt = {name: value[:1] for name, value in inputs.items() if value.shape[0] == 2 and name != "labels"}
    prompt |= {"pixel_values": inputs["pixel_values"][:48], "image_grid_thw": inputs["image_grid_thw"][:2]}
    generated = [m.eval().generate(**prompt, max_new_tokens=4, do_sample=False) for m in (model, wrapped)]
    assert torch.equal(*generated)


def test_truncated_drops_what_crosses_a_windows_start() -> None:
    model, inputs = make_multimodal(LLAVA), make_multimodal_batch(LLAVA)
    expected = loss_and_gradients(model, **inputs)
    got = loss_and_gradients(wrapped_copy(model, adjoint.Truncated(8, chunk_size=8)), **inputs)
    assert abs(got[0] - expected[0]) < 1e-12 and errors(got, expected).total > 1e-4


@since(5, 18, "masks of image tokens are made for whole sequences alone")
def test_what_is_refused() -> None:
    """Masks by which tokens see later ones that are no runs of image tokens; inputs of another length."""
    model = wrapped_copy(make_multimodal(GEMMA))
    inputs = make_multimodal_batch(GEMMA)
    adjoint.wrap(model, adjoint.Truncated(16, chunk_size=8))
    with one_line("token_type_ids moves chunks' edges to the ends of blocks"):
        model(**inputs)
    model = make_multimodal(LLAVA)
    model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "bias": torch.zeros(7)}), with_kwargs=True
    )
    with one_line("its language model is given bias of shape (7,), which has no value per token"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=8))(**make_multimodal_batch(LLAVA))


def test_a_mask_that_only_the_model_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from adjoint.hf import chunking

    model = wrapped_copy(make_multimodal(GEMMA))
    monkeypatch.setattr(chunking, "block_function", lambda *_: None)
    with one_line("its own mask lets tokens attend to later ones, which a chunk does not have"):
        model(**make_multimodal_batch(GEMMA))


@pytest.mark.slow
def test_trainer_with_a_vision_collator(tmp_path: Path) -> None:
    """Two steps of two batches each and an evaluation, wrapped and not, in float32."""
    transformers = pytest.importorskip("transformers")
    batches = [make_multimodal_batch(QWEN_VL, seed=seed) for seed in range(4)]

    def collate(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        (batch,) = features
        return {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}

    results = []
    for wrapped in (False, True):
        model = make_multimodal(QWEN_VL).float()
        model = wrapped_copy(model) if wrapped else model
        options = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
        options |= {"report_to": [], "use_cpu": True, "remove_unused_columns": False, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **options)
        trainer = transformers.Trainer(
            model, arguments, collate, train_dataset=batches, eval_dataset=batches[:1]
        )
        trainer.train()
        results.append(trainer.evaluate()["eval_loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
