"""The report of `adjoint plan`: as plain data, and on the terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from adjoint.memory import rate_text, size_text, size_unit
from adjoint.plan.budget_curve import CurvePoint
from adjoint.plan.capacity import LONGEST, Fit
from adjoint.plan.estimate import Costs, Estimate
from adjoint.plan.host_traffic import SUSTAINED_LINK, adding_seconds, hiding_chunk, link_bytes
from adjoint.plan.layouts import Ranked
from adjoint.plan.partition import named
from adjoint.plan.run_memory import PARTS, Setup, needs
from adjoint.tools.measure.show import print_table
from adjoint.train.config import plain
from adjoint.train.gpus import LINKS
from adjoint.train.layout import Layout

SHOWN = 6  # layouts, of those that were compared


def as_dict(
    fit: Fit,
    spans: Sequence[range],
    estimate: Estimate,
    source: str,
    is_measured: bool,
    bounds: tuple[float, float] | None = None,
    ranked: Sequence[Ranked] = (),
) -> dict[str, Any]:
    """Return the plan in plain types. Sizes are bytes, times seconds.

    Args:
        spans: each shard's layers.
        source: what times rest on. is_measured: whether that is a measurement on this machine.
        bounds: the least and the most seconds of a step under the assumptions; None if nothing is assumed.
        ranked: the layouts that were compared, the one planned for first.
    """
    setup, limits = fit.setup, fit.limits
    per_shard = setup.layout.sequence * setup.layout.tensor
    layout, needs_by_shard = setup.layout, needs(setup, spans)
    tokens = setup.batch * setup.seqlen * setup.training.grad_accumulation * layout.replicas
    return {
        "model": {"parameters": setup.model.num_parameters, **setup.model.described()},
        "method": {"name": setup.method.name, **plain(dataclasses.asdict(setup.method))},
        "batch": setup.batch,
        "replicas": layout.replicas,
        "sequence": layout.sequence,
        "tensor": layout.tensor,
        "seqlen": setup.seqlen,
        "chunk_size": setup.spec.chunk_size,
        "segment_layers": setup.spec.layers_of_segments,
        "task_size": setup.window[1],
        "precision": setup.machine.precision,
        "device": setup.machine.kind,
        "fits": True,  # what does not is refused
        "longest_seqlen": None if limits is None else fit.longest(),
        "devices": [
            {
                "layers": [span.start, span.stop - 1],
                "memory_bytes": None if limits is None else int(limits[i]),
                "total_bytes": need.total,
                "host_bytes": need.host,
                "parts_bytes": need.parts,
                "busy_seconds": max(estimate.busy[i * per_shard : (i + 1) * per_shard]),
            }
            for i, (span, need) in enumerate(zip(spans, needs_by_shard, strict=True))
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
            "is_measured": is_measured,
            "seconds_range": bounds,
        },
        "layouts": [candidate.as_dict() for candidate in ranked],
    }


def host_weights_as_dict(setup: Setup, costs: Costs) -> dict[str, object]:
    """Return, in plain types, what weights in host memory move, and from which chunk on copies hide."""
    moved, planned, model = link_bytes(setup), setup.host_link, setup.model
    costs_by_layer = costs.forward, costs.backward
    rates = {name: SUSTAINED_LINK * peak for name, peak in LINKS.items()}
    assert planned is not None
    return {
        "bytes_per_second": planned,
        "to_device_bytes": moved.to_device,
        "to_host_bytes": moved.to_host,
        "bytes_per_chunk": moved.per_chunk,
        "adding_seconds_per_chunk": adding_seconds(
            setup, sum(layer.weights for layer in model.layers) + model.last
        ),
        "hiding_chunk": hiding_chunk(setup, *costs_by_layer, planned),
        "hiding_chunks": {name: hiding_chunk(setup, *costs_by_layer, rate) for name, rate in rates.items()},
    }


def labels_of(spans: Sequence[range], layout: Layout) -> list[str]:
    """Return a name for each worker of a replica."""
    names = []
    for i, span in enumerate(spans):
        turns = [""] if layout.sequence == 1 else [f", turn {turn}" for turn in range(layout.sequence)]
        names += [f"{i}: {named(span)}{turn}" for turn in turns]
    return names + [f"helper of {shard}" for shard in layout.helped]


def show(plan: dict[str, Any]) -> None:
    """Print the plan."""
    model, method, step = plan["model"], plan["method"], plan["step"]
    mixers = model.get("class", model.get("mixer"))
    kinds = mixers if isinstance(mixers, str) else "+".join(dict.fromkeys(mixers))
    layers = plan["segment_layers"]
    left_out = ["name", "chunk_size", "segment_layers"]
    if layers is not None and method.get("keep") == "edges":  # those that are picked store inputs
        left_out.append("keep")
    arguments = {k: v for k, v in method.items() if k not in left_out and v not in (None, False)}
    method_line = ", ".join([method["name"], *(f"{k} {v}" for k, v in arguments.items())])
    if plan["sequence"] > 1:
        method_line += f", each sequence over {plan['sequence']} devices in turn"
    if plan["tensor"] > 1:
        method_line += f", each weight over {plan['tensor']} devices"
    if plan["replicas"] > 1:
        method_line += f", {plan['replicas']} replicas, each"
    model_line = (
        f"{kinds}, {model['n_layer']} layers, d_model {model['d_model']}, {model['parameters']:,} parameters"
    )
    data = f"{plan['batch']} × {plan['seqlen']:,} tokens in chunks of {plan['chunk_size']:,}"
    if layers is not None:
        data += f", segments of {layers:,} layer{'s' * (layers > 1)}"
    print(f"model   {model_line}, {plan['precision']}\nmethod  {method_line}: {data}")
    _show_devices(plan["devices"])
    print()
    _show_memory(plan)
    rate = f"{_seconds(step['seconds'])} a step, {step['tokens_per_second']:,.0f} tokens/s"
    print(f"time    {rate} ({step['rests_on']})")
    if not step["is_measured"]:
        least_most = step["seconds_range"]
        between = "" if least_most is None else ": {} to {}".format(*map(_seconds, least_most))
        print(f"        estimated, never measured{between}")
    if step["workers"] > 1:
        sent, busiest = size_text(step["bytes_sent"]), size_text(step["bytes_busiest_link"])
        idle = f"{step['idle_share']:.1%} of all devices' time"
        print(f"idle    {idle}; {sent} sent a step, {busiest} over the busiest link")
        if (rows := plan.get("rows_that_fill")) is not None:
            print(
                f"        raise data.batch: with {rows} rows, {rows} replicas wait for less than half as long"
            )
        if (links := plan.get("links")) is not None:
            inside, between = rate_text(links["inside"]), rate_text(links["between"])
            print(
                f"links   {inside} from GPU to GPU in a node of {links['devices']}, {between} between nodes"
            )
    if "host_weights" in plan:
        link = plan["host_weights"]
        _show_host_weights(link, link["hiding_chunks"], link["adding_seconds_per_chunk"])
    if len(plan["layouts"]) > 1:
        _show_layouts(plan["layouts"])


def show_curve(curve: Sequence[CurvePoint]) -> None:
    """Print a row per way to take a step, if there are any."""
    rows = [
        (
            point.way,
            size_text(point.memory_bytes),
            _seconds(point.seconds),
            "" if point.fits else "does not fit",
        )
        for point in curve
    ]
    if rows:
        print_table(("method", "memory", "a step", ""), rows, "time against memory")


def _show_memory(plan: dict[str, Any]) -> None:
    fullest = max(plan["devices"], key=lambda d: d["total_bytes"] / (d["memory_bytes"] or 1))
    need, capacity, longest = fullest["total_bytes"], fullest["memory_bytes"], plan["longest_seqlen"]
    if capacity is None:
        print(f"memory  {size_text(need)} on the fullest device; --device-memory says if it fits")
    else:
        reach = "any length" if longest >= LONGEST // 2 else f"up to {longest:,} tokens"
        full = f"{size_text(need)} of {size_text(capacity)} on the fullest device"
        print(f"memory  fits: {full} ({need / capacity:.0%}); fits {reach}")
    host = [device["host_bytes"] for device in plan["devices"]]
    if any(host):
        total = size_text(plan["sequence"] * sum(host))
        print(f"host    {size_text(max(host))} of host memory for the fullest device, {total} in all")


def _show_host_weights(
    link: dict[str, int], hiding_chunks: dict[str, int], adding_seconds_per_chunk: float
) -> None:
    others = ", ".join(f"{tokens:,} over {name}" for name, tokens in hiding_chunks.items())
    down, up = size_text(link["to_device_bytes"]), size_text(link["to_host_bytes"])
    each, rate = size_text(link["bytes_per_chunk"]), rate_text(link["bytes_per_second"])
    print(
        f"link    {down} of weights to the GPU and {up} of gradients back a step, {each} a chunk, at {rate}"
    )
    print(f"        the host adds the gradients of a chunk in {_seconds(adding_seconds_per_chunk)}")
    print(f"        both hide in chunks of {link['hiding_chunk']:,} tokens ({others})")


def _show_layouts(layouts: Sequence[dict[str, Any]]) -> None:
    """Print a row per layout, the fastest that fits first, with the reason why it is not the best."""
    rows = [
        (
            *(str(layout[key]) for key in ("shards", "sequence", "tensor", "replicas")),
            "-" if layout["memory_bytes"] is None else size_text(layout["memory_bytes"]),
            "-" if layout["seconds"] is None else _seconds(layout["seconds"]),
            "-" if layout["idle_share"] is None else f"{layout['idle_share']:.1%}",
            layout["why_not"] or "",
        )
        for layout in layouts[:SHOWN]
    ]
    print_table(("shards", "sequence", "tensor", "replicas", "memory", "a step", "idle", ""), rows, "layouts")
    if len(layouts) > SHOWN:
        print(f"and {len(layouts) - SHOWN} more layouts: see --json")


def _show_devices(devices: Sequence[dict[str, Any]]) -> None:
    """Memory by parts, a row a device; devices in a row that need the same share one."""
    names = [name for name in PARTS if any(device["parts_bytes"][name] for device in devices)]
    unit, scale = size_unit(max(device["total_bytes"] for device in devices))
    rows = []
    alike = lambda i: (devices[i]["parts_bytes"], devices[i]["memory_bytes"])  # noqa: E731
    for _, numbers in itertools.groupby(range(len(devices)), alike):
        group = list(numbers)
        first, last = group[0], group[-1]
        sizes = [*(devices[first]["parts_bytes"][name] for name in names), devices[first]["total_bytes"]]
        layers = f"{devices[first]['layers'][0]}-{devices[last]['layers'][1]}"
        device_range = str(first) if first == last else f"{first}-{last}"
        rows.append((device_range, layers, *(f"{size / scale:.2f}" for size in sizes)))
    print_table(("device", "layers", *names, f"total {unit}"), rows, "memory")


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
