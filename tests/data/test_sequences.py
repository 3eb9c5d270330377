"""FASTA files, and a token for each character of the text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from adjoint.cli import main
from adjoint.data.batches import Data, open_data
from adjoint.data.config import DataConfig
from adjoint.data.tokenizer import CharTokenizer, load_tokenizer
from adjoint.errors import UserError
from tests.data.text_helpers import tokenizer_folder
from tests.training_helpers import metrics, train_tiny

GENOME = ">chr1 the first\nACGTnnNN\nACgt\n;a comment\n\n>empty\n>chr2\nNNAC  GT\n"
PROTEIN = ">p\nMEEPQSDPSVNN\n"


def opened(folder: Path, text: str, name: str = "genome.fa", **settings: object) -> Data:
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return open_data(DataConfig(path=str(file), seqlen=2, eval_fraction=0.0, **settings))


def parts(data: Data) -> tuple[str, str]:
    """The text of all tokens, and of those that are predicted."""
    tokens = np.asarray(data.train.tokens, np.int64)  # type: ignore[union-attr]
    decode = data.tokenizer.decode
    return decode(np.where(tokens < 0, ~tokens, tokens)), decode(tokens[tokens >= 0])


@pytest.mark.parametrize("tokenizer", ["byte", "chars"])
def test_records_are_documents_and_unknown_nucleotides_are_not_predicted(
    tmp_path: Path, tokenizer: str
) -> None:
    for name in ("genome.fa", "genome.fna.gz"):
        text, predicted = parts(opened(tmp_path, GENOME, name, tokenizer=tokenizer))
        assert (text, predicted) == ("ACGTnnNNACgt\0NNACGT\0", "ACGTACgt\0ACGT\0")
    upper = opened(tmp_path, GENOME, tokenizer=tokenizer, upper_case=True)
    assert parts(upper) == ("ACGTNNNNACGT\0NNACGT\0", "ACGTACGT\0ACGT\0")
    assert parts(opened(tmp_path, PROTEIN, "p.faa", tokenizer=tokenizer))[1] == "MEEPQSDPSVNN\0"  # asparagine
    with pytest.raises(UserError, match=r"genome\.fa:1: a FASTA file begins with a line '>name'"):
        opened(tmp_path, "ACGT\n")


def test_unknown_nucleotides_of_a_tokenizer_that_joins_them(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "t", "NNNN ACGT", 270, ["<|end|>"])
    text, predicted = parts(opened(tmp_path, ">a\nACGTNNNNNNNNACGT\n", tokenizer=str(tmp_path / "t")))
    assert text == "ACGTNNNNNNNNACGT<|end|>" and set(predicted.removesuffix("<|end|>")) <= set("ACGT")


def test_the_characters_of_a_text_are_its_tokens(tmp_path: Path) -> None:
    """Also from a cache, by their setting alone, and in transformers."""
    data = opened(tmp_path, "état 状態 🌊\n", "a.txt", tokenizer="chars")
    tokenizer = data.tokenizer
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.vocab_size == 1 + len(set("état 状態 🌊\n"))
    assert (
        parts(data)[0]
        == "état 状態 🌊\n\0"
        == parts(opened(tmp_path, "état 状態 🌊\n", "a.txt", tokenizer="chars"))[0]
    )
    again = load_tokenizer(tokenizer.setting)
    assert again.identity == tokenizer.identity and again.encode("état") == tokenizer.encode("état")
    with pytest.raises(UserError, match=r"data\.tokenizer chars: has no token for 'Z'"):
        tokenizer.encode("taZ")


def test_a_run_on_a_genome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration has the tokens, the sample begins as the text does, and the export has them too."""
    transformers = pytest.importorskip("transformers")
    letters = np.random.default_rng(0).choice(list("ACGT"), 4000)
    (tmp_path / "genome.fa").write_text(">chr1\n" + "".join(letters) + "\n")
    flags = {"data__path": tmp_path / "genome.fa", "data__tokenizer": "chars", "training__steps": 2}
    assert train_tiny(tmp_path, **flags, training__sample_tokens=5) == 0
    said = capsys.readouterr().out
    assert "note: the tokenizer has 5 tokens and model.vocab_size is 256; --model.vocab_size 5 is" in said
    held_out = "".join(letters)[-199:][:16]
    assert (tmp_path / "run" / "sample.txt").read_text().startswith(held_out)
    assert train_tiny(tmp_path, **flags | {"training__steps": 3}, run__resume="auto") == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    stored = json.loads((tmp_path / "run/checkpoints/step-00000003/trainer.json").read_text())["config"]
    assert stored["data"]["tokenizer"] == "chars:ACGT"
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert "its tokenizer (characters)" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(stored["data"]["tokenizer"])
    assert theirs("GATTACA")["input_ids"] == ours.encode("GATTACA")
    assert theirs.decode(ours.encode("GATTACA")) == "GATTACA"
    assert torch.tensor(theirs("AC")["input_ids"]).max() < 5
