"""Cases in the processes of a gloo group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adjoint.errors import UserError

# Numbers of ranks that a test runs on: three are a stricter case than two.
RANKS = [pytest.param(2, marks=pytest.mark.slow), 3]
# Whether a case runs all that it has: slow ones do, each run of the tests takes a part.
THOROUGH = [False, pytest.param(True, marks=pytest.mark.slow)]


def on_ranks(
    world: int, folder: Path, case: Callable[..., None], *args: Any, timeout: float = 60, start: str = "fork"
) -> None:
    """Runs a case in processes of a gloo group of their own; raises what one of them raises.

    Args:
        start: "spawn" for processes that share nothing with this one, as torchrun's: they have hashes of
            their own, and take seconds to import everything.
    """
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401  # once, not in each rank

    meeting = folder / f"meeting-{time.monotonic_ns()}"
    mp.start_processes(_rank, (world, str(meeting), timeout, case, args), world, start_method=start)


def _rank(rank: int, world: int, meeting: str, timeout: float, case: Any, args: Any) -> None:
    torch.set_num_threads(1)
    init = {"init_method": f"file://{meeting}", "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **init)
    try:
        case(*args)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(UserError) as raised:
        yield
    text = str(raised.value)
    assert text.startswith("sequence_group") and "\n" not in text, text
    assert all(word in text for word in words), text
