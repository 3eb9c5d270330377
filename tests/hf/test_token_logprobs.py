"""`adjoint.token_logprobs` against TRL's function of whole logits, for wrapped and untouched models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, not in each rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
import adjoint.loss
from adjoint.hf.logprobs import logprobs_and_entropies
from adjoint.hf.model_parts import backbone_of, layers_of
from tests.hf.hf_models import VOCAB, assert_exact, current_gradients, float64_throughout, make
from tests.model_helpers import make_model
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("one_thread")]

LLAMA, BAMBA, GEMMA, GRANITE = (f"{n}ForCausalLM" for n in ("Llama", "Bamba", "Gemma2", "Granite"))
# Granite divides logits, Gemma caps them.
MODELS = [LLAMA, BAMBA, GEMMA, GRANITE, "MambaForCausalLM", "Mamba2ForCausalLM", "Qwen3_5ForCausalLM"]
SEQLEN, TEMPERATURE, HIDDEN_SIZE = 23, 0.7, 24


def batch(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, the mask of completions of different lengths, and weights of their tokens."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (rows, SEQLEN), generator=draw)
    starts = torch.tensor([[0], [9], [17]])[:rows]
    mask = (torch.arange(SEQLEN) >= starts).long()
    mask[0, 5] = 0
    return ids, mask, torch.randn(rows, SEQLEN, generator=draw, dtype=torch.float64)


def by_trl(logits: Tensor, ids: Tensor, mask: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return what TRL's function makes of whole logits, as verl's formula does: 0 at position 0 and where
    the mask is 0."""
    selective_log_softmax = pytest.importorskip("trl.trainer.utils").selective_log_softmax
    logprobs = selective_log_softmax(logits[:, :-1] / temperature, ids[:, 1:])
    by_verl = (logits[:, :-1] / temperature).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(logprobs, by_verl)
    logprobs = torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs], dim=1)
    return torch.where(mask.bool(), logprobs, 0)


def weighted_gradients(model: Any, logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = (logprobs.exp() * weights).sum()
    loss.backward()
    return loss.detach(), current_gradients(model)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str) -> None:
    model, (ids, mask, weights) = make(name), batch()
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=5))
    with float64_throughout():
        expected = by_trl(model(input_ids=ids).logits, ids, mask)
        expected_gradients = weighted_gradients(model, expected, weights)
        for other in (wrapped, model):
            logprobs = adjoint.token_logprobs(other, ids, mask, TEMPERATURE)
            torch.testing.assert_close(logprobs, expected, rtol=1e-11, atol=1e-11)
            assert_exact(weighted_gradients(other, logprobs, weights), expected_gradients)
            with torch.no_grad():
                again = adjoint.token_logprobs(other, ids, mask.bool(), TEMPERATURE)
            assert not again.requires_grad
            torch.testing.assert_close(again, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["mamba", "mamba2", "gated_deltanet", "attention"])
def test_a_stack(variant: str) -> None:
    stack, (ids, mask, weights) = make_model(variant, vocab_size=VOCAB), batch()
    expected = by_trl(stack(ids).logits, ids, mask)
    expected_gradients = weighted_gradients(stack, expected, weights)
    logprobs = adjoint.token_logprobs(stack, ids, mask, TEMPERATURE)
    torch.testing.assert_close(logprobs, expected, rtol=1e-11, atol=1e-11)
    assert_exact(weighted_gradients(stack, logprobs, weights), expected_gradients)
    with torch.no_grad():
        again = adjoint.token_logprobs(stack, ids, mask, TEMPERATURE)
    torch.testing.assert_close(again, expected, rtol=1e-11, atol=1e-11)
    stack.lm_head = torch.nn.Linear(*stack.lm_head.weight.shape[::-1])  # with a bias
    with pytest.raises(ValueError, match=r"lm_head must be an nn\.Linear without bias"):
        adjoint.token_logprobs(stack.double(), ids, mask)


