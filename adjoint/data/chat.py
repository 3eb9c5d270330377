"""Tokenise chats with the tokenizer's chat template; only the assistant's answers are predicted.

The template renders the whole chat once, as text. An *answer* is a span of characters in it: what the
template marks with ``{% generation %}``, or else what an answer adds to the rendering of the messages before
it plus the generation prompt. Each token is predicted if its characters are an answer's, and what is
predicted must decode to the answer's text: transformers' own masks are wrong for some tokenizers that drop
whitespace.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import numpy as np

from adjoint.data.sources import Chat
from adjoint.data.tokenizer import FileTokenizer, Tokenizer
from adjoint.errors import UserError

# Roles that are not trained on. Any other name (Assistant, model, gpt) may mark an answer, and is refused.
ASKING = {"system", "developer", "user", "tool", "function", "ipython", "observation", "context"}
HELD = (
    "content",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
)  # what a message may contain; calls last
# Fields by which data sets of OpenAI, axolotl, ms-swift and slime say whether an answer is trained on.
MARKS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "step_loss_mask")
# Fields that a template may leave out without a word: a chat says the same without them, or they are `HELD`.
_KNOWN_FIELDS = {"role", "name", "tool_call_id", "id", *HELD}
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Noncharacters of Unicode, of which the first pair that is not in the text marks where answers begin and end.
_BRACKETS = [(chr(0xFDD0 + i), chr(0xFDD1 + i)) for i in range(0, 32, 2)]
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
_JOINED = "give the tokenizer a template that puts a special token or a line end between them"


class TextSpan(NamedTuple):
    """The characters [start, stop) of a rendered chat."""

    start: int
    stop: int


class Difference(NamedTuple):
    """A way in which predicted tokens differ from a record's answers: a kind, noted once, and a line."""

    kind: str
    line: str


class EncodedChat(NamedTuple):
    """The tokens of a rendered chat.

    Attributes:
        offsets: the characters [start, stop) of each token, (n, 2); None if the tokenizer does not tell.
        owners: the number of the answer that each token belongs to, -1 for none: (n,) int64.
    """

    ids: list[int]
    offsets: np.ndarray | None
    owners: np.ndarray


class ChatEncoder:
    """Turns chats into tokens.

    Attributes:
        notes: A line for each field of a message that is not read, by the field's name, and for each way in
            which what is predicted differs from the answers, by `Difference.kind`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.notes: dict[str, str] = {}

    def encode(self, chat: Chat) -> np.ndarray:
        """Return a chat's tokens and the separator, (n,) int64; -1 - id for tokens that are not predicted.

        Raises:
            UserError: the answers cannot be located exactly; the template omits part of a message; or a role
                is unknown.
        """
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, FileTokenizer) or tokenizer.renderer is None or not tokenizer.chats:
            raise UserError(_why_no_chats(tokenizer))
        messages, predicted_messages = self._read_messages(chat, str(tokenizer.renderer.chat_template))
        _check_messages(messages, chat.place)
        for name in chat.unread:
            self._note(
                f"{chat.place}: the record has a field {name!r} beside messages, which is not read", name
            )
        rendered = _Rendered(tokenizer, chat, messages)
        spans = rendered.answers(predicted_messages)
        encoded = _encoded(tokenizer, rendered.text, spans, chat.place)
        ids, predicted = encoded.ids, encoded.owners >= 0
        for kind, line in _differences(tokenizer, rendered, predicted_messages, spans, encoded, self.notes):
            self._note(f"{chat.place}: {line}", kind)
        separator = list(tokenizer.separator_ids)
        if separator and not _is_closed(tokenizer, ids, separator):
            answered = messages[-1]["role"] == "assistant" and predicted_messages[-1]
            ids, predicted = ids + separator, np.append(predicted, [answered] * len(separator))
        if (highest := max(ids, default=0)) >= tokenizer.vocab_size:
            raise UserError(f"{chat.place}: the chat template's token {highest} is not in {tokenizer.name}")
        return np.where(predicted, ids, ~np.array(ids, np.int64))

    def _read_messages(self, chat: Chat, template: str) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return the messages without `MARKS`, and whether each is to be predicted if it is an answer."""
        messages, predicted = [], []
        for i, message in enumerate(chat.messages, 1):
            place = f"{chat.place}: message {i}"
            present = {name: value for name, value in message.items() if value not in (None, "", [], {})}
            marks = {name: _mark(present[name], f"{place}: {name}") for name in MARKS if name in present}
            if len(set(marks.values())) > 1:
                said = " and ".join(f"{name} {message[name]}" for name in marks)
                raise UserError(f"{place} has {said}, which contradict each other")
            if True in marks.values() and message["role"] != "assistant":
                name = next(iter(marks))
                self._note(f"{place} has {name} {message[name]}, but answers alone are predicted", name)
            for name in present.keys() - _KNOWN_FIELDS - set(MARKS):
                if not re.search(rf"\b{re.escape(name)}\b", template):
                    self._note(f"{place} has a field {name!r}, which the chat template does not read", name)
            messages.append({name: value for name, value in message.items() if name not in MARKS})
            predicted.append(False not in marks.values())
        return messages, predicted

    def _note(self, line: str, name: str) -> None:
        self.notes.setdefault(name, f"{line}; further ones are not named")


