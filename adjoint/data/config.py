"""`DataConfig`: the training text, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from adjoint.errors import UserError
from adjoint.files.remote import refuse_remote
from adjoint.settings import (
    Must,
    NotNegative,
    PathText,
    Positive,
    PositiveNumber,
    SeqLen,
    Text,
    check_fields,
    documented,
    is_path,
    option,
)


def _are_paths(path: str | list[str] | None) -> bool:
    return path is None or all(map(is_path, [path] if isinstance(path, str) else path or [""]))


Paths = Annotated[str | list[str] | None, Must("a path, a list of paths or null", _are_paths)]


@documented
@dataclass(frozen=True)
class DataConfig:
    """The training text, and how it is cut into sequences."""

    path: Paths = option(
        None,
        "a file, a folder (searched recursively), a glob, or a list of them, here or at an address such as "
        "s3://bucket/text: .txt .md .py .jsonl "
        ".parquet .json and FASTA (.fa .fasta .fna), each also as .gz or .zst (.json is read only if it is "
        "named, as an array of records). Each record of FASTA is a document, whose N's are read and not "
        "predicted. Records with `messages` are chats: the tokenizer's chat template is applied, and only "
        "the assistant's tokens are trained on; `weight: 0`, `loss: 0` or `train: false` leaves an answer "
        "out. hf:NAME or hf:NAME:split "
        "is a dataset of the datasets library, from the hub or a folder. null is the source code of the "
        "Python standard library.",
    )
    weights: list[PositiveNumber] | None = option(
        None,
        "for a mixture: relative frequency with which a batch row comes from each entry of `path`, a list. "
        "Each entry is its own stream, repeated as needed. null is one stream of all entries.",
    )
    validation_path: Paths = option(
        None, "held-out text, given like `path`. null is a share of the text of `path` (`eval_fraction`)."
    )
    seqlen: SeqLen = option(16384, "tokens per sequence.")
    batch: Positive = option(1, "sequences per step.")
    tokenizer: Text | None = option(
        None,
        '"byte" (256 tokens, the UTF-8 bytes), "chars" (a token for each character of the text), or the '
        "path of a tokenizer.json or of a Hugging Face tokenizer folder. null is the one in the folder of "
        "model.from_pretrained, else bytes.",
    )
    text_field: Text | None = option(
        None,
        "the field (.jsonl) or column (.parquet) with a document's text or messages. null is `messages`, or "
        "else `text`.",
    )
    upper_case: bool = option(
        False, "read plain text in upper case, as for genomes whose repeats are written in lower case."
    )
    documents: Literal["stream", "packed"] = option(
        "stream",
        '"stream": all documents form one continuous text. "packed": nothing crosses document '
        "boundaries, and a document's first token is not predicted.",
    )
    separator: str | None = option(
        None,
        'what ends each document in the stream: a token of the tokenizer (any text for "byte"), or "" '
        "for nothing. null is byte 0, or the tokenizer's end-of-text token.",
    )
    max_tokens: Positive | None = option(
        None,
        "maximum number of tokens to read, for each entry of `path` if `weights` is given, and for "
        "`validation_path`; hf: datasets are then streamed instead of downloaded whole. null is all.",
    )
    eval_fraction: Annotated[float, Must("a number from 0 to 0.5", lambda x: 0 <= x <= 0.5)] = option(
        0.05,
        "share of the text held out for evaluation, at most 0.5: whole files if they come near the "
        "share, else the end of the stream. With 0, evaluation needs a `validation_path`; with a "
        "`validation_path`, nothing is held out.",
    )
    eval_tokens: NotNegative = option(
        65536, "maximum number of held-out tokens per evaluation; 0 for no evaluation."
    )
    cache_dir: PathText | None = option(
        None,
        "where tokenized text is stored. null is $ADJOINT_CACHE, else $XDG_CACHE_HOME/adjoint, else "
        "~/.cache/adjoint.",
    )

    def __post_init__(self) -> None:
        check_fields("data", self)
        refuse_remote("data.tokenizer", self.tokenizer, "tokenizers")
        refuse_remote("data.cache_dir", self.cache_dir, "caches")
        entries = len(self.path) if isinstance(self.path, list) else 1
        if self.weights is not None and len(self.weights) != entries:
            raise UserError(f"data.weights: {len(self.weights)} weights for {entries} entries of data.path")
        if self.documents == "packed" and self.separator == "":
            raise UserError('data.documents: packed documents need a data.separator that closes each, not ""')
