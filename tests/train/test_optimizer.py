"""Weight decay and Muon go by the kind of a parameter's module, not by its dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adjoint import Stack, StackConfig
from adjoint.layers import MIXERS
from adjoint.train.config import TrainingConfig
from adjoint.train.optimizer import Several, make_optimizer, parameter_groups

# Parameters of classes of transformers that have two dimensions or more, and are no matrices.
VECTORS = {
    "ZambaForCausalLM": {"dt_proj_bias", "A_log", "D"},
    "RecurrentGemmaForCausalLM": {"input_gate_bias", "recurrent_gate_bias"},
    "GptOssForCausalLM": {"gate_up_proj_bias", "down_proj_bias"},
    "DeepseekV4ForCausalLM": {"position_bias"},
    "Inkling2ForCausalLM": {"scale", "query"},
    "MambaForCausalLM": {"A_log"},
    "KimiLinearForCausalLM": {"A_log"},
}


def own_parameters(model: nn.Module) -> list[tuple[nn.Module, str, str, nn.Parameter]]:
    """Each parameter with its module, the module's name and its own."""
    return [
        (module, place, name, parameter)
        for place, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]


def decayed_ids(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in parameter_groups(model, 0.1)[0]["params"]}


def of_muon(model: nn.Module) -> set[int]:
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"))
    parts = optimizer.parts if isinstance(optimizer, Several) else [optimizer]
    muon = [member for member in parts if isinstance(member, torch.optim.Muon)]
    return {id(p) for member in muon for group in member.param_groups for p in group["params"]}


@pytest.mark.parametrize("mixer", [*MIXERS, "mamba3 with several inputs"])
def test_of_a_stack_matrices_and_convolutions_decay(mixer: str) -> None:
    options: dict[str, Any] = {"is_mimo": True, "mimo_rank": 2} if " " in mixer else {}
    sizes = {"vocab_size": 61, "d_model": 64, "n_layer": 1, "d_intermediate": 32, "tie_embeddings": False}
    model = Stack(StackConfig(**sizes, mixer=mixer.split()[0], **options))
    decayed, muons, head = decayed_ids(model), of_muon(model), id(model.lm_head.weight)
    for module, place, name, parameter in own_parameters(model):
        is_matrix = isinstance(module, nn.Linear) and name == "weight"
        is_kernel = isinstance(module, nn.Conv1d) and name == "weight"
        assert (id(parameter) in decayed) == (is_matrix or is_kernel), f"{place}.{name}"
        assert (id(parameter) in muons) == (is_matrix and id(parameter) != head), f"{place}.{name}"


@pytest.mark.parametrize("name", VECTORS)
def test_of_a_pretrained_model_vectors_do_not_decay(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make

    model = make(name, torch.float32, skips=False)
    decayed, muons, covered = decayed_ids(model), of_muon(model), set()
    for module, place, key, parameter in own_parameters(model):
        is_vector = key in VECTORS[name] or key == "bias" or "Norm" in type(module).__name__
        covered |= {key} & VECTORS[name]
        if is_vector or isinstance(module, nn.Embedding) or parameter.ndim < 2:
            assert id(parameter) not in decayed, f"{place}.{key}"
        elif parameter is not model.get_input_embeddings().weight:  # which a tied head has
            assert id(parameter) in decayed, f"{place}.{key}"
        assert id(parameter) not in muons or isinstance(module, nn.Linear), f"{place}.{key}"
    assert covered == VECTORS[name] and id(model.get_output_embeddings().weight) not in muons


def test_a_layer_of_your_own_declares_what_does_not_decay() -> None:
    class Gated(nn.Module):
        undecayed = ("slopes",)

        def __init__(self) -> None:
            super().__init__()
            self.slopes, self.mix = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))

    layer = Gated()
    assert decayed_ids(layer) == {id(layer.mix)}


def test_entries_of_containers_are_what_the_container_is_called() -> None:
    """An adapter of embeddings has its two matrices in containers, by the adapter's name."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embeddings", "in_proj"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_embeddings = {name for name in trained if "embedding" in name}
    assert len(of_embeddings) == 2 < len(trained)
    assert decayed_ids(model) == {id(p) for name, p in trained.items() if name not in of_embeddings}
    listed = nn.Module()
    listed.A_log, listed.mix = (nn.ParameterList([torch.ones(3, 4)]) for _ in range(2))
    assert decayed_ids(listed) == {id(listed.mix[0])}


def test_an_optimizer_without_parameters_is_left_out() -> None:
    optimizer = make_optimizer(nn.Linear(3, 3, bias=False), TrainingConfig(optimizer="muon"))
    assert isinstance(optimizer, torch.optim.Muon)
