"""Our formulas in the places of the forwards of transformers' norms and MLPs.

Classes are registered by name: transformers writes the same few formulas in hundreds of classes. A class
whose methods somebody has replaced, a subclass, and a module with a forward of its own run as they are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from adjoint.engine.host_weights import is_unit, with_weights_fetched
from adjoint.hf.model_parts import Forward, original_class
from adjoint.hf.transformers_api import ACT2FN, MODELS
from adjoint.kernels.checks import is_untouched
from adjoint.kernels.columns import SplitOnce
from adjoint.kernels.gated import gated, gated_linear
from adjoint.kernels.rms_norm import rms_norm

# weight · x / √(mean x² + ε), of which classes round the product or its factor; a test compares each class
# of the installed release with our formula
RMS_NORMS = """
    AXK1RMSNorm AXK2RMSNorm AfmoeRMSNorm Apertus1p5TextRMSNorm ApertusRMSNorm ArceeRMSNorm AriaTextRMSNorm
    BailingHybridRMSNorm BambaRMSNorm BeamRMSNorm BitNetRMSNorm BltRMSNorm ChameleonRMSNorm ClvpRMSNorm
    Cohere2MoeRMSNorm Cosmos3EdgeTextRMSNorm CsmRMSNorm CwmRMSNorm DeepseekOcr2TextRMSNorm
    DeepseekV2RMSNorm DeepseekV32RMSNorm DeepseekV3RMSNorm DeepseekV4RMSNorm DiaRMSNorm DiffLlamaRMSNorm
    DogeRMSNorm Dots1RMSNorm Dots3NoteRMSNorm Emu3RMSNorm Ernie4_5RMSNorm Ernie4_5_MoeRMSNorm
    Ernie4_5_VLMoeRMSNorm EuroBertRMSNorm Exaone4RMSNorm Exaone4_5_RMSNorm ExaoneMoeRMSNorm
    FalconH1RMSNorm FalconMambaRMSNorm FlexOlmoRMSNorm FlintRMSNorm Glm4MoeLiteRMSNorm Glm4MoeRMSNorm
    Glm4RMSNorm Glm4vMoeRMSNorm Glm4vMoeTextRMSNorm Glm4vRMSNorm Glm5NextRMSNorm Glm5NextTextRMSNorm
    GlmMoeDsaRMSNorm GlmOcrRMSNorm GlmRMSNorm GptOssRMSNorm GraniteDoclingTextRMSNorm
    GraniteMoeHybridRMSNorm GraniteMoeRMSNorm GraniteMoeSWARMSNorm GraniteMoeSharedRMSNorm GraniteRMSNorm
    GraniteSWARMSNorm HYV3RMSNorm HYV4RMSNorm HYV4VLRMSNorm HunYuanDenseV1RMSNorm HunYuanMoEV1RMSNorm
    HunYuanVLRMSNorm HyperCLOVAXRMSNorm Inkling2LoopRMSNorm Inkling2RMSNorm InklingRMSNorm JambaRMSNorm
    JetMoeRMSNorm KimiLinearRMSNorm Kolibri1RMSNorm LagunaRMSNorm Lfm2MoeRMSNorm Lfm2RMSNorm Lfm3RMSNorm
    LightOnOcrRMSNorm LlamaRMSNorm LongcatFlashRMSNorm Mamba2RMSNorm MambaRMSNorm MellumRMSNorm
    MiMoV2FlashRMSNorm MiniCPM3RMSNorm MiniMaxM2RMSNorm MiniMaxRMSNorm Ministral3RMSNorm MinistralRMSNorm
    Mistral3RMSNorm Mistral4RMSNorm MistralLarge4RMSNorm MistralRMSNorm MixtralRMSNorm MllamaTextRMSNorm
    Molmo2RMSNorm MuseGlimmerAssistantRMSNorm NemotronHRMSNorm Olmo2RMSNorm Olmo3RMSNorm OlmoHybridRMSNorm
    OlmoeRMSNorm OpenAIPrivacyFilterRMSNorm Ovis2RMSNorm PaddleOCRRMSNorm Phi3RMSNorm
    Phi4MultimodalRMSNorm Qwen2MoeRMSNorm Qwen2RMSNorm Qwen2VLRMSNorm Qwen2_5OmniRMSNorm Qwen2_5_VLRMSNorm
    Qwen3MoeRMSNorm Qwen3OmniMoeRMSNorm Qwen3OmniMoeTextRMSNorm Qwen3OmniMoeThinkerTextRMSNorm
    Qwen3RMSNorm Qwen3VLMoeTextRMSNorm Qwen3VLTextRMSNorm SeedOssRMSNorm SmolLM3RMSNorm SolarOpenRMSNorm
    UltraVBertRMSNorm UltrabertRMSNorm UnlimitedOcrTextRMSNorm VibeVoiceAsrRMSNorm VibeVoiceRMSNorm
    VoxtralRealtimeRMSNorm YoutuRMSNorm Zamba2RMSNorm ZambaRMSNorm ZayaRMSNorm
