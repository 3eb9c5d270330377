"""`adjoint.wrap`: loss and gradients by chunks against those of the untouched model, in float64."""

from __future__ import annotations

import collections
import copy
import functools
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import adjoint
from adjoint.engine.executor import Executor
from adjoint.engine.grid import Tile
from adjoint.errors import UserError
from adjoint.hf.cache import RecurrentLayer
from adjoint.hf.kernels import replacements
from adjoint.hf.kernels.modules import replacement_forwards, replacement_rows
from adjoint.hf.model_parts import layers_of
from tests.both_kinds import ModelOfEitherKind
from tests.hf.hf_models import (
    MODELS,
    OTHERS,
    REFUSED,
    RELEASE,
    VOCAB,
    assert_exact,
    by_spans,
    cache_contents,
    errors,
    float64_throughout,
    loss_and_gradients,
    make,
    make_batch,
    one_line,
    refusal_reason,
    skip_if_broken,
)
from tests.model_helpers import make_ids
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {"tie_word_embeddings": False},
    "MambaForCausalLM": {"tie_word_embeddings": True},
    "Mamba2ForCausalLM": {"tie_word_embeddings": False},
}
# Much like others, or long: tried with -m slow only.
ALIKE = {
    "BailingHybridForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Gemma2ForCausalLM",
    "GraniteForCausalLM",
    "Inkling2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "Olmo3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Zamba2ForCausalLM",
    "ZayaForCausalLM",
}
# One class of each family.
ONE_OF_EACH = [
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "BambaForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "MistralForCausalLM",  # a sliding window
    "DeepseekV3ForCausalLM",  # MLA
]
TABLE = Path(__file__).parents[2] / "docs" / "models_classes.md"


def table() -> dict[str, list[str]]:
    """Map each class in docs/models_classes.md to its family, its cache's kind and its gradient's error."""
    text = TABLE.read_text().partition("<!-- classes table -->")[2].partition("<!-- end")[0]
    rows = (line.strip("|\n ").split(" | ") for line in text.splitlines() if "| `" in line)
    pattern = r"`(\w+)` (refused: .*|[\de.-]+)"
    return {
        name: [family, cache.strip(), outcome]
        for family, cache, classes in rows
        for name, outcome in re.findall(pattern, classes)
    }


