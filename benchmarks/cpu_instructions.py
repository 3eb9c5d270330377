"""Instructions of the C++ recurrences, and what bounds them: `python -m benchmarks.cpu_instructions`.

Counted, not timed: each kernel is executed one instruction at a time (cpu_instructions.cpp), for two lengths,
and the difference is divided by the tokens between them. This counts what the processor executes, AVX-512
included, which valgrind cannot. The unit is one vector of the state: 16 numbers with AVX-512, 8 with AVX2.

The least cycles of each resource are those of a Zen 4 core, whose units take 256 bits at a time and 512 bits
in two turns; rates were measured with chains of one instruction. Per cycle it dispatches 6 instructions and
executes, of 256 bits:
- 2 products, multiply-adds, comparisons or reciprocals (units 0 and 1);
- 2 sums, roundings, minima or maxima (units 2 and 3); a scaling by a power of two counts twice;
- 2 permutations (units 1 and 2), 4 of all of these and of selections and logic;
- 2 loads, also as another instruction's operand, or 3 of single numbers; and 1 store.

The largest of these is what the kernel takes if nothing is ever waited for. "measured" and "roof" are the
stored results of `benchmarks.kernels` for the same vectors, in cycles. Needs Linux on x86-64 and objdump.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch

from adjoint.files import write_atomically
from adjoint.kernels.cpu import backend as cpu_backend
from adjoint.kernels.cpu import build as cpu_build
from benchmarks import report
from benchmarks.kernels import roof
from benchmarks.kernels.operations import OPS, draw, results
from benchmarks.report import Row
from benchmarks.runner import RESULTS

# Tokens after which a kernel repeats itself: a segment, a block.
PERIODS = {"selective_scan": 32, "ssd_scan": 64, "gated_delta_rule": 64, "kda": 64}
NARROWED = {"d_inner": 128, "nheads": 1}  # widths that are counted; more only repeat the same
KINDS = ("multiply", "add", "shuffle", "other", "load", "store", "move", "scalar")
VECTOR_KINDS = {  # by the beginning of a mnemonic, the first that matches
    "load": r"v(p?mov[aud]|p?broadcast|lddqu|movs[sd]$|mov[dq]$)",
    "multiply": r"vfn?m|vmul|vcmp|vrcp|vrsqrt|vdiv|vsqrt",
    "add": r"vadd|vsub|vmax|vmin|vrnd|vround|vscalef|vcvt",
    "shuffle": r"vp?(perm|shuf|unpck|insert|extract|align)|vmov(hl|lh|sh|sl)|vhadd",
}
SLOTS = {"vscalef": 2, "vdiv": 5, "vsqrt": 5}  # turns of a unit where it is not one
Counts = collections.Counter[str]


def classify(line: str) -> Counts:
    """Return an instruction's kind, as objdump writes it, and the slots of 256 bits that it takes of each
    resource."""
    name, _, operands = line.partition("#")[0].strip().partition(" ")
    target = re.split(r",(?![^(]*\))", operands.strip())[-1]
    size = 2 if "zmm" in operands else 1
    accesses = "(" in operands and not re.match(r"lea|nop|prefetch|cs|data16", name)
    if not name.startswith("v"):
        return Counts({"scalar": 1, "load slots": 2 / 3 if accesses and "(" not in target else 0})
    if "(" in target:
        return Counts({"store": 1, "store slots": size})
    kind = next((kind for kind, begin in VECTOR_KINDS.items() if re.match(begin, name)), "other")
    slots = size * next((slots for begin, slots in SLOTS.items() if name.startswith(begin)), 1)
    if kind == "load" and not accesses:  # between registers
        kind = "shuffle" if "broadcast" in name else "other" if "{%k" in target else "move"
    exponentials = name.startswith(("vscalef", "vpslld"))
    unit = {} if kind in ("load", "move") else {f"{kind} slots": slots}
    return Counts({kind: 1, "exponentials": int(exponentials), "load slots": size * accesses, **unit})


def cycles(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the least cycles of each resource."""
    multiply, add, shuffle, other = (counts.get(f"{kind} slots", 0.0) for kind in KINDS[:4])
    return {
        "multiply": multiply / 2,
        "add": add / 2,
        "shuffle": shuffle / 2,
        "all vector units": max((multiply + add + shuffle + other) / 4, (multiply + shuffle) / 3),
        "load": counts.get("load slots", 0.0) / 2,
        "store": counts.get("store slots", 0.0),
        "dispatch": sum(counts.get(kind, 0.0) for kind in KINDS) / 6,
    }


