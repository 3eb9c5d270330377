"""Refusals by name, for models and inputs that are known not to work by chunks.

`verification` finds out more by running a few tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from adjoint.engine import verification
from adjoint.engine.weights import REPLICA, is_replica
from adjoint.fla import functions as fla
from adjoint.hf.cache import why_no_recurrence
from adjoint.hf.model_parts import original_class, root_of
from adjoint.hf.tensor_parallel import modules_that_split_tokens
from adjoint.kernels.checks import refusal_of_transforms

T = TypeVar("T")
ALTERNATIVE = "adjoint.wrap(model, adjoint.Backprop()) works"
IN_ONE_PROCESS = "leave sequence_group, or accelerate's cp_size, out"
STATE = "the cache that it is given"  # what a chunk continues from
# PEFT's hooks for calls that pick an adapter for each row or token of the batch.
POSITIONAL_HOOKS = ("_alora_offsets_pre_forward_hook", "_adapter_names_pre_forward_hook")
# PEFT's adapters that read more than the tokens of a chunk, by the Python module that defines their layers.
WHOLE_BATCH_ADAPTERS = {
    "peft.tuners.lily.layer": "PEFT's Lily takes the mean of its routers over all tokens",
    "peft.tuners.poly.layer": "PEFT's Poly picks adapters by the row of the batch (task_ids)",
    "peft.tuners.shadow.layers": "PEFT's Shadow runs its own network on the whole sequence first",
    "peft.tuners.xlora.layer": "PEFT's X-LoRA weighs adapters by a first pass through the whole sequence",
}
# PEFT's initial weights that hooks of modules collect or count, by the Python module that defines the hooks.
COLLECTING_HOOKS = {
    "peft.tuners.lora.corda": "PEFT's CorDA",
    "peft.tuners.lora.eva": "PEFT's EVA",
    "peft.tuners.lora.loraga": "PEFT's LoRA-GA",
}
DRAWS_RANDOM_NUMBERS = (
    "it draws random numbers (dropout, NEFTune), of which each rank would have its own: set dropout to 0 and "
    "neftune_noise_alpha to None"
)
SPLITS_TOKENS = (
    "it splits tokens over ranks (SequenceParallel, Shard(1)), and not all chunks can be; leave that style "
    "out"
)
ROUTER_LOGITS, Z_LOSS = "output_router_logits", "z_loss_coefficient"  # settings that add a loss
LOGIT_PENALTY = "use_l2warp"  # fla's setting
ONE_PROCESS = "train it in one process: --cluster.shards 0"  # for models that cannot be cut into layers


def uses_router_loss(model: PreTrainedModel) -> bool:
    """Whether the configuration asks for the routers' loss."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def refuse_transforms(model: PreTrainedModel) -> None:
    """Refuse calls in places where an autograd function does not work.

    Raises:
        Refused: it is a call of a replica of `nn.DataParallel`, or inside a function transform.
    """
    if is_replica(model):
        refuse(model, REPLICA)
    if why := refusal_of_transforms():
        refuse(model, why)


def z_loss_coefficient(model: PreTrainedModel) -> float:
    """Return the configuration's coefficient of the z-loss, 0 if there is none."""
    return getattr(model.config.get_text_config(), Z_LOSS, 0) or 0


def has_logit_penalty(model: PreTrainedModel) -> bool:
    """Whether the configuration asks for fla's penalty of each token's largest logit, as RWKV-7's does by
    default."""
    return bool(getattr(model.config, LOGIT_PENALTY, False)) and fla.is_of_fla(model)


def refuse_logit_penalty(model: PreTrainedModel) -> None:
    """Refuse fla's penalty of each token's largest logit, a gradient that is added to that of a loss."""
    if has_logit_penalty(model):
        reason = f"{LOGIT_PENALTY} adds a gradient of each token's largest logit, which shards do not compute"
        refuse(model, f"{reason}; set config.{LOGIT_PENALTY} to False, or {ONE_PROCESS}")