# --------------------------------------------------------------------------------- the untouched model's own


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in MODELS]
)
def test_loss_and_gradients_are_the_models_own(name: str, double: None) -> None:
    """Chunks of one size, then of another, layers recomputed; the last one shorter, and of a single token
    (33 = 4 · 8 + 1). Padding at the right, labels ignored; each hook fires once."""
    options = OPTIONS.get(name, {})
    model = make(name, **options)
    for option, value in options.items():
        assert getattr(model.config, option) == value
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8))
    fired: list[str] = []
    for parameter_name, p in wrapped.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, n=parameter_name: fired.append(n))
    for seqlen, chunk_size, recompute in ((29, 5, "none"), (33, 8, "selective")):
        adjoint.wrap(wrapped, adjoint.Exact(chunk_size=chunk_size, recompute=recompute))
        inputs, fired[:] = make_batch(seqlen, seed=seqlen), []
        expected, got = (loss_and_gradients(m, **inputs) for m in (model, wrapped))
        assert_exact(got, expected)
        # PyTorch calls the hooks of parameters without a gradient too: of an indexer's, and of a router's
        # bias, which was a parameter before transformers 5.16
        without = [n for n, _ in model.named_parameters() if n not in expected[1]]
        without = [n for n in without if ".indexer." in n or n.endswith("correction_bias")]
        assert sorted(fired) == sorted([*expected[1], *without])
    assert cache_contents(wrapped) == table()[name][1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Mamba2ForCausalLM"])
def test_bfloat16_is_no_further_off_than_the_models_own(name: str) -> None:
    """Gradients under bfloat16 autocast against those of the same weights in float64, over six seeds, between
    which the ratio varies by 5% either way."""
    ours, theirs = [], []
    for seed in range(6):
        model = make(name, torch.float32, seed)
        inputs = make_batch(65, seed=seed)
        exact = copy.deepcopy(model).double()
        with float64_throughout():
            expected = loss_and_gradients(exact, **inputs)
        for wrapped, distances in ((False, theirs), (True, ours)):
            model_copy = copy.deepcopy(model)
            if wrapped:
                adjoint.wrap(model_copy, adjoint.Exact(chunk_size=16))
            with torch.autocast("cpu", torch.bfloat16):
                loss, gradients = loss_and_gradients(model_copy, **inputs)
            gradients = {name: gradient.double() for name, gradient in gradients.items()}
            distances.append(errors((loss.double(), gradients), expected).total)
    assert min(theirs) > 1e-4  # it is bfloat16 that is measured
    assert sum(ours) <= 1.05 * sum(theirs), (ours, theirs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["BambaForCausalLM", "Qwen3_5ForCausalLM"])
def test_norms_and_mlps_keep_their_inputs_alone_in_bfloat16_too(name: str) -> None:
    """Gradients of weights in bfloat16 are no further off than the model's own, and a norm keeps less for
    its backward: transformers' keep tensors in float32."""
    if name.startswith("Bamba") and RELEASE < (5, 23):
        pytest.skip("before transformers 5.23 its gated norm is over all groups together, which is not ours")
    ours, theirs = [], []
    for seed in range(4):
        model = make(name, torch.float32, seed).bfloat16()
        inputs = make_batch(65, seed=seed)
        exact = copy.deepcopy(model).double()
        with float64_throughout():
            expected = loss_and_gradients(exact, **inputs)
        wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=16))
        for model_copy, distances in ((model, theirs), (wrapped, ours)):
            loss, gradients = loss_and_gradients(model_copy, **inputs)
            gradients = {name: gradient.double() for name, gradient in gradients.items()}
            distances.append(errors((loss.double(), gradients), expected).total)
    assert min(theirs) > 1e-4
    assert sum(ours) <= 1.05 * sum(theirs), (ours, theirs)
    forwards = replacement_forwards(replacement_rows(wrapped))
    replaced = {type(module).__name__ for module in forwards}
    norms = {type(m).__name__ for m in wrapped.modules() if "RMSNorm" in type(m).__name__}
    assert norms and norms <= replaced
    for norm, forward in forwards.items():
        if type(norm).__name__ in norms:
            assert bytes_kept(norm, forward) < 0.7 * bytes_kept(norm, norm.forward)


def bytes_kept(norm: Any, forward: Any) -> int:
    """Bytes that a norm's forward of bfloat16 keeps for its backward."""
    saved = dict[int, int]()
    x = torch.randn(1, 64, norm.weight.shape[0]).bfloat16().requires_grad_()

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = forward(x, x) if "Gated" in type(norm).__name__ else forward(x)
    assert output.dtype == x.dtype
    return sum(saved.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("BambaForCausalLM", "selective"),
        ("MambaForCausalLM", "full"),
        ("LlamaForCausalLM", "selective"),
        ("DeepseekV3ForCausalLM", "full"),
        pytest.param("Qwen3NextForCausalLM", "full", marks=pytest.mark.slow),
        pytest.param("Mamba2ForCausalLM", "selective", marks=pytest.mark.slow),
    ],
)
def test_layers_are_computed_again_if_asked(name: str, recompute: str, double: None) -> None:
    """Layers are recomputed from the chunk's own state, in the backward, once.

    3 chunks run forward, 2 of them again when they are linearised, and each layer of the 3 once more."""
    model = make(name)
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=11, recompute=recompute))
    inputs, runs = make_batch(29), collections.Counter()
    first, *_ = layers_of(wrapped.base_model).values()
    for module in first.modules():
        module.register_forward_hook(lambda module, *_: runs.update([module]))
    wrapped(**inputs).loss.backward()  # the comparison on first use
    runs.clear()
    assert_exact(loss_and_gradients(wrapped, **inputs), loss_and_gradients(model, **inputs))
    assert statistics.mode(runs.values()) == 3 + 2 + 3  # of its modules; experts may run several times


