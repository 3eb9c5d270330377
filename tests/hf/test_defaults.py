"""Trainers' defaults: adapters with gradient checkpointing, steps without labels, columns that the model
ignores, logits that are read for metrics, hidden states of padding."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.errors import UserError
from tests.hf.hf_models import (
    VOCAB,
    assert_exact,
    float64_throughout,
    loss_and_gradients,
    make,
    make_batch,
    one_line,
    transformers,
)
from tests.model_helpers import current_gradients, make_ids

__all__ = ["transformers"]
pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA, BAMBA = "LlamaForCausalLM", "BambaForCausalLM"  # Bamba: Mamba-2, then attention
METHODS = [adjoint.Exact(chunk_size=8), adjoint.MiniSequence()]


def labelled(rows: int = 2) -> dict[str, Tensor]:
    ids = make_ids(rows, 37, vocab_size=VOCAB)
    return {"input_ids": ids, "labels": ids}


# ------------------------------------------------------------------------ gradient checkpointing and adapters


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["in_proj", "q_proj"]
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def with_frozen_embedding(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    return model


@pytest.mark.sampled(7)
@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("adapt", [with_lora, with_frozen_embedding])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_gradient_checkpointing_with_adapters(
    wrapped_first: bool, adapt: Any, reentrant: bool, method: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """The embedding's output is then a leaf of each chunk's own (enable_input_require_grads)."""
    with float64_throughout():
        results = []
        for wrapped in (False, True):
            model = make(BAMBA, torch.float64, num_hidden_layers=2)
            model = adjoint.wrap(model, method) if wrapped and wrapped_first else model
            model = adapt(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model = adjoint.wrap(model, method) if wrapped and not wrapped_first else model
            results.append(loss_and_gradients(model.train(), **labelled()))
        plain, got = results
        assert_exact(got, plain)
    assert not [w for w in recwarn if "compared in its own precision" in str(w.message)]


# ------------------------------------------------------------------------------------- steps without labels


@pytest.mark.sampled(5)
@pytest.mark.parametrize("items", [0, torch.tensor(0), None])
@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
def test_a_step_without_labels_changes_no_weight(method: Any, items: Any) -> None:
    """The Trainer always counts the labels of a step; if it has none the loss is 0."""
    model = adjoint.wrap(make(LLAMA, torch.float32), method).train()
    ids = labelled()["input_ids"]
    with pytest.warns(UserWarning, match="every label is ignored"):
        loss = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=items).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not g.any() for g in current_gradients(model).values())
    with pytest.raises(ValueError, match="num_items_in_batch is 0, but some labels count"):
        model(input_ids=ids, labels=ids, num_items_in_batch=0)


# ----------------------------------------------------------------------- weights that no gradient reaches


def with_merged_adapters(model: Any) -> Any:
    model = with_lora(model)
    model.merge_adapter()
    return model


def with_value_head(model: Any) -> Any:
    model.requires_grad_(False)
    model.v_head = nn.Linear(24, 1)
    return model


@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
@pytest.mark.parametrize("adapt", [with_merged_adapters, with_value_head])
def test_an_evaluation_whose_loss_nothing_trained_reaches(adapt: Any, method: Any, double: None) -> None:
    model = adapt(make(BAMBA, num_hidden_layers=2)).double().eval()
    inputs = labelled()
    with torch.no_grad(), float64_throughout():
        expected = model(**inputs).loss
        assert adjoint.wrap(model, method)(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
def test_weights_of_inference_mode(method: Any, double: None) -> None:
    """An evaluation runs; a backward could not read such weights, which is said in one line."""
    with torch.inference_mode():
        model = make(BAMBA, num_hidden_layers=2)
    model, inputs = adjoint.wrap(model, method), labelled()
    with pytest.raises(UserError, match=r"weight was made under torch.inference_mode\(\)") as refused:
        model(**inputs)
    assert "\n" not in str(refused.value)
    with torch.no_grad():
        losses = [model(**inputs).loss.item()]
        adjoint.unwrap(model)
        losses.append(model(**inputs).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
def test_weights_without_values_are_refused(method: Any) -> None:
    config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1)
    with torch.device("meta"):
        model = adjoint.wrap(transformers.LlamaForCausalLM(config), method)
    with pytest.raises(UserError, match=r"embed_tokens\.weight is on the meta device, without values; load"):
        model(**labelled())


# ---------------------------------------------------------------------------- inputs that the model ignores


@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
def test_inputs_that_the_model_ignores_are_ignored(method: Any) -> None:
    """A reward's margin, which TRL passes on, is ignored; what the model reads is refused by its name."""
    model, inputs = adjoint.wrap(make(LLAMA, torch.float32), method).train(), labelled()
    expected = model(**inputs).loss
    assert model(**inputs, margin=torch.ones(2), texts=["a", "b"]).loss == expected
    for name, value in {"is_causal": True, "position_bias": torch.ones(1)}.items():
        with pytest.raises(UserError, match=f"{name} is not an input that can be split into chunks"):
            model(**inputs, **{name: value})


