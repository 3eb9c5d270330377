"""`adjoint plan`: memory and time of a run before it runs, and a picture of its pipeline."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adjoint.cluster.fit import Fit
from adjoint.cluster.gpus import GPUS, Gpu
from adjoint.cluster.memory import Setup
from adjoint.cluster.partition import layer_costs
from adjoint.cluster.shard import check_method
from adjoint.cluster.spec import check_chunks
from adjoint.errors import UserError
from adjoint.stack import Stack
from adjoint.tools.plan import estimate as plan_time
from adjoint.tools.plan.report import as_dict, labels_of, text
from adjoint.train.config import Config, load_config
from adjoint.train.flags import Flags, count, nearest, size
from adjoint.train.machine import pick_precision

UNNAMED = "a100-40gb"  # whose rate is assumed of a GPU that is not named
SUSTAINED = 0.3  # of the peak, what a step is assumed to keep up
CPU_TFLOPS = 0.05  # assumed of a CPU: --measure knows better
BANDWIDTH = 10e9  # bytes a second from device to device: through host memory, as between MIG slices


@dataclass(frozen=True)
class Request:
    """What the command line asked for, beside the configuration.

    Attributes:
        limits: bytes of each device; None where they are not known.
        device: cpu or cuda. tflops: that a device of full speed keeps up; source: why, a phrase.
        measure: time real layers here instead. bandwidth: bytes a second from device to device.
        timeline: a picture's path, "-" for the terminal, or None.
    """

    devices: int
    limits: tuple[float, ...] | None
    device: str
    tflops: float
    source: str
    measure: bool
    bandwidth: float
    timeline: str | None
    json: bool


def main(argv: list[str]) -> int:
    """``adjoint plan``: exit code 0.

    Raises:
        UserError: a bad argument, or a run that does not fit: the message says what would.
    """
    request, config = read_arguments(argv)
    setup, replicas = setup_of(request, config), config.cluster.replicas
    with torch.device("meta"):
        model = Stack(config.model)
    limits = request.limits
    speeds = None if limits is None else [limit / max(limits) for limit in limits]
    fit = Fit(setup, layer_costs(model), request.devices, speeds, limits)
    spans = fit.assign()
    costs, drawn = _costs(request, setup, config), request.timeline is not None
    estimate = plan_time.estimate(setup, spans, costs, request.bandwidth, speeds, replicas, drawn)
    found = as_dict(fit, spans, estimate, costs.source, model.num_parameters(), replicas)
    print(json.dumps(found, indent=1) if request.json else text(found))
    if drawn:
        _draw(request, setup, spans, estimate)
    return 0


def _draw(request: Request, setup: Setup, spans: Sequence[range], estimate: plan_time.Estimate) -> None:
    from adjoint.tools.plan.plot import plot_timeline, text_timeline

    labels = labels_of(spans, setup.sequence, setup.helpers)
    if request.timeline == "-":
        width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 200))
        print("\n" + text_timeline(estimate.timeline, labels, width))
        return
    workers = len(estimate.busy)
    title = (
        f"One step of {setup.method.name}: {setup.seqlen:,} tokens in {setup.chunks} chunks of "
        f"{setup.scheme.chunk_size:,}, {setup.model.n_layer} layers on {workers} device{'s' * (workers > 1)}"
    )
    plot_timeline(estimate.timeline, labels, str(request.timeline), title)
    if not request.json:
        print(f"timeline: {request.timeline}")


def _costs(request: Request, setup: Setup, config: Config) -> plan_time.Costs:
    if not request.measure:
        return plan_time.counted(setup, request.tflops * 1e12, request.source)
    largest = max(setup.layer(k, 64).parameters for k in range(setup.model.n_layer))
    # a few seconds a layer on a slow CPU, and enough tokens to fill it
    most = 4096 if request.device == "cuda" else max(64, int(1e10 / largest / setup.batch))
    tokens = min(setup.scheme.chunk_size, most)
    return plan_time.measured(setup, tokens, config.training.threads, torch.device(request.device))


def setup_of(request: Request, config: Config) -> Setup:
    """What the plan is of.

    Raises:
        UserError: the method does not run on so many devices.
    """
    method, cluster = config.method.build(), config.cluster
    if request.devices > config.model.n_layer:
        raise UserError(
            f"--devices {request.devices}: the model has {config.model.n_layer} layers and a device needs "
            f"one; take at most {config.model.n_layer}"
        )
    check_method(method, cluster.helpers, cluster.sequence)
    precision: str = config.training.precision
    if precision == "auto":
        here = pick_precision("auto", torch.device("cpu"))
        precision = "bfloat16" if request.device == "cuda" else here
    setup = Setup(
        config.model,
        method,
        -(-config.data.batch // cluster.replicas),  # rows of the replica that has most
        config.data.seqlen,
        precision,
        request.device,
        None if request.limits is None else min(request.limits),
        config.training.grad_accumulation,
        sequence=cluster.sequence,
        helpers=cluster.helpers,
    )
    check_chunks(method, setup.seqlen, setup.scheme.chunk_size, setup.sequence)
    return setup


# ----------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = Flags(
        prog="adjoint plan",
        allow_abbrev=False,
        usage="%(prog)s [--config FILE] [--seqlen N] [--devices N] [--device-memory 40GB] …",
        description="Memory and time of a training run before it runs: part by part for each device, whether "
        "it fits, up to what length it would, and how much of the pipeline's time is waiting.",
        epilog="Whole numbers may be written 16K (16,384) or 1M (1,048,576), sizes 40GB (10⁹) or 40GiB (2³⁰)."
        " All keys of adjoint train are flags here too (--model.d_model, --method.chunk_size, …).",
    )
    add = parser.add_argument
    add("--config", action="append", metavar="FILE", help="configuration, as for adjoint train")
    add("--seqlen", metavar="N", help="tokens a sequence; default: the configuration's data.seqlen")
    add("--devices", metavar="N", help="how many share the layers; default: cluster.shards, or 1")
    add("--device-memory", metavar="SIZE", help="of each, such as 40GB; or one of each, as 20GB,10GB,10GB")
    add("--device", metavar="NAME", help=f"memory and rate of a known GPU: {', '.join(GPUS)}")
    add(
        "--device-tflops",
        metavar="X",
        help=f"TFLOP/s that a device keeps up; default: {SUSTAINED:.0%} of the peak of the GPU named, or of "
        f"an {UNNAMED}; {CPU_TFLOPS} of a CPU".replace("%", "%%"),
    )
    add("--measure", action="store_true", help="time one layer of each kind on this machine instead")
    add("--bandwidth", metavar="SIZE", default="10GB", help="a second, from device to device; default: 10GB")
    add("--timeline", metavar="FILE", help="draw the pipeline: .png, .svg or .pdf, or - in the terminal")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def read_arguments(argv: list[str]) -> tuple[Request, Config]:
    """The command line: what is the plan's own, and the configuration.

    Raises:
        UserError: naming the flag, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    given, rest = _parser().parse_known_args(argv)
    words = [word for file in given.config or [] for word in ("--config", file)] + rest
    if given.seqlen is not None:
        words += ["--data.seqlen", str(count("--seqlen", given.seqlen, 2))]
    if given.timeline not in (None, "-"):
        folder, suffix = Path(given.timeline).parent, Path(given.timeline).suffix
        if suffix not in (".png", ".svg", ".pdf"):
            raise UserError(f"--timeline {given.timeline}: expected a .png, .svg or .pdf file, or - for text")
        if not folder.is_dir():
            raise UserError(f"--timeline {given.timeline}: there is no folder {folder}; make it first")
    config = load_config(words, "adjoint plan")
    known = None if given.device is None else _known(given.device)
    limits: tuple[float, ...] | None = None if known is None else (known.memory,)
    if given.device_memory is not None:
        limits = tuple(size("--device-memory", word) for word in given.device_memory.split(","))
    devices = _devices(given.devices, limits, config)
    if limits is not None:
        limits = limits * devices if len(limits) == 1 else limits
        if len(limits) != devices:
            raise UserError(
                f"--device-memory: {len(limits)} sizes for {devices} devices; give one for all or one of each"
            )
    device = _device(config, gpus=limits is not None)
    if limits is None and device == "cuda" and torch.cuda.is_available():
        limits = (float(torch.cuda.get_device_properties(0).total_memory),) * devices
    if given.measure and device == "cuda" and not torch.cuda.is_available():
        raise UserError("--measure: this machine has no GPU to time; leave it out, or --training.device cpu")
    if given.measure and given.device_tflops is not None:
        raise UserError("--measure: goes without --device-tflops; leave one of them out")
    tflops, source = _rate(given, known, device, config.training.precision)
    bandwidth = size("--bandwidth", given.bandwidth)
    return (
        Request(
            devices, limits, device, tflops, source, given.measure, bandwidth, given.timeline, given.json
        ),
        config,
    )


