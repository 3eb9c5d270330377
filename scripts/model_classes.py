"""Write the tables of docs/models_classes.md: try every class of tests/hf/hf_models.py and
multimodal_models.py, and all other causal LMs that transformers has. And the table of docs/models_calls.md:
calls with caches, padding and documents of every recurrent class. Takes some minutes; less with
`--multimodal` or `--calls`, which write the table of multimodal classes or that of calls alone. What
`scripts.tested_classes` writes from the tables follows.

python -m scripts.model_classes
"""

from __future__ import annotations

import copy
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import adjoint
from adjoint.hf.transformers_api import CACHE_NAMES
from benchmarks.report import ROOT, put_table
from scripts import tested_classes
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
CALLS_PAGE = ROOT / "docs" / "models_calls.md"
HEAD = ["family", "its cache holds", "class: gradient by chunks"]
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
    "LaraMiniForCausalLM": {
        **TEXT,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 6),
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **{"num_experts": 4, "num_experts_per_tok": 2},
    },
    "RwkvForCausalLM": {
        **{"vocab_size": VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 40},
        **{"num_hidden_layers": 3, "context_length": 64, "bos_token_id": 1, "eos_token_id": 2},
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
    torch.manual_seed(0)
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


def grouped_rows(outcomes: list[tuple[tuple[str, ...], str, str]]) -> list[list[str]]:
    """Return a row for the classes of each group, in the order of their first ones.

    Args:
        outcomes: of each class the first cells of its group's row, its name, and its gradient's error or the
            reason of its refusal, which has a row of its own.
    """
    texts: dict[tuple[str, ...], list[str]] = {}
    for group, name, outcome in outcomes:
        refused = (name,) if outcome.startswith("refused") else ()
        texts.setdefault((*group, *refused), []).append(f"`{name}` {outcome}")
    return [[*group[: len(HEAD) - 1], ", ".join(classes)] for group, classes in texts.items()]


def as_table(rows: list[list[str]]) -> str:
    """Return rows as a table, the first one as its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def classes_table() -> str:
    """Return the table of the classes that the tests have."""
    classes = [(family, name) for family, names in FAMILIES.items() for name in names]
    outcomes = []
    for family, name in [*classes, *(("refused", name) for name in REFUSED)]:
        print(name, flush=True)
        cache, outcome = try_model(make(name))
        outcomes.append(((family, cache), name, outcome))
    return as_table([HEAD, *grouped_rows(outcomes)])


def multimodal_table() -> str:
    """Return the table of classes with images, video or sound."""
    outcomes = []
    for name in MULTIMODAL:
        print(name, flush=True)
        inputs = make_multimodal_batch(name)
        extra_inputs = [n for n in inputs if n not in ("input_ids", "labels", "attention_mask")]
        names = ", ".join(f"`{n}`" for n in extra_inputs)
        cache, outcome = try_model(make_multimodal(name), inputs)
        outcomes.append(((names, cache), name, outcome))
    return as_table([["inputs beside ids", *HEAD[1:]], *grouped_rows(outcomes)])


# ------------------------------------------------------------------------------------- the table of calls

# Recurrent classes that are in no table of the tests.
MORE_RECURRENT = ("LaraMiniForCausalLM", "RwkvForCausalLM")
CALL_COLUMNS = {
    **{f"`{name}=`": ("cache", name) for name in CACHE_NAMES},
    "padding at the left": ("padding", "none"),
    "the same with `position_ids`": ("padding", "position_ids"),
    "documents by `position_ids`": ("documents", "position_ids"),
    "documents by `seq_idx`": ("documents", "seq_idx"),
    "documents by `cu_seq_lens_q`": ("documents", "cu_seq_lens_q"),
}
CALL_IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(3))
CUT, PADDED = 9, 6  # tokens of the first document and before the cache; tokens of padding
MODES = list(itertools.product((True, False), (True, False)))  # training, gradients
CALL_LIMIT = 1e-8


def expected_logits(model: Any, kind: str) -> list[Tensor]:
    """Return the logits (tokens, vocab_size) of each row, from calls of the model's own forward in which its
    tokens, its document or its tokens without padding are by themselves."""
    full_rows: list[Tensor] = [row[None] for row in CALL_IDS]
    pieces = {
        "cache": [[row] for row in full_rows],
        "padding": [[full_rows[0][:, PADDED:]], [full_rows[1]]],
        "documents": [list(row.split([CUT, row.shape[1] - CUT], dim=1)) for row in full_rows],
    }[kind]
    model.eval()
    with torch.no_grad(), float64_throughout():
        rows = [torch.cat([model(input_ids=p, use_cache=False).logits[0] for p in row]) for row in pieces]
    return [row[CUT:] for row in rows] if kind == "cache" else rows


def call_inputs(kind: str, form: str, cache: Any) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a call, and the mask of the tokens (rows, tokens) whose results count."""
    ids = CALL_IDS[:, CUT:] if kind == "cache" else CALL_IDS
    counts = torch.ones_like(ids, dtype=torch.bool)
    if kind == "cache":
        return {"input_ids": ids, form: cache, "use_cache": True}, counts
    if kind == "padding":
        counts[0, :PADDED] = False
        inputs = {"input_ids": ids, "attention_mask": counts.long()}
        if form == "position_ids":
            inputs["position_ids"] = (counts.cumsum(-1) - 1).clamp(min=0)
        return inputs, counts
    tokens = torch.arange(ids.shape[1]).expand(len(ids), -1)
    offsets = torch.tensor([0, CUT, ids.shape[1], ids.shape[1] + CUT, ids.numel()], dtype=torch.int32)
    longest = ids.shape[1] - CUT
    documents: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": torch.where(tokens < CUT, tokens, tokens - CUT)},
        "seq_idx": {"seq_idx": (tokens >= CUT).int()},
        "cu_seq_lens_q": {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        | dict.fromkeys(("max_length_q", "max_length_k"), longest),
    }
    if form == "cu_seq_lens_q":  # of one row, as the collator without padding makes it
        return {"input_ids": ids.view(1, -1), **documents[form]}, counts.view(1, -1)
    return {"input_ids": ids, **documents[form]}, counts


def error_of_call(model: Any, kind: str, form: str, has_labels: bool, expected: list[Tensor]) -> float:
    """Return the relative error of a call's logits, or of its loss if it has labels."""
    cache = None
    if kind == "cache":
        out = model(input_ids=CALL_IDS[:, :CUT], use_cache=True)
        names = (*CACHE_NAMES, "state")  # RWKV-4 calls it a state
        cache = next(value for name in names if (value := out.get(name)) is not None)
    inputs, counts = call_inputs(kind, form, cache)
    right = torch.cat(expected)
    if not has_labels:
        logits = model(**inputs).logits[counts]
        return float((logits - right).norm() / right.norm())
    labels = inputs["input_ids"].masked_fill(~counts, -100)
    firsts = {"cache": [0], "padding": [0, PADDED], "documents": [0, CUT]}[kind]
    labels.view(len(CALL_IDS), -1)[:, firsts] = -100  # predicted by no token of the same document
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)[counts]
    loss = F.cross_entropy(right, targets, ignore_index=-100)
    return float((model(**inputs, labels=labels).loss - loss).abs() / loss.abs())


