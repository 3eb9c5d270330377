"""Text in, batches of token ids out.

    data = open_data(DataConfig(seqlen=16384, batch=1), seed=0)
    ids = next(data.train)              # (batch, seqlen) int64, also the labels: the model shifts them
    cursor = data.train.state_dict()    # plain ints and strings; load_state_dict(cursor) resumes from there
    for ids in data.eval: ...           # fixed windows of the held-out split, the same at every evaluation

Documents are packed end to end, each followed by a separator, into one long stream per split
(`adjoint.data.sources` reads the files, `adjoint.data.tokenizer` tokenises, `adjoint.data.token_cache` stores
the result). Training cuts its stream into windows of `seqlen` consecutive tokens, in an order that depends
only on the seed and the epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adjoint.batch import IGNORE_INDEX, labelled, shift_labels
from adjoint.data.config import DataConfig
from adjoint.data.sources import Sources, check_apart, find_sources
from adjoint.data.token_cache import TokenCache, characters_of, entropy, frequencies, open_tokens
from adjoint.data.tokenizer import CHARS, Tokenizer, load_tokenizer, needs_text
from adjoint.errors import UserError
from adjoint.layers.packed_documents import document_ends, from_separator

# Keys by which a user names other text.
TEXT_KEYS = ("path", "weights", "validation_path", "text_field", "max_tokens", "eval_fraction", "upper_case")
Cursor = Mapping[str, Any]  # `state_dict()` of batches, plain values as from JSON
RESIZE = (
    "name another data.tokenizer, or a folder whose model has {size} (resize_token_embeddings and "
    "save_pretrained of transformers)"
)
_COUNTED = 1 << 22  # training tokens that are looked at before a run for windows without a prediction


class Batches:
    """The endless, resumable sequence of training batches.

    Epoch e cuts the stream into windows of `seqlen` tokens from its own offset (so window edges move from
    epoch to epoch) and shuffles them; both depend only on (seed, e). A batch is the next `batch` windows and
    may span two epochs, so no window is dropped and a corpus may have fewer windows than a batch.
    In a stream of fewer than four windows, the first and last `seqlen` tokens are windows too: an epoch reads
    every token, and some twice.
    With `consecutive`, every row reads its own part of the stream in order; an epoch ends with these parts.

    Attributes:
        epoch: Number of the epoch of the next window, from 0.
        position: Windows of that epoch already handed out.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seqlen: int,
        batch: int,
        seed: int,
        fingerprint: str,
        consecutive: bool = False,
    ) -> None:
        """tokens: (n,) integers, identified by their fingerprint. Raises UserError if there are too few."""
        if len(tokens) < (needed := max(seqlen + 1, batch * seqlen if consecutive else 0)):
            rows = f" and {batch} continuous rows (data.batch)" if consecutive else ""
            raise UserError(
                f"data.path: {len(tokens)} tokens to train on, but data.seqlen {seqlen}{rows} needs at least "
                f"{needed}: lower it, or give more text"
            )
        self.tokens, self.seqlen, self.batch, self.seed = tokens, seqlen, batch, seed
        self.fingerprint, self.consecutive = fingerprint, consecutive
        self.epoch, self.position = 0, 0
        # Whether there are so few windows that an offset would skip a large part of an epoch.
        self.few = len(tokens) < 4 * seqlen * (batch if consecutive else 1)
        self._starts_epoch = -1
        self._starts = np.empty(0, np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        """Return the next batch: (batch, seqlen) int64 on the CPU; see `adjoint.batch.labelled`."""
        ids = np.empty((self.batch, self.seqlen), np.int64)
        for row in ids:
            starts = self._window_starts(self.epoch)
            if self.position >= len(starts):
                self.epoch, self.position = self.epoch + 1, 0
                starts = self._window_starts(self.epoch)
            start = starts[self.position]
            row[:] = self.tokens[start : start + self.seqlen]
            self.position += 1
        return torch.from_numpy(ids)

    def _window_starts(self, epoch: int) -> np.ndarray:
        """First token of each window of an epoch, in the order they are handed out: (windows,) int64."""
        if epoch != self._starts_epoch:
            # Raw bits, not Generator.permutation: NumPy promises the same bits in every release, but not the
            # same permutation, and a resumed run must see the order it saw before.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            spare = len(self.tokens) - self.seqlen
            offset = int(bits.random_raw()) % (min(self.seqlen - 1, spare) + 1)
            if self.consecutive:
                rows = self.batch * self.seqlen
                offset = min(offset, len(self.tokens) % rows if self.few else len(self.tokens) - rows)
            windows = (len(self.tokens) - offset) // self.seqlen
            starts = offset + self.seqlen * np.arange(windows)
            if self.few and not self.consecutive:
                starts = np.union1d(starts, [0, spare])
            order = np.argsort(bits.random_raw(len(starts)), kind="stable")
            if self.consecutive:
                each = windows // self.batch
                order = np.arange(each * self.batch).reshape(self.batch, each).T.ravel()
            self._starts, self._starts_epoch = starts[order].astype(np.int64), epoch
        return self._starts

    @property
    def begins(self) -> bool:
        """Whether the next batch's rows do not continue those of the last one."""
        return not self.consecutive or self.position in (0, len(self._window_starts(self.epoch)))

    def state_dict(self) -> dict[str, int | str]:
        """Return the cursor: plain ints and strings."""
        return {"epoch": self.epoch, "position": self.position, "few": self.few, **self._identity()}

    def load_state_dict(self, state: Cursor) -> None:
        """Resume from a cursor of `state_dict`. Raises OtherPlace if it is from another run."""
        _check_place(state, self.state_dict())
        self.epoch, self.position = state["epoch"], state["position"]
        self.few, self._starts_epoch = state.get("few", False), -1  # as the older ones cut the stream

    def _identity(self) -> dict[str, int | str]:
        return {
            "carry_state_previous": self.consecutive,
            "seed": self.seed,
            "seqlen": self.seqlen,
            "batch": self.batch,
            "n_tokens": len(self.tokens),
            "fingerprint": self.fingerprint,
        }


class Mixture:
    """Batches whose rows come from several streams, `Batches` of one row each.

    The next row comes from the stream furthest behind its weight: nothing is random, and after any number of
    rows each stream has had its share, to within about one row. A stream that ends starts again.
    """

    begins = True

    def __init__(self, parts: Sequence[Batches], weights: Sequence[float], batch: int) -> None:
        self.parts, self.weights, self.batch = list(parts), list(weights), batch
        self.taken = [0] * len(parts)

    def __iter__(self) -> Mixture:
        return self

    def __next__(self) -> torch.Tensor:
        rows = []
        for _ in range(self.batch):
            due = [
                (rows_drawn + 1) / weight for rows_drawn, weight in zip(self.taken, self.weights, strict=True)
            ]
            stream = due.index(min(due))
            self.taken[stream] += 1
            rows.append(next(self.parts[stream]))
        return torch.cat(rows)

    def state_dict(self) -> dict[str, Any]:
        parts = [stream.state_dict() for stream in self.parts]
        return {"weights": self.weights, "taken": list(self.taken), "batch": self.batch, "parts": parts}

    def load_state_dict(self, state: Cursor) -> None:
        """Resume from a cursor of `state_dict`. Raises OtherPlace if it is from another run."""
        _check_place(state, self.state_dict())
        for stream, cursor in zip(self.parts, state["parts"], strict=True):
            stream.load_state_dict(cursor)
        self.taken = list(state["taken"])


class OtherPlace(UserError):
    """A cursor of batches that this run does not draw.

    Attributes:
        differing: what the cursor has and what this run has, by the key of the configuration; "data.path"
            where the text itself differs.
    """

    def __init__(self, differing: dict[str, tuple[object, object]]) -> None:
        self.differing = differing
        key, (saved, current) = next(iter(differing.items()))
        super().__init__(
            f"the checkpoint's place in the data has {key} {saved!r}, this run has {current!r}; set it back"
        )


def _check_place(saved: Cursor, current: Cursor) -> None:
    """Raise OtherPlace where two cursors are not of the same batches."""
    before, after = _identity_of(saved, current), _identity_of(current, current)
    if differing := {key: (before[key], after[key]) for key in after if before[key] != after[key]}:
        raise OtherPlace(differing)


def _identity_of(cursor: Cursor, current: Cursor) -> dict[str, object]:
    """Return what determines a cursor's batches, by keys of the configuration; what cursors of older versions
    lack is as in the current one."""
    streams, others = (each.get("parts", [each]) for each in (cursor, current))
    carries = streams[0].get("carry_state_previous", others[0]["carry_state_previous"])
    return {
        "data.seqlen": streams[0]["seqlen"],
        "data.batch": cursor["batch"],
        "data.weights": cursor.get("weights"),
        "training.seed": streams[0]["seed"],
        "training.carry_state": "previous" if carries else "another",
        "data.path": " and ".join(
            f"{stream['n_tokens']} tokens ({stream['fingerprint']})" for stream in streams
        ),
    }


def fingerprint_of(cursor: Cursor) -> str:
    """`Data.fingerprint` of a cursor's text."""
    return " ".join(stream["fingerprint"] for stream in cursor.get("parts", [cursor]))


class EvalBatches:
    """The held-out windows, in order and the same at every pass; `len` counts the batches of one pass.

    Each item is (up to batch, up to seqlen) int64: the last batch may hold fewer windows, and a held-out
    split (or `eval_tokens`) shorter than seqlen is one shorter window. Weight each batch's loss by its number
    of predictions (`Data.targets`). Empty if there are fewer than two tokens.
    """

    def __init__(self, tokens: np.ndarray, seqlen: int, batch: int, eval_tokens: int) -> None:
        available = min(len(tokens), eval_tokens)
        window = min(seqlen, available)
        count = available // window if window > 1 else 0
        self.tokens, self.batch = tokens, batch
        self._windows = tokens[: count * window].reshape(count, window)

    def __len__(self) -> int:
        return -(-len(self._windows) // self.batch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first in range(0, len(self._windows), self.batch):
            yield torch.from_numpy(self._windows[first : first + self.batch].astype(np.int64))


@dataclass(frozen=True)
class Data:
    """Training and held-out batches of a text, as `open_data` returns them.

    Attributes:
        train: Endless training batches, with the cursor. eval: Held-out batches; may be empty.
        unigram_entropy: Entropy of the training split's unigram distribution, in nats per token: the loss of
            a model that knows only frequencies; training must get below it.
        description: The text in one line, for the log.
        fingerprint: Digest of the tokens, as in the cursor.
        packed: Whether documents are kept apart.
        predicted: Share of the training tokens that are predicted; None if all are.
    """

    train: Batches | Mixture
    eval: EvalBatches
    tokenizer: Tokenizer
    n_train_tokens: int
    unigram_entropy: float
    description: str
    fingerprint: str
    packed: bool
    predicted: float | None

    def seq_idx(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return the document index of each token of a batch (batch, seqlen); None if documents are one
        stream."""
        return from_separator(labelled(ids)[0], self.tokenizer.separator_ids) if self.packed else None

    def beginning(self, tokens: int) -> list[int]:
        """Return the first tokens of the held-out text, or else of the training text, in one document."""
        streams = self.train.parts if isinstance(self.train, Mixture) else [self.train]
        text = self.eval.tokens if len(self.eval.tokens) else streams[0].tokens
        ids = labelled(torch.from_numpy(text[:tokens].astype(np.int64))[None])[0]
        ends = (
            document_ends(ids, self.tokenizer.separator_ids)[0]
            if self.tokenizer.separator_ids
            else ids[0] < 0
        )
        end = int(ends.int().argmax()) if ends.any() else tokens
        return ids[0, : end or tokens].tolist()

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target of each token of a batch, -100 for none."""
        return shift_labels(labelled(ids)[1], self.seq_idx(ids))

    def describe_unpredicted(self, steps: int, batches_per_step: int) -> list[str]:
        """Return a line each about training and held-out windows in which no token is predicted, if there are
        some.

        Args:
            steps: how many steps are ahead, of which those of `_COUNTED` tokens are looked at.
            batches_per_step: batches whose gradients a step adds up.
        """
        if self.predicted is None and not self.packed:
            return []
        lines, cursor, empty, rows, read = [], self.train.state_dict(), list[bool](), 0, 0
        while len(empty) < steps and read < _COUNTED:
            batches = [next(self.train) for _ in range(batches_per_step)]
            counts = torch.cat([(self.targets(ids) != IGNORE_INDEX).sum(1) for ids in batches])
            empty.append(not counts.any())
            rows += int((counts == 0).sum())
            read += sum(ids.numel() for ids in batches)
        self.train.load_state_dict(cursor)
        if rows:
            windows = len(empty) * batches_per_step * batches[0].shape[0]
            lines.append(
                f"data.seqlen: no token is predicted in {rows / windows:.0%} of the windows and "
                f"{sum(empty) / len(empty):.0%} of the next {len(empty)} steps, which teach nothing; raise "
                "data.seqlen, or data.batch or training.grad_accumulation"
            )
        held_out = [(self.targets(ids) != IGNORE_INDEX).any(1) for ids in self.eval]
        if held_out and not (predicted := torch.cat(held_out)).all():
            share = 1 - predicted.double().mean().item()
            remedy = "raise data.seqlen or data.eval_tokens, or name other text with data.validation_path"
            nothing = "" if predicted.any() else ": there is nothing to evaluate, and no best checkpoint"
            lines.append(
                f"data.eval_tokens: no token is predicted in {share:.0%} of the held-out windows{nothing}; "
                f"{remedy}"
            )
        return lines

    def ended(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch,) bool: the rows of a batch whose last token ends a packed document."""
        if not self.packed:
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        return document_ends(labelled(ids)[0], self.tokenizer.separator_ids)[:, -1]


def open_data(
    config: DataConfig,
    seed: int = 0,
    vocab_size: int | None = None,
    consecutive: bool = False,
    trust_remote_code: bool = False,
    table_of: str | None = None,
    remedy: str = RESIZE,
) -> Data:
    """Find, tokenise (once: the result is cached and memory-mapped) and cut the text of `config`.

    Args:
        config: The text and how it is cut.
        seed: Determines the order of the training windows; at least 0.
        vocab_size: The model's vocabulary, to check the tokens against; None checks nothing.
        consecutive: Whether each row of a training batch continues where the previous batch ended.
        trust_remote_code: Whether Python files of the tokenizer's folder may run.
        table_of: The model whose vocabulary it is, for an error, where no setting changes its size.
        remedy: What to do then, if the vocabulary lacks a token; {size} stands for the tokenizer's.

    Raises:
        UserError: Paths, files, tokenizer or sizes do not fit; the message says which and what to do.
    """
    weights, splits_training_text = config.weights, config.validation_path is None
    if weights is not None and consecutive:
        raise UserError("data.weights: training.carry_state previous needs one stream; leave one of them out")
    entries = config.path if weights and isinstance(config.path, list) else [config.path]
    streaming = config.max_tokens is not None
    parts = [find_sources(entry, streaming=streaming) for entry in entries]
    others = (
        []
        if splits_training_text
        else [find_sources(config.validation_path, "data.validation_path", streaming=streaming)]
    )
    check_apart(parts, others)
    setting = config.tokenizer
    if needs_text(setting):
        arguments = config.text_field, config.cache_dir, config.max_tokens, config.upper_case
        characters = [characters_of(sources, *arguments) for sources in (*parts, *others)]
        setting = f"{CHARS}:{''.join(sorted(set().union(*characters)))}"
    tokenizer = load_tokenizer(setting, config.separator, trust_remote_code)

    def tokens_of(sources: Sources, fraction: float) -> TokenCache:
        limits = config.cache_dir, config.max_tokens, config.upper_case
        return open_tokens(sources, tokenizer, config.text_field, fraction, *limits)

    caches = [tokens_of(sources, config.eval_fraction if splits_training_text else 0.0) for sources in parts]
    held_out = [tokens_of(sources, 0.0) for sources in others]
    _check_tokens([*caches, *held_out], tokenizer, vocab_size, config, table_of, remedy)
    _check_contents(caches, held_out)
    rows = config.batch if weights is None else 1
    streams = [Batches(c.train, config.seqlen, rows, seed, c.fingerprint, consecutive) for c in caches]
    pieces = [cache.train for cache in held_out] or [cache.eval for cache in caches]
    tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    shares = [1.0] if weights is None else [weight / sum(weights) for weight in weights]
    answers = [cache.predicted for cache in caches]
    return Data(
        train=streams[0] if weights is None else Mixture(streams, weights, config.batch),
        eval=EvalBatches(tokens, config.seqlen, config.batch, config.eval_tokens),
        tokenizer=tokenizer,
        n_train_tokens=sum(len(cache.train) for cache in caches),
        unigram_entropy=caches[0].unigram_entropy if weights is None else _mixed_entropy(caches, shares),
        description=" + ".join(sources.description for sources in parts),
        fingerprint=" ".join(cache.fingerprint for cache in caches),
        packed=config.documents == "packed",
        predicted=None if set(answers) == {1.0} else float(np.dot(shares, answers)),
    )


def _check_contents(trained: Sequence[TokenCache], held_out: Sequence[TokenCache]) -> None:
    """Raise UserError if half of the held-out text is trained on, or the reverse; warn from one percent."""
    if not held_out:
        return
    tables = [np.concatenate([cache.documents for cache in caches]) for caches in (held_out, trained)]
    both = np.intersect1d(tables[0][:, 0], tables[1][:, 0])
    shares = [
        float(table[np.isin(table[:, 0], both), 1].sum() / max(table[:, 1].sum(), 1)) for table in tables
    ]
    overlap = f"data.validation_path: {shares[0]:.0%} of its text is trained on too"
    if max(shares) >= 0.5:
        raise UserError(f"{overlap}, which is {shares[1]:.0%} of the text of data.path; name other text")
    if shares[0] >= 0.01:
        warnings.warn(overlap, stacklevel=3)


def _check_tokens(
    caches: Sequence[TokenCache],
    tokenizer: Tokenizer,
    vocab_size: int | None,
    config: DataConfig,
    table_of: str | None,
    remedy: str,
) -> None:
    """Raise UserError if the vocabulary lacks a token, or a packed document contains the separator."""
    if config.documents == "packed" and not all(cache.apart for cache in caches):
        token = tokenizer.decode(tokenizer.separator_ids)
        raise UserError(f"data.separator: {token!r} is inside documents too; name another token")
    highest = max(cache.max_token_id for cache in caches)
    if vocab_size is not None and highest >= vocab_size:
        if table_of is not None:
            raise UserError(
                f"token id {highest} in the text ({tokenizer.name}) is out of range for the {vocab_size} "
                f"embeddings of {table_of}: {remedy.format(size=tokenizer.vocab_size)}"
            )
        raise UserError(
            f"token id {highest} in the text is out of range for model.vocab_size {vocab_size}: set it to "
            f"{tokenizer.vocab_size}, the tokenizer's size ({tokenizer.name}), or name another data.tokenizer"
        )


def _mixed_entropy(caches: Sequence[TokenCache], weights: Sequence[float]) -> float:
    shares = [frequencies(cache.train) for cache in caches]
    mixed = np.zeros(max(map(len, shares)))
    for share, weight in zip(shares, weights, strict=True):
        mixed[: len(share)] += share * weight
    return entropy(mixed)
