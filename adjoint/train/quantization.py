"""Quantized weights under adapters: how `model.quantization` has transformers load them, and what is
refused before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from adjoint.errors import UserError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig


Quantization = Literal["4bit", "8bit"]
KEY = "model.quantization"


def transformers_config(quantization: str) -> BitsAndBytesConfig:
    """Return what `from_pretrained` takes to quantize weights as it loads them: NF4 with quantized scales
    (Dettmers et al. 2023, QLoRA), or LLM.int8 (Dettmers et al. 2022).

    Raises:
        UserError: bitsandbytes is not installed.
    """
    import torch
    from transformers import BitsAndBytesConfig

    _require_bitsandbytes(f"{KEY}: {quantization}")
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def stored_settings(config: object) -> dict[str, object]:
    """Return the quantization_config of a config.json as plain values; empty if weights are not quantized."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else settings.to_dict()


def described(config: object) -> str | None:
    """Say by which method, and to how many bits if that is known, a model's weights are quantized."""
    settings = stored_settings(config)
    if not settings:
        return None
    bits = settings.get("bits") or next((b for b in (4, 8) if settings.get(f"load_in_{b}bit")), None)
    method = settings.get("quant_method", "a method it does not name")
    name = str(getattr(method, "value", method))  # transformers has an enumeration of these
    return f"{name}, {bits} bits" if bits else name


def check(
    quantization: str | None, config: PreTrainedConfig, folder: str, has_adapters: bool, precision: str
) -> None:
    """Raise a UserError for a quantized base that cannot be trained.

    Args:
        quantization: `model.quantization`.
        config: of the model in `folder`.
    """
    stored = described(config)
    if quantization is None and stored is None:
        return
    if quantization is not None and stored is not None:
        raise UserError(f"{KEY}: the weights in {folder} are quantized already ({stored}); leave it out")
    key = f"{KEY}: {quantization}" if stored is None else f"model.from_pretrained: {folder} ({stored})"
    if not has_adapters:
        raise UserError(f"{key}: quantized weights are not trained; add adapters, --model.lora.rank 16")
    if precision == "float64":
        raise UserError(
            f"{key}: quantized weights do not multiply in float64; set --training.precision float32"
        )
    if stored is None or stored.startswith("bitsandbytes"):
        _require_bitsandbytes(key)


def _require_bitsandbytes(key: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{key} needs bitsandbytes, which is not installed; pip install bitsandbytes")