def refuse_other_losses(model: PreTrainedModel, routed: bool, supported: tuple[str, ...] = ()) -> None:
    """Refuse losses beside the labels' cross-entropy: the routers' if that is asked for (`routed`), and those
    of settings, but for the `supported` ones."""
    if routed and ROUTER_LOGITS not in supported:
        refuse(
            model,
            "output_router_logits adds a loss of the whole sequence's routing, which only Exact and "
            "Truncated in one process compute; set output_router_logits to False",
        )
    for name, value in vars(model.config.get_text_config()).items():
        if "z_loss" in name and name not in supported and isinstance(value, (int, float)) and value:
            refuse(model, f"{name} adds a loss that is not supported; set it to 0")


def refuse_unreadable_weights(model: PreTrainedModel) -> None:
    """Refuse weights that have no values, or that no backward can read.

    Raises:
        Refused: some are on the meta device, or gradients are on and some were made in inference mode.
    """
    for name, p in model.named_parameters():
        if p.is_meta:
            load = "load them first (from_pretrained, or to_empty and load_state_dict)"
            refuse(model, f"{name} is on the meta device, without values", load)
        if p.is_inference() and torch.is_grad_enabled():
            make = "make or load the model outside of it, or call it under torch.no_grad()"
            refuse(
                model, f"{name} was made under torch.inference_mode(), so that no backward can read it", make
            )


class LargeMasks(TorchFunctionMode):
    """Context in which a model's own code is refused a mask that PyTorch's attention misreads on CUDA.

    Our attention in transformers' registry cuts queries so that masks are small. Models whose code calls
    PyTorch's kernel itself do not use it, and their calls of the kernel are watched.

    Args:
        limit: the most pairs of a query and a key that a mask may have.
    """

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        super().__init__()
        self.model, self.limit = model, limit
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[nn.Module] = []  # modules of the model, from the outermost to the innermost

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Enter the context, and note which module runs."""
        with (
            nn.modules.module.register_module_forward_pre_hook(self._begin),
            nn.modules.module.register_module_forward_hook(self._end, always_call=True),
            self,
        ):
            yield

    def _begin(self, module: nn.Module, _: object) -> None:
        if module in self.names:
            self.running.append(module)

    def _end(self, module: nn.Module, *_: object) -> None:
        if module in self.names:
            self.running.pop()

    def __torch_function__(
        self,
        func: Callable[..., T],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> T:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            check: Callable[..., None] = self._check_mask
            check(*args, **kwargs)
        return func(*args, **kwargs)

    def _check_mask(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *_: object,
        **__: object,
    ) -> None:
        pairs = query.shape[-2] * key.shape[-2]
        if attn_mask is not None and pairs > self.limit:
            mask_size = f"a mask of {pairs:,} pairs of a query and a key"
            why = "gives to a kernel of PyTorch that is silently wrong on CUDA beyond 2**32"
            name = self.names[self.running[-1]]
            refuse(self.model, f"{name} has {mask_size}, which its own code {why}: shorten chunk_size")


def refuse_windows_in_padding(model: PreTrainedModel, mask: Tensor) -> None:
    """Refuse padding at the left of a model that reads windows of tokens, counted from the row's beginning.

    Chunks begin after the padding, and so do their windows. DeepSeek-V4 compresses the keys of a window,
    MiniMax-M3 picks blocks of keys.

    Args:
        mask: (batch, seqlen) bool, False for padding.
    """
    config = model.config.get_text_config()
    has_windows = any(getattr(config, name, None) for name in ("compress_rates", "index_block_size"))
    if has_windows and not bool(mask[:, 0].all()):
        reason = "rows are padded at the left, and it counts padding in its windows of keys"
        refuse(model, reason, "pad at the right (tokenizer.padding_side = 'right')")


def refuse_unsupported_model(model: PreTrainedModel) -> None:
    """Refuse options with which a chunk does not compute a part of the whole."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *rope.values()):
        kind = parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, dict) else None
        if kind in ("dynamic", "longrope"):
            refuse(model, f"rope_type {kind!r} depends on the length so far, which a chunk does not know")
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop" and config.n_recurrent_loops > 1:
        refuse(
            model,
            "recurrent_kv_cache_mode='last_loop': with a cache, earlier loops attend to the last loop's keys "
            "of the past, and without one to their own; set it to 'per_loop'",
        )
    if why_not_recurrent := why_no_recurrence(config):
        refuse(model, why_not_recurrent)
    for module in root_of(model).modules():
        for adapter in (getattr(module, "peft_config", None) or {}).values():
            if getattr(adapter, "peft_type", "") == "CPT":
                why = "PEFT's CPT computes its loss from the logits, which a call with labels does not make"
                refuse(model, why)
    if nn.utils.parametrize._cache_enabled and any(
        map(nn.utils.parametrize.is_parametrized, model.modules())
    ):
        refuse(
            model, "parametrize.cached() keeps weights from one chunk to the next; call the model outside it"
        )


