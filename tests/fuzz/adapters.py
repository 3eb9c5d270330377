"""What trainers do to models by default, wrapped and not, in float64: adapters, frozen embeddings, both
kinds of gradient checkpointing, padding, columns that the model ignores, steps without labels.

Whatever the untouched model can do the wrapped one must do: a refusal is a deviation here."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import adjoint
from tests.fuzz.oracle import Case, Deviation, Vacuous, method_of, raised_by_us, same, some
from tests.hf.hf_models import MODELS, VOCAB, float64_throughout, make

transformers.logging.set_verbosity_error()
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
# Of Mamba's mixers PEFT takes no out_proj, which is never called.
LINEAR: dict[str, Any] = {"target_modules": "all-linear", "exclude_modules": ["out_proj"], **CAUSAL}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, **LINEAR),
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True, **LINEAR),
    "head": lambda: peft.LoraConfig(r=2, modules_to_save=["lm_head"], **LINEAR),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
}
STEPS = ("freeze", "require_grads", "checkpoint", "wrap", "adapter")  # in any order


# With adapters as large as these, the unwrapped model's gradients change by 1e-10 where its convolutions are
# summed in another order.
ILL_CONDITIONED = ("Inkling2LoopForCausalLM",)


def draw(rng: random.Random) -> Case:
    seqlen = rng.choice((2, 3, 5, 8, 12, 17, 29, 40))
    case: Case = {
        "kind": "adapters",
        "seed": rng.randrange(10**6),
        "model": rng.choice([name for name in MODELS if name not in ILL_CONDITIONED]),
        "batch": rng.randint(1, 3),
        "seqlen": seqlen,
        "order": rng.sample(STEPS, len(STEPS)),
    }
    inputs = {
        "adapter": lambda: rng.choice(list(ADAPTERS)),
        "reentrant": lambda: rng.random() < 0.5,
        "frozen": True,
        "padded": lambda: rng.choice((0.2, 0.6)),
        "columns": True,
        "call": lambda: rng.choice(("backbone", "logits")),
        "unlabelled": True,
    }
    case |= some(rng, 0.45, inputs)
    exact = {"name": "Exact", "chunk_size": rng.randint(2, seqlen + 2)}
    case["method"] = exact if rng.random() < 0.75 else {"name": "MiniSequence"}
    return case


def built(case: Case, model: Any, wrapped: bool) -> Any:
    """The model after all of it has been done, in the case's order."""
    for what in case.get("order", STEPS):
        if what == "wrap" and wrapped:
            adjoint.wrap(model, method_of(case))
        elif what == "adapter" and "adapter" in case:
            torch.manual_seed(case["seed"])
            model = peft.get_peft_model(model, ADAPTERS[case["adapter"]]())
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if "lora_B" in name:
                        p.normal_()
        elif what == "freeze" and "frozen" in case:
            model.get_input_embeddings().requires_grad_(False)
        elif what == "require_grads" and ("frozen" in case or "reentrant" in case):
            model.enable_input_require_grads()
        elif what == "checkpoint" and "reentrant" in case:
            options = {"use_reentrant": case["reentrant"]}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model.train()


def loss_of(case: Case, model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(case["seed"])
    batch, seqlen = case.get("batch", 1), max(2, case["seqlen"])
    ids = torch.randint(3, VOCAB, (batch, seqlen), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    if "padded" in case:
        padding = max(1, int(case["padded"] * (seqlen - 2)))
        mask[-1, -padding:], labels[-1, -padding:] = 0, -100
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "padded" in case:
        given["attention_mask"] = mask
    if "columns" in case:
        given |= {"margin": torch.ones(batch), "texts": ["one"] * batch}
    if case.get("call") == "backbone":
        lm = model.get_base_model() if "adapter" in case else model
        states = lm.base_model(**given).last_hidden_state
        return (states * torch.randn(states.shape, generator=generator) * mask[..., None]).sum()
    if case.get("call") == "logits":
        return (model(**given).logits * mask[..., None]).square().mean()
    if "unlabelled" in case:
        given["num_items_in_batch"] = torch.tensor(0)
        labels = torch.full_like(labels, -100)
    return model(**given, labels=labels).loss


def results(case: Case, model: Any, wrapped: bool) -> dict[str, Tensor | None]:
    model = built(case, model, wrapped)
    loss = loss_of(case, model)
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def check(case: Case) -> None:
    if case.get("adapter") == "prefix" and "unlabelled" in case:
        raise Vacuous("prefix tuning runs as if not wrapped, where a mean of no label is 0 / 0")
    try:
        model = make(case["model"], seed=case["seed"] % 7)
    except (ValueError, ImportError) as error:
        raise Vacuous(f"no such model: {error}") from error
    labelled = {key: value for key, value in case.items() if key != "unlabelled"}
    without = {key: value for key, value in labelled.items() if key != "reentrant"}
    with float64_throughout():
        try:
            expected = results(labelled, copy.deepcopy(model), wrapped=False)
            if case.get("reentrant"):  # which loses the gradients of a layer's keyword arguments
                unchecked = results(without, copy.deepcopy(model), wrapped=False)
        except Exception as error:
            raise Vacuous(f"the untouched model: {error!r}") from error
        try:
            found = results(case, model, wrapped=True)
        except Exception as error:
            if raised_by_us(error):
                raise Deviation(f"refused: {error}") from error
            raise
    if case.get("reentrant"):
        try:
            same(unchecked, expected)
        except Deviation as error:
            raise Vacuous("reentrant checkpoints give the untouched model other gradients") from error
    if "unlabelled" in case and "call" not in case:
        if any(t is not None and bool(t.any()) for t in found.values()):
            raise Deviation("a step without labels has a loss or a gradient")
        return
    same(found, expected)