def test_modules_are_registered_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours replace transformers' RMSNorms, gated or not, and its silu-gated MLPs.

    They do not replace subclasses, classes whose methods were replaced, or modules with another activation or
    one that has hooks."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, gate = torch.randn(2, 3, 5, 24)
    model, gated = make("MistralForCausalLM", torch.float32), Qwen3NextRMSNormGated(24)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    with torch.no_grad():
        gated.weight.copy_(torch.randn(24))
        subclassed = type("MistralRMSNorm", (type(norm),), {})(24)
        model_parts = nn.ModuleList([norm, gated, mlp, nn.RMSNorm(8), nn.LayerNorm(8), subclassed])
        forwards = replacement_forwards(replacement_rows(model_parts))
        assert list(forwards) == [norm, gated, mlp]
        for ours, inputs in ((norm, (x,)), (gated, (x, gate)), (mlp, (x,))):
            assert torch.allclose(forwards[ours](*inputs), ours(*inputs), atol=1e-6)
        narrow = x.half()  # rounded where the class rounds it
        assert torch.equal(forwards[norm.half()](narrow), norm(narrow))
    for act in (nn.Sequential(nn.SiLU()), nn.GELU(), nn.SiLU()):
        act.register_forward_hook(lambda *_: None)
        mlp.act_fn = act
        assert [row.module() for row in replacement_rows(model_parts)] == [norm, gated]
    theirs = type(norm).forward
    for replaced in (functools.wraps(theirs)(lambda self, x: theirs(self, x)), lambda self, x: x):
        monkeypatch.setattr(type(norm), "forward", replaced)
        assert not replacement_rows(norm)


def test_a_state_does_not_keep_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions' states are the last tokens of what they read; only these stay, with their cotangents."""
    model = adjoint.wrap(make("Mamba2ForCausalLM", torch.float32), adjoint.Exact(chunk_size=64))
    inputs, sizes, backward = make_batch(256), [], Executor.backward

    def watched(worker: Executor, tile: Tile) -> None:
        backward(worker, tile)
        states = [*worker.final, *(v for key, v in worker.store.items() if key[0] == "dS")]
        sizes.extend((s.nbytes, s.untyped_storage().nbytes()) for state in states for s in state)

    monkeypatch.setattr(Executor, "backward", watched)
    model(**inputs).loss.backward()
    assert len(sizes) > 20 and all(storage < 2 * nbytes for nbytes, storage in sizes)


# ------------------------------------------------------------------------------------------ forms of a call

CALLS: dict[str, dict[str, Any]] = {
    "position_ids": {"packed": 0.2},
    "seq_idx": {"packed": 0.2, "form": "seq_idx"},
    "cu_seq_lens": {"packed": 0.2, "form": "cu_seq_lens_q"},
    "a tuple, padded": {"call": "tuple", "padded": 0.4, "items": "tensor"},
    "by position": {"call": "positional", "labels": "both", "items": 7},
    "backbone": {"call": "backbone"},
    "backbone, position_ids": {"call": "backbone", "packed": 0.2},
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_forms_of_a_call(name: str, form: str) -> None:
    """Packed documents are as one by one, every token with a target. The backbone is called by trainers that
    fuse the head: any loss of its hidden states will do."""
    pytest.importorskip("peft")
    from tests.fuzz.wrapped import check

    if name.startswith("Mamba") and "items" in CALLS[form] and RELEASE < (5, 17):
        pytest.skip("Mamba itself does not read num_items_in_batch, which the reference divides by")
    method = {"name": "Exact", "chunk_size": 8}
    sizes = {"model": name, "seed": 3, "batch": 2, "seqlen": 29, "labels": "shift_labels"}
    check({**sizes, "method": method, **CALLS[form]})


# -------------------------------------------------------------------------------------------------- truncated


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Mamba2ForCausalLM", "BambaForCausalLM"]
)
def test_truncated_drops_what_crosses_a_spans_start(name: str, double: None) -> None:
    """A window of 12 and chunks of 5: spans of two chunks, 10 tokens."""
    model = make(name)
    ids, targets = torch.randint(3, VOCAB, (2, 2, 29), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": ids, "shift_labels": targets}
    exact_gradients = by_spans(model, ids, targets, 29)
    for window, span in ((12, 10), (5, 5), (29, 29), (1000, 1000)):
        expected = by_spans(model, ids, targets, span)
        wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Truncated(window, chunk_size=5))
        got = loss_and_gradients(wrapped, **inputs)
        assert_exact(got, expected)
        if span < 29:
            assert errors(got, exact_gradients).total > 1e-4  # something was dropped
    exact = loss_and_gradients(adjoint.wrap(wrapped, adjoint.Exact(chunk_size=5)), **inputs)
    assert errors(got, exact).worst <= 1e-14


