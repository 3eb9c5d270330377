"""`adjoint plan`: memory and time of a run before it runs, and a picture of its pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from adjoint.cluster.fit import Fit, make_setup
from adjoint.cluster.gpus import GPUS
from adjoint.cluster.memory import Setup
from adjoint.cluster.partition import layer_costs
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
BANDWIDTH = "10GB"  # a second from device to device: through host memory, as between MIG slices


def main(argv: list[str]) -> int:
    """``adjoint plan``: exit code 0.

    Raises:
        UserError: a bad argument, or a run that does not fit: the message says what would.
    """
    given, config = read_arguments(argv)
    setup, replicas = setup_of(given, config), config.cluster.replicas
    parameters, weights = sizes_of(setup, config)
    limits = given.limits
    speeds = None if limits is None else [limit / max(limits) for limit in limits]
    fit = Fit(setup, weights, given.devices, speeds, limits)
    spans = fit.assign()
    costs, drawn = _costs(given, setup, config), given.timeline is not None
    estimate = plan_time.estimate(setup, spans, costs, given.bandwidth, speeds, replicas, drawn)
    found = as_dict(fit, spans, estimate, costs.source, parameters, replicas)
    print(json.dumps(found, indent=1) if given.json else text(found))
    if drawn:
        _draw(given, setup, spans, estimate)
    return 0


def sizes_of(setup: Setup, config: Config) -> tuple[int, list[float]]:
    """The number of parameters, and each layer's cost by which layers are shared out."""
    if setup.stages_are_spans:
        return setup.model.found.num_parameters, list(setup.model.found.costs)
    with torch.device("meta"):
        model = Stack(config.model)
    return model.num_parameters(), layer_costs(model)


def _draw(given: Any, setup: Setup, spans: Sequence[range], estimate: plan_time.Estimate) -> None:
    from adjoint.tools.plan.plot import plot_timeline, text_timeline

    labels = labels_of(spans, setup.sequence, setup.helpers)
    if given.timeline == "-":
        width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 200))
        print("\n" + text_timeline(estimate.timeline, labels, width))
        return
    workers = len(estimate.busy)
    title = (
        f"One step of {setup.method.name}: {setup.seqlen:,} tokens in {setup.chunks} chunks of "
        f"{setup.scheme.chunk_size:,}, {setup.model.n_layer} layers on {workers} device{'s' * (workers > 1)}"
    )
    plot_timeline(estimate.timeline, labels, given.timeline, title)
    if not given.json:
        print(f"timeline: {given.timeline}")


def _costs(given: Any, setup: Setup, config: Config) -> plan_time.Costs:
    if not given.measure:
        return plan_time.counted(setup, *_rate(given, setup))
    largest = max(setup.layer(k, 64).parameters for k in range(setup.model.n_layer))
    # a few seconds a layer on a slow CPU, and enough tokens to fill it
    most = 4096 if setup.device == "cuda" else max(64, int(1e10 / largest / setup.batch))
    tokens = min(setup.scheme.chunk_size, most)
    return plan_time.measured(setup, tokens, config.training.threads, torch.device(setup.device))


def _rate(given: Any, setup: Setup) -> tuple[float, str]:
    """FLOPs a second that a device of full speed keeps up, and why, a phrase."""
    if given.device_tflops is not None:
        return 1e12 * given.device_tflops, f"{given.device_tflops:g} TFLOP/s a device, as given"
    if setup.device == "cpu" and given.device is None:
        knows = "--device-tflops says better" if setup.stages_are_spans else "--measure times this machine"
        return 1e12 * CPU_TFLOPS, f"{CPU_TFLOPS:g} TFLOP/s a process, assumed: {knows}"
    named = given.device or UNNAMED
    gpu = GPUS[named.lower()]
    peak = {"float32": gpu.float32, "float64": gpu.float32 / 2}.get(setup.precision, gpu.bfloat16)
    rate = SUSTAINED * peak
    return 1e12 * rate, f"{rate:.3g} TFLOP/s a device, assumed: {SUSTAINED:.0%} of the peak of an {named}"


