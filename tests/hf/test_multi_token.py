"""Multi-token prediction: losses at several distances, and modules above the hidden states, by chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adjoint
from adjoint import loss as loss_module
from adjoint.errors import UserError
from tests.hf.hf_models import VOCAB, assert_exact, make
from tests.model_helpers import current_gradients, make_ids

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "double")
LLAMA, GEMMA, QWEN = "LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3_5ForCausalLM"  # Gemma 2 caps its logits
SEQLEN, WIDTH = 23, 24
IDS = make_ids(2, SEQLEN, vocab_size=VOCAB)
LABELS = IDS.clone()
LABELS[:, 4:7] = -100
LABELS[1, 20:] = -100
DOCUMENTS = torch.zeros_like(IDS)  # the third has the number of the first, as mamba-ssm's seq_idx may
DOCUMENTS[:, 8:9] = 1


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of five tokens, so that there are several."""
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 5 * VOCAB)


def mean_by_hand(logits: Tensor, shift: int, documents: Tensor | None) -> Tensor:
    """The definition: token by token, on whole logits."""
    terms = []
    for row in range(len(IDS)):
        for t in range(min(logits.shape[1], SEQLEN - shift)):
            between = slice(t, t + shift + 1)
            same = documents is None or bool((documents[row, between] == documents[row, t]).all())
            if same and LABELS[row, t + shift] != -100:
                terms.append(F.cross_entropy(logits[row, t], LABELS[row, t + shift]))
    return torch.stack(terms).mean() if terms else logits.sum() * 0


class Recurrence(nn.Module):
    """A prediction module with a state along the sequence: (x, state) → (y, state)."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.gru(self.join(torch.cat(x, dim=-1)), state)
        return self.norm(y), state


class OwnLayer(nn.Module):
    """DeepSeek-V3's form: a layer of the model's own class, as a backbone of one layer on embeddings."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        config = copy.deepcopy(lm.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        self.join, self.backbone = nn.Linear(2 * WIDTH, WIDTH), type(lm.base_model)(config)
        self.backbone.set_input_embeddings(lm.get_input_embeddings())

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        joined = self.join(torch.cat(x, dim=-1))
        return self.backbone(inputs_embeds=joined, use_cache=False).last_hidden_state