def test_logits_beside_a_loss(double: None) -> None:
    model, inputs = make("LlamaForCausalLM").eval(), make_batch(29)
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8))
    ids, labels, mask = (inputs[name] for name in ("input_ids", "labels", "attention_mask"))
    assert list(wrapped(**inputs)) == ["loss"]
    assert torch.allclose(wrapped(ids).logits, model(ids).logits, atol=1e-12)
    left = mask.flip(1)
    padded = {**inputs, "attention_mask": left, "labels": labels.masked_fill(left.roll(1) == 0, -100)}
    with torch.no_grad():
        for labelled in ({"input_ids": ids, "labels": labels}, padded):
            expected = model(**labelled)
            for keep in (3, 100, torch.tensor([0, 11, 28])):
                got = wrapped(**labelled, logits_to_keep=keep)
                tokens = keep if isinstance(keep, Tensor) else slice(-keep, None)
                real = labelled.get("attention_mask", torch.ones_like(ids))[:, tokens, None]
                assert torch.allclose(got.logits * real, expected.logits[:, tokens] * real, atol=1e-12)
                assert (
                    got.loss.item() == wrapped(**labelled).loss.item() == pytest.approx(expected.loss.item())
                )


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_refused(name: str) -> None:
    """A class is refused on first use at the latest, in one line that is the table's too.

    A model that can be wrapped at all still trains by Backprop."""
    model, inputs = make(name), make_batch(29)
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match=name) as caught:
        adjoint.wrap(model, adjoint.Exact(chunk_size=8))(**inputs)
    assert "\n" not in str(caught.value)
    assert table()[name][2].replace("&lt;", "<") == f"refused: {refusal_reason(caught.value)}"
    assert "adjoint.wrap(model, adjoint.Backprop()) works" in str(caught.value)
    adjoint.wrap(model, adjoint.Backprop())
    got, expected = (loss_and_gradients(m, **inputs) for m in (model, plain))
    assert errors(got, expected).worst <= 1e-6


def test_checkpointing_that_transformers_does_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"model\.gradient_checkpointing_enable"):
        adjoint.wrap(make("LlamaForCausalLM"), adjoint.Backprop(checkpoint=True))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MOE |= {"moe_shared_expert_intermediate_size": 16, "layers_block_type": ["mamba", "attention", "moe"]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "YaRN": ("LlamaForCausalLM", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "YaRN, a window": ("GptOssForCausalLM", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "experts": ("NemotronHForCausalLM", MOE),
    "latent experts": ("NemotronHForCausalLM", {**MOE, "moe_latent_size": 8}),
    "no positions": ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "nope"}),
    "rotary positions": ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "rope"}),
    "Mistral 4": ("Mistral4ForCausalLM", {}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", VARIANTS)
def test_variants(case: str, double: None) -> None:
    name, options = VARIANTS[case]
    model, inputs = make(name, **options), make_batch(29)
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8))
    assert_exact(loss_and_gradients(wrapped, **inputs), loss_and_gradients(model, **inputs))