def _why_no_chats(tokenizer: Tokenizer) -> str:
    if tokenizer.chats:
        return "conversations need transformers: pip install transformers"
    return (
        f"data.tokenizer {tokenizer.name}: has no chat template, which conversations need; name a "
        "tokenizer folder with one, or plain text by data.text_field"
    )


def _mark(value: Any, place: str) -> bool:
    """Whether a mark asks for a message to be trained on."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise UserError(f"{place} is {value!r}; an answer is predicted or not: give 0 or 1, true or false")


def _is_closed(tokenizer: FileTokenizer, ids: list[int], separator: list[int]) -> bool:
    """Whether tokens end with the separator, followed at most by whitespace, as in ChatML."""
    ends = range(len(ids), len(separator) - 1, -1)
    last = next((end for end in ends if ids[end - len(separator) : end] == separator), None)
    return last is not None and not tokenizer.decode(ids[last:]).strip()


def _check_messages(messages: list[dict[str, Any]], place: str) -> None:
    """Raise UserError if a message has a role or content that templates do not handle."""
    for i, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role != "assistant" and role not in ASKING:
            raise UserError(
                f"{place}: message {i} has the role {role!r}; answers have the role 'assistant', what "
                f"they answer one of {', '.join(sorted(ASKING))}"
            )
        if content is None and not any(message.get(field) for field in HELD):
            raise UserError(f"{place}: message {i} is empty: its content is null")
        for block in content if isinstance(content, list) else ():
            text = (
                block.get("text")
                if isinstance(block, dict) and block.get("type", "text") == "text"
                else block
            )
            if not isinstance(text, str):
                kind = block.get("type") if isinstance(block, dict) else type(block).__name__
                raise UserError(f"{place}: message {i} has a part of the type {kind!r}; only text is read")


# ------------------------------------------------------------------------------------------------ rendering


class _TemplateError(UserError):
    """An error that a template raises."""


class _Rendered:
    """A chat as the text that the template makes of it.

    Attributes:
        text: The whole chat.
        messages: The messages in the form that the template writes out in full.
    """

    def __init__(self, tokenizer: FileTokenizer, chat: Chat, messages: list[dict[str, Any]]) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self.options: dict[str, Any] = {"tools": chat.tools} if chat.tools else {}
        self.template: str = self._refusing(lambda: tokenizer.renderer.get_chat_template(**self.options))
        refusals: list[UserError] = []
        for form in _forms_of_arguments(messages):
            try:
                self.messages, self.text = form, self.render(form)
                _check_rendered(self.text, form, chat)
                return
            except UserError as error:
                refusals.append(error)
        # What the template leaves out says more than that it fails on another form of the same.
        raise next((each for each in refusals if not isinstance(each, _TemplateError)), refusals[0])

    def render(
        self, messages: list[dict[str, Any]], prompt: bool = False, template: str | None = None
    ) -> str:
        """Return the text of messages, with the generation prompt after it if `prompt`."""
        apply = self.tokenizer.renderer.apply_chat_template
        options = {
            "chat_template": template or self.template,
            "add_generation_prompt": prompt,
            **self.options,
        }
        return self._refusing(lambda: apply(messages, tokenize=False, **options))

    def _refusing(self, call: Callable[[], str]) -> str:
        try:
            return call()
        except Exception as error:  # transformers and templates raise errors of any type
            reason, name = " ".join(str(error).split())[:200], self.tokenizer.name
            raise _TemplateError(f"{self.chat.place}: {name}'s chat template refuses it ({reason})") from None

    def answers(self, predicted: list[bool]) -> list[TextSpan]:
        """Return the spans of the answers to predict; `predicted` has a value for each message."""
        if _GENERATION.search(self.template):
            return self._marked_answers(predicted)
        numbers = [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and predicted[i]]
        return [self._added_by(i) for i in numbers]

    def _added_by(self, i: int) -> TextSpan:
        """Return the span that message i adds after the earlier messages and the generation prompt."""
        place = f"{self.chat.place}: the chat template writes message {i + 1}"
        through = self._through(i)
        before = self.render(self.messages[:i], prompt=True) if i else self._before_first(through)
        if not through.startswith(before):
            raise UserError(
                f"{place} differently from the generation prompt before it; give the tokenizer a template "
                "with {% generation %} around answers"
            )
        if not self.text.startswith(through):
            raise UserError(
                f"{place} differently when more messages follow; give the tokenizer a template with "
                "{% generation %} around answers"
            )
        return TextSpan(len(before), len(through))

    def _through(self, i: int) -> str:
        """Return the text up to the end of message i."""
        through = self.render(self.messages[: i + 1])
        if self.text.startswith(through):
            return through
        # Some templates end a chat's last message differently (Phi-3, gpt-oss), unless a prompt follows it.
        prompt, prompted = self._generation_prompt(), self.render(self.messages[: i + 1], prompt=True)
        return through if prompt is None or not prompted.endswith(prompt) else prompted.removesuffix(prompt)

    def _generation_prompt(self) -> str | None:
        """Return the text that the template writes to ask for an answer; None if it cannot be determined."""
        question = [{"role": "user", "content": "?"}]
        prompted, plain = self.render(question, prompt=True), self.render(question)
        for end in ("", self.tokenizer.renderer.eos_token or ""):  # which may end what no prompt follows
            if prompted.startswith(before := plain.removesuffix(end)):
                return prompted.removeprefix(before)
        return None

    def _before_first(self, through: str) -> str:
        """Return the text before an answer that is the first message: all such answers begin with it."""
        texts = [self.render([{"role": "assistant", "content": content}]) for content in ("0", "1")]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        before = "".join(character for character, _ in same)
        prompt = (self._generation_prompt() or "").rstrip()
        if not through.startswith(before) or not before.rstrip().endswith(prompt):
            raise UserError(
                f"{self.chat.place}: message 1 is an answer to nothing, and the chat template does not tell "
                "where it begins; put a message before it, or give the tokenizer a template with "
                "{% generation %} around answers"
            )
        return before

    def _marked_answers(self, predicted: list[bool]) -> list[TextSpan]:
        """Return the spans inside ``{% generation %}`` that belong to predicted answers."""
        spans = self._brackets(self.messages)
        answers = [message["role"] == "assistant" for message in self.messages]
        excluded = [i for i, answer in enumerate(answers) if answer and not predicted[i]]
        if not excluded:
            return spans
        # Which spans are whose: those that the rendering gains with each message, if they hold its text.
        counts = [0, *(len(self._brackets(self.messages[: i + 1])) for i in range(len(answers)))]
        chosen = []
        for i, (start, stop) in enumerate(itertools.pairwise(counts)):
            text = _squeezed("".join(self.text[a:b] for a, b in spans[start:stop]))
            leaves = [leaf for field in HELD for leaf in _leaves(self.messages[i].get(field)) if answers[i]]
            if (stop > start) != answers[i] or not all(_places(leaf, text) for leaf in leaves):
                raise UserError(
                    f"{self.chat.place}: message {excluded[0] + 1} is not to be predicted, but the chat "
                    f"template does not tell which {{% generation %}} holds message {i + 1}; leave the "
                    "record out"
                )
            chosen += spans[start:stop] if predicted[i] else []
        return chosen

    def _brackets(self, messages: list[dict[str, Any]]) -> list[TextSpan]:
        """Return the spans inside ``{% generation %}``, found by rendering with a character at each end of
        them."""
        plain = self.text if messages is self.messages else self.render(messages)
        opening, closing = next(pair for pair in _BRACKETS if not set(pair) & set(plain))

        def bracket(tag: re.Match[str]) -> str:
            # Between two tags, so that Jinja trims whitespace on both sides as it does for the tag itself.
            left, ends, right = tag.groups()
            return f"{{%{left} if true %}}{{{{ '{closing if ends else opening}' }}}}{{% endif {right}%}}"

        text = self.render(messages, template=_GENERATION.sub(bracket, self.template))
        spans, at, start = [], 0, None
        for piece in re.split(f"([{opening}{closing}])", text):
            if piece == opening and start is None:
                start = at
            elif piece == closing and start is not None:
                spans.append(TextSpan(start, at))
                start = None
            elif piece in (opening, closing):
                at = -1
                break
            else:
                at += len(piece)
        if start is not None or at != len(plain) or re.sub(f"[{opening}{closing}]", "", text) != plain:
            raise UserError(
                f"{self.chat.place}: what the chat template has inside {{% generation %}} cannot be told "
                "from the rest of its text; put the tags directly around answers"
            )
        return spans


def _forms_of_arguments(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Messages with the arguments of tool calls as objects, which most templates want, and as they are, and
    as JSON."""

    def with_arguments(change: Callable[[Any], Any]) -> list[dict[str, Any]]:
        return [
            {**m, "tool_calls": [_changed(call, change) for call in m["tool_calls"]]}
            if isinstance(m.get("tool_calls"), list)
            else m
            for m in messages
        ]

    forms: list[list[dict[str, Any]]] = []
    for change in (_decoded, lambda arguments: arguments, _as_json):
        form = with_arguments(change)
        if form not in forms:
            forms.append(form)
            yield form


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tool call with other arguments; they are in its `function`, or in itself."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _decoded(arguments: Any) -> Any:
    """Return the object that a JSON string holds; anything else as it is."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _check_rendered(rendered: str, messages: list[dict[str, Any]], chat: Chat) -> None:
    """Raise UserError if the template omits part of a record, or renders it as Python's repr."""
    text, at = _squeezed(rendered), 0
    for i, message in enumerate(messages, 1):
        # Templates render messages in order, except system messages, which some put elsewhere.
        first = end = 0 if message["role"] in ("system", "developer") else at
        for field in HELD:
            value = message.get(field)
            as_python = any(form in text[first:] for form in _python_forms(value))
            for leaf in _leaves(value):
                place = min(_places(leaf, text, first), default=None)
                if place is None or as_python:
                    fault = "leaves out" if place is None else "writes as Python does"
                    raise UserError(
                        f"{chat.place}: the chat template {fault} the {field} of message {i} "
                        f"({leaf.strip()[:60]!r}); take it out of the record, or give the tokenizer a "
                        "template that knows its form"
                    )
                end = max(end, place.stop)
        at = max(at, end)
    for tool in chat.tools if isinstance(chat.tools, list) else ():
        name = tool.get("function", tool).get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and name not in text:
            raise UserError(f"{chat.place}: the chat template leaves out the tools ({name!r})")


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a field of a message, without those that only name the type of a part."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from () if name in ("type", "id", "index") else _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str) and value.strip():
        yield value


