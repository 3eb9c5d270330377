"""Conversations: what a record holds is in the tokens, or the record is refused by its place."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adjoint.data.batches import Data, open_data
from adjoint.data.config import DataConfig
from adjoint.data.sources import find_sources
from adjoint.data.tokenizer import FileTokenizer
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
            "message 2 is empty: its content is null",
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


# Which tokens are an answer's

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACED = {"role": "assistant", "content": " Because."}


def dropping_whitespace(folder: Path, kind: str) -> Path:
    """A tokenizer of words that drops whitespace before them, as `save_pretrained` writes it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"strip": "Strip", "lower": "Lowercase"}
    made.normalizer = getattr(tokenizers.normalizers, names[kind])() if kind in names else None
    trainer = tokenizers.trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    made.train_from_iterator(["Why? Because . Because. user\nWhy? assistant\n Because. Yes"], trainer)
    names = {"eos_token": "<|im_end|>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("first", [[QUESTION], []])
@pytest.mark.parametrize("template", [MARKED, CHATML])
@pytest.mark.parametrize("kind", ["whitespace", "strip"])
def test_answers_where_the_tokenizer_drops_whitespace(
    tmp_path: Path, kind: str, template: str, first: list[Any]
) -> None:
    """Exactly they are predicted; masks of transformers 5.23 run on to the end here, or stop."""
    messages = [*first, SPACED, QUESTION, {"role": "assistant", "content": "Yes"}]
    data = opened(dropping_whitespace(tmp_path / "t", kind), template, {"messages": messages})
    assert "".join(texts(data)[1].split()) == "Because.<|im_end|>Yes<|im_end|>"


def test_a_template_may_end_the_last_message_differently(chatty: Path) -> None:
    """As Phi-3's, which ends a chat by a token, and gpt-oss's, which ends its last answer by another."""
    ended = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    ending = (
        "{{ '!' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|im_end|>' }}"
    )
    for template, last in [(ended, "<|im_end|>\n<|im_end|>"), (CHATML.replace("<|im_end|>", ending), "!\n")]:
        data = opened(chatty, template, {"messages": [QUESTION, ANSWER, QUESTION, SPACED]})
        assert texts(data)[1].startswith(f"Because.<|im_end|>\n Because.{last}")


def test_a_token_that_joins_an_answer_to_other_text_is_refused(chatty: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    records = [[{"role": "user", "content": "Why?"}, SPACED], [{"role": "user", "content": "Beca"}, ANSWER]]
    said = r"chat\.jsonl:2: token '\w+' of .* joins an answer to the text beside it; give the tokenizer a"
    records[1][1] = {**ANSWER, "content": "use."}
    with pytest.raises(UserError, match=said):
        opened(chatty, template, *({"messages": record} for record in records))


def test_tokens_that_are_said_to_be_elsewhere_are_refused(
    chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted tokens are decoded, and compared with the answer."""
    encode = FileTokenizer.encode_with_offsets

    def shifted(self: FileTokenizer, text: str) -> Any:
        ids, offsets = encode(self, text)
        assert offsets is not None
        return ids, [*offsets[3:], *[offsets[-1]] * 3]

    monkeypatch.setattr(FileTokenizer, "encode_with_offsets", shifted)
    said = r"chat\.jsonl:1: the tokens of an answer decode to .* does not tell which tokens are the answer's"
    with pytest.raises(UserError, match=said):
        opened(chatty, CHATML, {"messages": [QUESTION, ANSWER]})


PROMPTED = (
    "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'Q: ' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


@pytest.mark.parametrize(
    "kind, template, answer, said",
    [
        ("bpe", PROMPTED, "Because.", r"token ' Because' of .* joins whitespace beside an answer to it"),
        (
            "bpe",
            MARKED.replace("m.content or ''", "m.content | trim"),
            " Because.",
            r"changes whitespace of an",
        ),
        ("lower", CHATML, "Because.", r"changes the text of an answer before it is predicted, to 'because\."),
        ("whitespace", CHATML, "Because. Because", r"drops whitespace of answers, such as ' '"),
        ("whitespace", CHATML, "Therefore", r"has no token for a part of an answer"),
        ("bpe", CHATML, " Because.\nWhy? ", None),
        ("bpe", MARKED, "Because.", None),
    ],
)
def test_answers_that_tokens_do_not_repeat_exactly_are_noted_once(
    tmp_path: Path, kind: str, template: str, answer: str, said: str | None
) -> None:
    """Also when the tokens come from the cache."""
    folder = tmp_path / "t"
    if kind == "bpe":
        tokenizer_folder(folder, "Why? Because. user assistant", 300, ["<|im_end|>", "<|im_start|>"])
    else:
        dropping_whitespace(folder, kind)
    record = {"messages": [QUESTION, {"role": "assistant", "content": answer}]}
    for _ in range(2):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            opened(folder, template, record, record)
        lines = [str(note.message) for note in notes]
        expected = rf"chat\.jsonl:1: .*{said}"
        assert len([line for line in lines if said is not None and re.search(expected, line)]) == bool(said)
        assert not any(re.search(r"further ones", line) for line in lines) or said is not None, lines


# What messages say about themselves


@pytest.mark.parametrize("template", [MARKED, CHATML])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"train": False, "weight": 0.0}])
def test_answers_that_are_not_to_be_learned(chatty: Path, template: str, mark: dict[str, Any]) -> None:
    learned = {"role": "assistant", "content": "So.", "weight": 1}
    messages = [QUESTION, {**ANSWER, **mark}, QUESTION, learned]
    whole, predicted = texts(opened(chatty, template, {"messages": messages}))
    assert predicted.strip() == "So.<|im_end|>" and "Because." in whole


def test_marks_that_cannot_be_honoured_are_refused(chatty: Path) -> None:
    for mark, said in [
        ({"weight": 0.5}, "message 2: weight is 0.5; an answer is predicted or not: give 0 or 1"),
        ({"weight": 1, "train": False}, "message 2 has weight 1 and train False, which contradict"),
    ]:
        with pytest.raises(UserError, match=rf"chat\.jsonl:1: {said}"):
            opened(chatty, CHATML, {"messages": [QUESTION, {**ANSWER, **mark}]})
    last_only = MARKED.replace("m.role == 'assistant'", "loop.last")
    with pytest.raises(UserError, match=r"message 2 is not to be predicted, but .* which {% generation %}"):
        opened(chatty, last_only, {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER]})


def test_a_field_that_nobody_reads_is_named_once(chatty: Path) -> None:
    """Also when the tokens come from the cache."""
    strange = {"messages": [QUESTION, {**ANSWER, "mood": "good", "name": "me"}]}
    for _ in range(2):
        with pytest.warns(UserWarning, match="message 2 has a field 'mood', which the chat template") as seen:
            opened(chatty, CHATML, strange, {**strange, "system": "Be good."})
        assert len(seen) == 2 and "2: the record has a field 'system' beside messages" in str(seen[1].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(chatty, CHATML + "{# reads mood #}", strange)


def test_messages_in_a_string_are_a_chat(chatty: Path) -> None:
    record = {"messages": json.dumps([QUESTION, ANSWER]), "tools": "[]"}
    assert texts(opened(chatty, CHATML, record))[1] == "Because.<|im_end|>\n"
    for text in ("Why? Because.", '{"role": "user"}', "[1"):
        with pytest.raises(UserError, match=r"chat\.jsonl:1: field 'messages' is a string \(.*not a list of"):
            opened(chatty, CHATML, {"messages": text})


@pytest.mark.parametrize("given", [{"city": "Bern \u00fc"}, '{"city": "Bern \u00fc"}'])
def test_arguments_of_calls_come_in_the_form_that_the_template_writes(chatty: Path, given: Any) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": given}}],
    }
    told = '{"city": "Bern \u00fc"}'
    for written in ("c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments"):
        template = MARKED.replace("c.function | tojson", f"c.function.name }}}} {{{{ {written}")
        assert texts(opened(chatty, template, {"messages": [QUESTION, call]}))[1].startswith(f"f {told}<")


@pytest.mark.parametrize(
    "record, said",
    [
        ({"messages": []}, "field 'messages' is an empty list; write messages"),
        ({"text": ["a", "b"]}, "field 'text' is a list of strings, not text; write one string, or a record"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "field 'messages': message 2 is .* an object with"),
    ],
)
def test_lists_that_are_no_chat(chatty: Path, record: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"chat\.jsonl:1: {said}"):
        opened(chatty, CHATML, record, {"messages": [QUESTION, ANSWER]})


def test_a_json_file_is_read_as_its_elements(chatty: Path) -> None:
    """On one line or on many, as .json or .jsonl; in a folder only if it is named."""
    records = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, SPACED]}]
    (chatty / "chat_template.jinja").write_text(CHATML)
    folder = chatty.parent / "text"
    folder.mkdir()
    lines = "\n".join(json.dumps(record) for record in records)
    for name, content in [
        ("a.json", json.dumps(records)),
        ("b.json", json.dumps(records, indent=2)),
        ("c.json", lines),
        ("d.jsonl", json.dumps(records)),
    ]:
        (folder / name).write_text(content)
        config = DataConfig(path=str(folder / name), tokenizer=str(chatty), seqlen=2, eval_fraction=0.0)
        assert texts(open_data(config))[1] == "Because.<|im_end|>\n Because.<|im_end|>\n", name
    assert [file.name for file in find_sources(str(folder)).files] == ["d.jsonl"]
    assert [file.name for file in find_sources(str(folder / "*")).files] == ["d.jsonl"]
    assert len(find_sources(str(folder / "*.json")).files) == 3
    (folder / "a.json").write_text('["Why?", "Because."]')
    said = r'element 1: is "Why\?", not a JSON object; write {"messages": \[…\]} or {"text": "…"} for'
    with pytest.raises(UserError, match=said):
        open_data(DataConfig(path=str(folder / "a.json"), tokenizer=str(chatty), seqlen=2))
    (folder / "a.json").write_text('[{"messages": []}]')
    with pytest.raises(UserError, match=r"a\.json, element 1: field 'messages' is an empty list"):
        open_data(DataConfig(path=str(folder / "a.json"), tokenizer=str(chatty), seqlen=2))


def test_a_separator_inside_text_cannot_pack_documents(tmp_path: Path) -> None:
    """Plain text, in one piece and with the separator across the end of a document."""
    for i, (texts, separator) in enumerate([(["a\0b", "c"], None), (["a\n", "c"], "\n\n")]):
        file = write(tmp_path / f"{i}.jsonl", texts)
        config = {"path": str(file), "seqlen": 2, "separator": separator}
        open_data(DataConfig(**config))
        with pytest.raises(UserError, match=r"data\.separator: .* is inside documents too"):
            open_data(DataConfig(documents="packed", **config))
    open_data(DataConfig(path=str(write(tmp_path / "b.jsonl", ["ab", "c"])), seqlen=2, documents="packed"))