def _devices(text: str | None, limits: tuple[float, ...] | None, config: Config) -> int:
    if text is not None:
        return count("--devices", text, 1)
    if limits is not None and len(limits) > 1:
        return len(limits)
    shards = config.cluster.shards
    if shards == "auto":
        raise UserError("cluster.shards: is auto, which a plan cannot know; say how many with --devices N")
    return max(1, shards)


def _device(config: Config, gpus: bool) -> str:
    """cpu or cuda: what the configuration says, else a GPU where one is described or there."""
    wanted = config.training.device
    if wanted != "auto":
        return "cuda" if wanted.startswith("cuda") else "cpu"
    return "cuda" if gpus or torch.cuda.is_available() else "cpu"


def _rate(given: Any, known: Gpu | None, device: str, precision: str) -> tuple[float, str]:
    if given.device_tflops is not None:
        try:
            rate = float(given.device_tflops)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e9:
            raise UserError(
                f"--device-tflops: expected a number above 0, such as 90; got {given.device_tflops!r}"
            )
        return rate, f"{rate:g} TFLOP/s a device, as given"
    if device == "cpu" and known is None:
        return CPU_TFLOPS, f"{CPU_TFLOPS:g} TFLOP/s a process, assumed: --measure times this machine"
    named = given.device or UNNAMED
    gpu = known or GPUS[UNNAMED]
    peak = {"float32": gpu.float32, "float64": gpu.float32 / 2}.get(precision, gpu.bfloat16)
    rate = SUSTAINED * peak
    return rate, f"{rate:.3g} TFLOP/s a device, assumed: {SUSTAINED:.0%} of the peak of an {named}"


def _known(name: str) -> Gpu:
    found = GPUS.get(name.lower())
    if found is None:
        raise UserError(
            f"--device {name}: not a known GPU; did you mean {nearest(name.lower(), GPUS)}? Else give "
            "--device-memory and --device-tflops"
        )
    return found
