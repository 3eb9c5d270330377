"""`adjoint plan`: memory and time of a run before it runs, the fastest layout that fits, and a picture of its
pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import torch

from adjoint.data.progress import Progress, Waiting
from adjoint.errors import UserError
from adjoint.memory import print_sizes_as, total_memory_bytes, usable_cores
from adjoint.methods import Exact
from adjoint.plan import estimate as plan_time
from adjoint.plan.budget_curve import CurvePoint, budget_curve
from adjoint.plan.host_traffic import SUSTAINED_LINK, in_host_memory
from adjoint.plan.layouts import Ranked, Request, more_rows, rank
from adjoint.plan.links import Links
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup
from adjoint.plan.worker_devices import Machine
from adjoint.settings import Positive, PositiveNumber, SeqLen, read_value, size_bytes
from adjoint.tools.plan.report import as_dict, host_weights_as_dict, labels_of, show, show_curve
from adjoint.train.config import Config, load_config
from adjoint.train.flags import Flags, reads
from adjoint.train.gpus import GPUS, INSTANCES, LINKS
from adjoint.train.language_model import check_offload
from adjoint.train.layout import Layout
from adjoint.train.quantization import described

UNNAMED = "a100-40gb"  # whose rate is assumed of a GPU that is not named
REACHED = 0.5  # of a GPU's peak rates, in products as in memory traffic: what a step is assumed to keep up
# Its bounds: what many small kernels leave, and what large products and copies reach.
REACHED_RANGE = 0.25, 0.8
IMPORTED = 400e6  # bytes of a process that has imported everything, above which memory is planned
BANDWIDTH = "10GB"  # a second from device to device: through host memory, as between MIG slices
ALL = 1 << 30  # tiles: of what is drawn none is extrapolated


def main(argv: list[str]) -> int:
    """``adjoint plan``: exit code 0.

    Raises:
        UserError: a bad argument, or a run that does not fit: the message says what would.
    """
    flags, config = read_arguments(argv)
    request, ranked = request_of(flags, config), []
    layout = flags.layout
    if layout is None:
        ranked = _compared(request)
        layout = ranked[0].layout
    with Waiting("counting memory"):
        fit = request.fit(layout)
        spans = fit.assign()
    with Waiting("simulating a step"):
        estimate = request.estimate(fit, spans, tiles=ALL if flags.timeline else plan_time.MOST_TILES)
        bounds = None
        if not (flags.measure or flags.device_tflops):
            slower = [REACHED / share for share in reversed(REACHED_RANGE)]
            if layout.world == 1:  # nothing but tiles takes time
                seconds = [factor * estimate.seconds for factor in slower]
            else:
                seconds = [request.estimate(fit, spans, factor).seconds for factor in slower]
            bounds = seconds[0], seconds[1]
    if ranked:
        ranked[0] = dataclasses.replace(ranked[0], estimate=estimate)
    source = request.costs(fit.setup).source
    report = as_dict(fit, spans, estimate, source, flags.measure, bounds, ranked)
    if fit.setup.host_link is not None:
        report["host_weights"] = host_weights_as_dict(fit.setup, request.costs(fit.setup))
    if isinstance(flags.links, Links):
        report["links"] = dataclasses.asdict(flags.links)
    with Waiting("counting more rows"):
        report["rows_that_fill"] = more_rows(request, estimate)
    curve: list[CurvePoint] = []
    if flags.curve:
        with Waiting("simulating budgets"):
            seconds_of = lambda other, spans: request.estimate(other, spans).seconds  # noqa: E731
            curve = budget_curve(fit, seconds_of)
            report["curve"] = [point._asdict() for point in curve]
    if flags.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
        show_curve(curve)
    if curve:
        from adjoint.tools.plan.plot import plot_curve

        title = f"A step of {fit.setup.seqlen:,} tokens, {fit.setup.model.n_layer} layers"
        plot_curve(curve, flags.curve, title)
    if flags.timeline:
        from adjoint.tools.plan.plot import plot_timeline

        setup = fit.setup
        subtitle = f"{setup.seqlen:,} tokens in {setup.chunks} chunks of {setup.spec.chunk_size:,}"
        title = f"One step of {setup.method.name}: {subtitle}, {setup.model.n_layer} layers"
        plot_timeline(estimate.timeline, labels_of(spans, layout), flags.timeline, title)
    return 0


def _compared(request: Request) -> list[Ranked]:
    """Rank the layouts, the best first, with progress on stderr.

    Raises:
        UserError: none fits: the message is that of the one that is nearest to it.
    """
    with Progress("comparing layouts", None, "layout", delay=1) as progress:
        ranked = rank(request, progress.update)
    if not ranked[0].fits:
        nearest = min(ranked, key=lambda layout: layout.memory or float("inf"))
        request.fit(nearest.layout).assign()
    return ranked


def request_of(flags: argparse.Namespace, config: Config) -> Request:
    """Return the planning request that a command line and a configuration describe, for any layout.

    Raises:
        UserError: layers of a pretrained model are to be measured, or its folder cannot be planned for.
    """
    precision: str = config.training.precision
    if precision == "auto":
        precision = "bfloat16" if flags.kind == "cuda" else "float32"
    model: Any = config.model
    if config.model.from_pretrained is not None:
        from adjoint.plan.outline import outlined
        from adjoint.train.pretrained import configuration

        if config.model.lora is not None:
            raise UserError("model.lora: a plan counts all weights as trained; leave it out")
        trusted = config.model.trust_remote_code
        if stored := described(configuration(config.model.from_pretrained, trusted)):
            raise UserError(
                f"model.from_pretrained: {config.model.from_pretrained} is quantized ({stored}), and a plan "
                "counts all weights as trained; train a few steps and read peak_memory_bytes in metrics.jsonl"
            )
        model = outlined(config.model.from_pretrained, config.model.trust_remote_code)
    machine = Machine(flags.kind, precision, None if flags.limits is None else min(flags.limits))
    sizes, method = (config.data.batch, config.data.seqlen), config.method
    setup = Setup(model_of(model), method, *sizes, Layout(), machine, config.training)
    if config.model.offload == "weights":
        check_offload(config)
        setup = in_host_memory(setup, flags.host_bandwidth or _link_bandwidth(flags))
    costs = functools.partial(_measured if flags.measure else _counted, flags)
    return Request(setup, flags.devices, flags.limits, costs, flags.links)


def _link_bandwidth(flags: argparse.Namespace) -> float:
    """Return the bytes per second assumed of the link between a device and host memory."""
    return SUSTAINED_LINK * LINKS[GPUS[flags.device or UNNAMED].link]


def _counted(flags: argparse.Namespace, setup: Setup) -> plan_time.Costs:
    """Costs of a device with the rate that was given, or of a GPU at a share of its data sheet's rates."""
    if flags.device_tflops is not None:
        source = f"{flags.device_tflops:g} TFLOP/s a device, as given"
        return plan_time.counted(setup, 1e12 * flags.device_tflops, source)
    named = flags.device or UNNAMED
    gpu = GPUS[named]
    costs = plan_time.roofline(setup, gpu, "").slower_by(1 / REACHED)
    peak = gpu.peak(setup.machine.precision)
    computing = sum(costs.forward) + sum(costs.backward)
    costs = costs.at_least(plan_time.queued(setup))
    is_queue_longer = sum(costs.forward) + sum(costs.backward) > 1.1 * computing
    share = sum(plan_time.counted(setup, 1e12 * peak, "").forward) / sum(costs.forward)
    rates = f"{REACHED:.0%} of {peak:.3g} TFLOP/s and {gpu.bandwidth / 1e12:.3g} TB/s"
    result = f"layers reach {share:.0%} of its peak"
    if is_queue_longer:
        result += ", which waits for its host to queue chunks"
        if setup.spec.chunk_size < setup.seqlen:
            result += ": a larger method.chunk_size is faster"
    other = "" if flags.device else "; name another GPU with --device"
    return dataclasses.replace(costs, source=f"assuming an {named.upper()} at {rates}: {result}{other}")


