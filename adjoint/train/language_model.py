"""The model of a run, a `Stack` or a causal LM of transformers, as the training loop and the tools use it."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, Batch, shift_labels
from adjoint.data.tokenizer import check_bytes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.host_weights import device_of, offload_weights
from adjoint.engine.runner import chunk_losses, last_hidden
from adjoint.engine.stage import check_windows
from adjoint.engine.threads import share_of_cores
from adjoint.errors import UserError
from adjoint.files.remote import Place
from adjoint.formats import file_format_of
from adjoint.loss import linear_cross_entropy
from adjoint.methods import Exact, Method, as_picked, check_bidirectional_method
from adjoint.stack import Stack, StackCall, StackOutput
from adjoint.train import quantization
from adjoint.train.checkpoint import trained_model
from adjoint.train.config import Config, TrainingConfig
from adjoint.train.machine import pick_precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ModuleT = TypeVar("ModuleT", bound=nn.Module)
Device = torch.device | str | None


class OutputWithLoss(Protocol):
    """The output of transformers for a call with labels."""

    loss: Tensor | None


class LanguageModel(Protocol):
    """A model with the method by which its gradients are computed.

    Args:
        module: it as PyTorch sees it.
        group: of processes that share each sequence.
    """

    module: nn.Module
    method: Method
    group: dist.ProcessGroup | None

    def __init__(self, module: nn.Module, method: Method, group: dist.ProcessGroup | None = None) -> None:
        self.module, self.method, self.group = module, method, group

    @staticmethod
    def check(config: Config) -> None:
        """Raise a UserError for what such a model cannot do, before there is a folder, or text is read."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        device: Device = None,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> LanguageModel:
        """Return the model of a configuration, as it is before the first step.

        Args:
            group: of processes that share each sequence.
            tensor_group: of processes over which its weights are split; None leaves them whole.
        """

    @classmethod
    def from_checkpoint(cls, checkpoint: Place, device: Device = None) -> LanguageModel:
        """Return the model of a run's checkpoint that is known to be whole, to be evaluated."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model has."""

    @property
    def num_parameters(self) -> int:
        """The number of parameters, each tied one counted once."""

    def picked_method(self, batch: int, seqlen: int, has_state: bool) -> Method:
        """Return the method, which has chunks, with those and the segments that are picked for a batch.

        Args:
            batch, seqlen: of its ids. The caller's autocast counts.
            has_state: whether it goes on from the state of the batch before it.
        """

    def output(
        self, ids: Tensor, labels: Tensor, seq_idx: Tensor | None, **states: object
    ) -> StackOutput | OutputWithLoss:
        """Return an output with the mean `loss` of a batch. Arguments are those of `Stack.forward`, with
        `state` and `return_state` where states are carried."""

    def continued(self, prompt: Tensor, settings: TrainingConfig) -> Tensor:
        """Return the prompt (1, seqlen) with sampled tokens after it."""

    def chunk_losses(self, ids: Tensor, spec: EngineSpec, labels: Tensor | None = None) -> list[Tensor]:
        """Return the summed loss of each chunk of ids (1, seqlen), without gradients.

        Args:
            labels: (1, seqlen), what each token itself is predicted to be, for a model that reads in both
                directions; None where each token predicts the next.
        """

    def last_logits(self, ids: Tensor, tokens: int, chunk_size: int) -> Tensor:
        """Logits (1, tokens, vocab_size) of the last `tokens` of ids (1, seqlen), without gradients."""


