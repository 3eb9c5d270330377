"""`adjoint compare`: a model of transformers as it is, with gradient checkpointing, and wrapped.

Every point (a way at a length) runs in a fresh process and is kept in a journal: a run that was stopped goes
on where it was, and one that is asked for more lengths measures only those. Results are in one folder:
compare.json and compare.png.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from adjoint.data.progress import Waiting, duration_text, has_bar
from adjoint.engine.verification import COARSE, tolerance
from adjoint.errors import UserError
from adjoint.files import write_atomically
from adjoint.formats import file_kinds
from adjoint.formats.folders import described_sizes, has_weights
from adjoint.memory import print_sizes_as, size_text, total_memory_bytes
from adjoint.methods import METHODS, Exact
from adjoint.settings import Positive, SeqLen, size_bytes
from adjoint.tools.compare import report
from adjoint.tools.compare.time_estimate import GRADIENTS, TimeEstimate
from adjoint.tools.measure.journal import Journal, completed, progress
from adjoint.tools.measure.passes import fits, predicted_bytes, typical
from adjoint.tools.measure.process import Point, Process
from adjoint.train.config import Config, LoraConfig, Precision, load_config, plain
from adjoint.train.flags import Flags, comma_list, new_folder, reads
from adjoint.train.machine import Environment, environment, pick_device, pick_precision
from adjoint.train.quantization import Quantization, described

WAYS = ("transformers", "checkpointing", "wrapped")
PILOT = "pilot"
PILOT_LENGTHS = (256, 1024)  # tokens of its passes, or the shortest and the longest that are asked for


def main(argv: list[str]) -> int:
    """`adjoint compare`: exit code 0; 130 after Ctrl-C, with what was finished."""
    request, config = read_arguments(argv)
    settings = _settings(request, config)
    host = environment(torch.device(request.device))
    journal = Journal(request.out / "points.jsonl", _mark(request, settings, host), fresh=request.fresh)
    if journal.discarded:
        print(
            f"{request.out}: has results of other settings, versions or another machine; measuring all",
            file=sys.stderr,
        )
    weights = "random weights" if settings["random"] else "its weights"
    if settings["quantized"] is not None:
        weights += f", quantized ({settings['quantized']})"
    if settings["lora_rank"] is not None:
        weights += f", under adapters of rank {settings['lora_rank']}"
    print(
        f"{request.model}, {weights}, {settings['dtype']}, batch {settings['batch']} on {settings['device']}"
    )
    complete = completed(lambda: _measure(request, settings, journal))
    rows = list(_rows(journal))
    result = {
        "settings": settings,
        "environment": host,
        "complete": complete,
        "rows": rows,
        "fits": _fits(rows, settings["limit"]),
        GRADIENTS: journal.get(settings | {"way": GRADIENTS, "length": min(request.lengths)}),
    }
    write_atomically(request.out / "compare.json", json.dumps(result, indent=1) + "\n")
    if rows:
        report.show(result)
        files = "compare.json"
        if any("memory_bytes" in row for row in rows):
            report.draw(result, request.out / "compare.png")
            files += ", compare.png"
        print(f"written to {request.out}: {files}")
    return 0 if complete else 130


def _mark(request: Namespace, settings: dict[str, Any], host: Environment) -> str:
    """Describe the settings, versions, hardware and configuration that all points of a journal share."""
    sizes = described_sizes(request.folder)
    return json.dumps([settings, host["versions"], host["gpu"] or host["cpu"], sizes])


def _settings(request: Namespace, config: Config) -> dict[str, Any]:
    """Return the settings that all points share, as JSON types."""
    from adjoint.methods import check_wrapped_method

    method = config.method
    try:
        check_wrapped_method(method)
    except ValueError as error:
        raise UserError(f"--method {method.name}: {error}") from None
    device = pick_device(request.device, "--device")
    request.device = str(device)
    folder = request.folder
    on_gpu = device.type == "cuda"
    random = not has_weights(folder)
    dtype = pick_precision(request.dtype, device)
    quantized = _quantized(request, random, dtype)
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else total_memory_bytes()
    return {
        "model": str(folder.resolve()),
        "trust_remote_code": request.trust_remote_code,
        "name": Path(request.model).name,
        "random": random,
        "quantization": request.quantization,
        "quantized": quantized,
        "lora_rank": request.lora_rank or (None if quantized is None else LoraConfig().rank),
        "dtype": dtype,
        "device": str(device),
        "batch": request.batch,
        "method": plain({"name": method.name, **vars(method)}),
        "repeat": request.repeat,
        "limit": int(request.memory or 0.75 * total),
    }


def _quantized(request: Namespace, random: bool, dtype: str) -> str | None:
    """Say how the model's weights are quantized; None if they are not.

    Raises:
        UserError: they cannot be, for what is asked.
    """
    kind = request.quantization
    stored = described(request.model_config)
    if kind is None and stored is None:
        return None
    key = f"{request.folder} ({stored})" if kind is None else f"--quantization {kind}"
    if kind is not None and stored is not None:
        raise UserError(f"{key}: the weights in {request.folder} are quantized already; leave it out")
    if random:
        raise UserError(f"{key}: random weights are not quantized; name a folder that has weights")
    if dtype == "float64":
        raise UserError(f"{key}: is not for float64; give --dtype float32 or bfloat16")
    return stored or f"bitsandbytes, {kind[0]} bits"


# ------------------------------------------------------------------------------------------------ measuring


def _measure(request: Namespace, settings: dict[str, Any], journal: Journal) -> None:
    """Measure what the journal lacks: gradients first, then lengths as they grow.

    Raises:
        UserError: the model cannot be measured, or its gradients differ.
    """
    lengths, process = sorted(request.lengths), Process("adjoint.tools.compare.measure")
    points = [(way, length) for length in lengths for way in request.ways]
    if "wrapped" in request.ways:
        points.insert(0, (GRADIENTS, lengths[0]))
    with progress(len(points)) as tell:

        def measure(key: Point, expected_s: float | None = None) -> Point:
            """Measure a point in a process of its own."""
            task = f"{key['way']}, {key['length']:,} tokens" if key["way"] != PILOT else "short passes"
            with contextlib.nullcontext() if has_bar() else Waiting(task, expected_s):
                answer = process.measure(key)
                process.close()
            if "error" in answer and not _killed(answer):
                point_name = "" if key["way"] == PILOT else f"{key['way']}, {key['length']:,} tokens: "
                raise UserError(f"{request.model}: {point_name}{answer['error']}")
            return answer

        def remaining(points: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
            keys = (settings | {"way": way, "length": length} for way, length in points)
            return [each for each, key in zip(points, keys, strict=True) if journal.get(key) is None]

        def point(way: str, length: int, later: Sequence[tuple[str, int]] = ()) -> Point:
            key = settings | {"way": way, "length": length}
            tell("", 1)
            answer = journal.get(key)
            if answer is None:
                tell(f"{way}, {length:,} tokens, about {duration_text(times.of_point(way, length))}", 0)
                answer, began = _skipped(journal, way, length, settings["limit"]), time.monotonic()
                if answer is None:
                    answer = measure(key, times.of_point(way, length))
                    passed = sum(answer.get("seconds", [])) or times.of_point(way, length) - times.overhead
                    times.overhead = max(0.0, time.monotonic() - began - passed)
                journal.add(key, answer)
                if "seconds" in answer:
                    times.add(way, length, typical(answer["seconds"]))
                left = remaining(later)
                rest = f"; about {duration_text(times.of_points(left))} left" if left else ""
                tell(f"    {report.row_text(answer)}{rest}", 0)
            return answer

        try:
            times = _estimate(measure, settings, lengths, request.ways, journal)
            left = remaining(points)
            if left:
                search_note = ", then a search for the longest that fit" if request.search else ""
                tell(f"{len(left)} points, about {duration_text(times.of_points(left))}{search_note}", 0)
            for number, (way, length) in enumerate(points):
                answer = point(way, length, points[number + 1 :])
                if way == GRADIENTS:
                    _check(answer, settings)
            if request.search:
                _search(point, request.ways, lengths[-1], journal, times, settings["limit"], tell)
        finally:
            process.close()


def _estimate(
    measure: Callable[[Point], Point],
    settings: dict[str, Any],
    lengths: list[int],
    ways: list[str],
    journal: Journal,
) -> TimeEstimate:
    """Time each way on short sequences, and take over what the journal has of longer ones."""
    short = [min(PILOT_LENGTHS[0], lengths[0]), min(PILOT_LENGTHS[1], lengths[-1])]
    key = settings | {"way": PILOT, "length": short[-1], "lengths": short, "ways": ways}
    pilot = journal.get(key)
    if pilot is None:
        began = time.monotonic()
        pilot = measure(key)
        passes = sum(sum(seconds) for seconds in pilot.get("passes", {}).values())
        pilot = pilot | {"overhead": max(0.0, time.monotonic() - began - passes)}
        journal.add(key, pilot)
    times = TimeEstimate(settings["repeat"], pilot["overhead"])
    for way, seconds in pilot.get("passes", {}).items():  # none where memory was full
        for length, each in zip(short, seconds, strict=True):
            times.add(way, length, each)
    for row in _rows(journal):
        if "seconds_per_step" in row:
            times.add(row["way"], row["length"], row["seconds_per_step"])
    return times


def _search(
    point: Callable[[str, int], Point],
    ways: list[str],
    length: int,
    journal: Journal,
    times: TimeEstimate,
    limit: int,
    tell: Callable[[str, int], object],
) -> None:
    """Double the length of each way until it does not fit."""
    rows, doubled = list(_rows(journal)), []
    for way, fit in _fits(rows, limit).items():
        if fit["measured"] is not None:
            at = fit["measured"]
            while at < (fit["extrapolated"] or 0) and fit["failed"] is None:
                at *= 2
                doubled.append((way, at))
    if doubled:
        tell(f"search: about {len(doubled)} points, {duration_text(times.of_points(doubled))}", 0)
    for way in ways:
        n = length
        while "memory_bytes" in point(way, n):
            n *= 2


def _check(point: Point, settings: dict[str, Any]) -> None:
    """Raise a UserError where the gradients of the model wrapped are not its own."""
    limit = COARSE if point.get("rounds_by_chunk") else tolerance([getattr(torch, settings["dtype"])])
    if METHODS[settings["method"]["name"]].is_exact and not point.get("difference", 0.0) <= limit:
        raise UserError(
            f"the gradient of {point['parameter']} differs by {point['difference']:.1e} when the model is "
            f"wrapped, more than the {limit:g} of rounding in {settings['dtype']}: nothing was timed; in "
            "float32 (--dtype float32) this is a bug in adjoint: report it with the model's config.json"
        )


def _skipped(journal: Journal, way: str, length: int, limit: int) -> Point | None:
    """Return the result of a point that need not be run, with the reason; None if it must be."""
    shorter_rows = [row for row in _rows(journal) if row["way"] == way and row["length"] < length]
    if any("memory_bytes" not in row for row in shorter_rows):
        return {"skipped": "a shorter one did not fit"}
    expected = predicted_bytes([(row["length"], row["memory_bytes"]) for row in shorter_rows], length) or 0
    return {"skipped": f"{size_text(expected)} predicted"} if expected > 2 * limit else None


def _killed(point: Point) -> bool:
    """Whether the process was ended from outside, as the system does where memory is full."""
    return any(f"ended by {name}" in point.get("error", "") for name in ("SIGKILL", "SIGABRT"))


# -------------------------------------------------------------------------------------------------- results


def _rows(journal: Journal) -> Iterator[dict[str, Any]]:
    """Yield the result of each way and length that the journal has, by length, then way."""
    points = ((json.loads(key), measurement) for key, measurement in journal.done.items())
    timed = [
        (p["length"], WAYS.index(p["way"]), measurement) for p, measurement in points if p["way"] in WAYS
    ]
    for length, way, measurement in sorted(timed, key=lambda row: row[:2]):
        row: dict[str, Any] = {"way": WAYS[way], "length": length}
        if "memory_bytes" in measurement:
            yield row | measurement | {"seconds_per_step": typical(measurement["seconds"])}
        else:
            yield row | {"why": next(iter(measurement.values()))}


def _fits(rows: list[dict[str, Any]], limit: int) -> dict[str, dict[str, Any]]:
    """Map each way to the longest length that fits in `limit` bytes (see `fits`)."""
    fits_by_way = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        way_rows = [row for row in rows if row["way"] == way]
        sizes = [(row["length"], row["memory_bytes"]) for row in way_rows if "memory_bytes" in row]
        failed = min((row["length"] for row in way_rows if "memory_bytes" not in row), default=None)
        fits_by_way[way] = fits(sizes, limit, failed)
    return fits_by_way


# ----------------------------------------------------------------------------------------- the command line


def _parser() -> Flags:
    parser = Flags(
        prog="adjoint compare",
        usage="%(prog)s MODEL [--lengths 4K,16K,64K] [--memory 8GB] [--method exact] …",
        description="Measure what adjoint.wrap gains for a model of transformers on this machine: peak "
        "memory and time of forward + backward as it is, with gradient checkpointing, and wrapped; how far "
        "gradients differ; and the longest sequence that fits.",
        epilog="The method's own settings are flags too, as for adjoint train: --method.chunk_size 4K. "
        "Memory is a step's peak above the imports: weights, gradients and activations, without an "
        "optimizer.",
    )
    add, least = parser.add, reads(Positive)
    model_help = (
        "a folder with a transformers model, or a config.json; without weights they are random; "
        f"{file_kinds()}; or a name on the Hugging Face hub"
    )
    add("model", model_help, metavar="MODEL")
    add("--lengths", "sequence lengths in tokens", comma_list(reads(SeqLen)), default="4K,16K,64K")
    memory = "memory limit of a step, such as 8GB; default: three quarters of the device's"
    add("--memory", memory, size_bytes)
    add("--ways", "some of these", comma_list(reads(Literal[WAYS])), default=",".join(WAYS))
    add("--method", "method of the wrapped model: exact or truncated", default=Exact.name)
    add("--dtype", "float32, bfloat16 or float64", reads(Precision), default="auto")
    add("--quantization", "quantize its weights, under adapters: 4bit or 8bit", reads(Quantization))
    adapters = "train adapters (LoRA) of this rank alone; default for quantized weights: 8"
    add("--lora-rank", adapters, least)
    add("--batch", "sequences per step", least, default="1")
    add("--repeat", "timed passes", least, default="3")
    add("--device", "auto, cpu, cuda or cuda:1", default="auto")
    add("--search", "double the length until it does not fit, instead of extrapolating", action="store_true")
    add("--fresh", "discard earlier results and measure all", action="store_true")
    add("--out", "folder for the results", new_folder, default="compare")
    trust = "let Python code that comes with the model run: read it first"
    add("--trust-remote-code", trust, action="store_true")
    return parser


def read_arguments(argv: list[str]) -> tuple[Namespace, Config]:
    """Return the command's own arguments, and a configuration with its method."""
    parser = _parser()
    request, rest = parser.parse_known_args(argv)
    for word in rest:
        if not word.startswith("--method.") and word.startswith("-"):
            raise parser.unknown(word)
    from adjoint.train.pretrained import configuration, folder_of

    print_sizes_as(request.memory)
    request.folder = Path(folder_of(request.model, key=parser.prog))
    request.model_config = configuration(str(request.folder), request.trust_remote_code, parser.prog)
    request.ways = [way for way in WAYS if way in request.ways]
    return request, load_config(["--method.name", request.method, *rest], "adjoint compare")