# -------------------------------------------------------------------------------- adapters that train nothing


class Experts(nn.Module):
    """An MLP that sends all tokens to the first of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def peft_model(model: Any, kind: str, targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"feedforward_modules": []} if kind == "IA3Config" else {"r": 2}
    options |= {"use_dora": True} if kind == "dora" else {}
    config = getattr(peft, "LoraConfig" if kind == "dora" else kind)
    return peft.get_peft_model(model, config(target_modules=targets, task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "dora"])
def test_adapters_that_train_nothing_are_named(kind: str) -> None:
    """transformers' Mamba reads dt_proj's weight and never calls it: no gradient, wrapped or not."""
    model = adjoint.wrap(peft_model(make("MambaForCausalLM"), kind, ["dt_proj", "in_proj"]), METHODS[0])
    with pytest.warns(
        UserWarning, match=r"MambaForCausalLM: .*layers\.0\.mixer\.dt_proj, as of 2 more, trains nothing here"
    ):
        model(**make_batch(29)).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained and all("in_proj" in name for name in trained)


@pytest.mark.filterwarnings("error:.*trains nothing")
def test_adapters_that_a_batch_does_not_reach_are_not_warned_of() -> None:
    model = make(LLAMA)
    for layer in model.model.layers:
        layer.mlp = Experts().double()
    wrapped = adjoint.wrap(peft_model(model, "LoraConfig", ["experts.0", "experts.1"]), METHODS[0])
    wrapped(**make_batch(29)).loss.backward()
    trained = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    assert trained and all("experts.0" in name for name in trained)


# --------------------------------------------------------------------------------------- logits that are read


@pytest.mark.parametrize("method", METHODS, ids=["Exact", "MiniSequence"])
def test_logits_are_computed_when_they_are_used(method: Any, double: None) -> None:
    """Logits come from the weights at the time of use; an output that nobody reads has none."""
    accelerate = pytest.importorskip("accelerate")
    plain, inputs = make(BAMBA), make_batch(29)
    model = adjoint.wrap(copy.deepcopy(plain), method)
    out = model(**inputs)
    converted = accelerate.utils.convert_outputs_to_fp32(lambda: out)()  # as autocast's models do
    assert list(out) == ["loss"] and "logits=None" in repr(out)
    assert pickle.loads(pickle.dumps(type(out)(loss=out.loss.detach()))).loss == out.loss
    with float64_throughout():
        out.loss.backward()
        drawn = torch.get_rng_state()
        expected = plain(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        for output in (out, converted):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what only describes them computes nothing
                logits = output.logits
                assert logits is output.logits and logits.requires_grad and isinstance(logits, Tensor)
                assert (logits.shape, logits.dtype, logits.device) == (
                    expected.shape,
                    expected.dtype,
                    expected.device,
                )
                assert len(logits) == logits.size(0) == 2 and logits.dim() == 3 and not logits.is_cuda
            with pytest.warns(UserWarning, match="a second forward"):
                assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            assert torch.allclose(pickle.loads(pickle.dumps(logits)), expected, atol=1e-12)
    assert torch.equal(drawn, torch.get_rng_state())


def z_loss(logits: Any) -> Tensor:
    return 0.1 * logits.logsumexp(-1).square().mean()


def loss_of_logits(logits: Any) -> Tensor:
    """Read three times, once for a metric; only where no padding is."""
    with torch.no_grad():
        assert logits.argmax(-1).shape == logits.shape[:2]
    return z_loss(logits[:, :20]) + logits[0].softmax(-1).square().sum()


LOGITS_OF_OUTPUTS: dict[str, tuple[Any, ...]] = {  # method, inputs, and how the logits are read
    "attribute": (METHODS[0], {}, lambda out: out.logits),
    "name": (METHODS[0], {"num_items_in_batch": 31}, lambda out: out["logits"]),
    "number": (METHODS[0], {"use_cache": False}, lambda out: out[1]),
    "tuple": (METHODS[0], {"return_dict": False}, lambda out: out[1]),
    "pieces": (METHODS[1], {}, lambda out: out.get("logits")),
}


def test_a_loss_of_logits_reaches_embeddings_once_and_threads_wait() -> None:
    """A leaf that both losses read gets each gradient once; calls of threads run one after another."""
    plain, ids = make(LLAMA), make_batch(13)["input_ids"]
    model = adjoint.wrap(copy.deepcopy(plain), adjoint.Exact(chunk_size=4))

    def gradient_of(model: Any, ids: Tensor) -> Tensor:
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        out = model(inputs_embeds=embeddings, labels=ids)
        (out.loss + out.logits.square().mean()).backward()
        assert embeddings.grad is not None
        return embeddings.grad

    rows = [ids[:, start:] for start in range(3)]
    with float64_throughout():
        expected = [gradient_of(plain, each) for each in rows]
        assert (gradient_of(model, ids) - expected[0]).norm() <= 1e-10 * expected[0].norm()
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            results = list(threads.map(lambda each: gradient_of(model, each), rows))
    for result, gradient in zip(results, expected, strict=True):
        assert (result - gradient).norm() <= 1e-10 * gradient.norm()
    with one_line("out.logits: a hook would see the gradient of losses that are made of the logits"):
        model(input_ids=ids, labels=ids).logits.register_hook(print)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", LOGITS_OF_OUTPUTS)
@pytest.mark.filterwarnings("ignore:out.logits was used")
def test_a_loss_of_logits_beside_the_models_own(case: str, double: None) -> None:
    """Both gradients are there; Bamba's embedding and head are tied, and a row is padded."""
    method, more, read = LOGITS_OF_OUTPUTS[case]
    model = make(BAMBA, tie_word_embeddings=True)
    wrapped, results = adjoint.wrap(copy.deepcopy(model), method), []
    for subject in (model, wrapped):
        with float64_throughout():
            out = subject(**make_batch(29), **more)
            loss = out[0] + loss_of_logits(read(out))
            loss.backward()
        results.append((loss.detach(), current_gradients(subject)))
    assert_exact(*reversed(results))
    if case != "tuple":
        assert "logits" in out and list(out) == ["loss"] and len(out.to_tuple()) == 2


