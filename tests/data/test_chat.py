"""Conversations: what a record holds is in the tokens, or the record is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adjoint.data.batches import Data, DataConfig, open_data
from adjoint.errors import UserError
from tests.data.text_helpers import packed, stream, tokenizer_folder, write

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}",
)
WITH_PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}",
)
QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Why "}, {"type": "text", "text": "so?"}]}
CALL = {"function": {"name": "look_up", "arguments": {"what": 'a "word"\n'}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    tokenizer_folder(folder, "Why? Because. user assistant", 300, ["<|im_end|>", "<|im_start|>"])
    return folder


def opened(folder: Path, template: str, *records: Any, **more: Any) -> Data:
    (folder / "chat_template.jinja").write_text(template)
    file = folder.parent / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return open_data(
        DataConfig(path=str(file), tokenizer=str(folder), seqlen=2, **{"eval_fraction": 0.0, **more})
    )


def texts(data: Data) -> tuple[str, str]:
    """The text of all tokens, and of those that are predicted."""
    tokens = data.train.tokens  # type: ignore[union-attr]
    return data.tokenizer.decode(np.where(tokens < 0, ~tokens, tokens)), data.tokenizer.decode(
        tokens[tokens >= 0]
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_come_before_text_unless_the_text_is_asked_for(tmp_path: Path, kind: str) -> None:
    """The byte tokenizer refuses conversations: so it is known what was read."""
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": ["a", "b"], "messages": [None, [QUESTION, ANSWER]]}), file)
    else:
        records = [{"text": "a"}, {"text": "b", "messages": [QUESTION, ANSWER]}]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match="has no chat template, which conversations need"):
        open_data(DataConfig(path=str(file), seqlen=2))
    assert stream(open_data(DataConfig(path=str(file), seqlen=2, text_field="text"))) == packed(["a", "b"])


@pytest.mark.parametrize(
    "template, messages, said",
    [
        (CHATML, [PARTS, ANSWER], r"writes as Python does the content of message 1 \('Why'\)"),
        (
            CHATML.replace("m.content", "m.content or ''"),
            [QUESTION, CALLING],
            r"leaves out the tool_calls of",
        ),
        (
            CHATML,
            [QUESTION, {"role": "assistant", "content": None}],
            "message 2 holds nothing: its content is null",
        ),
        (
            CHATML,
            [QUESTION, {**ANSWER, "reasoning_content": "As."}],
            "leaves out the reasoning_content of mes",
        ),
        (
            CHATML,
            [QUESTION, {**ANSWER, "role": "Assistant"}],
            "message 2 has the role 'Assistant'; answers ha",
        ),
        (
            WITH_PARTS,
            [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, ANSWER],
            "has a part of the type 'image'; only text is read",
        ),
        (
            CHATML.replace("m.content", "m.content if m != {'role': 'user', 'content': 'Because.'} else ''"),
            [{"role": "user", "content": "Because."}, ANSWER],  # the same words elsewhere do not count
            "leaves out the content of message 2",
        ),
    ],
)
def test_what_the_template_does_not_write_is_refused(
    chatty: Path, template: str, messages: list[Any], said: str
) -> None:
    with pytest.raises(UserError, match=rf"chat\.jsonl:2: .*({said})"):
        opened(chatty, template, {"messages": [QUESTION, ANSWER]}, {"messages": messages})


def test_parts_calls_and_blanks_that_the_template_writes_are_taken(chatty: Path) -> None:
    whole, predicted = texts(opened(chatty, WITH_PARTS, {"messages": [PARTS, ANSWER]}))
    assert "user\nWhy so?<|im_end|>" in whole and predicted == "Because.<|im_end|>\n"
    trimming = WITH_CALLS.replace("m.content or ''", "(m.content or '') | trim")
    spaced = {"role": "user", "content": "  Why?\n"}
    _, predicted = texts(opened(chatty, trimming, {"messages": [spaced, CALLING]}))
    assert json.loads(predicted.removesuffix("<|im_end|>\n")) == CALL["function"]


def test_the_end_that_the_template_writes_is_not_written_twice(chatty: Path) -> None:
    whole, predicted = texts(opened(chatty, CHATML, {"messages": [QUESTION, ANSWER]}))
    assert whole == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"
    assert predicted == "Because.<|im_end|>\n"


def test_a_separator_inside_text_cannot_pack_documents(tmp_path: Path) -> None:
    """Plain text, in one piece and with the separator across the end of a document."""
    for i, (texts, separator) in enumerate([(["a\0b", "c"], None), (["a\n", "c"], "\n\n")]):
        file = write(tmp_path / f"{i}.jsonl", texts)
        config = {"path": str(file), "seqlen": 2, "separator": separator}
        open_data(DataConfig(**config))
        with pytest.raises(UserError, match=r"data\.separator: .* is inside documents too"):
            open_data(DataConfig(documents="packed", **config))
    open_data(DataConfig(path=str(write(tmp_path / "b.jsonl", ["ab", "c"])), seqlen=2, documents="packed"))