def _python_forms(value: Any) -> Iterator[str]:
    """Python's repr of the objects and lists in a field, where it is not JSON too."""
    if isinstance(value, dict | list):
        form = _squeezed(str(value))
        if form not in [_squeezed(json.dumps(value, ensure_ascii=escaped)) for escaped in (False, True)]:
            yield form
        for each in value.values() if isinstance(value, dict) else value:
            yield from _python_forms(each)


def _places(leaf: str, text: str, first: int = 0) -> list[TextSpan]:
    """Return the spans of a leaf in a squeezed text, as it is or JSON-escaped."""
    forms = {_squeezed(form) for form in _forms(leaf)}
    starts = [(text.find(form, first), len(form)) for form in forms]
    return [TextSpan(start, start + size) for start, size in starts if start >= 0]


def _forms(leaf: str) -> list[str]:
    """Return the forms in which a template may write a text: as it is or JSON-escaped."""
    return [leaf, *(json.dumps(leaf, ensure_ascii=escaped)[1:-1] for escaped in (False, True))]


def _squeezed(text: str) -> str:
    """Return a text without whitespace, which many templates and tokenizers trim."""
    return "".join(text.split())


# ------------------------------------------------------------------------------------------------- tokens


def _encoded(tokenizer: FileTokenizer, text: str, spans: list[TextSpan], place: str) -> EncodedChat:
    """Return a text's tokens, and to which of the spans they belong.

    Raises:
        UserError: a token covers text inside and outside of an answer, or what would be predicted does not
            decode to the answers.
    """
    ids, pairs = tokenizer.encode_with_offsets(text)
    offsets = None if pairs is None else np.array(pairs, np.int64).reshape(-1, 2)
    if offsets is None:
        owners = _owners_by_prefixes(tokenizer, ids, text, spans, place)
    else:
        owners = _owners_by_offsets(tokenizer, offsets, text, spans, place)
    for number, (start, stop) in enumerate(spans):
        answer = text[start:stop]
        answer_ids = [ids[token] for token in np.flatnonzero(owners == number)]
        decoded, expected = _squeezed(tokenizer.decode(answer_ids)), _squeezed(answer)
        if decoded != expected and not _says_the_same(tokenizer, answer_ids, tokenizer.encode(answer)):
            raise UserError(
                f"{place}: the tokens of an answer decode to {decoded[:60]!r} and not to {expected[:60]!r}: "
                f"{tokenizer.name} does not tell which tokens are the answer's; leave the record out, or "
                "name another data.tokenizer"
            )
    return EncodedChat(ids, offsets, owners)