@pytest.mark.parametrize("name", ["MistralForCausalLM", "DeepseekV32ForCausalLM"])
def test_masked_attention_takes_few_queries_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch, double: None
) -> None:
    """PyTorch's kernel on CUDA is wrong beyond 2**32 pairs of a query and a key; here the limit is 40."""
    attend, sizes = replacements.sdpa_attention_forward, list[int]()

    def noted(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(query.shape[2] * key.shape[2])
        return attend(module, query, key, *args, **kwargs)

    monkeypatch.setattr(replacements, "sdpa_attention_forward", noted)
    monkeypatch.setattr(replacements, "MASKED_PAIRS", 40)
    model, inputs = make(name), make_batch(29)
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8))
    assert_exact(loss_and_gradients(wrapped, **inputs), loss_and_gradients(model, **inputs))
    assert len(sizes) > 20 and max(sizes) <= 40
    falcon = adjoint.wrap(make("FalconForCausalLM"), adjoint.Exact(chunk_size=8))  # calls the kernel itself
    monkeypatch.setattr(replacements, "MASKED_PAIRS", 100)  # more than in the comparison on first use
    with one_line("transformer.h.0.self_attention has a mask of 128 pairs of a query and a key"):
        falcon(**inputs)


def test_states_that_cannot_last_are_told() -> None:
    """Models made from a configuration begin so; those of `make` have the time steps of trained ones."""
    model, ids = adjoint.wrap(make("BambaForCausalLM", torch.float32), adjoint.Exact(8)), make_ids(1, 20)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recurrent layers keep at most")
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "mamba"):
                layer.mamba.dt_bias.fill_(1)
                layer.mamba.A_log.copy_(torch.arange(1, len(layer.mamba.A_log) + 1).log())
    message = "BambaForCausalLM: recurrent layers keep at most 27% of a state from one token to the next"
    with pytest.warns(UserWarning, match=message):
        adjoint.wrap(model, adjoint.Exact(7))(input_ids=ids, labels=ids)


