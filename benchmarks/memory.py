"""Peak memory and time a token against sequence length: `python -m benchmarks.memory`.

Every point is forward + backward of a whole language model on random tokens, in a fresh process: d_model 256,
4 layers, expand 2, d_state 16, a byte vocabulary with tied embeddings, float32, batch 1. Mamba-2 has headdim
64 and d_state 16 too, so that the widths are equal. Compared are `Exact`, backpropagation through the same
scan with and without checkpointing (the honest opponents) and transformers' Mamba and Mamba-2.

- Memory: peak resident size above what is resident after the imports; on a GPU, the peak torch allocated.
- Time: of a forward + backward, after one at 128 tokens that loads libraries and starts threads. Passes are
  repeated inside a process for some seconds, processes `--repeats` times; published is the median of those.
- Points of different methods alternate, so that a machine that slows down slows all of them.
- A length is left out when the memory predicted from the last two exceeds `--max-memory`; the results say so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.train import machine as meter
from benchmarks import common

MODEL: dict[str, Any] = {
    "d_model": 256,
    "n_layer": 4,
    "d_state": 16,
    "expand": 2,
    "vocab_size": 256,
    "headdim": 64,
}
LENGTHS = (1024, 4096, 16384, 65536, 262144)
QUICK_LENGTHS = (1024, 4096)
# A process repeats its pass until it has run this long, so that a short pass is not one draw.
SETTLE_S = 4.0


@dataclass(frozen=True)
class Method:
    """One curve: what it is called, what it is built from and how far it is taken."""

    label: str
    peer: bool
    mixer: str
    checkpoint: bool = False
    exact: bool = False
    mambapy: bool = False
    max_length: int | None = None  # the slow path of transformers takes minutes beyond the shortest
    max_repeats: int | None = None


METHODS = {
    "exact": Method("Exact", False, "mamba", exact=True),
    "backprop": Method("Backprop", False, "mamba"),
    "backprop-checkpoint": Method("Backprop + checkpointing", False, "mamba", checkpoint=True),
    "exact-mamba2": Method("Exact, Mamba-2", False, "mamba2", exact=True),
    "hf-mamba": Method("transformers Mamba (mambapy)", True, "mamba", mambapy=True),
    "hf-mamba-checkpoint": Method(
        "transformers Mamba (mambapy) + checkpointing", True, "mamba", mambapy=True, checkpoint=True
    ),
    "hf-mamba-slow": Method("transformers Mamba (default)", True, "mamba", max_length=1024, max_repeats=1),
    "hf-mamba2": Method("transformers Mamba-2", True, "mamba2"),
    "hf-mamba2-checkpoint": Method("transformers Mamba-2 + checkpointing", True, "mamba2", checkpoint=True),
}


def build_ours(method: Method, device: str) -> Callable[[Any], Any]:
    """`ids -> loss` of this package's model under `method`. Imports now, builds when first called."""
    import adjoint

    how = adjoint.Exact() if method.exact else adjoint.Backprop(checkpoint=method.checkpoint)
    model: Any = None

    def loss(ids: Any) -> Any:
        nonlocal model
        if model is None:
            model = adjoint.Stack(adjoint.StackConfig(mixer=method.mixer, tie_embeddings=True, **MODEL)).to(
                device
            )
        model.zero_grad(set_to_none=True)
        return model(ids, labels=ids, method=how).loss

    return loss


def build_transformers(method: Method, device: str) -> Callable[[Any], Any]:
    """`ids -> loss` of transformers' causal LM of the same widths. Imports now; builds when first called."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": MODEL["vocab_size"],
        "hidden_size": MODEL["d_model"],
        "num_hidden_layers": MODEL["n_layer"],
        "state_size": MODEL["d_state"],
        "expand": MODEL["expand"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if method.mixer == "mamba2":
        heads = MODEL["d_model"] * MODEL["expand"] // MODEL["headdim"]
        config: Any = transformers.Mamba2Config(
            **shape, head_dim=MODEL["headdim"], num_heads=heads, n_groups=1
        )
        kind: Any = transformers.Mamba2ForCausalLM
    else:
        if method.mambapy:
            import mambapy.pscan  # noqa: F401  without it transformers takes another path in silence
        config = transformers.MambaConfig(**shape, use_mambapy=method.mambapy)
        kind = transformers.MambaForCausalLM
    model: Any = None

    def loss(ids: Any) -> Any:
        nonlocal model
        if model is None:
            model = kind(config).to(device).train()
            if method.checkpoint:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad(set_to_none=True)
        return model(input_ids=ids, labels=ids).loss

    return loss


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Run one point in this process and return its memory (bytes), seconds of each pass, and loss."""
    import torch

    method, device = METHODS[point["method"]], point["device"]
    loss_of = (build_transformers if method.peer else build_ours)(method, device)
    cuda = device.startswith("cuda")
    meter.reset_peak_rss()
    baseline, _ = meter.rss_bytes()
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    torch.manual_seed(0)
    ids = torch.randint(MODEL["vocab_size"], (1, point["length"]), device=device)
    loss_of(ids[:, :128]).backward()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < point["settle_s"] and len(seconds) < 20):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = loss_of(ids)
        loss.backward()
        value = loss.item()  # also waits for the device's forward
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        del loss  # or its graph lives on while the next pass builds one
    peak = torch.cuda.max_memory_allocated() if cuda else meter.rss_bytes()[1] - baseline
    return {"memory_bytes": peak, "baseline_bytes": baseline, "seconds": seconds, "loss": value}