def _differences(
    tokenizer: FileTokenizer,
    rendered: _Rendered,
    predicted: list[bool],
    spans: list[TextSpan],
    encoded: EncodedChat,
    noted: Container[str],
) -> Iterator[Difference]:
    """Yield how predicted tokens differ from the record's answers; kinds that are `noted` may be left out."""
    answers = [rendered.text[start:stop] for start, stop in spans]
    if "trimmed" not in noted:
        for i, message in enumerate(rendered.messages):
            written = (leaf for field in HELD[:-1] for leaf in _leaves(message.get(field)))
            if message["role"] == "assistant" and predicted[i]:
                for leaf in written:
                    if not any(form in answer for form in _forms(leaf) for answer in answers):
                        line = f"the chat template changes whitespace of an answer, message {i + 1} "
                        yield Difference(
                            "trimmed", f"{line}({leaf[:60]!r}), and the changed one is predicted"
                        )
    if encoded.offsets is not None:
        yield from _differences_of_tokens(tokenizer, rendered.text, spans, encoded, noted)
    unknown = tokenizer.unknown_id
    if unknown is not None and unknown in np.array(encoded.ids)[encoded.owners >= 0]:
        line = f"{tokenizer.name} has no token for a part of an answer; its unknown token is predicted there"
        yield Difference("unknown", line)