def setup_of(given: Any, config: Config) -> Setup:
    """What the plan is of.

    Raises:
        UserError: the method does not run on so many devices.
    """
    method = config.method
    if given.devices > config.model.n_layer:
        raise UserError(
            f"--devices {given.devices}: the model has {config.model.n_layer} layers and a device needs "
            f"one; take at most {config.model.n_layer}"
        )
    layout = dataclasses.replace(config.cluster.layout, shards=given.devices)
    layout.check(config.model, method)
    precision: str = config.training.precision
    if precision == "auto":
        here = pick_precision("auto", torch.device("cpu"))
        precision = "bfloat16" if given.kind == "cuda" else here
    model: Any = config.model
    if config.model.from_pretrained is not None:
        from adjoint.cluster.pretrained_memory import outlined

        if given.measure:
            raise UserError("--measure: times layers of a Stack; leave it out with model.from_pretrained")
        model = outlined(config.model.from_pretrained)
    setup = make_setup(
        model,
        method,
        layout.rows(config.data.batch),
        config.data.seqlen,
        precision,
        given.kind,
        None if given.limits is None else min(given.limits),
        config.training.grad_accumulation,
        sequence=layout.sequence,
        helpers=layout.helpers,
        optimizer=config.training.optimizer,
    )
    layout.check_chunks(method, setup.seqlen, setup.scheme.chunk_size)
    return setup


# ----------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = Flags(
        prog="adjoint plan",
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
    add(
        "--bandwidth",
        metavar="SIZE",
        default=BANDWIDTH,
        help=f"a second, from device to device; default: {BANDWIDTH}",
    )
    add("--timeline", metavar="FILE", help="draw the pipeline: .png, .svg or .pdf, or - in the terminal")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The plan's own flags, as numbers, and the configuration. Beside the flags there are

        limits  bytes of each device, None where they are not known
        kind    of the devices: cpu or cuda

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
    if given.device is not None and given.device.lower() not in GPUS:
        raise UserError(
            f"--device {given.device}: not a known GPU; did you mean {nearest(given.device.lower(), GPUS)}? "
            "Else give --device-memory and --device-tflops"
        )
    given.limits = None if given.device is None else (float(GPUS[given.device.lower()].memory),)
    if given.device_memory is not None:
        given.limits = tuple(size("--device-memory", word) for word in given.device_memory.split(","))
    given.devices = _devices(given.devices, given.limits, config)
    wanted, here = config.training.device, torch.cuda.is_available()
    gpus = wanted.startswith("cuda") or (wanted == "auto" and (given.limits is not None or here))
    given.kind = "cuda" if gpus else "cpu"
    if given.limits is None and gpus and here:
        given.limits = (float(torch.cuda.get_device_properties(0).total_memory),)
    if given.limits is not None:
        if len(given.limits) == 1:
            given.limits *= given.devices
        if len(given.limits) != given.devices:
            raise UserError(
                f"--device-memory: {len(given.limits)} sizes for {given.devices} devices; give one for all "
                "or one of each"
            )
    if given.measure and gpus and not here:
        raise UserError("--measure: this machine has no GPU to time; leave it out, or --training.device cpu")
    if given.measure and given.device_tflops is not None:
        raise UserError("--measure: goes without --device-tflops; leave one of them out")
    if given.device_tflops is not None:
        given.device_tflops = _positive("--device-tflops", given.device_tflops)
    given.bandwidth = size("--bandwidth", given.bandwidth)
    return given, config


def _devices(text: str | None, limits: tuple[float, ...] | None, config: Config) -> int:
    if text is not None:
        return count("--devices", text, 1)
    if limits is not None and len(limits) > 1:
        return len(limits)
    if config.cluster.shards == "auto":
        raise UserError("cluster.shards: is auto, which a plan cannot know; say how many with --devices N")
    return max(1, config.cluster.shards)


def _positive(flag: str, text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < 1e9:
            return number
    raise UserError(f"{flag}: expected a number above 0, such as 90; got {text!r}")