def refuse_unsupported_modules(model: PreTrainedModel) -> None:
    """Refuse modules with which a chunk does not compute a part of the whole, by what snapshots see."""
    splitting = modules_that_split_tokens(model)
    for name, module in model.named_modules():
        if reason := SPLITS_TOKENS if module in splitting else _reason_against(module):
            refuse(model, f"{name}: {reason}")


def _reason_against(module: nn.Module) -> str | None:
    """Return the reason why a module is known not to work by chunks, or None."""
    if fla.is_of_fla(module) and (reason := fla.why_not(module)):
        return reason
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
        return "BatchNorm in training takes statistics over the whole sequence; use its eval mode"
    if isinstance(module, nn.Embedding):
        if module.sparse and module.weight.requires_grad:
            return "sparse gradients cannot be added up over chunks; set sparse=False"
        if module.scale_grad_by_freq and module.weight.requires_grad:
            return "scale_grad_by_freq counts tokens of the whole batch; set it to False"
        if module.max_norm is not None:
            return "max_norm changes weights in the forward; set it to None"
    if module.training and vars(module).get("layerdrop"):
        return "layerdrop skips a layer in one chunk, whose keys later chunks then lack; set it to 0"
    replaced_forward = vars(module).get("forward")  # X-LoRA gives LoRA's layers another
    for code in (type(module), replaced_forward):
        if (adapter := WHOLE_BATCH_ADAPTERS.get(getattr(code, "__module__", ""))) is not None:
            return adapter
    hooks = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())
    if any(getattr(hook, "__name__", "") in POSITIONAL_HOOKS for hook in hooks):
        return (
            "adapters that are picked by row or by token (adapter_names, aLoRA) need the whole batch at once"
        )
    for hook in (*module._forward_hooks.values(), *module._backward_hooks.values()):
        if (initialization := COLLECTING_HOOKS.get(getattr(hook, "__module__", ""))) is not None:
            return (
                f"{initialization} reads the whole sequence in hooks, which chunks run several times; "
                "initialize the adapters before adjoint.wrap"
            )
    return None


def as_refusal(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Turn an error of the model's own code, run chunk by chunk, into a refusal."""
    return verification.errors_as_refusals(original_class(model).__name__, STATE, ALTERNATIVE)


def refuse(model: nn.Module, why: str, otherwise: str = ALTERNATIVE) -> NoReturn:
    """Raise `Refused` with the reason and with an alternative that works."""
    verification.refuse(original_class(model).__name__, why, otherwise)


def refuse_shared(model: nn.Module, why: str) -> NoReturn:
    """Raise `Refused` for what one process can do, but not ranks that share a sequence."""
    refuse(model, f"sequence_group: {why}", IN_ONE_PROCESS)
