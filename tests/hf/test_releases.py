"""Releases of transformers: too old, tested, newer than tested, and names that one of them lacks."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import adjoint
from adjoint import releases
from tests.hf.hf_models import errors, loss_and_gradients, make, one_line

transformers = pytest.importorskip("transformers")
from adjoint.hf.transformers_api import CACHE_NAMES  # noqa: E402

IDS = torch.arange(18).view(2, 9) % 50 + 3


@pytest.fixture
def another_release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes transformers appear as another release."""

    def install(version: str) -> None:
        monkeypatch.setattr(releases, "installed", {"transformers": version, "torch": "2.13.0"}.get)
        monkeypatch.setattr(releases, "_warned", set())
        monkeypatch.setattr(transformers, "__version__", version)

    return install


def test_an_old_release_is_refused(another_release: Any) -> None:
    another_release("5.0.0")
    with pytest.raises(ValueError, match=r"needs transformers 5\.\d+ or later, 5\.0\.0 is installed: pip"):
        importlib.reload(adjoint.hf)


def test_a_release_newer_than_the_tested_ones_warns_once_and_goes_on(another_release: Any) -> None:
    major, minor = releases.TESTED["transformers"].newest
    another_release(f"{major}.{minor + 1}.0")
    newer = rf"transformers {major}\.{minor + 1}\.0 is newer than {major}\.{minor}, the newest tested"
    with pytest.warns(UserWarning, match=rf"{newer}.*pip install 'transformers>="):
        importlib.reload(adjoint.hf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(adjoint.hf)
    model = adjoint.wrap(make("LlamaForCausalLM", torch.float32), adjoint.Exact(chunk_size=4))
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(
        ValueError, match=rf"^{newer}; LlamaForCausalLM cannot be trained by chunks: rope_type"
    ):
        model(input_ids=IDS, labels=IDS)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "LlamaForCausalLM"])
def test_the_cache_goes_by_every_name(name: str) -> None:
    """Arguments and outputs take each of its names, and our own calls use this release's name."""
    model = adjoint.wrap(make(name, torch.float32), adjoint.Exact(chunk_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        out = model(input_ids=IDS, labels=IDS, use_cache=True)
        caches = [getattr(out, cache_name) for cache_name in CACHE_NAMES]
        losses = [model(input_ids=IDS, labels=IDS, **{n: caches[0]}).loss.item() for n in CACHE_NAMES]
    assert caches[0] is not None and all(cache is caches[0] for cache in caches)
    assert losses[0] == losses[1] == losses[2] != out.loss.item()


@pytest.mark.parametrize("name", ["MambaForCausalLM", "BambaForCausalLM", "RecurrentGemmaForCausalLM"])
def test_recurrent_layers_that_begin_without_a_state_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adjoint.wrap(make(name, torch.float32), adjoint.Exact(chunk_size=4))
    monkeypatch.setattr("adjoint.hf.cache.BEGINS_WITH_STATES", False)
    with pytest.raises(ValueError, match=r"begin several tokens without the state before them: pip install"):
        model(input_ids=IDS, labels=IDS)


MISSING = """
import sys, torch, transformers, adjoint
config = transformers.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1)
model = transformers.LlamaForCausalLM(config)
for name in sys.argv[1].split():
    sys.modules[name] = None  # an import of it fails
model = adjoint.wrap(model, adjoint.Exact(chunk_size=4))
ids = torch.arange(9)[None]
model(input_ids=ids, labels=ids).loss.backward()
from adjoint.train.pretrained import tensor_parallel_config
try:
    tensor_parallel_config(1)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_missing_name_stops_the_feature_that_needs_it_alone() -> None:
    """Loading by tensor parallelism is refused by name; a model that is there trains."""
    missing = "transformers.conversion_mapping transformers.distributed.configuration_utils"
    command = [sys.executable, "-c", MISSING, missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cluster.tensor: needs a newer transformers; pip install -U transformers"


def test_a_missing_name_that_chunks_need_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    api = importlib.import_module("adjoint.hf.transformers_api")
    with one_line("lacks a name that chunks need"):
        importlib.reload(api)


class MeanLoss(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """A causal LM that takes `num_items_in_batch` and does not read it, as Mamba was before 5.17."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class LateLoss(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """A causal LM that computes its loss after the forward of its base class, so that logits come first."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        for_loss = {name: kwargs.pop(name, None) for name in ("num_items_in_batch", "shift_labels")}
        output = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None or for_loss["shift_labels"] is not None:
            output.loss = self.loss_function(output.logits, labels, self.vocab_size, **for_loss)
        return output


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [MeanLoss, LateLoss])
def test_a_count_counts_where_the_model_reads_it(kind: type[torch.nn.Module]) -> None:
    """The Trainer gives the number of labels to every model whose forward takes keyword arguments."""
    config = make("LlamaForCausalLM", torch.float32).config
    model = kind(config)
    expected = loss_and_gradients(model, input_ids=IDS, labels=IDS, num_items_in_batch=7)
    wrapped = adjoint.wrap(model, adjoint.Exact(chunk_size=4))
    got = loss_and_gradients(wrapped, input_ids=IDS, labels=IDS, num_items_in_batch=7)
    assert errors(got, expected).loss <= 1e-5 and errors(got, expected).worst <= 1e-4
