"""Wrapped transformers models against untouched ones that live the same life, in float64.

Equal, or refused by name: never another number, never somebody else's error."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import adjoint
from adjoint.batch import shift_labels
from adjoint.hf.model_parts import backbone_of, layers_of
from adjoint.methods import RECOMPUTE
from tests.fuzz.losses import loss_function
from tests.fuzz.oracle import (
    Case,
    Deviation,
    Refusal,
    Vacuous,
    documents,
    method_of,
    raised_by_us,
    same,
    some,
)
from tests.hf.hf_models import MODELS, VOCAB, float64_throughout, make

transformers.logging.set_verbosity_error()
# Of Mamba's mixers PEFT takes no out_proj, which is never called.
ADAPTER = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["out_proj"])
LOUD = "this was raised on purpose"
IMAGES = "Gemma3ForConditionalGeneration"


def draw(rng: random.Random) -> Case:
    seqlen = rng.choice((1, 2, 3, 4, 5, 7, 8, 12, 17, 24, 29, 33, 40))
    life = {
        when: lambda when=when: rng.sample([n for n in OPERATIONS if n not in NEVER[when]], rng.randint(1, 2))
        for when in NEVER
    }
    case = {
        "kind": "wrapped",
        "seed": rng.randrange(10**6),
        "model": rng.choice([*MODELS, IMAGES]),
        "batch": rng.randint(1, 3),
        "seqlen": seqlen,
    }
    inputs = {
        "options": lambda: some(rng, 0.5, {
            "tie_word_embeddings": lambda: rng.random() < 0.5,
            "attn_implementation": lambda: rng.choice(("eager", "sdpa")),
            "use_cache": False,
        }),
        "ignored": lambda: rng.choice((0.2, 0.8)),
        "labels": lambda: rng.choice(("shift_labels", "both")),
        "items": lambda: rng.choice((7, 7.0, "tensor")),
        "call": lambda: rng.choice(("tuple", "positional", "embeds", "backbone")),
        rng.choice(("padded", "packed")): lambda: rng.choice((0.1, 0.4, 1.0)),
        "loss": lambda: rng.choice(("smoothed", "z")),
        "head": lambda: rng.choice(("buffer", "trained")),
        "types": lambda: rng.choice((0.2, 0.5)),
    }  # fmt: skip
    case |= some(rng, 0.3, inputs) | some(rng, 0.35, life)
    case["method"] = draw_method(rng, case)
    if "packed" in case:
        case["form"] = rng.choice(("position_ids", "seq_idx", "cu_seq_lens_q"))
    return case


def draw_method(rng: random.Random, case: Case) -> Case:
    """Any; but plain backpropagation only of what transformers' own forward understands."""
    seqlen, kind = case["seqlen"], rng.random() * (0.8 if "packed" in case else 1)
    size = some(rng, 0.9, {"chunk_size": lambda: rng.randint(1, seqlen + 2)})
    if kind < 0.65:
        keep = some(rng, 0.2, {"keep": lambda: rng.choice(("inputs", "offload"))})
        keep |= some(rng, 0.2, {"segment_layers": lambda: rng.randint(1, 3)})
        storage = {
            "memory": lambda: rng.choice((1, "200KB", "1GB")),
            "checkpoints": lambda: rng.choice((1, 2, 3, 5, 20)),
        }
        if keep:
            storage.pop("checkpoints")
        storage = some(rng, 0.3, storage)
        rest = {"recompute": lambda: rng.choice(RECOMPUTE), "offload": True}
        return {"name": "Exact", **size, **keep, **storage, **some(rng, 0.3, rest)}
    if kind < 0.8:
        return {"name": "Truncated", "window": 1000, **size}
    if kind < 0.95 or not {"labels", "items"}.isdisjoint(case):
        chunks = {"mlp_chunks": lambda: rng.randint(1, 5), "head_chunks": lambda: rng.randint(1, 20)}
        return {"name": "MiniSequence", **some(rng, 0.7, chunks)}
    return {"name": "Backprop"}


# ------------------------------------------------------------------------------------------ what may happen


