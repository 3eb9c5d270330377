"""Tokenise chats with the tokenizer's chat template; only the assistant's answers are predicted."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adjoint.data.sources import Chat
from adjoint.data.tokenizer import Tokenizer
from adjoint.errors import UserError

# Roles that are not trained on. Any other name (Assistant, model, gpt) may mark an answer, and is refused.
ASKING = {"system", "developer", "user", "tool", "function", "ipython", "observation", "context"}
HELD = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")  # what a message may contain


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> np.ndarray:
    """A chat's tokens and the separator, (n,) int64; -1 - id for tokens that are not predicted.

    The predicted tokens are those that the template marks with ``{% generation %}``. If it marks none, they
    are what an answer adds to the messages before it plus the generation prompt.

    Raises:
        UserError: the answers cannot be located, because the template renders the first messages of a chat
            differently than within the whole; the template omits part of a message; or a role is unknown.
    """
    if not tokenizer.chats:
        raise UserError(
            f"data.tokenizer {tokenizer.name}: has no chat template, which conversations need; name a "
            "tokenizer folder with one, or plain text by data.text_field"
        )
    given: dict[str, Any] = {"tools": chat.tools} if chat.tools else {}
    _check_messages(chat)
    try:
        template = _template(tokenizer.name)
        _check_rendered(template, given, chat)
        if re.search(r"\{%-?\s*generation\b", template.get_chat_template(**given)):
            found = template.apply_chat_template(
                chat.messages, return_dict=True, return_assistant_tokens_mask=True, **given
            )
            ids, predicted = found["input_ids"], np.array(found["assistant_masks"], bool)
        else:
            ids, predicted = _by_prefixes(template, given, chat)
    except UserError:
        raise
    except Exception as error:  # transformers and templates raise errors of any type
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{chat.place}: {tokenizer.name}'s chat template refuses it ({reason})") from None
    separator = list(tokenizer.separator_ids)
    if separator and not _is_closed(tokenizer, list(ids), separator):
        answered = chat.messages[-1]["role"] == "assistant"
        ids, predicted = ids + separator, np.append(predicted, [answered] * len(separator))
    if (highest := max(ids, default=0)) >= tokenizer.vocab_size:
        raise UserError(f"{chat.place}: the chat template's token {highest} is not in {tokenizer.name}")
    return np.where(predicted, ids, ~np.array(ids, np.int64))


def _is_closed(tokenizer: Tokenizer, ids: list[int], separator: list[int]) -> bool:
    """Whether tokens end with the separator, followed at most by whitespace, as in ChatML."""
    ends = range(len(ids), len(separator) - 1, -1)
    last = next((end for end in ends if ids[end - len(separator) : end] == separator), None)
    return last is not None and not tokenizer.decode(ids[last:]).strip()


def _check_messages(chat: Chat) -> None:
    """Raises UserError if a message has a role or content that templates do not handle."""
    for i, message in enumerate(chat.messages, 1):
        role, content = message["role"], message["content"]
        if role != "assistant" and role not in ASKING:
            raise UserError(
                f"{chat.place}: message {i} has the role {role!r}; answers have the role 'assistant', what "
                f"they answer one of {', '.join(sorted(ASKING))}"
            )
        if content is None and not any(message.get(field) for field in HELD):
            raise UserError(f"{chat.place}: message {i} holds nothing: its content is null")
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UserError(
                    f"{chat.place}: message {i} has a part of the type {kind!r}; only text is read"
                )


def _check_rendered(template: Any, given: dict[str, Any], chat: Chat) -> None:
    """Raises UserError if the template omits part of a record, or renders it as Python's repr."""

    text, at = _squeezed(template.apply_chat_template(chat.messages, tokenize=False, **given)), 0
    for i, message in enumerate(chat.messages, 1):
        # Templates render messages in order, except system messages, which some put elsewhere.
        first = end = 0 if message["role"] in ("system", "developer") else at
        for field in HELD:
            value = message.get(field)
            as_python = isinstance(value, list | dict) and _squeezed(str(value)) in text[first:]
            for leaf in _leaves(value):
                places = [(text.find(form, first), len(form)) for form in _forms(leaf)]
                found = min((place for place in places if place[0] >= 0), default=None)
                if found is None or as_python:
                    what = "leaves out" if found is None else "writes as Python does"
                    raise UserError(
                        f"{chat.place}: the chat template {what} the {field} of message {i} "
                        f"({leaf.strip()[:60]!r}); take it out of the record, or give the tokenizer a "
                        "template that knows its form"
                    )
                end = max(end, sum(found))
        at = max(at, end)
    for tool in chat.tools if isinstance(chat.tools, list) else ():
        name = tool.get("function", tool).get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and name not in text:
            raise UserError(f"{chat.place}: the chat template leaves out the tools ({name!r})")


def _leaves(value: Any) -> Iterator[str]:
    """The texts in a field of a message, without those that only name the type of a part."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from () if name in ("type", "id", "index") else _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str) and value.strip():
        yield value


def _forms(text: str) -> list[str]:
    """How templates render a text: as it is, or JSON-escaped; without whitespace, which many trim."""
    return [_squeezed(text), *(_squeezed(json.dumps(text, ensure_ascii=a)[1:-1]) for a in (False, True))]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _by_prefixes(template: Any, given: dict[str, Any], chat: Chat) -> tuple[list[int], np.ndarray]:
    def ids_of(messages: list[dict[str, Any]], prompt: bool = False) -> list[int]:
        if not messages:  # an answer without anything before it
            return []
        made = template.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True, **given)
        return list(made["input_ids"])

    whole = ids_of(chat.messages)
    predicted = np.zeros(len(whole), bool)
    for i, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            before, through = ids_of(chat.messages[:i], True), ids_of(chat.messages[: i + 1])
            if through[: len(before)] != before or whole[: len(through)] != through:
                raise UserError(
                    f"{chat.place}: the chat template writes message {i + 1} differently when others follow; "
                    "give the tokenizer a template with {% generation %} around answers"
                )
            predicted[len(before) : len(through)] = True
    return whole, predicted


@functools.cache
def _template(name: str) -> Any:
    """The transformers tokenizer, with its chat template, that `data.tokenizer` names."""
    place = Path(name).expanduser()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError("conversations need transformers: pip install transformers") from None
    return AutoTokenizer.from_pretrained(
        str(place if place.is_dir() else place.parent), local_files_only=True
    )