def _differences_of_tokens(
    tokenizer: FileTokenizer, text: str, spans: list[TextSpan], encoded: EncodedChat, noted: Container[str]
) -> Iterator[Difference]:
    """Yield what tokens join to the answers, drop from them or write otherwise."""
    assert encoded.offsets is not None
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, encoded.offsets[:, 0], 1)
    np.add.at(covered, encoded.offsets[:, 1], -1)
    is_covered = np.cumsum(covered)[:-1] > 0
    for number, (first, last) in enumerate(spans):
        tokens = np.flatnonzero(encoded.owners == number)
        start, stop = encoded.offsets[tokens].T
        for token in tokens[((start < first) & (stop > first)) | ((start < last) & (stop > last))]:
            joined = text[slice(*encoded.offsets[token])]
            # A special token may take whitespace beside it in, and is the same token without.
            if not tokenizer.is_token(encoded.ids[token], joined.strip()):
                line = (
                    f"token {joined!r} of {tokenizer.name} joins whitespace beside an answer to it, and is "
                )
                yield Difference("joined", f"{line}predicted; generation prompts may end in that whitespace")
        answer = text[first:last]
        if not is_covered[first:last].all():
            dropped = answer[int((~is_covered[first:last]).argmax()) :][:1]
            line = f"{tokenizer.name} drops whitespace of answers, such as {dropped!r}, which nobody learns"
            yield Difference("dropped", line)
        if "normalized" not in noted and (changed := tokenizer.changed_by_normalizer(answer)) is not None:
            line = (
                f"{tokenizer.name} changes the text of an answer before it is predicted, to {changed[:60]!r}"
            )
            yield Difference("normalized", line)