def outcome_of_call(measure: Callable[[], float]) -> tuple[str, float]:
    """Return a call's outcome ("ok", "off", "off, warned", "refused" or "error") and its relative error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            error = measure()
        except (ValueError, StopIteration) as reason:
            is_ours = isinstance(reason, ValueError) and "transformers" not in type(reason).__module__
            return ("refused" if is_ours else "no cache"), 0.0
        except Exception:
            return "error", 0.0
    if error <= CALL_LIMIT:
        return "ok", error
    is_warned = any(w.category is UserWarning for w in caught)
    return ("off, warned" if is_warned else "off"), error


def percent(error: float) -> str:
    """Return a relative error in percent, with two digits."""
    return f"{float(f'{100 * error:.2g}'):g}%"


def call_cells(model: Any, right: dict[str, list[Tensor]]) -> Iterator[str]:
    """Iterate over the cells of a model's row: the outcomes without labels and with, over all modes."""
    for kind, form in CALL_COLUMNS.values():
        texts = []
        for has_labels in (False, True):
            outcomes: dict[str, float] = {}
            for training, has_gradients in MODES:
                model.train(training)
                with torch.set_grad_enabled(has_gradients), float64_throughout():
                    outcome, error = outcome_of_call(
                        lambda: error_of_call(model, kind, form, has_labels, right[kind])  # noqa: B023
                    )
                outcomes[outcome] = max(error, outcomes.get(outcome, 0.0))
            shown = [f"{o} {percent(e)}" if "off" in o else o for o, e in sorted(outcomes.items())]
            texts.append(", ".join(shown).replace("off, warned ", "warned ").replace("off ", ""))
        separator = " / " if "," in "".join(texts) else "/"
        yield texts[0] if texts[0] == texts[1] else separator.join(texts)


def calls_rows(name: str, by_itself: list[str], wrapped: list[str]) -> list[list[str]]:
    """Return a class's row of transformers' results, and a second one of the wrapped model's if any differs
    from ok."""
    if set(wrapped) == {"ok"}:
        return [[f"`{name}`", "ok", *by_itself]]
    return [[f"`{name}`", "below", *by_itself], ["… wrapped", "", *wrapped]]


def calls_table() -> str:
    """Return the table of calls: for each class transformers' results, and whether the wrapped's are ok."""
    recurrent = [name for family, names in FAMILIES.items() if family != "attention" for name in names]
    rows = [["class", "wrapped", *CALL_COLUMNS]]
    for name in [*recurrent, *(name for name in MORE_RECURRENT if hasattr(transformers, name))]:
        print(name, flush=True)
        model = make_small(getattr(transformers, name)) if name in MORE_RECURRENT else make(name)
        wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=5))
        right = {
            kind: expected_logits(copy.deepcopy(model), kind) for kind in ("cache", "padding", "documents")
        }
        rows += calls_rows(name, list(call_cells(model, right)), list(call_cells(wrapped, right)))
    return as_table(rows)


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _raise_timeout)
    if "--multimodal" not in sys.argv:
        put_table(CALLS_PAGE, "calls table", calls_table())
    if "--calls" in sys.argv:
        return
    put_table(PAGE, "multimodal table", multimodal_table())
    if "--multimodal" in sys.argv:
        tested_classes.write()
        return
    lines = (f"- {o} ({len(n)}): {', '.join(n)}\n" for o, n in try_other_classes().items() if n)
    put_table(PAGE, "classes table", classes_table())
    put_table(PAGE, "others table", "".join(lines))
    tested_classes.write()


if __name__ == "__main__":
    main()