class Library:
    """The loaded kernels: where they are, the kind of each instruction and the function it belongs to."""

    def __init__(self) -> None:
        library, said = cpu_build.load()
        if library is None:
            raise SystemExit(f"the C++ kernels are not usable: {said}")
        self.path = Path(said.partition(",")[0])
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split("-", 1) for line in maps if line.endswith(str(self.path))]
        self.begin = int(ranges[0][0], 16)
        self.size = int(ranges[-1][1].partition(" ")[0], 16) - self.begin
        command = ["objdump", "-d", "-w", "-C", "--no-show-raw-insn", str(self.path)]
        self.instructions: dict[int, tuple[str, Counts]] = {}
        function = ""
        for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
            if label := re.match(r"[0-9a-f]+ <(.*)>:$", line):
                function = label[1].replace("(anonymous namespace)::", "")
            elif code := re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line):
                self.instructions[int(code[1], 16)] = function, classify(code[2])

    def executed(self, op_name: str, seqlen: int) -> dict[bool, dict[int, int]]:
        """Return how often each instruction runs in a call's forward (False) and in its backward (True)."""
        counter = roof.build(Path(__file__).with_suffix(".cpp"))
        if counter is None:
            raise SystemExit("no C++ compiler found (install g++ or clang++, or set CXX)")
        passes: dict[bool, dict[int, int]] = {}

        def stepped(name: str, dtype: torch.dtype) -> Callable[..., None]:
            def call(arguments: object, *flags: int) -> None:
                counts, words = (ctypes.c_uint32 * self.size)(), map(ctypes.c_int64, (*flags, 0)[:2])
                place = ctypes.c_size_t(self.begin), ctypes.c_size_t(self.size)
                counter.count_instructions(*place, counts, original(name, dtype), arguments, *words)
                passes[bool(flags[-1])] = {at: count for at, count in enumerate(counts) if count}

            return call

        op, original = OPS[op_name], cpu_backend._function
        inputs, cotangent = draw(op, narrowed(op_name, seqlen), "cpu", torch.float32)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        with mock.patch.object(cpu_backend, "_function", stepped):
            results(op, functools.partial(op.ours, backend="cpu"), leaves, cotangent)
        return passes

    def count(self, op_name: str, vectors: Callable[[int], float]) -> dict[bool, dict[str, Counts]]:
        """Return each function's counts per vector of the state, forward (False) and backward (True)."""
        tokens = PERIODS[op_name]
        short, long = self.executed(op_name, tokens), self.executed(op_name, 2 * tokens)
        passes: dict[bool, dict[str, Counts]] = {False: {}, True: {}}
        for backward, functions in passes.items():
            for at in short[backward].keys() | long[backward].keys():
                times = long[backward].get(at, 0) - short[backward].get(at, 0)
                name, kinds = self.instructions.get(at, ("", Counts()))
                sums = functions.setdefault(name, Counts())
                for kind, count in kinds.items():
                    sums[kind] += times * count / vectors(tokens)  # type: ignore[assignment]
        return passes


def narrowed(op_name: str, seqlen: int) -> dict[str, int]:
    """The benchmark's size with this length and few channels or heads."""
    size = OPS[op_name].sizes["cpu"]["default"]
    return size | {"seqlen": seqlen} | {key: n for key, n in NARROWED.items() if key in size}


def state_vectors(size: Mapping[str, int], lanes: int) -> float:
    """Vectors of the state of all tokens."""
    widths = ("d_inner", "nheads", "headdim", "d_state", "d_k", "d_v")
    return size["batch"] * size["seqlen"] * functools.reduce(
        lambda product, name: product * size.get(name, 1), widths, 1
    ) / lanes  # fmt: skip


