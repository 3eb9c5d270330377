"""Conversations to tokens by a tokenizer's chat template; the assistant's answers alone are predicted."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from adjoint.data.sources import Chat
from adjoint.data.tokenizer import Tokenizer
from adjoint.errors import UserError


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> tuple[np.ndarray, bool]:
    """A conversation's tokens with the separator behind them, -1 - id where they are not predicted; and
    whether the separator stands inside, too.

    Predicted are those that the template marks by ``{% generation %}``. With a template that marks none they
    are what an answer adds to the conversation before it with the generation prompt; a UserError where that
    cannot be told, because the template writes a beginning in another way than the whole.
    """
    if not tokenizer.chats:
        raise UserError(
            f"data.tokenizer {tokenizer.name}: has no chat template, which conversations need; name a "
            "tokenizer folder with one, or plain text by data.text_field"
        )
    given: dict[str, Any] = {"tools": chat.tools} if chat.tools else {}
    try:
        template = _template(tokenizer.name)
        if re.search(r"\{%-?\s*generation\b", template.get_chat_template(**given)):
            found = template.apply_chat_template(
                chat.messages, return_dict=True, return_assistant_tokens_mask=True, **given
            )
            ids, predicted = found["input_ids"], np.array(found["assistant_masks"], bool)
        else:
            ids, predicted = _by_prefixes(template, given, chat)
    except UserError:
        raise
    except Exception as error:  # transformers and templates raise what they like
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{chat.place}: {tokenizer.name}'s chat template refuses it ({reason})") from None
    separator = list(tokenizer.separator_ids)
    if separator and ids[-len(separator) :] != separator:
        answered = chat.messages[-1]["role"] == "assistant"
        ids, predicted = ids + separator, np.append(predicted, [answered] * len(separator))
    if (highest := max(ids, default=0)) >= tokenizer.vocab_size:
        raise UserError(f"{chat.place}: the chat template's token {highest} is not in {tokenizer.name}")
    places = range(len(ids) - len(separator)) if separator else ()
    inside = any(ids[i : i + len(separator)] == separator for i in places)
    return np.where(predicted, ids, ~np.array(ids, np.int64)), inside


def _by_prefixes(template: Any, given: dict[str, Any], chat: Chat) -> tuple[list[int], np.ndarray]:
    def ids_of(messages: list[dict[str, Any]], prompt: bool = False) -> list[int]:
        if not messages:  # an answer that nothing precedes
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
    """The tokenizer of transformers with a chat template that `data.tokenizer` names."""
    place = Path(name).expanduser()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError("conversations need transformers: pip install transformers") from None
    return AutoTokenizer.from_pretrained(
        str(place if place.is_dir() else place.parent), local_files_only=True
    )
