"""Sizes and weights of other libraries' models, as a stack has them: transformers' Mamba and Mamba-2."""

from typing import Any

from torch import Tensor, nn

from adjoint.layers.config import StackConfig


def from_transformers(hf_model: nn.Module) -> tuple[StackConfig, dict[str, Tensor]]:
    """The configuration and the weights, by the stack's names, of a MambaForCausalLM or Mamba2ForCausalLM.

    Raises:
        ValueError: the model is neither, or uses an option a stack does not have.
    """
    hf: Any = getattr(hf_model, "config", None)
    readers = {"mamba": _mamba_config, "mamba2": _mamba2_config}
    kind = getattr(hf, "model_type", None)
    if kind not in readers or not hasattr(hf_model, "backbone") or not hasattr(hf_model, "lm_head"):
        name = type(hf_model).__name__
        raise ValueError(
            f"only MambaForCausalLM and Mamba2ForCausalLM can be copied, this is a {name} of type {kind!r}"
        )
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, the model has {hf.hidden_act!r}")
    config = readers[kind](hf)
    source = {_renamed(name): tensor for name, tensor in hf_model.state_dict().items()}
    if config.tie_embeddings:
        source["lm_head.weight"] = source["embedding.weight"]
    return config, source


def _renamed(name: str) -> str:
    return name.removeprefix("backbone.").replace("embeddings.weight", "embedding.weight")


def _shared(hf: Any) -> dict[str, Any]:
    return {
        "vocab_size": hf.vocab_size,
        "d_model": hf.hidden_size,
        "n_layer": hf.num_hidden_layers,
        "d_state": hf.state_size,
        "d_conv": hf.conv_kernel,
        "expand": int(hf.expand),
        "tie_embeddings": hf.tie_word_embeddings,
        "norm_eps": hf.layer_norm_epsilon,
        "bias": hf.use_bias,
        "conv_bias": hf.use_conv_bias,
        "initializer_range": hf.initializer_range,
    }


def _mamba_config(hf: Any) -> StackConfig:
    if hf.intermediate_size != int(hf.expand) * hf.hidden_size:
        raise ValueError(
            f"intermediate_size {hf.intermediate_size} must be expand * hidden_size = "
            f"{int(hf.expand) * hf.hidden_size}"
        )
    return StackConfig(mixer="mamba", dt_rank=int(hf.time_step_rank), **_shared(hf))


def _mamba2_config(hf: Any) -> StackConfig:
    low, high = hf.time_step_limit
    if low > 0 or high != float("inf"):
        raise ValueError(
            "time_step_limit must be (0, inf): step sizes are not clamped here, "
            f"the model has {hf.time_step_limit}"
        )
    return StackConfig(mixer="mamba2", headdim=hf.head_dim, ngroups=hf.n_groups, **_shared(hf))