def _says_the_same(tokenizer: FileTokenizer, ids: list[int], others: list[int]) -> bool:
    """Whether tokens have the same text but for whitespace, also as tokenizers write it, for which tokens are
    unknown, and for how words are cut."""
    texts = []
    for each in (ids, others):
        text = tokenizer.decode([token for token in each if token != tokenizer.unknown_id])
        for mark in filter(None, ("\N{LOWER ONE EIGHTH BLOCK}", tokenizer.continues)):
            text = text.replace(mark, "")
        texts.append(_squeezed(text))
    return texts[0] == texts[1]


def _owners_by_offsets(
    tokenizer: FileTokenizer, offsets: np.ndarray, text: str, spans: list[TextSpan], place: str
) -> np.ndarray:
    """Return the number of the span that each token belongs to, -1 for none, (n,) int64, by the characters
    that it covers. Whitespace at a span's edge belongs to the token that it is in."""
    of_character = np.full(len(text) + 1, -1)
    for number, span in enumerate(spans):
        of_character[span.start : span.stop] = number
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    words = np.flatnonzero(~np.isin(codes, _SPACES))  # characters that are not whitespace
    of_word = np.append(of_character[words], -1)
    changes = np.append(0, np.cumsum(of_word[1:] != of_word[:-1]))  # of owners, up to each of these
    start, stop = offsets.T
    first, last = np.searchsorted(words, start), np.searchsorted(words, stop) - 1
    has_words = last >= first
    joined = has_words & (changes[np.maximum(last, 0)] != changes[first])
    if joined.any():
        token = int(joined.argmax())
        raise UserError(
            f"{place}: token {text[start[token] : stop[token]]!r} of {tokenizer.name} joins an answer to the "
            f"text beside it; {_JOINED}"
        )
    # A token of whitespace belongs to the answer that it touches, one of no character to the one around it.
    before, after = of_character[np.maximum(start, 1) - 1], of_character[start]
    blank = np.maximum(after, of_character[np.maximum(stop, 1) - 1])
    blank = np.where(stop > start, blank, np.where(before == after, after, -1))
    return np.where(has_words, of_word[first], blank)


def _owners_by_prefixes(
    tokenizer: FileTokenizer, ids: list[int], text: str, spans: list[TextSpan], place: str
) -> np.ndarray:
    """Return the same as `_owners_by_offsets`, for a tokenizer without offsets: a span owns the tokens that
    the text up to its end has beyond those of the text before it."""
    owners = np.full(len(ids), -1)
    for number, span in enumerate(spans):
        before, through = tokenizer.encode(text[: span.start]), tokenizer.encode(text[: span.stop])
        if ids[: len(through)] != through or through[: len(before)] != before:
            raise UserError(
                f"{place}: a token of {tokenizer.name} joins an answer to the text beside it; {_JOINED}"
            )
        owners[len(before) : len(through)] = number
    return owners
