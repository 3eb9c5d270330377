"""What `adjoint plan` says: as plain data, and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from adjoint.cluster import fit
from adjoint.cluster import memory as plan
from adjoint.cluster.memory import Setup, chunking
from adjoint.cluster.partition import GB
from adjoint.tools.plan.estimate import Estimate
from adjoint.train.config import plain


def as_dict(
    setup: Setup,
    spans: Sequence[range],
    limits: Sequence[float] | None,
    estimate: Estimate,
    source: str,
    longest: int | None,
    leaner: tuple[int, int] | None,
    parameters: int,
    replicas: int = 1,
) -> dict[str, Any]:
    """The plan in plain types. Sizes are bytes, times seconds.

    Args:
        spans: each device's layers. limits: its memory, None where it is not known.
        source: what times rest on. longest: the most tokens that would fit.
        leaner: a chunk size with which the fullest device would take least, and what it would take.
        replicas: pipelines like this one, each with rows of its own.
    """
    cut, needs = chunking(setup, len(spans)), fit.needs(setup, spans)
    fullest = max(need.total for need in needs)
    tokens = setup.batch * setup.seqlen * setup.grad_accumulation * replicas
    return {
        "model": {"parameters": parameters, **plain(dataclasses.asdict(setup.model))},
        "method": {"name": setup.method.name, **plain(dataclasses.asdict(setup.method))},
        "batch": setup.batch,
        "replicas": replicas,
        "seqlen": setup.seqlen,
        "chunk_size": cut.size,
        "task_size": cut.task,
        "precision": setup.precision,
        "device": setup.device,
        "fits": limits is None or all(n.total <= x for n, x in zip(needs, limits, strict=True)),
        "longest_seqlen": longest,
        "leaner_chunk_size": leaner[0] if leaner and leaner[1] < 0.9 * fullest else None,
        "leaner_bytes": leaner[1] if leaner and leaner[1] < 0.9 * fullest else None,
        "devices": [
            {
                "layers": [span.start, span.stop - 1],
                "memory_bytes": None if limits is None else int(limits[i]),
                "total_bytes": need.total,
                "host_bytes": need.host,
                "parts_bytes": need.parts,
                "busy_seconds": estimate.timeline.busy[i] * estimate.steps,
            }
            for i, (span, need) in enumerate(zip(spans, needs, strict=True))
        ],
        "step": {
            "seconds": estimate.seconds,
            "tokens_per_second": tokens / estimate.seconds,
            "idle_share": estimate.timeline.idle_share,
            "chunks": estimate.schedule.chunks,
            "workers": estimate.schedule.workers,
            "bytes_sent": estimate.bytes_sent,
            "bytes_busiest_link": estimate.per_link,
            "rests_on": source,
        },
    }


def labels_of(spans: Sequence[range], workers: int) -> list[str]:
    """A name for each worker of a schedule."""
    names = [f"{i}: layer{_range(span)}" for i, span in enumerate(spans)]
    return names + [f"helper of {i % len(spans)}" for i in range(workers - len(spans))]


def text(found: dict[str, Any]) -> str:
    """The plan in lines for a terminal."""
    model, method, step = found["model"], found["method"], found["step"]
    kinds = model["mixer"] if isinstance(model["mixer"], str) else "+".join(dict.fromkeys(model["mixer"]))
    arguments = {
        k: v for k, v in method.items() if k not in ("name", "chunk_size") and v not in (None, False)
    }
    how = ", ".join([method["name"], *(f"{k} {v}" for k, v in arguments.items())])
    chunks = "chunk" if step["chunks"] == 1 else "chunks"
    what = f"{kinds}, {model['n_layer']} layers, d_model {model['d_model']}, {_count(model['parameters'])}"
    if found["replicas"] > 1:
        how += f", {found['replicas']} replicas, each"
    data = f"{found['batch']} × {found['seqlen']:,} tokens in {step['chunks']:,} {chunks} of"
    lines = [f"model   {what} parameters, {found['precision']}"]
    lines += [f"method  {how}: {data} {found['task_size']:,}", "", *_table(found["devices"]), ""]
    lines += _verdict(found)
    if any(device["host_bytes"] for device in found["devices"]):
        host = [device["host_bytes"] for device in found["devices"]]
        fullest, total = _size(max(host)), _size(sum(host))
        lines.append(f"host    {fullest} of host memory for the fullest device, {total} in all")
    rate = f"{_seconds(step['seconds'])} a step, {step['tokens_per_second']:,.0f} tokens/s"
    lines.append(f"time    {rate} ({step['rests_on']})")
    if step["workers"] > 1:
        sent, busiest = _size(step["bytes_sent"]), _size(step["bytes_busiest_link"])
        idle = f"{step['idle_share']:.1%} of all devices' time"
        lines.append(f"idle    {idle}; {sent} sent a step, {busiest} over the busiest link")
    return "\n".join(lines)


def _verdict(found: dict[str, Any]) -> list[str]:
    devices = found["devices"]
    fullest = max(devices, key=lambda d: d["total_bytes"] / (d["memory_bytes"] or 1))
    if fullest["memory_bytes"] is None:
        return [
            f"memory  {_size(fullest['total_bytes'])} on the fullest device; --device-memory says if it fits"
        ]
    share = fullest["total_bytes"] / fullest["memory_bytes"]
    longest = found["longest_seqlen"]
    reach = "any length" if longest >= fit.LONGEST // 2 else f"up to {longest:,} tokens"
    full = f"{_size(fullest['total_bytes'])} of {_size(fullest['memory_bytes'])} on the fullest device"
    lines = [f"memory  fits: {full} ({share:.0%}); fits {reach}"]
    if found["leaner_chunk_size"]:
        size, least = found["leaner_chunk_size"], _size(found["leaner_bytes"])
        lines.append(f"        least with --method.chunk_size {size}: {least} there")
    return lines


def _table(devices: Sequence[dict[str, Any]]) -> list[str]:
    """Parts in GB, a row a device; devices in a row that need the same share one."""
    names = [name for name in plan.PARTS if any(device["parts_bytes"][name] for device in devices)]
    largest = max(device["total_bytes"] for device in devices)
    unit, scale = ("GB", GB) if largest >= GB else ("MB", 1e6)
    rows = [["device", "layers", *names, f"total {unit}"]]
    groups: list[list[int]] = []
    for i, device in enumerate(devices):
        same = ("parts_bytes", "memory_bytes")
        if groups and all(device[key] == devices[groups[-1][-1]][key] for key in same):
            groups[-1].append(i)
        else:
            groups.append([i])
    for group in groups:
        device = devices[group[0]]
        numbers = str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        first, last = device["layers"][0], devices[group[-1]]["layers"][1]
        cells = [f"{device['parts_bytes'][name] / scale:.2f}" for name in names]
        rows.append([numbers, f"{first}-{last}", *cells, f"{device['total_bytes'] / scale:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _range(span: range) -> str:
    return f" {span.start}" if len(span) == 1 else f"s {span.start}-{span.stop - 1}"


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