"""
# (1 + weight) · x / √(mean x² + ε)
NORMS_AROUND_ONE = """
    Gemma2RMSNorm Gemma3RMSNorm GemmaRMSNorm MiniMaxM3VLRMSNorm MuseGlimmerTextCenteredRMSNorm
    Qwen3NextRMSNorm Qwen3_5MoeRMSNorm Qwen3_5RMSNorm RecurrentGemmaRMSNorm Step3p7RMSNorm T5Gemma2RMSNorm
    T5GemmaRMSNorm VaultGemmaRMSNorm
"""
# weight · norm(x · silu(gate)), since transformers 5.23 in groups
GATED_BEFORE_NORM = """
    BambaRMSNormGated GraniteMoeHybridRMSNormGated MambaRMSNormGated NemotronHRMSNormGated
    Zamba2RMSNormGated
"""
# weight · norm(x) · act(gate)
GATED_AFTER_NORM = """
    OlmoHybridRMSNormGated Qwen3NextRMSNormGated Qwen3_5MoeRMSNormGated Qwen3_5RMSNormGated
    Qwen4ExpTextRMSNormGated
"""
# down(act(gate(x)) · up(x))
GATED_MLPS = """
    AXK1MLP AXK2MLP AfmoeMLP AriaSharedExpertsMLP BailingHybridMLP BambaMLP BltMLP ChameleonMLP Cohere2MLP
    Cohere2MoeMLP CohereCompassMLP CohereMLP CsmMLP CwmMLP DeepseekOcr2TextMLP DeepseekV2MLP
    DeepseekV32MLP DeepseekV3MLP DiffLlamaMLP DiffusionGemmaText4MLP DogeMLP Dots1MLP Dots3NoteTextMLP
    EmbeddingGemma2MLP Emu3MLP Ernie4_5MLP Ernie4_5_MoeMLP Ernie4_5_VLMoeMLP EuroBertMLP Exaone4MLP
    ExaoneMoeMLP FlexOlmoMLP FlintMLP Gemma2MLP Gemma3MLP Gemma4TextMLP Gemma4UnifiedTextMLP GemmaMLP
    Glm4MoeLiteMLP Glm4MoeMLP Glm4vMoeTextMLP GlmMoeDsaMLP GraniteDoclingTextMLP GraniteMLP GraniteSWAMLP
    HYV3MLP HYV4MLP HYV4VLMLP HeliumMLP HrmTextMLP HunYuanDenseV1MLP HunYuanMoEV1MLP HunYuanVLMLP
    HyperCLOVAXMLP JambaMLP KimiLinearMLP Kolibri1MLP LagunaMLP LaraMiniMLP LlamaMLP LongcatFlashMLP
    MellumMLP MiMoV2FlashMLP MiniCPM3MLP Ministral3MLP MinistralMLP Mistral4MLP MistralLarge4TextMLP
    MistralMLP MllamaTextMLP Molmo2MLP MuseGlimmerAssistantMLP MuseGlimmerTextMLP MuseSparkTextMLP
    NomicBertMLP Olmo2MLP Olmo3MLP OlmoHybridMLP OlmoMLP OlmoeMLP Ovis2MLP PaddleOCRMLP Qwen2MLP
    Qwen2MoeMLP Qwen3MLP Qwen3MoeMLP Qwen3NextMLP Qwen3OmniMoeMLP Qwen3OmniMoeTalkerTextMLP
    Qwen3OmniMoeThinkerTextMLP Qwen3VLMoeTextMLP Qwen3VLTextMLP Qwen3_5MLP Qwen3_5MoeMLP Qwen4ExpTextMLP
    SmolLM3MLP SolarOpenMLP StableLmMLP UltrabertMLP UnlimitedOcrTextMLP VaultGemmaMLP VibeVoiceMLP
    VoxtralRealtimeMLP VoxtralRealtimeTextMLP YoutuMLP ZambaMLP