@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_bfloat16_logits(name: str) -> None:
    """Logits are widened before the softmax: TRL's result, without its rounding to bfloat16."""
    model, (ids, mask, _) = make(name, torch.bfloat16).eval(), batch()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        logprobs = adjoint.token_logprobs(model, ids, mask)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs, by_trl(logits.float(), ids, mask, 1.0), rtol=1e-5, atol=1e-5)
        rounded = by_trl(logits, ids, mask, 1.0).float()
        torch.testing.assert_close(logprobs, rounded, rtol=2**-7, atol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_logits_exist_for_a_slice_of_the_completions_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_at_once = 3
    monkeypatch.setattr(adjoint.loss, "SLICE_ELEMENTS", tokens_at_once * VOCAB)
    largest = 0

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            is_weight = isinstance(result, Tensor) and result.shape == (HIDDEN_SIZE, VOCAB)
            if isinstance(result, Tensor) and result.shape[-1:] == (VOCAB,) and not is_weight:
                largest = max(largest, result.numel() // VOCAB)
            return result

    model, (ids, mask, weights) = make(name), batch()
    wrapped = adjoint.wrap(model, adjoint.Exact(chunk_size=5))
    weighted_gradients(wrapped, adjoint.token_logprobs(wrapped, ids, mask), weights)  # compared on first use
    with Noting():
        weighted_gradients(wrapped, adjoint.token_logprobs(wrapped, ids, mask), weights)
    assert largest == tokens_at_once


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [LLAMA, BAMBA])
def test_padding_at_both_ends(name: str) -> None:
    """Rows of a padded batch are as each row alone."""
    wrapped = adjoint.wrap(make(name), adjoint.Exact(chunk_size=5))
    ids, mask, _ = batch(2)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :4] = attention_mask[1, -3:] = 0
    mask = mask & attention_mask
    mask[0, 4] = 0
    logprobs = adjoint.token_logprobs(wrapped, ids, mask, attention_mask=attention_mask)
    for row, tokens in enumerate((slice(4, None), slice(0, -3))):
        alone = adjoint.token_logprobs(wrapped, ids[row : row + 1, tokens], mask[row : row + 1, tokens])
        torch.testing.assert_close(logprobs[row : row + 1, tokens], alone, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="the first token after padding"):
        adjoint.token_logprobs(wrapped, ids, torch.ones_like(ids), attention_mask=attention_mask)


@pytest.mark.usefixtures("double")
def test_adapters() -> None:
    """PEFT's adapters, also on the head."""
    peft = pytest.importorskip("peft")
    ids, mask, weights = batch()
    config = peft.LoraConfig(
        r=3, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(make(LLAMA), config).double()
    expected = weighted_gradients(model, by_trl(model(input_ids=ids).logits, ids, mask), weights)
    adjoint.wrap(model, adjoint.Exact(chunk_size=5))
    logprobs = adjoint.token_logprobs(model, ids, mask, TEMPERATURE)
    assert_exact(weighted_gradients(model, logprobs, weights), expected)


@pytest.mark.usefixtures("fresh_accelerate")
def of_logprobs(model: Any) -> Tensor:
    ids, mask, weights = batch()
    return (adjoint.token_logprobs(model, ids, mask) * weights).sum()


def of_divergence(model: Any) -> Tensor:
    ids = batch()[0]
    return adjoint.distillation_loss(model, make(LLAMA, seed=1).eval(), ids, ids)


def of_several_tokens(model: Any) -> Tensor:
    hidden = torch.randn(3, SEQLEN, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).double()
    losses = adjoint.multi_token_loss(model, [hidden.requires_grad_()], batch()[0])
    return torch.stack([*losses]).sum()


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "adapters disabled": lambda model, head: model.base_model.disable_adapter_layers(),
    "another adapter": lambda model, head: model.base_model.set_adapter("other"),
    "an adapter's scale": lambda model, head: head.scaling.update(default=3.0),
    "a hook": lambda model, head: head.register_forward_hook(lambda module, args, logits: 2 * logits),
    "evaluation": lambda model, head: model.eval(),
}


def with_head_adapters(wrapped: bool) -> tuple[Any, Any]:
    """Return a model with adapters on its head, and the head."""
    peft = pytest.importorskip("peft")
    model = adjoint.wrap(make(LLAMA), adjoint.Exact(chunk_size=5)) if wrapped else make(LLAMA)
    torch.manual_seed(4)
    adapter = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.5
    )
    model = peft.get_peft_model(model, adapter)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
    return model.double().train(), model.base_model.model.lm_head


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("loss_of", [of_logprobs, of_divergence, of_several_tokens])
@pytest.mark.parametrize("change", CHANGES)
def test_the_backward_finds_the_head_as_it_was(change: str, loss_of: Callable[[Any], Tensor]) -> None:
    results = []
    with float64_throughout():
        for is_changed in (False, True):
            model, head = with_head_adapters(wrapped=True)
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            torch.manual_seed(5)
            loss = loss_of(model)
            if is_changed:
                CHANGES[change](model, head)
            for parameter in trained.values():  # a gradient reaches no weight that is frozen by then
                parameter.requires_grad_()
            gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            results.append(
                (loss.detach(), {n: g for n, g in zip(trained, gradients, strict=True) if g is not None})
            )
    assert_exact(*results)


