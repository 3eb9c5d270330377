"""Chats through random tokenizers and templates: what is trained on is exactly the answers, or the record is
refused in one line.

A template is drawn as pieces, of which the oracle renders a chat by itself: so it knows which characters are
answers. Tokens that differ in whitespace alone at the edges of an answer are alike.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from adjoint.data.chat import ChatEncoder
from adjoint.data.sources import find_sources, read_documents
from adjoint.data.tokenizer import FileTokenizer
from adjoint.errors import UserError
from tests.fuzz.oracle import Case, Deviation, Refusal, some

ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", *(f"<|{role}|>" for role in ROLES))
SENTENCE = (
    "yes no why because really the state of a chunk is all that next needs [INST] [/INST] user assistant "
    "system tool USER ASSISTANT SYSTEM TOOL <think> </think> <tool_call> </tool_call> name arguments city"
)
WORDS = SENTENCE.split()
ODD = (
    "é",
    "状態",
    "🌊",
    "e\u0301",
    "ﬁ",
    "\u200b",
    "12",
    "3.5",
    "don't",
    "…",
    "▁",
    "Ġ",
    "</s>",
    "<|im_end|>",
    "\\",
    '"',
)
SPACES = (" ", " ", " ", "\n", "  ", "\t", "\n\n", " \n", "\u00a0", "")
# How a message begins and ends, for a role; and how its role is written.
STYLES = {
    "chatml": (lambda role: f"<|im_start|>{role}\n", "<|im_end|>\n"),
    "tags": (lambda role: f"<|{role}|>", "</s>"),
    "lines": (lambda role: f"{role.upper()}: ", "\n"),
    "tight": (lambda role: f"{role}:", ";"),
    "inst": (lambda role: " " if role == "assistant" else "[INST] ", " </s>"),
    "bare": (lambda role: "" if role == "assistant" else "|", " "),
}
MODELS = {
    "BPE": (models.BPE, trainers.BpeTrainer),
    "Unigram": (models.Unigram, trainers.UnigramTrainer),
    "WordPiece": (models.WordPiece, trainers.WordPieceTrainer),
    "WordLevel": (models.WordLevel, trainers.WordLevelTrainer),
}
PRE_TOKENIZERS = {
    "whitespace": pre_tokenizers.Whitespace,
    "split": pre_tokenizers.WhitespaceSplit,
    "bert": pre_tokenizers.BertPreTokenizer,
    "digits": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()]),
    "none": lambda: None,
}
NORMALIZERS = {
    "strip": normalizers.Strip,
    "lower": normalizers.Lowercase,
    "nfkc": normalizers.NFKC,
    "nfd": normalizers.NFD,
    "bert": normalizers.BertNormalizer,
    "spaces": lambda: normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
    "prepend": lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}


# ------------------------------------------------------------------------------------------------- drawing


def draw(rng: random.Random) -> Case:
    model = rng.choice(tuple(MODELS))
    # Vocabularies of words know none of a word that is cut otherwise: they have words between spaces alone.
    spaced = ("whitespace", "split", "bert")
    any_cut = ("bytes", "bytes prefix", "metaspace", "metaspace first", *PRE_TOKENIZERS)
    pre = rng.choice(any_cut if model in ("BPE", "Unigram") else spaced)
    tokenizer = {"model": model, "pre": pre}
    tokenizer |= some(rng, 0.3, {
        "normalizer": lambda: rng.choice(tuple(NORMALIZERS)),
        "byte_fallback": True,
        "fuse_unk": True,
        "flags": lambda: [flag for flag in ("lstrip", "rstrip", "normalized") if rng.random() < 0.4],
        "no_decoder": True,
        "trim_offsets": True,
        "bos": True,
        "truncation": True,
        "split_special_tokens": True,
        "ordinary": True,  # the tokens of `SPECIAL` are words like others
    })  # fmt: skip
    template = {"style": rng.choice(tuple(STYLES)), "layout": rng.choice(("tight", "lines", "dashes"))}
    template |= some(rng, 0.35, {
        "generation": lambda: rng.choice(("content", "close")),
        "trim": True,
        "bos": True,
        "thinking": lambda: rng.choice(("always", "last")),
        "tools": True,
        "arguments": lambda: rng.choice(("object", "string", "printed")),
        "parts": True,
        "end": True,  # written unless a generation prompt is
    })  # fmt: skip
    case = {
        "kind": "chats",
        "seed": rng.randrange(10**6),
        "tokenizer": tokenizer,
        "template": template,
        "messages": draw_messages(rng, template),
    }
    return case | some(rng, 0.2, {"as_string": True, "text": lambda: draw_text(rng)})


def draw_text(rng: random.Random) -> str:
    words = rng.choices((*WORDS, *ODD), weights=[1] * len(WORDS) + [0.4] * len(ODD), k=rng.randint(0, 6))
    text = "".join(word + rng.choice(SPACES) for word in words)
    return rng.choice(("", "", " ", "\n")) + text


def draw_messages(rng: random.Random, template: Case) -> list[Case]:
    messages: list[Case] = []
    roles = ["system"] * (rng.random() < 0.3) + ["user"] * (rng.random() < 0.9)
    for _ in range(rng.randint(1, 4)):
        roles += ["assistant"] + ["tool"] * (rng.random() < 0.15) + ["user"] * (rng.random() < 0.8)
    for role in roles:
        message: Case = {"role": role, "content": draw_text(rng)}
        if rng.random() < 0.15 and template.get("parts"):
            message["content"] = [{"type": "text", "text": draw_text(rng)} for _ in range(rng.randint(1, 2))]
        if role == "assistant":
            if "thinking" in template and rng.random() < 0.5:
                message["reasoning_content"] = draw_text(rng)
            if "arguments" in template and rng.random() < 0.4:
                arguments: Any = {"city": draw_text(rng), "days": rng.choice((1, [2], None, {"a": 'b"'}))}
                if rng.random() < 0.5:
                    arguments = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": "no", "arguments": arguments}}
                ]
                message["content"] = rng.choice((None, "", message["content"]))
            if rng.random() < 0.15:
                message[rng.choice(("weight", "loss", "train"))] = rng.choice((0, 1, False, True))
        messages.append(message)
    return messages


# ------------------------------------------------------------------------------------------------ building


def make_tokenizer(options: Case, seed: int) -> Any:
    """A tokenizer of the tokenizers library, trained on `WORDS`."""
    rng = random.Random(seed)
    kind, pre = options.get("model", "BPE"), options.get("pre", "whitespace")
    unknown = {} if kind == "Unigram" else {"unk_token": "<unk>"}
    if kind == "BPE":
        unknown |= {name: True for name in ("byte_fallback", "fuse_unk") if options.get(name)}
    model, trainer = MODELS[kind]
    made = tokenizers.Tokenizer(model(**unknown))
    # What is put before a text changes how its first word is found, which only some vocabularies allow.
    first_word_counts = kind in ("WordLevel", "WordPiece") or "normalized" in options.get("flags", ())
    if options.get("normalizer", "prepend") != "prepend" or (
        "normalizer" in options and not first_word_counts
    ):
        made.normalizer = NORMALIZERS[options["normalizer"]]()
    more: Case = {}
    if pre.startswith("bytes"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=pre.endswith("prefix"))
        more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        made.decoder = decoders.ByteLevel()
    elif pre.startswith("metaspace"):
        spec = "first" if pre.endswith("first") else "always"
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spec)
        made.decoder = decoders.Metaspace(prepend_scheme=spec)
    elif pre in PRE_TOKENIZERS and (pre_tokenizer := PRE_TOKENIZERS[pre]()) is not None:
        made.pre_tokenizer = pre_tokenizer
    if options.get("byte_fallback") and kind == "BPE" and not pre.startswith("bytes"):
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if kind == "WordPiece":
        made.decoder = decoders.WordPiece()
    if options.get("no_decoder") and not pre.startswith("bytes") and not options.get("byte_fallback"):
        made.decoder = None
    fallback = [f"<0x{i:02X}>" for i in range(256)] if options.get("byte_fallback") else []
    if kind == "Unigram":
        more["unk_token"] = "<unk>"
    texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(40)]
    given = {"vocab_size": rng.choice((600, 700, 900)), "special_tokens": ["<unk>"], "show_progress": False}
    given["special_tokens"] += fallback
    made.train_from_iterator(texts, trainer(**given, **more))
    flags = dict.fromkeys(options.get("flags", ()), True)
    add = made.add_tokens if options.get("ordinary") else made.add_special_tokens
    add([tokenizers.AddedToken(token, **{"normalized": False, **flags}) for token in SPECIAL])
    steps = [processors.ByteLevel(trim_offsets=True)] if options.get("trim_offsets") else []
    if options.get("bos"):
        bos = made.token_to_id("<s>")
        steps += [processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])]
    if steps:
        made.post_processor = processors.Sequence(steps)
    if options.get("truncation"):
        made.enable_truncation(3)
    return made


def make_template(spec: Case) -> str:
    """The Jinja template whose text `render` writes."""
    head, close = STYLES[spec.get("style", "chatml")]
    content = "m.content"
    if spec.get("parts"):
        joined = "m.content | map(attribute='text') | join"
        content = f"(m.content if m.content is string or m.content is none else {joined})"
    content = f"({content} or '')"
    if spec.get("trim"):
        content = f"({content} | trim)"
    body = [f"{{{{ {content} }}}}"]
    if "arguments" in spec:
        arguments = {
            "object": "(c.function.arguments | tojson)",
            "string": "('' + c.function.arguments)",
            "printed": "c.function.arguments",
        }[spec["arguments"]]
        call = [
            "{{ '<tool_call>' }}",
            "{{ c.function.name }}",
            f"{{{{ {arguments} }}}}",
            "{{ '</tool_call>' }}",
        ]
        body += ["{% for c in m.tool_calls or [] %}", *call, "{% endfor %}"]
    if "thinking" in spec:
        after = "" if spec["thinking"] == "always" else " and ns.last < loop.index"
        thought = ["{{ '<think>' }}", "{{ m.reasoning_content }}", "{{ '</think>' }}"]
        body = [f"{{% if m.reasoning_content{after} %}}", *thought, "{% endif %}", *body]
    closing = [f"{{{{ {json.dumps(close)} }}}}"]
    generation = spec.get("generation")
    answer = {
        None: [*body, *closing],
        "content": ["{% generation %}", *body, "{% endgeneration %}", *closing],
        "close": ["{% generation %}", *body, *closing, "{% endgeneration %}"],
    }[generation]
    lines = ["{% set ns = namespace(last=0) %}"]
    lines += [
        "{% for m in messages %}",
        "{% if m.role == 'user' %}",
        "{% set ns.last = loop.index %}",
        "{% endif %}",
        "{% endfor %}",
    ]
    lines += ["{{ '<s>' }}"] * spec.get("bos", False)
    if spec.get("tools"):
        lines += ["{% if tools %}", "{{ tools | tojson }}", "{% endif %}"]
    lines += ["{% for m in messages %}"]
    for word, role in zip(("if", "elif", "elif", "elif"), ROLES, strict=True):
        lines += [f"{{% {word} m.role == '{role}' %}}", f"{{{{ {json.dumps(head(role))} }}}}"]
        lines += answer if role == "assistant" else [f"{{{{ {content} }}}}", *closing]
    lines += ["{% endif %}", "{% endfor %}", "{% if add_generation_prompt %}"]
    lines += [f"{{{{ {json.dumps(head('assistant'))} }}}}"]
    lines += ["{% else %}", "{{ eos_token }}"] * spec.get("end", False) + ["{% endif %}"]
    layout = spec.get("layout", "tight")
    if layout == "tight":
        return "".join(lines)
    if layout == "dashes":  # whitespace is trimmed by dashes
        dashed = [line.replace("{{ ", "{{- ").replace("{% ", "{%- ") for line in lines]
        return "\n   ".join(dashed)
    # Tags in lines of their own, whose indents and ends Jinja trims, as transformers sets it up.
    text = ""
    for line in lines:
        indent = "  " if line.startswith("{%") and text[-1:] in ("", "\n") else ""
        text += indent + line + ("\n" if line.startswith("{%") else "")
    return text


def render(spec: Case, messages: list[Case], tools: Any) -> list[tuple[str, int]]:
    """The text of a chat in pieces, each with the number of the message whose answer it is, or -1."""
    head, close = STYLES[spec.get("style", "chatml")]
    pieces = [("<s>", -1)] * spec.get("bos", False)
    if spec.get("tools") and tools:
        pieces.append((json.dumps(tools, ensure_ascii=False), -1))
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        content = message["content"] or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        text = text.strip() if spec.get("trim") else text
        answer = message["role"] == "assistant"
        if answer:
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                elif spec["arguments"] == "object":  # which is the object in the string
                    arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
                text += f"<tool_call>{call['function']['name']}{arguments}</tool_call>"
            thought = message.get("reasoning_content")
            if thought and (spec.get("thinking") == "always" or i > last):
                text = f"<think>{thought}</think>{text}"
        owner = i if answer else -1
        pieces += [(head(message["role"]), -1), (text, owner)]
        pieces.append((close, owner if spec.get("generation") != "content" else -1))
    if spec.get("end"):
        pieces.append(("</s>", owner if "generation" not in spec else -1))
    return pieces


# ------------------------------------------------------------------------------------------------ checking


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_in(Path(folder), case)


def check_in(folder: Path, case: Case) -> None:
    options, spec = case.get("tokenizer", {}), case.get("template", {})
    backend = make_tokenizer(options, case["seed"])
    split = {"split_special_tokens": True} if options.get("split_special_tokens") else {}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names, **split).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(make_template(spec))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = FileTokenizer(str(folder))
    check_text(tokenizer, reference, options, case.get("text", "yes </s> no"))
    messages = case.get("messages") or [{"role": "assistant", "content": "yes"}]
    tools = [{"type": "function", "function": {"name": "no"}}] if spec.get("tools") else None
    record = {"messages": json.dumps(messages) if case.get("as_string") else messages, "tools": tools}
    (folder / "chat.jsonl").write_text(json.dumps(record) + "\n")
    try:
        (chat,) = read_documents(find_sources(str(folder / "chat.jsonl")).files[0], None)
        tokens = ChatEncoder(tokenizer).encode(chat)  # type: ignore[arg-type]
    except UserError as error:
        check_refusal(str(error), case, reference, render(spec, messages, tools))
        return
    pieces = render(spec, messages, tools)
    text = "".join(piece for piece, _ in pieces)
    predicted, ids = tokens >= 0, np.where(tokens < 0, ~tokens, tokens)
    expected = reference(text, add_special_tokens=False)["input_ids"]
    end = [reference.eos_token_id]
    if list(ids) not in (expected, expected + end):
        raise Deviation(f"tokens of {reference.decode(ids)!r}, not of {text!r}")
    off = [any(name in m and not m[name] for name in ("weight", "loss", "train")) for m in messages]
    if len(ids) > len(expected):
        answered = messages[-1]["role"] == "assistant" and not off[-1]
        if predicted[-1] != answered:
            raise Deviation(f"the end is {'' if predicted[-1] else 'not '}predicted")
        ids, predicted = ids[:-1], predicted[:-1]
    check_answers(reference, ids, predicted, [(t, i >= 0 and not off[i]) for t, i in pieces])


def check_text(tokenizer: FileTokenizer, reference: Any, options: Case, text: str) -> None:
    """Plain text has the ids of transformers, and begins as transformers begins it."""
    if (found := tokenizer.encode(text)) != (expected := reference.encode(text, add_special_tokens=False)):
        raise Deviation(f"{text!r}: tokens {found}, of transformers {expected}")
    bos = (reference.bos_token_id,) if options.get("bos") else ()
    if tokenizer.bos_ids != bos or tokenizer.separator_ids != (reference.eos_token_id,):
        raise Deviation(f"documents begin with {tokenizer.bos_ids} and end with {tokenizer.separator_ids}")


def check_answers(reference: Any, ids: Any, predicted: Any, pieces: list[tuple[str, bool]]) -> None:
    """Runs of tokens that are predicted or not decode to the pieces that are answers or not."""
    texts = [
        (answer, "".join(text for text, _ in group))
        for answer, group in itertools.groupby(without_blanks(pieces), lambda piece: piece[1])
    ]
    starts = [0, *(np.flatnonzero(np.diff(predicted)) + 1).tolist(), len(ids)]
    runs = [(bool(predicted[a]), ids[a:b]) for a, b in itertools.pairwise(starts) if b > a]
    runs = [(answer, run) for answer, run in runs if squeezed(reference.decode(run))]
    alone = [
        (answer, squeezed(reference.decode(reference.encode(text, add_special_tokens=False))), squeezed(text))
        for answer, text in texts
    ]
    alone = merged([piece for piece in alone if piece[1]])  # a tokenizer may drop all of a piece
    runs = merged([(answer, squeezed(reference.decode(run))) for answer, run in runs])
    if [answer for answer, *_ in runs] != [answer for answer, *_ in alone]:
        raise Deviation(f"predicted and not: {runs}, not {alone}")
    for (answer, run), (_, *forms) in zip(runs, alone, strict=True):
        if run not in forms:
            raise Deviation(f"{'predicted' if answer else 'not predicted'}: {run!r}, not {forms}")


def without_blanks(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """The pieces, those of whitespace alone joined to the ones before them."""
    joined: list[tuple[str, bool]] = []
    for text, answer in pieces:
        if joined and not text.strip():
            joined[-1] = (joined[-1][0] + text, joined[-1][1])
        elif joined and not joined[-1][0].strip():
            joined[-1] = (joined[-1][0] + text, answer)
        else:
            joined.append((text, answer))
    return joined


def merged(runs: list[Any]) -> list[Any]:
    """Runs of the same kind that stand side by side, as one."""
    return [
        (answer, *("".join(texts) for texts in zip(*(run[1:] for run in group), strict=True)))
        for answer, group in ((a, list(g)) for a, g in itertools.groupby(runs, lambda run: run[0]))
    ]


def squeezed(text: str) -> str:
    """A text without whitespace, unknown tokens, which have none, and marks of continued words."""
    return "".join(text.replace("<unk>", "").replace("##", "").replace("▁", "").split())


def check_refusal(said: str, case: Case, reference: Any, pieces: list[tuple[str, int]]) -> None:
    """A refusal is one line that names the record, of something that cannot be had; it is counted by kind."""
    if "\n" in said or not re.search(r"chat\.jsonl:1\b", said):
        raise Deviation(f"refused without naming the record in one line: {said!r}")
    spec = case.get("template", {})
    reasons = {
        "joins an answer to the text beside it": joins(reference, pieces),
        "the tokens of an answer decode to": True,
        "leaves out the reasoning_content": "thinking" not in spec,
        "leaves out the tool_calls": "arguments" not in spec,
        "the content": not spec.get("parts"),
    }
    # A template that drops thoughts writes an answer differently when others follow; that it leaves one out
    # is noticed at a later message, if the same words are there.
    drops = spec.get("thinking") == "last" and any("reasoning_content" in m for m in case.get("messages", ()))
    if not drops and not any(words in said and holds for words, holds in reasons.items()):
        raise Deviation(f"refused: {said}")
    kind = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+|/\S*", "…", said)
    raise Refusal(kind[:110])


def joins(reference: Any, pieces: list[tuple[str, int]]) -> bool:
    """Whether a token covers text of an answer and other text."""
    text = "".join(piece for piece, _ in pieces)
    owners = [owner for piece, owner in pieces for _ in piece]
    offsets = reference(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return any(len({owners[i] for i in range(a, b) if not text[i].isspace()}) > 1 for a, b in offsets)
