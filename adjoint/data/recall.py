"""What has to be recalled: pairs of keys and values with questions after them, and needles in haystacks."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX
from adjoint.data.tokenizer import Tokenizer

KEYS = VALUES = 32  # ids 1 to 32 and 33 to 64; 0 is all else
VOCAB = 1 + KEYS + VALUES
ALPHA = 0.1  # of the power law, as in Zoology
DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)
LINE = "\nThe pass key is {}.\n"


def pairs_and_questions(
    generator: np.random.Generator, batch: int, seqlen: int, pairs: int
) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (Arora et al. 2023, "Zoology", section 4): pairs of a key and its value,
    and later each key once more, at places that follow a power law; everything else is 0.

    Returns:
        ids and labels (batch, seqlen) int64, labels in the model's convention (it shifts them): that of a
        question's key stands one place after it, -100 where nothing is asked.

    Raises:
        ValueError: seqlen is too short for twice the pairs and a question each.
    """
    room = (seqlen - 2 * pairs) // 2  # places of questions: every second token after the pairs
    if room < pairs or pairs > KEYS:
        raise ValueError(f"{pairs} pairs need {4 * pairs} tokens and as many keys; got {seqlen} and {KEYS}")
    weights = ALPHA * np.arange(1, room + 1) ** (ALPHA - 1)
    ids, labels = np.zeros((batch, seqlen), np.int64), np.full((batch, seqlen), IGNORE_INDEX)
    for row, asked in zip(ids, labels, strict=True):
        keys = 1 + generator.permutation(KEYS)[:pairs]
        values = 1 + KEYS + generator.integers(0, VALUES, pairs)
        row[: 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        gaps = generator.choice(room, pairs, replace=False, p=weights / weights.sum())
        row[2 * pairs + 2 * gaps] = keys
        asked[2 * pairs + 2 * gaps + 1] = values
    return torch.from_numpy(ids), torch.from_numpy(labels)


def needles(generator: np.random.Generator, batch: int, seqlen: int, depth: float) -> tuple[Tensor, Tensor]:
    """The same of one pair, at `depth` of the way, and one question, at the end."""
    keys = torch.from_numpy(1 + generator.integers(0, KEYS, (batch, 1)))
    values = torch.from_numpy(1 + KEYS + generator.integers(0, VALUES, (batch, 1)))
    nothing = torch.zeros(batch, seqlen - 4, dtype=torch.int64)
    return hidden(nothing, torch.cat([keys, values], dim=1), keys, values, depth)


def hidden(
    haystack: Tensor, needle: Tensor, question: Tensor, answer: Tensor, depth: float
) -> tuple[Tensor, Tensor]:
    """A haystack with a needle put in, behind the share `depth` of it, and at its end the question and its
    answer: (batch, tokens) int64 each.

    Returns:
        ids and labels (batch, seqlen) int64; labels, which the model shifts, are -100 but for the answer's.
    """
    at = int(depth * haystack.shape[1])
    ids = torch.cat([haystack[:, :at], needle, haystack[:, at:], question, answer], dim=1)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, -answer.shape[1] :] = answer
    return ids, labels


def pass_key(tokenizer: Tokenizer, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """A needle in words, "The pass key is 48213." on a line of its own (after Mohtashami & Jaggi 2023,
    "Landmark attention", section 4.2); its question, the line up to the key; and the answer, the key of five
    digits: (1, tokens) int64 each.

    Where the key begins and ends is seen by comparing the line's tokens with those of other keys.
    """
    lines = [tokenizer.encode(LINE.format(n)) for n in (key, *(11111 * digit for digit in range(1, 10)))]
    before = _in_common(lines)
    after = _in_common([line[before:][::-1] for line in lines])
    line = torch.tensor([lines[0]])
    return line, line[:, :before], line[:, before : line.shape[1] - after]


def _in_common(lines: list[list[int]]) -> int:
    """How many of their first tokens are the same."""
    return sum(1 for _ in itertools.takewhile(lambda at: len(set(at)) == 1, zip(*lines, strict=False)))