"""
# In bfloat16 classes round in places of their own, ours once at the end, which loses no more. Theirs keep
# tensors in float32: ours save 44% of a chunk's memory (Bamba, weights in bfloat16) and a third of its
# launches. float16 may overflow elsewhere than theirs.
REPLACED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class _Norm(nn.Module):
    """Attributes that transformers' norms have; some have no groups or no activation."""

    weight: nn.Parameter
    variance_epsilon: float
    eps: float
    group_size: int
    activation: str


class Replacement(NamedTuple):
    """The formula for the forward of some of transformers' classes.

    Attributes:
        classes: their names.
        inputs: number of tensors with which the forward must be called.
        formula: (module, *inputs) → output, the same as the forward's; or the form of a plain norm.
        fits: (module) → whether its attributes are what the formula supports.
    """

    classes: frozenset[str]
    inputs: int
    formula: Callable[..., Tensor] | NormForm
    fits: Callable[..., bool]


class NormForm(NamedTuple):
    """The form of an RMSNorm, whose inputs are x and perhaps a gate.

    Attributes:
        epsilon: name of the module's attribute.
        offset: added to its weight, in float32 at least, as transformers does: half precision would round
            small weights away beside one.
    """

    epsilon: str = "variance_epsilon"
    offset: float = 0.0

    def fits(self, module: _Norm) -> bool:
        """Whether a norm has a weight and nothing else, and a plain epsilon."""
        return [*module._parameters] == ["weight"] and type(getattr(module, self.epsilon)) is float


NORM, NORM_AROUND_ONE = NormForm(), NormForm("eps", 1.0)


REPLACEMENTS = (
    # transformers' own RMSNorm keeps two or three tensors as large as its input for the backward. Ours saves
    # 5% of a step's memory (Mamba-2, Llama), with a gate 20% (Mamba-2) and 11% (Bamba); 0 to 5% of its time.
    Replacement(frozenset(RMS_NORMS.split()), 1, NORM, NORM.fits),
    Replacement(frozenset(NORMS_AROUND_ONE.split()), 1, NORM_AROUND_ONE, NORM_AROUND_ONE.fits),
    Replacement(frozenset(GATED_BEFORE_NORM.split()), 2, NORM, NORM.fits),
    Replacement(
        frozenset(GATED_AFTER_NORM.split()),
        2,
        lambda module, x, gate: gated(gate, rms_norm(x, module.weight, module.variance_epsilon)),
        lambda module: NORM.fits(module) and module.activation in ("silu", "swish"),
    ),
    # transformers' gated MLP keeps four tensors of its width, ours two: 11 to 12% of a step's memory.
    Replacement(
        frozenset(GATED_MLPS.split()),
        1,
        lambda module, x: gated_linear(module.gate_proj(x), module.up_proj(x), module.down_proj),
        lambda module: is_untouched(module.act_fn, nn.SiLU, ACT2FN["silu"].__class__),
    ),
)


def _row_of(cls: type) -> Replacement | None:
    """Return the replacement registered for a class, or None."""
    if not cls.__module__.startswith(MODELS) or not all(map(functools.partial(_is_own, cls), METHODS)):
        return None
    return next((row for row in REPLACEMENTS if cls.__name__ in row.classes), None)


METHODS = ("forward", "_norm")  # of the registered classes


