"""The metrics of a run's steps, as metrics.jsonl holds them."""

from __future__ import annotations

from typing import TypedDict


class MetricsRow(TypedDict, total=False):
    """The metrics of one step, a line of metrics.jsonl.

    Attributes:
        loss: None if no token was predicted. tokens: trained on so far. time: of the clock, in seconds.
        mfu: share of the device's peak that the model's own operations are, where the peak is known.
        windows: of each layer, where the method picked them.
        eval_loss: on held-out text, at the steps that evaluate.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    peak_memory_bytes: int
    time: float
    mfu: float
    windows: list[int]
    eval_loss: float