class WithModules(nn.Module):
    """A causal LM and modules above its hidden states that predict two and three tokens ahead."""

    def __init__(self, lm: Any, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.lm, self.predictors = lm, nn.ModuleList(modules)
        self.double()

    def hidden_states(self, run: Callable[..., Tensor]) -> list[Tensor]:
        """Return the hidden states of every distance; module k also reads token t + k."""
        hidden_states = [self.lm.base_model(input_ids=IDS, use_cache=False).last_hidden_state]
        for k, module in enumerate(self.predictors, 1):
            embedded = self.lm.get_input_embeddings()(IDS[:, k:])
            hidden_states.append(run(module, (hidden_states[-1][:, :-1], embedded)))
        return hidden_states


def losses_and_gradients(model: nn.Module, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    (losses * torch.arange(1, len(losses) + 1)).sum().backward()
    return losses.detach().norm(), current_gradients(model)


def logits_of(lm: Any, hidden: Tensor) -> Tensor:
    cap = getattr(lm.config, "final_logit_softcapping", None)
    logits = lm.get_output_embeddings()(hidden)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def by_hand(model: WithModules, run: Callable[..., Tensor], documents: Tensor | None = None) -> Tensor:
    logits = [logits_of(model.lm, hidden) for hidden in model.hidden_states(run)]
    return torch.stack([mean_by_hand(each, k, documents) for k, each in enumerate(logits, 1)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "documents", "chunk_size"),
    [(LLAMA, None, 7), (GEMMA, None, 7), *((QWEN, DOCUMENTS, size) for size in (1, 7, SEQLEN))],
)
def test_recurrent_modules_by_chunks(name: str, documents: Tensor | None, chunk_size: int) -> None:
    """The whole chain: backbone, two modules that have a state, the model's head at three distances."""
    plain = WithModules(make(name, torch.float64).train(), [Recurrence() for _ in range(2)])
    model, state = copy.deepcopy(plain), torch.zeros(1, 2, WIDTH, dtype=torch.float64)
    expected = by_hand(plain, lambda module, x: module(x, state)[0], documents)
    adjoint.wrap(model.lm, adjoint.Exact(chunk_size=max(2, chunk_size)))  # 2 is the least there
    hidden_states = model.hidden_states(
        lambda module, x: adjoint.checkpoint_sequence(module, x, state, chunk_size=chunk_size)[0]
    )
    losses = adjoint.multi_token_loss(model.lm, hidden_states, LABELS, seq_idx=documents)
    assert (losses - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert_exact(losses_and_gradients(model, losses), losses_and_gradients(plain, expected))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("chunk_size", [2, 7, SEQLEN])
@pytest.mark.parametrize("name", [LLAMA, QWEN])
def test_modules_of_the_models_own_layers(name: str, chunk_size: int) -> None:
    """Layers whose state grows: keys and values."""
    lm = make(name, torch.float64).train()
    plain = WithModules(lm, [OwnLayer(lm) for _ in range(2)])
    model = copy.deepcopy(plain)
    expected = by_hand(plain, lambda module, x: module(x))
    for wrapped in (model.lm, *(module.backbone for module in model.predictors)):
        adjoint.wrap(wrapped, adjoint.Exact(chunk_size=chunk_size))
    hidden_states = model.hidden_states(lambda module, x: module(x))
    losses = adjoint.multi_token_loss(model.lm, hidden_states, LABELS)
    assert_exact(losses_and_gradients(model, losses), losses_and_gradients(plain, expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk_size", [2, 7])
def test_released_modules_of_transformers(chunk_size: int) -> None:
    """`MtpModel`, into which transformers loads DeepSeek-V3's modules for drafting, trains by chunks."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this release has no MtpModel")
    from transformers.cache_utils import MtpCache

    lm = make("DeepseekV3ForCausalLM", torch.float64).train()
    lm.config.num_mtp_layers = 2
    released = layers.MtpModel(lm, 2).train().double()
    for parameter in released.layers.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    for buffer in released.layers.buffers():
        buffer.zero_()
    plain = nn.ModuleList([lm, released])
    model = copy.deepcopy(plain)

    hidden = [lm.base_model(input_ids=IDS, use_cache=False).last_hidden_state]
    for k in range(2):
        ids, positions = IDS[:, k + 1 :], torch.arange(k + 1, SEQLEN)[None]
        cache = MtpCache(config=released.config)
        hidden.append(released.forward_layer(k, hidden[-1][:, :-1], positions, cache, input_ids=ids))
    expected = torch.stack([mean_by_hand(lm.lm_head(each), k, None) for k, each in enumerate(hidden, 1)])

    lm, released = model
    method = adjoint.Exact(chunk_size=chunk_size)
    adjoint.wrap(lm, method)
    hidden = [lm.base_model(input_ids=IDS).last_hidden_state]
    for k, layer in enumerate(released.layers, 1):
        backbone = type(lm.base_model)(released.config)
        layer.mtp_block.self_attn.layer_idx = 0  # the only layer of its cache
        backbone.layers, backbone.norm = nn.ModuleList([layer.mtp_block]), layer.post_norm
        backbone.rotary_emb, backbone.config.num_hidden_layers = released.rotary_emb, 1
        adjoint.wrap(backbone.train(), method)
        embedded = layer.enorm(lm.get_input_embeddings()(IDS[:, k:]))
        joined = torch.cat([embedded, layer.hnorm(hidden[-1][:, :-1])], dim=-1)
        hidden.append(backbone(inputs_embeds=layer.eh_proj(joined)).last_hidden_state)
    losses = adjoint.multi_token_loss(lm, hidden, LABELS)
    assert_exact(losses_and_gradients(model, losses), losses_and_gradients(plain, expected))


def test_heads_of_ones_own_on_a_stack() -> None:
    """A head for each distance, as Medusa has them, one with a bias; the stack's own comes first."""
    config = adjoint.StackConfig(vocab_size=VOCAB, d_model=WIDTH, n_layer=2, d_state=4)
    stack = adjoint.Stack(config, seed=0).double()
    plain = nn.ModuleList([stack, nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB, bias=False)]).double()
    model = copy.deepcopy(plain)
    hidden = plain[0](IDS, return_hidden_states=True).hidden_states
    logits = [plain[0].lm_head(hidden), plain[1](hidden), plain[2](hidden)]
    expected = torch.stack([mean_by_hand(each, k, DOCUMENTS) for k, each in enumerate(logits, 1)])

    hidden = model[0](IDS, method=adjoint.Exact(chunk_size=7), return_hidden_states=True).hidden_states
    losses = adjoint.multi_token_loss(list(model), [hidden] * 3, LABELS, seq_idx=DOCUMENTS)
    last = adjoint.multi_token_loss(model[2], [hidden.detach()], LABELS, seq_idx=DOCUMENTS, first_shift=3)
    assert torch.equal(last.detach(), losses[2:].detach())
    assert_exact(losses_and_gradients(model, losses), losses_and_gradients(plain, expected))
    nothing = adjoint.multi_token_loss(model[0], [hidden], torch.full_like(LABELS, -100))
    assert nothing.tolist() == [0.0]


def test_what_is_refused() -> None:
    lm, hidden = make(LLAMA, torch.float64), torch.zeros(2, SEQLEN, WIDTH)
    adapted = nn.Linear(WIDTH, VOCAB)
    adapted.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="passes over hooks, adapters and shards"):
        adjoint.multi_token_loss(adapted, [hidden], LABELS)
    with pytest.raises(UserError, match="multi_token_loss takes a causal LM of transformers, a Stack or an"):
        adjoint.multi_token_loss(nn.GRU(WIDTH, VOCAB), [hidden], LABELS)
    for head, states, shift, message in (
        (lm, hidden, 1, "hidden_states must be a list"),
        ([lm], [hidden, hidden], 1, "got 1 for 2"),
        (lm, [hidden], 0, "first_shift must be 1 or more, got 0"),
        (lm, [hidden, torch.zeros(2, SEQLEN + 1, WIDTH)], 1, r"hidden_states\[1\] must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            adjoint.multi_token_loss(head, states, LABELS, first_shift=shift)