@pytest.mark.filterwarnings("ignore:out.logits was used", "ignore:position_ids restart")
def test_a_loss_of_logits_of_documents_and_embeddings() -> None:
    """The documents are kept apart, and embeddings that were computed get the gradient of both losses."""
    model, ids = make(BAMBA), labelled()["input_ids"]
    labels = ids.index_fill(1, torch.tensor([0, 11]), -100)
    positions = torch.cat([torch.arange(11), torch.arange(26)]).expand(2, -1)
    wrapped, results = adjoint.wrap(copy.deepcopy(model), METHODS[0]), []
    for subject in (model, wrapped):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        embeddings = subject.get_input_embeddings()(ids) * scale
        with float64_throughout():
            if subject is model:
                pieces = embeddings.split([11, 26], 1)
                logits = torch.cat([model(inputs_embeds=piece).logits for piece in pieces], 1)
                loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            else:
                out = wrapped(inputs_embeds=embeddings, position_ids=positions, labels=labels)
                logits, loss = out.logits, out.loss
            (loss + loss_of_logits(logits)).backward()
        results.append((loss.detach(), {**current_gradients(subject), "scale": scale.grad}))
    assert_exact(*reversed(results))


@pytest.mark.filterwarnings("ignore:out.logits was used")
def test_logits_have_the_dropout_of_their_loss() -> None:
    """A loss of both is that of one forward: as if it were made of the logits alone."""
    wrapped, inputs = adjoint.wrap(make(LLAMA, attention_dropout=0.5), METHODS[0]), make_batch(29)
    ids, labels = inputs["input_ids"], inputs["labels"]
    results = []
    with float64_throughout():
        for arguments in ({"input_ids": ids, "labels": labels}, {"input_ids": ids}):
            wrapped.zero_grad()
            torch.manual_seed(3)
            out = wrapped(**arguments)
            torch.randn(3)
            loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            total = loss + (loss if out.loss is None else out.loss)
            (total + z_loss(out.logits)).backward()
            results.append((total.detach(), current_gradients(wrapped)))
    assert_exact(*results)