def test_a_scan_that_ignores_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own scan of Mamba-1: the loss is hardly off, the gradient is."""
    monkeypatch.setattr(replacements, "SCANS", {})
    model = adjoint.wrap(make("MambaForCausalLM", torch.float32), adjoint.Exact(chunk_size=8))
    with pytest.raises(ValueError, match="the gradient of 13 tokens in chunks is not that of the whole"):
        model(**make_batch(29))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_depends_on_the_length_is_refused(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    model = make("LlamaForCausalLM", rope_parameters=rope)
    plain, inputs = copy.deepcopy(model), make_batch(29)
    with one_line(f"rope_type {kind!r}"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=8))(**inputs)
    got = adjoint.wrap(model, adjoint.Backprop())(**inputs).loss
    assert got.item() == plain(**inputs).loss.item()


T5 = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)


def test_models_and_methods_that_are_refused() -> None:
    model, two = make("LlamaForCausalLM"), make("LlamaForCausalLM")
    two.base_model_prefix, two.another = "neither", model.model
    for wrong, method, message in (
        (
            torch.nn.Linear(2, 2),
            None,
            "takes a causal LM of transformers, a classifier, .* contains one of them: this is a Lin",
        ),
        (
            torch.nn.ModuleList([make("LlamaForCausalLM"), make("LlamaForCausalLM")]),
            None,
            r"ModuleList contains 2 models of transformers: wrap each by itself: 0 \(LlamaForCausalLM\), 1",
        ),
        (transformers.T5Model(T5), None, "T5Model has no backbone apart from its head"),
        (two, None, "LlamaForCausalLM has no backbone apart from its head"),
        (model, adjoint.Truncated("auto"), r"takes Truncated\(window\) with a window in tokens"),
        (model, adjoint.LayerLocal(), r"got LayerLocal\("),
        (model, adjoint.Truncated(1), "chunks have two tokens at least"),
        (model, adjoint.Exact(chunk_size=1), "chunks have two tokens at least"),
        (model, adjoint.Truncated(8, chunk_size=1), "chunks have two tokens at least"),
    ):
        with pytest.raises(ValueError, match=message):
            adjoint.wrap(wrong, method)
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, backend",
    [
        ("LlamaForCausalLM", "aot_eager"),
        ("Mamba2ForCausalLM", "aot_eager"),
        ("LlamaForCausalLM", "inductor"),
    ],
)
def test_compiled_layers(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything around cache and attention is compiled; a longer past needs no other graph."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(RecurrentLayer, "is_compiled", False)  # not so for later tests
    torch._dynamo.reset()
    counters.clear()
    model = make(name, torch.float32, num_hidden_layers=1)
    compiled, graphs = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8)), []
    for layer in layers_of(compiled.base_model).values():
        layer.compile(backend=backend)
    for seqlen in (40, 56, 96):
        inputs = {"input_ids": torch.randint(3, VOCAB, (1, seqlen))}
        inputs["labels"] = inputs["input_ids"]
        results = [loss_and_gradients(each, **inputs) for each in (compiled, model)]
        assert errors(*results).total <= 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[1] == graphs[2]


def test_the_table_lists_what_is_tried() -> None:
    rows = table()
    assert list(rows) == [*MODELS, *REFUSED]
    assert {name for name, row in rows.items() if row[2].startswith("refused: ")} == set(REFUSED)
    assert all(re.fullmatch(r"\de-\d\d", rows[name][2]) for name in MODELS)


def test_what_is_tried_on_first_use_leaves_nothing_behind() -> None:
    """RecurrentGemma's own forward, by which packed documents are tried, keeps a state in its mixers."""
    ids = make_batch(29, batch=1)["input_ids"]
    positions = torch.cat([torch.arange(10), torch.arange(19)])[None]
    model = adjoint.wrap(make("RecurrentGemmaForCausalLM"), adjoint.Exact(chunk_size=8))
    for _ in range(2):
        model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    assert len(model._adjoint.verifications) == 1


def results_or_refusal(case: ModelOfEitherKind, method: Any, inputs: Any, group: Any) -> Any:
    """Return loss and gradients, or the line by which they are refused."""
    try:
        return case.results(method, inputs, group=group)
    except ValueError as error:
        text = str(error)
        assert "\n" not in text, text
        return text


def compare_over_ranks(case: ModelOfEitherKind) -> None:
    """Compare a group with one process, or expect a refusal by name; if one process refuses, the group
    does."""
    ids, mask = make_ids(2, 31), torch.arange(31)[None] < torch.tensor([[31], [22]])
    padded = case.inputs(ids, ids.masked_fill(~mask, -100), mask=mask.long())
    packed = case.inputs(ids[:1], ids[:1], (torch.arange(31) >= 9).long()[None])
    for method in (adjoint.Exact(7), adjoint.Exact(9, recompute="full"), adjoint.Truncated(16, 8)):
        for inputs in (case.inputs(ids, ids), padded, packed)[: 3 if method == adjoint.Exact(7) else 1]:
            shared, alone = (results_or_refusal(case, method, inputs, g) for g in (dist.group.WORLD, None))
            if isinstance(alone, str):
                assert isinstance(shared, str), alone
            elif isinstance(shared, str):
                assert "sequence_group: " in shared, shared
            else:  # gradients that are nothing but rounding (key biases) count by the whole's size
                assert_exact(*((each.pop("loss"), each) for each in (shared, alone)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *REFUSED, *OTHERS])
def test_every_class_over_two_ranks(name: str, tmp_path: Path) -> None:
    skip_if_broken(name)
    on_ranks(2, tmp_path, compare_over_ranks, ModelOfEitherKind(name))
