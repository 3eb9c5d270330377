"""Messages of a wrapped model on its first use, and those of transformers that it suppresses."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import adjoint
from adjoint.engine.grid import EngineSpec
from adjoint.errors import UserError
from adjoint.hf.hf_model import chunk_losses

# A model, small, whose mixers' functions transformers calls slow, trained twice and then used without labels.
TRAINED = """
import logging, torch
from transformers import Mamba2Config, Mamba2ForCausalLM
import adjoint
{before}
sizes = dict(hidden_size=16, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=8, n_groups=1)
config = Mamba2Config(vocab_size=32, **sizes)
model = adjoint.wrap(Mamba2ForCausalLM(config), adjoint.Exact(chunk_size=8))
ids = torch.arange(20)[None]
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, variables, lines",
    [
        ("", {}, 1),
        ("logging.getLogger('adjoint').setLevel('WARNING')", {}, 0),
        ("", {"ADJOINT_VERBOSITY": "warning"}, 0),
        ("logging.basicConfig(level='INFO', format='mine: %(message)s')", {}, 1),
    ],
)
def test_the_first_use_is_one_line_on_stderr(before: str, variables: dict[str, str], lines: int) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", TRAINED.format(before=before)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "HOME": str(Path.home()), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "" and done.stderr.count("\n") == lines, done.stderr
    if lines:
        start = "mine: " if before else "[adjoint] "
        assert done.stderr.startswith(
            f"{start}Mamba2ForCausalLM of 2 layers runs by Exact in chunks of 8 tokens"
        )
        assert "in place of causal_conv1d_fn, mamba2_chunk_scan; gradients" in done.stderr
        assert "compared on 13 tokens: relative difference " in done.stderr


LLAMA = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


def test_mini_sequences_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = adjoint.wrap(LlamaForCausalLM(LLAMA), adjoint.MiniSequence()), torch.arange(20)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "adjoint"]
    assert "runs by MiniSequence: MLPs (1) in 4 pieces, the head in 16; gradients compared on 13" in line


def test_the_chunks_of_an_evaluation_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    model = adjoint.wrap(LlamaForCausalLM(LLAMA), adjoint.Exact(chunk_size=7))
    assert len(chunk_losses(model, torch.arange(20)[None], EngineSpec(5))) == 4
    (line,) = [record.getMessage() for record in caplog.records if record.name == "adjoint"]
    assert "runs by Exact in chunks of 5 tokens" in line


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adjoint.wrap(LlamaForCausalLM(LLAMA)), torch.arange(20)[None]
    monkeypatch.setattr(logging.getLogger("adjoint"), "level", logging.NOTSET)
    monkeypatch.setenv("ADJOINT_VERBOSITY", "loud")
    with pytest.raises(UserError, match="ADJOINT_VERBOSITY: expected one of debug, info"):
        model(input_ids=ids, labels=ids)