def predicted_bytes(measured: Sequence[tuple[int, int]], length: int) -> int | None:
    """Memory at `length` by a line through the last two (length, bytes), or through one and the origin."""
    shorter = sorted(m for m in measured if m[0] < length)[-2:]
    if not shorter:
        return None
    (x, y) = shorter[-1]
    slope = y / x if len(shorter) == 1 else (y - shorter[0][1]) / (x - shorter[0][0])
    return int(y + max(slope, 0.0) * (length - x))


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point, in the order of measuring: methods alternate innermost, repeats are outermost."""
    points = []
    for repeat in range(options.repeats):
        for length in options.lengths:
            for allocator in options.allocators:
                for name in options.methods:
                    method = METHODS[name]
                    if method.max_length is not None and length > max(
                        method.max_length, min(options.lengths)
                    ):
                        continue
                    if method.max_repeats is not None and repeat >= method.max_repeats:
                        continue
                    points.append(
                        {
                            "method": name,
                            "length": length,
                            "allocator": allocator,
                            "device": options.device,
                            "repeat": repeat,
                            "settle_s": options.settle_s,
                        }
                    )
    return points


def reason_to_skip(point: dict[str, Any], journal: common.Journal, max_memory: int) -> str | None:
    """Why `point` is not to be run: it would not fit, or a shorter one of its curve did not. None: run it."""
    measured: dict[int, int] = {}  # the highest of the repeats, by length
    for key, result in journal.done.items():
        other = json.loads(key)
        if any(other[field] != point[field] for field in ("method", "allocator", "device")):
            continue
        if "memory_bytes" in result:
            measured[other["length"]] = max(result["memory_bytes"], measured.get(other["length"], 0))
        elif other["length"] <= point["length"] and (other["length"], other["repeat"]) != (
            point["length"],
            point["repeat"],
        ):
            return f"at {other['length']:,} tokens: {result.get('skipped') or result.get('error')}"
    expected = predicted_bytes(sorted(measured.items()), point["length"])
    if expected is not None and expected > max_memory:
        return f"{expected / 2**30:.1f} GiB predicted, the limit is {max_memory / 2**30:.1f}"
    return None


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Measure every point that is not in the journal yet. A failing point is recorded, not raised."""
    from tqdm import tqdm

    points = grid(options)
    with tqdm(total=len(points), unit="point", dynamic_ncols=True, smoothing=0) as bar:
        for point in points:
            bar.set_description(f"{point['method']} {point['length']:,} {point['allocator']}")
            if journal.get(point) is None:
                reason = reason_to_skip(point, journal, options.max_memory)
                if reason:
                    journal.add(point, {"skipped": reason})
                else:
                    env = common.ALLOCATORS[point["allocator"]]
                    result = common.run_child("benchmarks.memory", point, env)
                    journal.add(point, result)
                    if "error" in result:
                        bar.write(f"{bar.desc}{result['error']}", file=sys.stderr)
            bar.update()