def stored(op_name: str, name: str, lanes: int) -> dict[str, float]:
    """Return measured cycles and the roof's per vector of the state, as the kernel benchmark stored them."""
    result = json.loads((RESULTS / {16: "avx512", 8: "avx2"}[lanes] / "kernels.json").read_text())
    fields = {"op": op_name, "contender": "adjoint", "pass": name}
    row = next(row for row in result["rows"] if fields.items() <= row.items())
    per_ms = result["roof"]["flops"] / (2 * lanes) * 1e-3 * (lanes / 16) / state_vectors(row["size"], lanes)
    return {"measured": row["ms"] * per_ms, "roof": row["roof_ms"] * per_ms}


def measure(library: Library, op_name: str, lanes: int) -> list[Row]:
    """A row of the forward and one of forward and backward."""
    counts = library.count(op_name, lambda tokens: state_vectors(narrowed(op_name, tokens), lanes))
    rows: list[Row] = []
    for name, passes in (("forward", [False]), ("both", [False, True])):
        functions: dict[str, Counts] = collections.defaultdict(Counts)
        for backward in passes:
            for function, sums in counts[backward].items():
                functions[function].update(sums)
        total = sum(functions.values(), Counts())
        rows.append({"op": op_name, "pass": name, "counts": dict(total), "cycles": cycles(total),
                     "functions": {function: dict(sums) for function, sums in functions.items()},
                     **stored(op_name, name, lanes)})  # fmt: skip
    return rows


def tables(rows: list[Row], most_functions: int) -> str:
    """Instructions by kind, cycles by resource, and the functions that execute most."""
    heads = ["", *KINDS, "all", "exponentials"]
    counts = [
        [label(row), *(f"{row['counts'].get(kind, 0):.1f}" for kind in KINDS),
         f"{6 * row['cycles']['dispatch']:.1f}", f"{row['counts'].get('exponentials', 0):.2f}"]
        for row in rows
    ]  # fmt: skip
    bounds = [
        [label(row), *(f"{value:.1f}" for value in row["cycles"].values()),
         max(row["cycles"], key=row["cycles"].__getitem__), f"{row['roof']:.1f}", f"{row['measured']:.1f}"]
        for row in rows
    ]  # fmt: skip
    parts = [
        f"Instructions per vector of the state:\n\n{report.markdown_table(heads, counts)}",
        "Least cycles per vector of the state:\n\n"
        + report.markdown_table(["", *rows[0]["cycles"], "bound by", "roof", "measured"], bounds),
    ]
    for row in rows if most_functions else ():
        by_total = sorted(row["functions"].items(), key=lambda item: -cycles(item[1])["dispatch"])
        lines = [
            [f"`{shortened(name)}`", *(f"{value:.2f}" for value in cycles(sums).values())]
            for name, sums in by_total[:most_functions]
        ]
        table = report.markdown_table([label(row), *row["cycles"]], lines)
        parts.append(f"Least cycles of the functions:\n\n{table}")
    return "\n".join(parts)


def label(row: Row) -> str:
    """Return the operation and the pass of a row."""
    return f"`{row['op']}`, {'forward' if row['pass'] == 'forward' else 'with backward'}"


def shortened(name: str) -> str:
    """A function's name without its parameters."""
    return re.sub(r"\(.*", "", re.sub(r"^void ", "", name.split("{lambda")[0]))[:60]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_instructions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--op", nargs="+", dest="ops", choices=PERIODS, default=["selective_scan", "kda"])
    parser.add_argument("--functions", type=int, default=0, help="show as many functions of each kernel")
    parser.add_argument("--out", type=Path, help="folder for cpu_instructions.json and .md")
    options = parser.parse_args()
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        parser.error("instructions can be counted on Linux with an x86-64 processor only")
    if shutil.which("objdump") is None:
        parser.error("objdump is not installed (apt install binutils)")
    torch.set_num_threads(1)
    library, lanes = Library(), cpu_backend._lanes(torch.float32)
    rows = [row for op_name in options.ops for row in measure(library, op_name, lanes)]
    text = tables(rows, options.functions)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": "cpu_instructions", "environment": report.environment(), "rows": rows}
        write_atomically(options.out / "cpu_instructions.json", json.dumps(result, indent=1) + "\n")
        write_atomically(options.out / "cpu_instructions.md", f"{(__doc__ or '').strip()}\n\n{text}")


if __name__ == "__main__":
    main()