def test_a_gradient_that_outputs_do_not_carry_is_refused() -> None:
    """Refuse it for logits after a cache, a cache that nobody asked for, a stack's logits beside a loss."""
    model = adjoint.wrap(make(BAMBA), METHODS[0])
    inputs = labelled()
    first = model(**inputs, use_cache=True)
    stack = adjoint.Stack(adjoint.StackConfig(VOCAB, 8, 1, "mamba", d_state=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later = model(**inputs, past_key_values=first.past_key_values)
        cache = model.eval().base_model(input_ids=inputs["input_ids"]).past_key_values
        outputs = {
            "out.logits of BambaForCausalLM's call with labels": later.loss + z_loss(later.logits),
            "past_key_values of BambaModel's call": cache.layers[0].conv_states[0].sum(),
            "out.logits, which has none beside a loss by Exact": z_loss(
                stack(**inputs, method=METHODS[0], return_logits=True).logits
            ),
        }
        for message, loss in outputs.items():
            with pytest.raises(UserError, match=f"a gradient has reached {message}"):
                loss.backward()


def test_logits_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adjoint.wrap(make(LLAMA, torch.float32), METHODS[0])
    monkeypatch.setenv("ADJOINT_LOGITS", "none")
    assert model(**labelled()).logits is None
    monkeypatch.setenv("ADJOINT_LOGITS", "no")
    with pytest.raises(UserError, match="ADJOINT_LOGITS: expected one of deferred, none; got 'no'"):
        model(**labelled())


# ----------------------------------------------------------------------------------- hidden states of padding


def hidden_loss(model: Any, real: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that reads all hidden states, those of padding too."""
    ids = make_ids(len(real), 37, vocab_size=VOCAB)
    mask = (torch.arange(37) < torch.tensor(real)[:, None]).long()
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
    weights = torch.arange(hidden.numel(), dtype=hidden.dtype).sin().view_as(hidden)
    loss = (hidden * weights).sum()
    loss.backward()
    return loss.detach(), current_gradients(model.base_model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [LLAMA, BAMBA, "Mamba2ForCausalLM", "MambaForCausalLM", "Qwen3_5ForCausalLM", "Gemma3ForCausalLM"],
)
def test_hidden_states_of_padding_are_the_models_own(name: str, double: None) -> None:
    """Losses that read hidden states of padding, and logged means over all tokens, are the untouched
    model's."""
    plain = make(name)
    model = adjoint.wrap(copy.deepcopy(plain), adjoint.Exact(chunk_size=8))
    with float64_throughout():
        expected = hidden_loss(plain, (37, 11, 22))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_exact(hidden_loss(model, (37, 11, 22)), expected)


def test_a_warning_where_hidden_states_of_padding_differ(double: None) -> None:
    model = adjoint.wrap(make("OPTForCausalLM"), adjoint.Exact(chunk_size=8))
    with (
        float64_throughout(),
        pytest.warns(UserWarning, match="hidden states at padding, computed by chunks, differ"),
    ):
        hidden_loss(model, (37, 11))


# --------------------------------------------------------------------------------- where a comparison differs


class Cumulative(nn.Module):
    """A module that adds up all tokens before, which no cache carries."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.cumsum(1)


def test_a_refusal_names_layer_parameter_and_token(caplog: pytest.LogCaptureFixture) -> None:
    """The message names layer and token; at the level DEBUG each gradient's difference is logged."""
    model = make(LLAMA, torch.float32)
    model.model.layers[1].mlp = Cumulative(model.model.layers[1].mlp)
    model = adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    caplog.set_level("DEBUG", "adjoint")
    with pytest.raises(UserError) as refused:
        model(**labelled())
    for text in ("the gradient of ", "first in layers.1, from token 5 on", "ADJOINT_VERBOSITY=debug"):
        assert text in str(refused.value)
    table = next(r.getMessage() for r in caplog.records if r.levelname == "DEBUG")
    assert all(name in table for name, _ in model.named_parameters())