def summarise(options: argparse.Namespace, journal: common.Journal) -> list[dict[str, Any]]:
    """One row a (method, length, allocator): medians over the processes, or why there is none."""
    rows = []
    for allocator in options.allocators:
        for name in options.methods:
            for length in options.lengths:
                results = []
                for repeat in range(options.repeats):
                    point = {
                        "method": name,
                        "length": length,
                        "allocator": allocator,
                        "device": options.device,
                    }
                    found = journal.get(point | {"repeat": repeat, "settle_s": options.settle_s})
                    if found:
                        results.append(found)
                row = {"method": name, "label": METHODS[name].label, "allocator": allocator, "length": length}
                good = [r for r in results if "memory_bytes" in r]
                if good:
                    # The first pass of several also paid for touching memory for the first time.
                    times = [statistics.median(r["seconds"][1:] or r["seconds"]) for r in good]
                    row |= {
                        "status": "measured",
                        "memory_bytes": int(statistics.median(r["memory_bytes"] for r in good)),
                        "ms_per_token": round(statistics.median(times) / length * 1e3, 6),
                        "ms_per_token_min": round(min(times) / length * 1e3, 6),
                        "ms_per_token_max": round(max(times) / length * 1e3, 6),
                        "processes": len(good),
                        "note": "",
                    }
                elif results:
                    error = results[0].get("error")
                    row |= {
                        "status": "failed" if error else "skipped",
                        "note": error or results[0]["skipped"],
                    }
                else:
                    continue
                rows.append(row)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0]
    )
    size = common.parse_size
    parser.add_argument("--lengths", type=size, nargs="+", help=f"tokens, as 16K (default {LENGTHS})")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
                        help=", ".join(METHODS))  # fmt: skip
    parser.add_argument("--repeats", type=int, help="processes a point (default 3)")
    parser.add_argument(
        "--allocator", choices=[*common.ALLOCATORS, "both"], help="glibc's settings (default both)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--max-memory", type=size, help="as 18GB (default 75%% of the machine's, or of the GPU's)"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default benchmarks/results)")
    parser.add_argument(
        "--quick", action="store_true", help="two short lengths once, into benchmarks/results/partial"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what a stopped run had finished")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return options
    options.lengths = sorted(set(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)))
    options.repeats = options.repeats if options.repeats is not None else (1 if options.quick else 3)
    allocator = options.allocator or ("default" if options.quick else "both")
    options.allocators = list(common.ALLOCATORS) if allocator == "both" else [allocator]
    if options.repeats < 1 or min(options.lengths) < 128:
        parser.error("--repeats must be at least 1 and every one of --lengths at least 128")
    if options.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            parser.error(f"--device {options.device}: torch sees no CUDA device here")
        options.allocators = ["default"]  # glibc's settings do not reach the GPU's memory
    if options.max_memory is None:
        options.max_memory = int(0.75 * _device_memory(options.device))
    options.settle_s = 0.5 if options.quick else SETTLE_S
    if options.quick and options.out is None:
        options.out = common.RESULTS / "partial" / "quick"
    return options


def _device_memory(device: str) -> int:
    if device == "cpu":
        return meter.total_memory_bytes()
    import torch

    return torch.cuda.get_device_properties(device).total_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: every point was run or would not fit; 1: one failed; 130: Ctrl-C."""
    options = parse(arguments)
    if options.child:
        common.answer(measure(json.loads(options.child)))
        return 0
    from benchmarks import memory_report

    environment = common.environment()
    folder = options.out or common.RESULTS
    mark = common.fingerprint(Path(__file__).read_text(), MODEL, environment["versions"], environment["cpu"])
    journal = common.Journal(folder / "partial" / f"memory-{options.device}.jsonl", mark, fresh=options.fresh)
    if journal.discarded:
        print(
            "The code has changed since the run that was stopped: measuring from the beginning.",
            file=sys.stderr,
        )
    elif journal.done:
        print(
            f"Going on: {len(journal.done)} points were finished before (--fresh measures anew).",
            file=sys.stderr,
        )
    stopped = False
    try:
        run(options, journal)
    except KeyboardInterrupt:
        stopped = True
        print("Stopped. The same command goes on from here.", file=sys.stderr)
    rows = summarise(options, journal)
    name = "memory" if options.device == "cpu" else f"memory-{options.device.partition(':')[0]}"
    payload = {"benchmark": "memory", "environment": environment, "model": MODEL, "complete": not stopped}
    payload |= {"max_memory_bytes": options.max_memory, "repeats": options.repeats, "device": options.device}
    common.write_results(folder, name, payload, rows)
    whole = options.methods == list(METHODS) and tuple(options.lengths) == LENGTHS
    to_docs = whole and not stopped and options.out is None and options.device == "cpu"
    memory_report.show(rows, environment, folder / name, to_docs=to_docs)
    if stopped:
        return 130
    journal.path.unlink()  # complete: the next run measures anew
    return 1 if any(row["status"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