def _measured(flags: argparse.Namespace, setup: Setup) -> plan_time.Costs:
    """Costs of this machine, whose cores the workers share. A pretrained model's are counted, at the rate of
    a layer of attention and MLP."""
    timed = setup
    if (config := setup.model.stand_in()) is not None:
        timed = dataclasses.replace(setup, model=model_of(config), method=Exact())
    largest = max([layer.weights for layer in timed.model.layers] + [int(timed.model.head_flops / 2)])
    # a few seconds a layer on a slow CPU, and enough tokens to fill it
    most = 4096 if flags.kind == "cuda" else max(64, int(1e10 / largest / setup.batch))
    tokens, workers, threads = min(setup.spec.chunk_size, most), flags.devices, setup.training.threads
    slower = 1.0
    if flags.kind == "cpu" and workers > 1:
        cores = usable_cores()
        threads = threads or max(1, cores // workers)
        slower = max(1.0, threads * workers / cores)
    if (setup.batch, tokens) not in flags.measured:
        costs = _timed(timed, tokens, threads, torch.device(flags.kind))
        flags.measured[setup.batch, tokens] = costs.slower_by(slower)
    costs = flags.measured[setup.batch, tokens]
    if timed is setup:
        return costs
    layer = timed.model.layers[0]
    rate = setup.batch * (layer.flops + layer.pairs * tokens / 2) / costs.forward[0]
    source = f"{costs.source}: of attention and MLP, {rate / 1e12:.2g} TFLOP/s"
    return plan_time.counted(setup, rate, source)


def _timed(setup: Setup, tokens: int, threads: int | None, device: torch.device) -> plan_time.Costs:
    """`measured`, with progress on stderr."""
    with Progress("timing layers on this machine", None, "layer") as progress:
        return plan_time.measured(setup, tokens, threads, device, progress.update)


# ----------------------------------------------------------------------------------------- command line


def _parser() -> Flags:
    parser = Flags(
        prog="adjoint plan",
        usage="%(prog)s [--config FILE] [--seqlen N] [--devices N] [--device-memory 40GB] …",
        description="Predict memory and time of a training run: what each device holds, part by part, "
        "whether it fits, the longest sequence that would, and how much of the pipeline's time is waiting. "
        "With --devices and no --cluster.shards, layouts (shards × sequence workers × replicas) are "
        "ranked, and the fastest that fits is planned.",
        epilog="Whole numbers may be written 16K (16,384) or 1M (1,048,576), sizes 40GB (10⁹) or 40GiB (2³⁰)."
        " --config and all keys of adjoint train are flags here too (--model.d_model, --method.keep, …).",
    )
    add = parser.add
    add("--seqlen", "tokens per sequence; default: the configuration's data.seqlen", reads(SeqLen))
    add("--devices", "number of devices; default: as the cluster keys say", reads(Positive))
    memory = "memory of each device, such as 40GB; or one size per worker, as 20GB,10GB,10GB"
    add("--device-memory", memory, _sizes)
    add("--device", f"take memory and speed of a known GPU: {', '.join(GPUS)}", _gpu)
    rate = f"measured here, or counted at {REACHED:.0%} of the rates of the GPU named, or of an {UNNAMED}"
    rate = f"sustained TFLOP/s of a device; default: {rate}".replace("%", "%%")
    add("--device-tflops", rate, reads(PositiveNumber))
    measure = "time one layer of each kind on this machine; the default if no other machine is described"
    add("--measure", measure, action="store_true")
    add("--instance", f"machines of AWS: {', '.join(INSTANCES)}; takes devices, links and --nodes", _instance)
    add("--nodes", "number of machines of --instance; default: 1", reads(Positive))
    add(
        "--bandwidth",
        f"bytes per second between devices; default: {BANDWIDTH}, or as of --instance",
        size_bytes,
    )
    link = f"{SUSTAINED_LINK:.0%} of the peak of the GPU's link ({', '.join(LINKS)})".replace("%", "%%")
    link = f"bytes per second between a GPU and host memory, for model.offload weights; default: {link}"
    add("--host-bandwidth", link, size_bytes)
    add("--timeline", "draw the pipeline to a .png, .svg or .pdf", _picture)
    curve = "draw a step's time against its memory, for budgets up to backpropagation's memory, to a .png, "
    add("--curve", curve + ".svg or .pdf, and print the table", _picture)
    add("--json", "print everything as JSON", action="store_true")
    return parser


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(map(size_bytes, text.split(",")))


def _gpu(text: str) -> str:
    return read_value(text.lower(), Literal[tuple(GPUS)])


def _instance(text: str) -> str:
    return read_value(text.lower(), Literal[tuple(INSTANCES)])


def _take_instance(flags: argparse.Namespace) -> None:
    """Set the flags that an instance stands for, and `links`.

    Raises:
        UserError: one of them is given too, or there is no instance.
    """
    given_bandwidth = flags.bandwidth
    flags.links = given_bandwidth or size_bytes(BANDWIDTH)
    if flags.instance is None:
        if flags.nodes is not None:
            raise UserError("--nodes: is for --instance; give the number of devices with --devices")
        return
    for flag in ("device", "devices", "device_memory"):
        if getattr(flags, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')}: --instance {flags.instance} says it; leave one out")
    instance = INSTANCES[flags.instance]
    flags.device, flags.devices = instance.gpu, instance.count * (flags.nodes or 1)
    if given_bandwidth is None:
        inside = size_bytes(BANDWIDTH) if instance.inside is None else SUSTAINED_LINK * instance.inside
        flags.links = Links(inside, SUSTAINED_LINK * instance.network / instance.count, instance.count)


def _picture(text: str) -> str:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{text}: expected a .png, .svg or .pdf file")
    if not path.parent.is_dir():
        raise ValueError(f"{text}: there is no folder {path.parent}; make it first")
    return text


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Return the plan's own flags, and the configuration. Beside the flags there are

        layout    of the workers; None to find one
        links     how fast devices send to each other
        limits    bytes of each worker's device, None where they are not known
        kind      of the devices: cpu or cuda
        measure   also where nothing says that another machine than this one is planned for
        measured  of layers, nothing yet

    Raises:
        UserError: naming the flag, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    flags, words = _parser().parse_with_keys(argv)
    if flags.seqlen is not None:
        words += ["--data.seqlen", str(flags.seqlen)]
    config = load_config(words, "adjoint plan")
    _take_instance(flags)
    limits, flags.measured = flags.device_memory, {}
    print_sizes_as(None if limits is None else limits[0])
    if limits is None and flags.device is not None:
        limits = (float(GPUS[flags.device].memory),)
    if flags.devices is None and limits is not None and len(limits) > 1:
        flags.devices = len(limits)
    flags.layout = _layout(flags.devices, config)
    flags.devices = flags.devices or flags.layout.world
    device, has_gpu = config.training.device, torch.cuda.is_available()
    gpus = device.startswith("cuda") or (device == "auto" and (limits is not None or has_gpu))
    flags.kind = "cuda" if gpus else "cpu"
    if flags.device is flags.device_tflops is None and (not gpus or (has_gpu and limits is None)):
        flags.measure, limits = True, limits or _memory_here(flags.kind, flags.devices)
    if limits is not None and len(limits) not in (1, flags.devices):
        raise UserError(
            f"--device-memory: {len(limits)} sizes for {flags.devices} devices; give one for all or one of "
            "each"
        )
    flags.limits = limits if limits is None or len(limits) > 1 else limits * flags.devices
    if flags.measure and gpus and not has_gpu:
        raise UserError("--measure: this machine has no GPU to time; leave it out, or --training.device cpu")
    if flags.measure and flags.device_tflops is not None:
        raise UserError("--measure: does not work with --device-tflops; leave one of them out")
    return flags, config


def _memory_here(kind: str, workers: int) -> tuple[float]:
    """Return the bytes of a GPU of this machine, or each worker's share of its main memory."""
    if kind == "cuda":
        return (float(torch.cuda.get_device_properties(0).total_memory),)
    return (max(1.0, total_memory_bytes() / workers - IMPORTED),)


def _layout(devices: int | None, config: Config) -> Layout | None:
    """Return the configured layout, read as training reads it; None if several devices have no layout yet."""
    cluster = config.cluster
    layout = cluster.layout
    if cluster.shards == "auto":
        if devices is None:
            raise UserError(
                "cluster.shards: auto is not known before a run; give the number of devices with --devices N"
            )
        room = devices // (layout.replicas * layout.sequence) - layout.helpers
        return dataclasses.replace(layout, shards=max(1, min(room, config.model.n_layer)))
    if cluster.shards == 0:
        return Layout() if devices in (None, 1) else None
    if devices not in (None, layout.world):
        raise UserError(
            f"--devices {devices}: cluster.shards and the other keys of cluster ask for {layout.world}; "
            "leave --devices out, or set --cluster.shards 0 to have layouts compared"
        )
    return layout
