"""What `adjoint plan` says: as plain data, and as text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from adjoint.plan.estimate import Estimate
from adjoint.plan.fit import LONGEST, Fit
from adjoint.plan.layouts import Ranked
from adjoint.plan.memory import PARTS, needs
from adjoint.plan.partition import GB, named
from adjoint.train.config import plain
from adjoint.train.layout import Layout

SHOWN = 6  # layouts, of those that were compared


def as_dict(
    fit: Fit, spans: Sequence[range], estimate: Estimate, source: str, ranked: Sequence[Ranked] = ()
) -> dict[str, Any]:
    """The plan in plain types. Sizes are bytes, times seconds.

    Args:
        spans: each shard's layers.
        source: what times rest on.
        ranked: the layouts that were compared, the one planned for first.
    """
    setup, limits = fit.setup, fit.limits
    layout, found = setup.layout, needs(setup, spans)
    longest, leaner = (None, None) if limits is None else (fit.longest(), fit.leanest_chunk())
    fullest = max(need.total for need in found)
    size, least = leaner if leaner and leaner[1] < 0.9 * fullest else (None, None)
    tokens = setup.batch * setup.seqlen * setup.training.grad_accumulation * layout.replicas
    return {
        "model": {"parameters": setup.model.num_parameters, **setup.model.described()},
        "method": {"name": setup.method.name, **plain(dataclasses.asdict(setup.method))},
        "batch": setup.batch,
        "replicas": layout.replicas,
        "sequence": layout.sequence,
        "seqlen": setup.seqlen,
        "chunk_size": setup.scheme.chunk_size,
        "task_size": setup.window[1],
        "precision": setup.machine.precision,
        "device": setup.machine.kind,
        "fits": limits is None or all(n.total <= x for n, x in zip(found, limits, strict=True)),
        "longest_seqlen": longest,
        "leaner_chunk_size": size,
        "leaner_bytes": least,
        "devices": [
            {
                "layers": [span.start, span.stop - 1],
                "memory_bytes": None if limits is None else int(limits[i]),
                "total_bytes": need.total,
                "host_bytes": need.host,
                "parts_bytes": need.parts,
                "busy_seconds": max(estimate.busy[i * layout.sequence : (i + 1) * layout.sequence]),
            }
            for i, (span, need) in enumerate(zip(spans, found, strict=True))
        ],
        "step": {
            "seconds": estimate.seconds,
            "tokens_per_second": tokens / estimate.seconds,
            "idle_share": estimate.idle_share,
            "chunks": setup.chunks,
            "workers": len(estimate.busy),
            "bytes_sent": estimate.bytes_sent,
            "bytes_busiest_link": estimate.per_link,
            "rests_on": source,
        },
        "layouts": [one.as_dict() for one in ranked],
    }


def labels_of(spans: Sequence[range], layout: Layout) -> list[str]:
    """A name for each worker of a replica."""
    names = []
    for i, span in enumerate(spans):
        turns = [""] if layout.sequence == 1 else [f", turn {turn}" for turn in range(layout.sequence)]
        names += [f"{i}: {named(span)}{turn}" for turn in turns]
    return names + [f"helper of {shard}" for shard in layout.helped]


def text(found: dict[str, Any]) -> str:
    """The plan in lines for a terminal."""
    model, method, step = found["model"], found["method"], found["step"]
    mixers = model.get("class", model.get("mixer"))
    kinds = mixers if isinstance(mixers, str) else "+".join(dict.fromkeys(mixers))
    arguments = {
        k: v for k, v in method.items() if k not in ("name", "chunk_size") and v not in (None, False)
    }
    how = ", ".join([method["name"], *(f"{k} {v}" for k, v in arguments.items())])
    chunks = "chunk" if step["chunks"] == 1 else "chunks"
    what = f"{kinds}, {model['n_layer']} layers, d_model {model['d_model']}, {_count(model['parameters'])}"
    if found["sequence"] > 1:
        how += f", each sequence over {found['sequence']} devices in turn"
    if found["replicas"] > 1:
        how += f", {found['replicas']} replicas, each"
    data = f"{found['batch']} × {found['seqlen']:,} tokens in {step['chunks']:,} {chunks} of"
    lines = [f"model   {what} parameters, {found['precision']}"]
    lines += [f"method  {how}: {data} {found['chunk_size']:,}", "", *_table(found["devices"]), ""]
    lines += _fits(found)
    host = [device["host_bytes"] for device in found["devices"]]
    if any(host):
        total = _size(found["sequence"] * sum(host))
        lines.append(f"host    {_size(max(host))} of host memory for the fullest device, {total} in all")
    rate = f"{_seconds(step['seconds'])} a step, {step['tokens_per_second']:,.0f} tokens/s"
    lines.append(f"time    {rate} ({step['rests_on']})")
    if step["workers"] > 1:
        sent, busiest = _size(step["bytes_sent"]), _size(step["bytes_busiest_link"])
        idle = f"{step['idle_share']:.1%} of all devices' time"
        lines.append(f"idle    {idle}; {sent} sent a step, {busiest} over the busiest link")
    if len(found["layouts"]) > 1:
        lines += ["", *_compared(found["layouts"])]
    return "\n".join(lines)


def _fits(found: dict[str, Any]) -> list[str]:
    fullest = max(found["devices"], key=lambda d: d["total_bytes"] / (d["memory_bytes"] or 1))
    need, there, longest = fullest["total_bytes"], fullest["memory_bytes"], found["longest_seqlen"]
    if there is None:
        return [f"memory  {_size(need)} on the fullest device; --device-memory says if it fits"]
    reach = "any length" if longest >= LONGEST // 2 else f"up to {longest:,} tokens"
    full = f"{_size(need)} of {_size(there)} on the fullest device"
    lines = [f"memory  fits: {full} ({need / there:.0%}); fits {reach}"]
    if found["leaner_chunk_size"]:
        size, least = found["leaner_chunk_size"], _size(found["leaner_bytes"])
        lines.append(f"        least with --method.chunk_size {size}: {least} there")
    return lines


def _compared(layouts: Sequence[dict[str, Any]]) -> list[str]:
    """A row a layout, the fastest that fits first, with what puts it behind the first."""
    rows = [["shards", "sequence", "replicas", "memory", "a step", "idle", ""]]
    for one in layouts[:SHOWN]:
        numbers = [str(one[key]) for key in ("shards", "sequence", "replicas")]
        memory = "-" if one["memory_bytes"] is None else _size(one["memory_bytes"])
        seconds = "-" if one["seconds"] is None else _seconds(one["seconds"])
        idle = "-" if one["idle_share"] is None else f"{one['idle_share']:.1%}"
        rows.append([*numbers, memory, seconds, idle, one["why_not"] or ""])
    more = len(layouts) - SHOWN
    return _aligned(rows) + [f"and {more} more layouts: see --json"] * (more > 0)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns to the right; one without a heading to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, rows[0], strict=True)
        lines.append("  ".join(cell.rjust(w) if head else cell for cell, w, head in cells).rstrip())
    return lines


def _table(devices: Sequence[dict[str, Any]]) -> list[str]:
    """Parts in GB, a row a device; devices in a row that need the same share one."""
    names = [name for name in PARTS if any(device["parts_bytes"][name] for device in devices)]
    unit, scale = ("GB", GB) if max(device["total_bytes"] for device in devices) >= GB else ("MB", 1e6)
    rows = [["device", "layers", *names, f"total {unit}"]]
    alike = lambda i: (devices[i]["parts_bytes"], devices[i]["memory_bytes"])  # noqa: E731
    for _, numbers in itertools.groupby(range(len(devices)), alike):
        group = list(numbers)
        first, last = devices[group[0]], devices[group[-1]]
        which = str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        cells = [f"{first['parts_bytes'][name] / scale:.2f}" for name in names]
        layers = f"{first['layers'][0]}-{last['layers'][1]}"
        rows.append([which, layers, *cells, f"{first['total_bytes'] / scale:.2f}"])
    return _aligned(rows)


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:,}"


def _size(count: float) -> str:
    return f"{count / GB:.2f} GB" if count >= GB else f"{count / 1e6:.1f} MB"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
