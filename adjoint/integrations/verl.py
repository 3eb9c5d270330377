"""verl imports this module by name, and its FSDP engine then computes log-probabilities by chunks.

    actor_rollout_ref.model.external_lib: adjoint.integrations.verl
    actor_rollout_ref.actor.strategy: fsdp2

verl's own engine makes the logits of every token outside of the model. Here actor and reference model are
wrapped before they are sharded, and their log-probabilities are `adjoint.token_logprobs`. The method comes
from the environment (`ADJOINT_METHOD__CHUNK_SIZE=4096`). Critics stay as they are. This module imports verl,
whose classes it changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal, Protocol, overload

import torch
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp import transformer_impl

from adjoint.errors import UserError
from adjoint.hf.wrap import wrap
from adjoint.integrations.options import method_from_environment
from adjoint.train.token_logprobs import token_logprobs, token_logprobs_and_entropies

# Settings of a batch that need logits, each with the key of verl's configuration that switches it off.
NEED_LOGITS = {
    "use_fused_kernels": "model.use_fused_kernels: false",
    "distillation_use_topk": "distillation.enabled: false",
    "calculate_sum_pi_squared": "actor.calculate_sum_pi_squared: false",
}


class NestedTensor(Protocol):
    """A jagged tensor: rows of different lengths."""

    def to_padded_tensor(self, padding: float) -> Tensor: ...
    def offsets(self) -> Tensor: ...


class MicroBatch(Protocol):
    """The part of verl's batches that is used here."""

    @overload
    def __getitem__(self, name: Literal["input_ids"]) -> NestedTensor: ...
    @overload
    def __getitem__(self, name: Literal["temperature"]) -> Tensor | float: ...
    def get(self, name: str, default: object) -> object: ...
    def to(self, device: object) -> MicroBatch: ...


class EngineConfig(Protocol):
    """The part of verl's `FSDPEngineConfig` that is used here."""

    strategy: str


class Engine(Protocol):
    """The part of verl's `FSDPEngineWithLMHead` that is used here."""

    module: nn.Module
    engine_config: EngineConfig
    _autocast_dtype: torch.dtype
    use_ulysses_sp: bool
    runs_by_chunks: bool  # set here, where the model was wrapped

    def get_data_parallel_group(self) -> object: ...


LossFunction = Callable[..., tuple[Tensor, dict[str, object]]]
StepResult = tuple[Tensor, dict[str, object]]
_engine_class = transformer_impl.FSDPEngineWithLMHead
_build_fsdp_module: Callable[[Engine, nn.Module], nn.Module] = _engine_class._build_fsdp_module
_forward_step: Callable[[Engine, MicroBatch, LossFunction | None, bool], StepResult] = (
    _engine_class.forward_step
)


def _build_wrapped(self: Engine, module: nn.Module) -> nn.Module:
    """Wrap the model, with its adapters, before verl shards it."""
    if isinstance(self, transformer_impl.FSDPEngineWithValueHead):
        return _build_fsdp_module(self, module)
    if self.engine_config.strategy != "fsdp2":
        raise UserError(
            f"adjoint.integrations.verl: strategy {self.engine_config.strategy} is FSDP1, which gathers "
            "weights where chunks cannot: set strategy: fsdp2 for actor and ref"
        )
    self.runs_by_chunks = True
    return _build_fsdp_module(self, wrap(module, method_from_environment()))


def _forward_step_by_chunks(
    self: Engine, micro_batch: MicroBatch, loss_function: LossFunction | None, forward_only: bool
) -> StepResult:
    """Return the loss of a micro-batch and what verl logs of it, as `FSDPEngineWithLMHead.forward_step`."""
    if not vars(self).get("runs_by_chunks", False):  # a critic, or an engine that builds its model otherwise
        return _forward_step(self, micro_batch, loss_function, forward_only)
    micro_batch = micro_batch.to(transformer_impl.get_device_id())
    needs_entropy = bool(_setting(micro_batch, "calculate_entropy"))
    _refuse_unsupported(self, micro_batch, needs_entropy and not forward_only)
    nested, temperature = micro_batch["input_ids"], _temperature_of(micro_batch)
    ids, offsets = nested.to_padded_tensor(0), nested.offsets()
    positions = torch.arange(ids.shape[1], device=ids.device)
    mask = positions < offsets.diff()[:, None]
    completion = mask & (positions > 0)
    device, dtype = ids.device.type, self._autocast_dtype
    autocast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)
    with autocast:
        entropies = None
        if needs_entropy:
            logprobs, entropies = token_logprobs_and_entropies(
                self.module, ids, completion, temperature, mask.long()
            )
        else:
            logprobs = token_logprobs(self.module, ids, completion, temperature, mask.long())

        def as_verl_has_it(values: Tensor) -> Tensor:
            # Each value stands at the token that predicts. A row's last token predicts nothing, and verl's
            # losses leave it out.
            return torch.nested.nested_tensor_from_jagged(values.roll(-1, 1)[mask], offsets)

        model_output = {"log_probs": as_verl_has_it(logprobs)}
        if entropies is not None:
            model_output["entropy"] = as_verl_has_it(entropies)
        loss, metrics = torch.ones((), device=ids.device), dict[str, object]()
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=group)
    detached = {name: values.detach() for name, values in model_output.items()}
    return loss, {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}


def _setting(micro_batch: MicroBatch, name: str) -> object:
    return tensordict_utils.get_non_tensor_data(data=micro_batch, key=name, default=False)


def _temperature_of(micro_batch: MicroBatch) -> float:
    """Return the temperature of all rows.

    Raises:
        UserError: rows have different ones.
    """
    temperatures = torch.as_tensor(micro_batch["temperature"]).flatten()
    if bool((temperatures != temperatures[0]).any()):
        raise UserError(
            "adjoint.integrations.verl: rows of a batch have different temperatures: sample with one"
        )
    return float(temperatures[0])


def _refuse_unsupported(engine: Engine, micro_batch: MicroBatch, differentiates_entropy: bool) -> None:
    """Raise a UserError for a batch whose loss needs more than log-probabilities."""
    reasons = {
        f"{name} needs logits": f"set {off}"
        for name, off in NEED_LOGITS.items()
        if _setting(micro_batch, name)
    }
    if differentiates_entropy:
        reasons["an entropy loss needs logits"] = (
            "set actor.entropy_coeff: 0 and actor.calculate_entropy: false"
        )
    if engine.use_ulysses_sp:
        reasons["Ulysses splits the sequence"] = "set ulysses_sequence_parallel_size: 1"
    if transformer_impl.extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", [])):
        reasons["multi_modal_inputs"] = "train on text, or without external_lib"
    for reason, remedy in reasons.items():
        raise UserError(f"adjoint.integrations.verl: {reason}, which chunks do not make: {remedy}")


_engine_class._build_fsdp_module = _build_wrapped
_engine_class.forward_step = _forward_step_by_chunks
