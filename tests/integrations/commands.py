"""A framework's own command line, run on a tiny model with our line in its configuration and without it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from tests.integrations.chunk_counter import LINE, LOSS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
SPECIAL = ("<s>", "</s>", "<pad>")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


class Run(NamedTuple):
    """The traces of a command.

    Attributes:
        losses: of each step.
        chunks: number of chunks that were computed.
        printed: stdout and stderr.
    """

    losses: list[float]
    chunks: int
    printed: str


def write_model(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a Llama of two layers with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    ids = {letter: number for number, letter in enumerate(letters)}
    of_bytes = Tokenizer(models.BPE(ids, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, chat_template=CHAT, **names)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        **{f"{name}_id": ids[token] for name, token in names.items()},
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_adapter(folder: Path, model: Path) -> None:
    """Write LoRA adapters of a model, none of whose weights is zero: not all frameworks seed their own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model),
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)


def write_data(folder: Path) -> None:
    """Write texts of 300 bytes, also as chats and as pairs of texts."""
    text = Path(os.__file__).read_text()
    pieces = [text[start : start + 300] for start in range(0, 12_000, 300)]
    chats = [
        [{"role": "user", "content": piece[:40]}, {"role": "assistant", "content": piece[40:]}]
        for piece in pieces
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "dataset_info.json").write_text(
        json.dumps({"texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}})
    )


def edited_example(name: str, folder: Path, without: tuple[str, ...], **changes: Any) -> Path:
    """Write an example's configuration with other values, for a tiny model and few steps.

    Args:
        without: keys that are left out: our lines.
        changes: keys and values that take the place of the example's.
    """
    values = yaml.safe_load((EXAMPLES / name).read_text()) | changes
    for key in without:
        del values[key]  # a KeyError if the example has lost our line
    file = folder / f"{'without' if without else 'with'}_{name}"
    file.write_text(yaml.safe_dump(values))
    return file


def run_module(
    folder: Path, module: str, *arguments: str, ranks: int | None = None, **environment: str
) -> Run:
    """Run `python -m module arguments` in a folder, or that of several ranks, with its chunks counted."""
    launcher = [
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
        "-m",
    ]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", *(launcher if ranks else ()), "tests.integrations.chunk_counter"),
            *(module, *arguments),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hub"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    losses = [float(loss) for loss in re.findall(rf"{LOSS} ([\d.]+(?:e-\d+)?)", printed)]
    counts = re.findall(rf"{LINE} (\d+)", printed)
    assert len(counts) >= (ranks or 1), printed[-2000:]
    return Run(losses, sum(map(int, counts)), printed)


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def assert_same_losses(plain: Run, ours: Run, steps: int = 3, tolerance: float = 2e-6) -> None:
    """Assert that a run with our line went by chunks, and has the losses of the one without."""
    print("without:", plain.losses, "with:", ours.losses, "chunks:", ours.chunks)
    assert len(plain.losses) == len(ours.losses) == steps
    assert plain.chunks == 0
    # rows of 256 tokens and more in chunks of 64: four at least, and all but the last computed again
    assert ours.chunks >= steps * (4 + 3)
    assert all(abs(a - b) <= tolerance * a for a, b in zip(plain.losses, ours.losses, strict=True))
