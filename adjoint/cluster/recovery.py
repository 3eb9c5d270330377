"""Failures of a group of shards: their causes, ranked so that the likeliest is named.

When a shard dies its neighbours fail too, with errors about the connection to it, and the first error to
arrive may be one of those. So all of them are collected and ranked before one is named.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from adjoint.memory import out_of_memory

# The more a cause explains, the earlier it stands. "environment" and "error" would come again with the next
# group: a folder that not all nodes have, a full disk, a missing package; an exception of the code.
KINDS = (
    *("out of memory", "preempted", "node lost", "died", "unreachable", "hung"),
    *("environment", "error", "connection"),
)
_COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|gloo|nccl|another shard has failed|broken pipe|timed out|"
    r"\bpeer\b|\bsocket\b|(TCP|File|Prefix)Store",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """A reason for which a shard did not answer.

    Attributes:
        kind: one of `KINDS`.
        rank: the shard.
        detail: in one line.
        error: what Ray raised, with the traceback of the shard's process, if it raised something.
        host: the address of the shard's node; "" where all are on one.
    """

    kind: str
    rank: int
    detail: str
    error: BaseException | None = field(default=None, compare=False, repr=False)
    host: str = ""

    def __str__(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"shard {self.rank}{place}: {self.kind}{f': {self.detail}' if self.detail else ''}"


class ShardFailure(RuntimeError):
    """Shards were lost: the group is of no more use.

    Attributes:
        causes: of all shards that did not answer, the likeliest culprit first.
    """

    def __init__(self, causes: list[Cause], during: str) -> None:
        self.causes = sorted(causes, key=lambda cause: (KINDS.index(cause.kind), cause.rank))
        super().__init__(f"{self.causes[0]} (during {during})")


def cause_of(error: BaseException, rank: int) -> Cause:
    """Classify an exception that `ray.get` raised for a shard's call."""
    from ray import exceptions

    text = " ".join(str(error).split())
    if isinstance(error, exceptions.OutOfMemoryError):  # Ray's monitor killed it; no RayActorError
        return Cause("out of memory", rank, "killed by Ray, its node's memory was full")
    if isinstance(error, exceptions.NodeDiedError):
        return Cause("node lost", rank, _first_line(error))
    if isinstance(error, exceptions.ActorUnavailableError):  # nothing is known yet: `Group` asks again
        return Cause("unreachable", rank, "neither its process nor its node answers")
    if isinstance(error, exceptions.RayActorError):
        if getattr(error, "preempted", False) or "node was preempted" in text:
            return Cause("preempted", rank, "its node was taken back")
        if re.search(r"node (was terminated|has died|died|is dead)|ip address.*dead", text, re.IGNORECASE):
            node = re.search(r"Node Id: .{,200}", text)
            return Cause("node lost", rank, node[0] if node else _first_line(error))
        # what Ray knows of a process's end, without its list of what else might have been
        ended = re.search(r"exit detail: (.{,300}?)(?: Some common causes| The leading|$)", text)
        killed = ended is not None and "End of file" in ended[1]
        why = "its process was killed or crashed" if killed else ended and ended[1]
        return Cause("died", rank, why or _first_line(error))
    # a RayTaskError wraps what the shard's own code raised
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else None
    inner = cause if isinstance(cause, BaseException) else error
    text = f"{type(inner).__name__}: {_first_line(inner)}"
    if out_of_memory(inner):
        return Cause("out of memory", rank, text)
    if isinstance(inner, OSError) and inner.filename is not None:
        return Cause("environment", rank, f"{inner.filename}: {inner.strerror}")
    if isinstance(inner, exceptions.RuntimeEnvSetupError | ImportError):
        return Cause("environment", rank, text)
    if is_collateral(inner):
        return Cause("connection", rank, text)
    return Cause("environment" if isinstance(inner, OSError) else "error", rank, text, error)


def is_collateral(error: BaseException) -> bool:
    """Whether an exception in one process of a run says that another one cannot be reached."""
    import torch.distributed as dist

    if isinstance(error, ConnectionError | TimeoutError | getattr(dist, "DistError", ConnectionError)):
        return True
    ray = sys.modules.get("ray")  # under torchrun it need not be installed
    if ray is not None and isinstance(error, ray.exceptions.RayError):  # a helper's, not one of its code
        return not isinstance(error, ray.exceptions.RayTaskError)
    return isinstance(error, RuntimeError) and _COLLATERAL.search(str(error)) is not None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]