class Life:
    """A model from its wrapping, or not, to its gradients; `found` is what it has given."""

    def __init__(self, case: Case, model: Any, wrapped: bool) -> None:
        self.case, self.model, self.wrapped = case, model, wrapped
        self.random = random.Random(case["seed"])
        self.found: dict[str, Any] = {}
        self.losses: list[Tensor] = []
        self.calls = 0
        self.extras: list[nn.Parameter] = []  # that no module holds
        self.types: Tensor | None = None

    def run(self) -> dict[str, Any]:
        self.beside = False
        with contextlib.ExitStack() as self.until_the_end:
            if self.wrapped:
                adjoint.wrap(self.model, method_of(self.case))
            for name in self.case.get("before", ()):
                self.live(name)
            self.forward()
            for name in self.case.get("between", ()):
                before = self.model
                self.live(name)
                self.model = before  # what was made of it is dropped; the backward is the first one's
            self.backward("first")
            if "after" in self.case:
                for name in self.case["after"]:
                    self.live(name)
                self.forward()
                self.backward("second")
        return self.found

    def live(self, name: str) -> None:
        torch.manual_seed(self.random.randrange(10**6))
        OPERATIONS[name](self)

    def forward(self) -> None:
        self.losses.append(self.loss())
        self.found[f"loss {self.calls}"] = self.losses[-1].detach()

    def backward(self, when: str) -> None:
        trained = any(loss.requires_grad for loss in self.losses)
        while self.losses:
            loss = self.losses.pop(0)
            if loss.requires_grad or not trained:
                loss.backward()
        for name, p in self.model.named_parameters():
            self.found[f"{when}: {name}"] = None if p.grad is None else p.grad.detach().clone()
        for number, p in enumerate(self.extras):
            self.found[f"{when}: extra {number}"] = None if p.grad is None else p.grad.detach().clone()

    def loss(self) -> Tensor:
        """The next batch's, each a little shorter."""
        case = self.case
        self.calls += 1
        generator = torch.Generator().manual_seed(case["seed"] + self.calls)
        batch, seqlen = case.get("batch", 1), max(min(2, case["seqlen"]), case["seqlen"] + 2 - 2 * self.calls)
        shape = {"batch": batch, "seqlen": seqlen}
        ids = torch.randint(3, VOCAB, (batch, seqlen), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < case.get("ignored", 0), -100)
        labels[0, 1:2] = ids[0, 1:2]  # or there may be nothing to learn
        mask = torch.ones_like(ids)
        if "padded" in case and seqlen > 1:
            padding = max(1, int(case["padded"] * (seqlen - 2)))
            mask[-1, -padding:], labels[-1, -padding:] = 0, -100
        targets = shift_labels(labels)
        if case.get("labels") == "shift_labels":
            targets = targets.roll(1, 0) if "padded" not in case else targets
        packed = documents({**shape, "documents": case["packed"]}, generator) if "packed" in case else None
        items = {"tensor": torch.tensor(7)}.get(case.get("items"), case.get("items"))
        if case.get("call") == "backbone":
            return self.hidden_loss(ids, packed, generator)
        if "types" in case and model_of(case) == IMAGES:
            self.types = (torch.rand(ids.shape, generator=generator) < case["types"]).long()
        if not self.wrapped:
            return self.untouched_loss(ids, labels, targets, mask, packed, items)
        given: dict[str, Any] = {"input_ids": ids, **self.packing(packed)}
        if "padded" in case:
            given["attention_mask"] = mask
        if case.get("labels") != "shift_labels":
            given["labels"] = labels
        if "labels" in case:
            given["shift_labels"] = targets
        if items is not None:
            given["num_items_in_batch"] = items
        return self.called(given)

    def token_types(self) -> dict[str, Any]:
        return {} if self.types is None else {"token_type_ids": self.types}

    def called(self, given: dict[str, Any]) -> Tensor:
        given |= self.token_types()
        call, arguments = self.case.get("call"), []
        if call == "tuple":
            return self.model(**given, return_dict=False)[0]
        if call == "embeds":
            given["inputs_embeds"] = self.model.get_input_embeddings()(given.pop("input_ids"))
        if call == "positional":
            taken = inspect.signature(lm_of(self.model).forward).parameters.values()
            names = [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
            arguments = [given.pop(name, None) for name in names[:6]]
        return self.model(*arguments, **given).loss

    def packing(self, packed: Tensor | None) -> dict[str, Any]:
        if packed is None:
            return {}
        begins = torch.ones_like(packed, dtype=torch.bool)
        begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
        form = self.case.get("form", "position_ids")
        if form == "cu_seq_lens_q":
            cuts = torch.tensor([*begins.flatten().nonzero().flatten(), begins.numel()]).int()
            return {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
        place = torch.arange(begins.shape[1]).expand(begins.shape)
        return {form: packed if form == "seq_idx" else place - torch.where(begins, place, 0).cummax(1).values}

    def pieces(self, packed: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Document by document, or all at once."""
        if packed is None:
            yield tensors
            return
        for row, numbers in enumerate(packed):
            lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
            yield from zip(*(t[row : row + 1].split(lengths, dim=1) for t in tensors), strict=True)

    def untouched_loss(
        self, ids: Tensor, labels: Tensor, targets: Tensor, mask: Tensor, packed: Tensor | None, items: Any
    ) -> Tensor:
        given = {"attention_mask": mask, "use_cache": False, **self.token_types()}
        if packed is None and items is None and "labels" not in self.case:
            return self.model(input_ids=ids, labels=labels, **given).loss
        if "loss" in self.case:
            given |= {"labels": labels, "shift_labels": targets, "num_items_in_batch": items}
            return self.model(input_ids=ids, **given).loss
        total = 0
        types = torch.zeros_like(ids) if self.types is None else self.types
        for i, t, m, own in self.pieces(packed, ids, targets, mask, types):
            given = {} if self.types is None else {"token_type_ids": own}
            logits = self.model(input_ids=i, attention_mask=m, use_cache=False, **given).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), t.flatten(), reduction="sum")
        return total / ((targets != -100).sum() if items is None else items)

    def hidden_loss(self, ids: Tensor, packed: Tensor | None, generator: torch.Generator) -> Tensor:
        backbone = backbone_of(lm_of(self.model))
        if self.wrapped:
            hidden = backbone(input_ids=ids, **self.packing(packed)).last_hidden_state.flatten(0, 1)
        else:
            made = [backbone(input_ids=i, use_cache=False) for (i,) in self.pieces(packed, ids)]
            hidden = torch.cat([h.last_hidden_state.flatten(0, 1) for h in made])
        return (hidden * torch.randn(hidden.shape, generator=generator)).sum() + hidden.square().mean()

    # what may happen, in the words of OPERATIONS

    def freeze(self) -> None:
        for p in self.model.parameters():
            p.requires_grad_(self.random.random() < 0.5 and p.requires_grad)
        self.model.get_output_embeddings().weight.requires_grad_()

    def evaluate(self, mode: Callable[[], Any]) -> None:
        training = self.model.training
        with mode():
            self.found[f"loss {self.calls + 1} without gradients"] = self.loss().clone()
            self.model.eval()
            ids = torch.randint(3, VOCAB, (2, 6))
            self.found[f"logits {self.calls}"] = self.model(input_ids=ids).logits.clone()
        self.model.train(training)

    def generate(self) -> None:
        ids = torch.randint(3, VOCAB, (2, 4))
        self.found[f"tokens {self.calls}"] = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
        )

    def save_and_load(self) -> None:
        torch.save(self.model, file := io.BytesIO())
        file.seek(0)
        self.model = torch.load(file, weights_only=False)

    def wrap_again(self, unwrapped: bool) -> None:
        method = method_of({"method": draw_method(self.random, self.case)})
        if self.wrapped and unwrapped:
            adjoint.unwrap(self.model)
            lm = lm_of(self.model)
            if "_adjoint" in lm.__dict__ or hasattr(type(lm), "_adjoint_original"):
                raise Deviation("something is left of the wrapping")
        if self.wrapped:
            adjoint.wrap(self.model, method)

    def add_adapter(self) -> None:
        if not isinstance(self.model, peft.PeftModel):
            self.model = peft.get_peft_model(self.model, ADAPTER)
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    if "lora_B" in name:
                        p.normal_()

    def fail_once(self) -> None:
        module = self.random.choice([m for m in self.model.modules() if not isinstance(m, nn.ModuleList)])
        calls = [self.random.randint(1, 9)]

        def hook(*_: Any) -> None:
            calls[0] -= 1
            if not calls[0]:
                raise RuntimeError(LOUD)

        handle = module.register_forward_pre_hook(hook)
        try:
            self.loss().backward()
        except Exception as error:
            if LOUD not in str(error):
                raise
        handle.remove()
        self.model.zero_grad()
        for p in self.extras:
            p.grad = None

    def beside_another(self) -> None:
        """A thread with an untouched model, to the end of this life. It is the only one: making another would
        take float64 from the first for a while."""
        if not self.wrapped or self.beside:
            return
        self.beside = True
        other = make(self.case.get("model", "LlamaForCausalLM"), seed=1)
        ids, results, over = torch.randint(3, VOCAB, (2, 9)), [], threading.Event()

        def gradients() -> dict[str, Any]:
            other.zero_grad()
            loss = other(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return {name: p.grad for name, p in other.named_parameters()} | {"loss": loss.detach()}

        def go_on() -> None:
            try:
                while not over.is_set():
                    same(gradients(), expected)
            except Exception as error:
                results.append(error)

        def end() -> None:
            over.set()
            thread.join()
            if results:
                raise Deviation(f"another thread's untouched model: {results[0]!r}")

        expected = {name: t if t is None else t.clone() for name, t in gradients().items()}
        thread = threading.Thread(target=go_on)
        thread.start()
        self.until_the_end.callback(end)

    def double_gradients(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_hook(lambda gradient: 2 * gradient)

    def hook_tensor(self) -> None:
        """A hook adds a tensor of its own to what a layer gives."""
        layers = list(layers_of(backbone_of(lm_of(self.model))).values())
        width = self.model.get_input_embeddings().weight.shape[1]
        self.extras.append(nn.Parameter(0.1 * torch.randn(width, dtype=torch.float64)))

        def add(_: Any, __: Any, output: Any, extra: Tensor = self.extras[-1]) -> Any:
            return (output[0] + extra, *output[1:]) if isinstance(output, tuple) else output + extra

        self.random.choice(layers).register_forward_hook(add)

    def side_channel(self) -> None:
        """A layer's values go to a later layer beside the hidden states, in an object."""
        layers = list(layers_of(backbone_of(lm_of(self.model))).values())
        first, last = sorted(self.random.sample(range(len(layers)), 2))
        box = dict[str, Tensor]()

        def keep(_: Any, __: Any, output: Any) -> None:
            box["kept"] = output[0] if isinstance(output, tuple) else output

        def use(_: Any, __: Any, output: Any) -> Any:
            gate = 1 + box["kept"].tanh()
            return (output[0] * gate, *output[1:]) if isinstance(output, tuple) else output * gate

        layers[first].register_forward_hook(keep)
        layers[last].register_forward_hook(use)

    def nested(self) -> None:
        """Activations go into boxes; and what is in one of these changes."""
        boxes = [module for module in self.model.modules() if isinstance(module, Box)]
        if boxes:
            self.random.choice(boxes).inner[0] = nn.Tanh()
        for module in list(self.model.modules()):
            if not boxes and isinstance(getattr(module, "act_fn", None), nn.Module):
                module.act_fn = Box(module.act_fn)

    def refill(self) -> None:
        """Buffers and tensors of a head of one's own."""
        with torch.no_grad():
            for name, tensor in (*self.model.named_buffers(), *self.model.named_parameters()):
                if name.endswith("temperature"):
                    tensor.fill_(0.5 + self.random.random())

    def step(self) -> None:
        torch.optim.SGD(self.model.parameters(), lr=0.01).step()


OPERATIONS: dict[str, Callable[[Life], Any]] = {
    "eval": lambda life: life.model.eval(),
    "train": lambda life: life.model.train(),
    "freeze": Life.freeze,
    "unfreeze": lambda life: life.model.requires_grad_(),
    "no_grad": lambda life: life.evaluate(torch.no_grad),
    "inference": lambda life: life.evaluate(torch.inference_mode),
    "generate": Life.generate,
    "deepcopy": lambda life: setattr(life, "model", copy.deepcopy(life.model)),
    "pickle": Life.save_and_load,
    "rewrap": lambda life: life.wrap_again(unwrapped=False),
    "unwrap": lambda life: life.wrap_again(unwrapped=True),
    "peft": Life.add_adapter,
    "checkpointing": lambda life: life.model.gradient_checkpointing_enable(),
    "no_cache": lambda life: setattr(lm_of(life.model).config, "use_cache", False),
    "input_grads": lambda life: life.model.enable_input_require_grads(),
    "fails": Life.fail_once,
    "thread": Life.beside_another,
    "forward": Life.forward,  # another batch's before this one's backward
    "step": Life.step,
    "hook_tensor": Life.hook_tensor,
    "side_channel": Life.side_channel,
    "nested": Life.nested,
    "refill": Life.refill,
    "zero_grad": lambda life: life.model.zero_grad(),
    "hooks": Life.double_gradients,
    "float32": lambda life: life.model.to(REALLY_FLOAT32).double(),
}
# What would be another life than the untouched model's: weights or structure changed under a backward.
NEVER: dict[str, set[str]] = {
    "before": {"step", "forward"},
    "between": {"step", "peft", "float32", "hook_tensor", "side_channel", "nested", "refill"},
    "after": {"forward"},
}
REALLY_FLOAT32 = torch.float32


class Box(nn.Module):
    """An activation further in."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


def with_own_head(model: Any, trained: bool) -> None:
    """Its logits are multiplied by a tensor, which may be filled anew."""

    class Own(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **given: Any) -> Any:
            loss = {name: given.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
            out = super().forward(*args, **given)
            out.logits = out.logits * self.temperature
            if labels is not None or loss["shift_labels"] is not None:
                words = self.config.get_text_config().vocab_size
                out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=words, **loss)
            return out

    temperature = torch.ones((), dtype=torch.float64)
    if trained:
        model.temperature = nn.Parameter(temperature)
    else:
        model.register_buffer("temperature", temperature)
    model.__class__ = Own


def model_of(case: Case) -> str:
    return case.get("model", "LlamaForCausalLM")


def lm_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check(case: Case) -> None:
    name = model_of(case)
    if "loss" in case and ("packed" in case or case.get("call") == "backbone"):
        raise Vacuous("a loss of one's own is the untouched model's of whole rows alone")
    if "head" in case and case.get("call") in ("tuple", "positional", "backbone"):
        raise Vacuous("this head is called by names, and gives names")
    happens = [what for when in ("before", "between", "after") for what in case.get(when, ())]
    if name.startswith("MiniMax") and "float32" in happens:
        raise Vacuous("its tables of decays, rounded, are no powers of each other")
    if name.startswith(("Gemma4", "DeepseekV4")) and case.get("call") == "embeds":
        raise Vacuous("its own forward looks for the ids of embeddings, and does not always find them")
    try:
        model = make(name, seed=case["seed"] % 7, **case.get("options", {}))
    except (ValueError, ImportError) as error:
        raise Vacuous(f"no such model: {error}") from error
    if "head" in case:
        with_own_head(model, case["head"] == "trained")
    if "loss" in case:
        term = {"smoothed": "smoothed", "z": "z of all"}[
            case["loss"]
        ]  # of all tokens, those without labels too
        model.loss_function = loss_function({"term": term, "divisor": "count"})
    plain = copy.deepcopy(model)
    with float64_throughout():
        try:
            expected = Life(case, plain, wrapped=False).run()
        except Exception as error:
            raise Vacuous(f"the untouched model: {error!r}") from error
        try:
            got = Life(case, model, wrapped=True).run()
        except Exception as error:
            if raised_by_us(error) and not isinstance(error, Deviation):
                raise Refusal(re.sub(r"\d[\d.e-]*", "#", str(error))) from error
            raise
    finite = all(t is None or t.isfinite().all() for t in expected.values())
    if not finite:
        raise Vacuous("the untouched model's gradient is not finite")
    apart = [key for key in expected if key.startswith("logits") or key.startswith("loss")]
    for key in apart:
        same({key: got.pop(key)}, {key: expected.pop(key)})
    same(got, expected)