class StackLM(LanguageModel):
    """A `Stack`."""

    module: Stack

    @staticmethod
    def check(config: Config) -> None:
        check_offload(config)
        if config.model.bidirectional is not None:
            return _check_bidirectional(config)
        check_windows(config.model, config.method.engine_spec(config.data.seqlen, config.data.seqlen))

    @classmethod
    def from_config(
        cls,
        config: Config,
        device: Device = None,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> StackLM:
        module = Stack(config.model)
        if tensor_group is not None:  # before it goes to a device that may not have room for all of it
            module.parallelize(tensor_group, "cluster.tensor", same_weights=True)
        module = _placed(module, config, device, dtype)
        grows = any(dim is not None for block in module.blocks() for dim in block.mixer.grows)
        if grows and config.training.carries_states:
            raise UserError(
                "training.carry_state: attention's keys and values would grow without limit; leave it out"
            )
        return cls(module, config.method, group)

    @classmethod
    def from_checkpoint(cls, checkpoint: Place, device: Device = None) -> StackLM:
        return cls(Stack.from_pretrained(checkpoint).to(device), Exact())

    @property
    def vocab_size(self) -> int:
        return self.module.config.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.module.num_parameters()

    def picked_method(self, batch: int, seqlen: int, has_state: bool) -> Method:
        ids = torch.empty(batch, seqlen, dtype=torch.int8, device=device_of(self.module))
        return as_picked(self.method, self.module.engine_spec(ids, self.method, has_state, self.group))

    def output(
        self, ids: Tensor, labels: Tensor, seq_idx: Tensor | None, **states: object
    ) -> StackOutput | OutputWithLoss:
        options = {"method": self.method, "sequence_group": self.group, **states}
        return self.module(ids, labels=labels, seq_idx=seq_idx, **options)

    def continued(self, prompt: Tensor, settings: TrainingConfig) -> Tensor:
        generator = torch.Generator(prompt.device).manual_seed(settings.seed)
        tokens, temperature = settings.sample_tokens, settings.sample_temperature
        return self.module.generate(prompt, tokens, temperature, generator=generator)

    def chunk_losses(self, ids: Tensor, spec: EngineSpec, labels: Tensor | None = None) -> list[Tensor]:
        if labels is not None:
            return self._masked_losses(ids, spec, labels)
        return chunk_losses(self.module, self._call(ids, spec), spec)

    def _call(self, ids: Tensor, spec: EngineSpec) -> StackCall:
        states = self.module.stage_states(self.module.initial_state(len(ids)))
        return StackCall(Batch(ids, shift_labels(ids), states=states), Exact(spec.chunk_size))

    @torch.no_grad()
    def _masked_losses(self, ids: Tensor, spec: EngineSpec, labels: Tensor) -> list[Tensor]:
        """Return the summed loss of each chunk's labels, with hidden states of all tokens in memory."""
        out = self.module(ids, method=Exact(spec.chunk_size), return_hidden_states=True)
        weight, cuts = self.module.head_weight(), itertools.pairwise(spec.cuts(ids.shape[1]))
        return [linear_cross_entropy(out.hidden_states[:, a:b], weight, labels[:, a:b]) for a, b in cuts]

    @torch.no_grad()
    def last_logits(self, ids: Tensor, tokens: int, chunk_size: int) -> Tensor:
        spec = EngineSpec(chunk_size)
        return self.module.logits(last_hidden(self.module, self._call(ids, spec), tokens, spec))


class PretrainedLM(LanguageModel):
    """A causal LM of transformers, wrapped."""

    module: PreTrainedModel

    @staticmethod
    def check(config: Config) -> None:
        from adjoint.train.pretrained import check_tensor_parallel, configuration

        directory, shards = str(config.model.from_pretrained), config.cluster.shards != 0
        if shards and config.cluster.tensor > 1:
            raise UserError(
                "cluster.tensor: Ray's shards do not split a pretrained model's weights; set cluster.shards "
                "to 0 and start the processes with torchrun"
            )
        file_format = file_format_of(directory) if shards else None
        if file_format is not None and file_format.WHY_NOT_SHARDED is not None:
            raise UserError(
                f"model.from_pretrained: {directory}: {file_format.WHY_NOT_SHARDED}; set cluster.shards to 0"
            )
        packed = config.data.documents == "packed"
        described = configuration(directory, config.model.trust_remote_code)
        if config.cluster.tensor > 1:
            check_tensor_parallel(described, config.cluster.tensor, config.model.quantization)
        check_offload(config, quantization.described(described))
        quantization.check(
            config.model.quantization,
            described,
            directory,
            config.model.lora is not None,
            config.training.precision,
        )
        if config.data.tokenizer is None:
            check_bytes(directory, config.model.vocab_size)
        if shards and config.model.lora is not None:
            raise UserError("model.lora: shards do not train adapters; set cluster.shards to 0")
        if config.training.carries_states and (shards or packed):
            place = "set cluster.shards to 0" if shards else 'set data.documents to "stream"'
            raise UserError(
                f"training.carry_state: a pretrained model's states go on in rows of one process; {place}"
            )
        if shards and packed:
            raise UserError(
                "data.documents: packed documents of a pretrained model work in one process only; set "
                'cluster.shards to 0, or data.documents to "stream"'
            )
        if packed and not config.method.has_chunks:
            raise UserError(
                "data.documents: packed documents need a method with chunks; use --method.name exact"
            )

    @classmethod
    def from_config(
        cls,
        config: Config,
        device: Device = None,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> PretrainedLM:
        from adjoint.hf.quantized import set_compute_dtype
        from adjoint.hf.wrap import wrap
        from adjoint.train.pretrained import KEY, prepared, unwrapped

        directory, lora = str(config.model.from_pretrained), config.to_dict()["model"]["lora"]
        trusted, kind = config.model.trust_remote_code, config.model.quantization
        ranks = 1 if tensor_group is None else dist.get_world_size(tensor_group)
        model = unwrapped(directory, dtype or torch.float32, trusted, KEY, kind, device, ranks)
        module = _placed(prepared(model, directory, config.method, lora), config, device, dtype)
        if pick_precision(config.training.precision, device_of(module)) == "bfloat16":
            set_compute_dtype(module, torch.bfloat16)
        if config.training.carries_states:
            from adjoint.hf.carried_state import why_not_from_batch_to_batch
            from adjoint.hf.model_parts import base_of

            if reason := why_not_from_batch_to_batch(base_of(module)):
                raise UserError(f"training.carry_state: {type(module).__name__}: {reason}; leave it out")
        return cls(module if group is None else wrap(module, config.method, group), config.method, group)

    @classmethod
    def from_checkpoint(cls, checkpoint: Place, device: Device = None) -> PretrainedLM:
        return cls(trained_model(checkpoint, Exact(), device).eval(), Exact())

    @property
    def vocab_size(self) -> int:
        return self.module.get_input_embeddings().num_embeddings

    @property
    def num_parameters(self) -> int:
        return self.module.num_parameters()

    def picked_method(self, batch: int, seqlen: int, has_state: bool) -> Method:
        from adjoint.hf.call import Call
        from adjoint.hf.hf_model import HFModel
        from adjoint.hf.verify.first_use import verification_of

        ids = torch.zeros(batch, seqlen, dtype=torch.long, device=device_of(self.module))
        verification = verification_of(self.module)
        call = Call(self.module, {"input_ids": ids, "labels": ids})
        tokens, starts = call.batch()
        spec = verification.chunk_spec(tokens.ids, starts)
        if self.group is None and not has_state:
            spec = HFModel(verification).in_segments(call, tokens, spec)
        return as_picked(self.method, spec)

    def output(
        self, ids: Tensor, labels: Tensor, seq_idx: Tensor | None, **states: object
    ) -> StackOutput | OutputWithLoss:
        if "return_state" in states:
            return self._output_with_state(ids, labels, states["state"])
        targets = shift_labels(labels, seq_idx)
        if (targets == IGNORE_INDEX).all():  # transformers' own loss would be nan
            return StackOutput(torch.zeros((), device=ids.device, requires_grad=True))
        self.module.train(torch.is_grad_enabled())  # it may have dropout
        if seq_idx is None:
            return self.module(input_ids=ids, labels=labels)
        return self.module(input_ids=ids, shift_labels=targets, seq_idx=seq_idx)

    def _output_with_state(self, ids: Tensor, labels: Tensor, state: object) -> StackOutput:
        """Return the loss of a batch that begins with a state, and its final state, by layers."""
        from adjoint.hf.carried_state import cache_by_layer, states_by_layer
        from adjoint.hf.model_parts import base_of

        self.module.train(torch.is_grad_enabled())
        model = base_of(self.module)
        cache = cache_by_layer(model, state) if isinstance(state, list) else None
        out = self.module(input_ids=ids, labels=labels, past_key_values=cache, use_cache=True)
        return StackOutput(out.loss, state=states_by_layer(model, out.past_key_values, ids))

    def continued(self, prompt: Tensor, settings: TrainingConfig) -> Tensor:
        from adjoint.train.pretrained import continued

        tokens, temperature = settings.sample_tokens, settings.sample_temperature
        return continued(self.module, prompt, tokens, temperature, settings.seed)

    def chunk_losses(self, ids: Tensor, spec: EngineSpec, labels: Tensor | None = None) -> list[Tensor]:
        from adjoint.hf.hf_model import chunk_losses

        return chunk_losses(self.module, ids, spec)

    def last_logits(self, ids: Tensor, tokens: int, chunk_size: int) -> Tensor:
        from adjoint.hf.hf_model import last_logits

        return last_logits(self.module, ids, tokens, EngineSpec(chunk_size, least=2))


def model_class(pretrained: str | None) -> type[LanguageModel]:
    """Return the class for a value of `model.from_pretrained`."""
    return StackLM if pretrained is None else PretrainedLM


def on_device(module: ModuleT, device: torch.device, precision: str, key: str) -> ModuleT:
    """Return a model on a device, in float64 if that is the precision; quantized weights are there already.

    Args:
        key: as what the precision was given, for an error.

    Raises:
        UserError: the model is quantized, and the precision is float64.
    """
    if quantization.described(module.config) is None:
        module.to(device, torch.float64 if precision == "float64" else None)
        if not isinstance(module, Stack):
            from adjoint.hf.transformers_api import use_float64_experts

            use_float64_experts(module)
        return module
    if precision == "float64":
        raise UserError(f"{key} float64: quantized weights do not multiply in it; leave it out")
    from adjoint.hf.quantized import set_compute_dtype

    set_compute_dtype(module, getattr(torch, precision))
    return module


def _placed(module: ModuleT, config: Config, device: Device, dtype: torch.dtype | None) -> ModuleT:
    """Return a model on its device, or with `model.offload` in host memory for it."""
    if config.model.offload == "none":
        return module.to(device, dtype)
    if config.training.threads is None:
        _use_share_of_cores()
    return offload_weights(module.to(dtype=dtype), device or "cpu")


def _check_bidirectional(config: Config) -> None:
    """Raise an error for a run that layers that read in both directions cannot have."""
    check_bidirectional_method(config.method)
    cluster, key = config.cluster, f"model.bidirectional: {config.model.bidirectional}"
    for name, value in (
        ("shards", cluster.shards),
        ("sequence", cluster.sequence),
        ("tensor", cluster.tensor),
    ):
        if value not in (0, 1) or (name == "shards" and value):
            raise UserError(
                f"{key}: such layers read the whole sequence in one process; leave cluster.{name} out"
            )
    if config.training.carries_states:
        raise UserError(f"{key}: no state goes on after the sequence; leave training.carry_state out")
    if config.model.offload != "none":
        raise UserError(f"{key}: such layers run with weights on the device; leave model.offload out")


def _use_share_of_cores() -> None:
    """Use this process's share of the host's cores, where torchrun started it with one thread.

    With weights in host memory the CPU adds gradients and takes the optimizer's step."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        torch.set_num_threads(max(torch.get_num_threads(), share_of_cores()))


def check_offload(config: Config, stored: str | None = None) -> None:
    """Raise a UserError for a run whose weights cannot be in host memory.

    Args:
        stored: how the weights of the model's folder are quantized.
    """
    if config.model.offload == "none":
        return
    key = f"model.offload: {config.model.offload}"
    if stored is not None:
        raise UserError(
            f"{key}: the folder's weights are quantized ({stored}) and stay on the GPU; leave it out"
        )
    if config.cluster.tensor > 1:
        raise UserError(f"{key}: weights are split over processes already; leave cluster.tensor out")
    if config.cluster.shards != 0:
        raise UserError(f"{key}: layer shards keep their weights on their devices; set cluster.shards to 0")
    if not config.method.has_chunks:
        raise UserError(
            f"{key}: {config.method.name} keeps all layers' weights on the GPU for its backward; use "
            "--method.name exact"
        )