def _is_own(cls: type, name: str) -> bool:
    """Whether nobody has replaced or wrapped a class's method, or there is none."""
    method = vars(cls).get(name)
    if method is None:
        return True
    place = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return place == (cls.__module__, f"{cls.__qualname__}.{name}") and not hasattr(method, "__wrapped__")


class Row(NamedTuple):
    """A module of a model with the replacement of its forward.

    Attributes:
        module: a reference, which does not keep it alive.
        is_unit: whether its weights come from host memory in its own forward.
    """

    module: weakref.ref[nn.Module]
    replacement: Replacement
    is_unit: bool


def replacement_rows(model: nn.Module) -> list[Row]:
    """Return the modules of a model whose class is registered, whose attributes fit, and which have no
    forward of their own."""
    row_of_class: dict[type, Replacement | None] = {}
    rows = []
    for module in model.modules():
        cls = original_class(module)
        if cls not in row_of_class:
            row_of_class[cls] = _row_of(cls)
        row = row_of_class[cls]
        if row is not None and "forward" not in vars(module) and row.fits(module):
            rows.append(Row(weakref.ref(module), row, is_unit(module)))
    return rows


def replacement_forwards(rows: Sequence[Row]) -> dict[nn.Module, Forward]:
    """Map modules to the forwards that take the place of their own, for a call."""
    forwards: dict[nn.Module, Forward] = {}
    for reference, replacement, comes_from_host in rows:
        if (module := reference()) is not None:
            forward = _forward(module, replacement)
            forwards[module] = with_weights_fetched(module, forward) if comes_from_host else forward
    return forwards


def _forward(module: nn.Module, replacement: Replacement) -> Forward:
    """Return a forward that uses the replacement's formula if the inputs fit, else the module's own."""
    original_forward, inputs, formula = module.forward, replacement.inputs, replacement.formula
    parameters, group_size = module._parameters, getattr(module, "group_size", None)

    def forward(*args: object, **kwargs: object) -> object:
        if kwargs or len(args) != inputs:
            return original_forward(*args, **kwargs)
        for value in args:
            if not isinstance(value, Tensor):
                return original_forward(*args)
            for (
                p
            ) in parameters.values():  # elsewhere while weights are offloaded until the module fetches them
                if p is None or (value.dtype, value.device) != (p.dtype, p.device):
                    return original_forward(*args)
                if p.dtype not in REPLACED_DTYPES:
                    return original_forward(*args)
        if not isinstance(formula, NormForm):
            return formula(module, *args)
        x, gate = cast(tuple[Tensor, Tensor | None], args if inputs == 2 else (*args, None))
        weight, epsilon = cast(_Norm, module).weight, getattr(module, formula.epsilon)
        return rms_norm(x, weight, epsilon, gate, group_size, offset=formula.offset)

    return forward


# Of which nothing but the parts of in_proj's outputs is read.
SPLIT_PROJECTIONS = (
    *("BambaMixer", "FalconMambaMixer", "GraniteMoeHybridMambaLayer", "JambaMambaMixer", "Mamba2Mixer"),
    *("MambaMixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"),
)


def split_projections(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    """Return the modules whose outputs mixers split, on a CPU and without hooks."""
    mixers = [m for m in model.modules() if type(m).__name__ in SPLIT_PROJECTIONS]
    modules = [m.get_submodule("in_proj") for m in mixers if type(m).__module__.startswith(MODELS)]
    return [weakref.ref(m) for m in modules if not m._forward_hooks and not is_unit(m)]


def projection_forwards(references: Iterable[weakref.ref[nn.Module]]) -> dict[nn.Module, Forward]:
    """Map these modules to forwards whose outputs' parts have their gradients written into one tensor."""
    return {
        module: functools.partial(_split_outputs, module.forward)
        for reference in references
        if (module := reference()) is not None
    }


def _split_outputs(forward: Forward, *args: object, **kwargs: object) -> object:
    y = forward(*args, **kwargs)
    if type(y) is not Tensor or not y.is_cpu or not y.requires_grad or torch.compiler.is_compiling():
        return y
    return y.as_subclass(SplitOnce)