@pytest.mark.parametrize("loss_of", [of_logprobs, of_divergence, of_several_tokens])
def test_a_head_that_was_written_to_before_the_backward(loss_of: Callable[[Any], Tensor]) -> None:
    with float64_throughout():
        model, head = with_head_adapters(wrapped=False)
        loss = loss_of(model)
        with torch.no_grad():
            head.lora_B.default.weight.mul_(1.5)
        with pytest.raises(
            RuntimeError, match=r"lm_head\.lora_B\.default\.weight was changed in place between"
        ):
            loss.backward()


@pytest.mark.usefixtures("fresh_accelerate")
def test_autocast_of_accelerate() -> None:
    """The autocast around the forward that accelerate has found on the model applies."""
    accelerate = pytest.importorskip("accelerate")
    ids, mask, _ = batch()
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(
        adjoint.wrap(make(LLAMA, torch.float32), adjoint.Exact(chunk_size=5))
    )
    logprobs = adjoint.token_logprobs(prepared, ids, mask)
    with torch.autocast("cpu", torch.bfloat16):
        expected = adjoint.token_logprobs(make(LLAMA, torch.float32), ids, mask)
    torch.testing.assert_close(logprobs, expected, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(logprobs, adjoint.token_logprobs(make(LLAMA, torch.float32), ids, mask))
    logprobs.sum().backward()


def test_what_is_refused() -> None:
    model, (ids, mask, _) = make(LLAMA, torch.float32), batch()
    with pytest.raises(ValueError, match="put 0 for the prompt's tokens before it"):
        adjoint.token_logprobs(model, ids, mask[:, 5:])
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        adjoint.token_logprobs(model, ids, mask, 0)
    with pytest.raises(adjoint.errors.UserError, match="takes a causal LM of transformers or a Stack"):
        adjoint.token_logprobs(model.model, ids, mask)
    offloaded = adjoint.offload_weights(make(LLAMA, torch.float32), "cpu")
    with pytest.raises(adjoint.errors.UserError, match="offload_weights fetches the head's weight"):
        adjoint.token_logprobs(offloaded, ids, mask)
    peft = pytest.importorskip("peft")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(adjoint.errors.UserError, match="prompts that PEFT has learnt"):
        adjoint.token_logprobs(peft.get_peft_model(model, prompts), ids, mask)


def shared_by_ranks(name: str, shards: int) -> None:
    """Compare ranks that share sequences with one process; with `shards`, each a part of rows under FSDP2."""
    ranks = dist.get_world_size() // shards
    mesh = init_device_mesh("cpu", (shards, ranks), mesh_dim_names=("data", "sequence"))
    ids, mask, weights = batch(2)
    with float64_throughout():
        model = make(name)
        shared = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=5), mesh["sequence"])
        expected = by_trl(model(input_ids=ids).logits, ids, mask)
        expected_gradients = weighted_gradients(model, expected, weights)
        rows = slice(None)
        if shards > 1:
            for layer in layers_of(backbone_of(shared)).values():
                fully_shard(layer, mesh=mesh["data"])
            fully_shard(shared, mesh=mesh["data"])
            rows = slice(mesh.get_local_rank("data"), mesh.get_local_rank("data") + 1)
        logprobs = adjoint.token_logprobs(shared, ids[rows], mask[rows], TEMPERATURE)
        torch.testing.assert_close(logprobs, expected[rows], rtol=1e-11, atol=1e-11)
        loss, gradients = weighted_gradients(shared, logprobs, shards * weights[rows])
        if shards > 1:
            gradients = {n: g.full_tensor() for n, g in gradients.items()}
            dist.all_reduce(loss, group=mesh.get_group("data"))
            loss = loss / shards
        assert_exact((loss, gradients), expected_gradients)
        values = logprobs_and_entropies(
            shared,
            ids[rows],
            mask[rows].bool() & (torch.arange(SEQLEN) > 0),
            TEMPERATURE,
            torch.ones_like(ids[rows]),
        )
        counted = mask[rows, 1:].bool()
        scaled = model(input_ids=ids[rows]).logits[:, :-1][counted] / TEMPERATURE
        entropies = torch.distributions.Categorical(logits=scaled).entropy()
        torch.testing.assert_close(
            values, torch.stack([expected[rows, 1:][counted], entropies]), rtol=1e-11, atol=1e-11
        )
        assert not values.requires_grad


@pytest.mark.parametrize("name", [LLAMA, pytest.param(BAMBA, marks=pytest.mark.slow)])
def test_ranks_that_share_a_sequence(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, shared_by_ranks, name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LLAMA, BAMBA])
def test_ranks_that_share_a_sequence_under_fsdp(name: str, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, shared_by_ranks, name, 2)
