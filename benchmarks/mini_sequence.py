"""Peak memory of a wide head, plain and by mini-sequences: `python -m benchmarks.mini_sequence`.

One forward and backward of a Llama of one layer, 64 wide, float32, batch 1, next to whose head nothing
counts, each in a process of its own, on the CPU. The plain head is measured at half the tokens, as all of
them would take over 20 GiB (`--plain-tokens` where there is room): the ratio is that of the two measured
peaks, and at equal lengths it is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adjoint import memory
from benchmarks import common
from benchmarks.common import Point

LIMIT = 1 / 6  # what the ratio may not pass
HIDDEN = 64


def measure(point: Point) -> Point:
    """Bytes that a forward and backward take above what is there before them, at most."""
    import transformers

    import adjoint

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=point["words"],
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=point["tokens"],
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if point["method"] == "mini-sequence":
        adjoint.wrap(model, adjoint.MiniSequence())
    ids = torch.randint(point["words"], (1, point["tokens"]))
    loss, before = torch.zeros(()), 0
    for length in (64, point["tokens"]):  # the first loads libraries, and probes what is probed on first use
        model.zero_grad()
        memory.reset_peak_rss()
        before, _ = memory.rss_bytes()
        loss = model(input_ids=ids[:, :length], labels=ids[:, :length], use_cache=False).loss
        loss.backward()
    return {**point, "bytes": memory.rss_bytes()[1] - before, "loss": loss.item()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: the ratio is within the limit; 1: it is not, or a process failed."""
    parser = common.parser("mini_sequence", __doc__, fresh=None)
    parser.add_argument("--tokens", type=common.parse_size, default=16384)
    parser.add_argument("--plain-tokens", type=common.parse_size, default=8192, help="of the plain head")
    parser.add_argument("--words", type=int, default=128256, help="of the vocabulary (default %(default)s)")
    options = parser.parse_args(arguments)
    rows = []
    for method, tokens in (("mini-sequence", options.tokens), ("plain", options.plain_tokens)):
        point = {"method": method, "tokens": tokens, "words": options.words}
        row = common.run_child(__name__ if __name__ != "__main__" else "benchmarks.mini_sequence", point)
        if "error" in row:
            print(f"{method}: {row['error']}")
            return 1
        print(f"{method}: {row['bytes'] / 2**30:.2f} GiB at {tokens:,} tokens, {options.words:,} words")
        rows.append(row)
    ratio = rows[0]["bytes"] / rows[1]["bytes"]
    print(f"ratio: {ratio:.3f} (limit {LIMIT:.3f})")
    folder = options.out or common.RESULTS
    payload = {"benchmark": "mini_sequence", "environment": common.environment()}
    common.write_results(folder, "mini_sequence", {**payload, "ratio": ratio, "limit": LIMIT}, rows)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
