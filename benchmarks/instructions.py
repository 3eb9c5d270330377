"""Instructions of the selective scan's Triton kernels: `python -m benchmarks.instructions`.

Counted, not timed; no GPU is involved, and none has run them: kernels are compiled as launched for one
sequence of 65,536 tokens, bfloat16, d_inner 4,096 and d_state 16 on 132 multiprocessors, and the machine
code's loops are read. A loop counts by how often it runs for a token; what is skipped by a branch counts too.
The unit is warp instructions per token and 32 channels. "memory" are those of the loops that load, store or
shuffle.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile

import torch
import triton

from adjoint.files import write_atomically
from adjoint.kernels.selective_scan.triton import launch, saved_states
from benchmarks import report
from benchmarks.report import Row
from benchmarks.runner import RESULTS
from tests.kernels import triton_aot as aot

EVERY, SPAN, STEPS = saved_states.CHECKPOINT, launch.SPAN, launch.backward_tile(16, False)[4]
# Of each kernel's loops, in order of their first instructions: tokens of one turn.
LOOPS = {
    "forward_kernel": (EVERY, launch.UNROLL),
    "adjoint_local_kernel": (launch.UNROLL,),
    # a stretch; its d; the marks; a span, and in it the walk back
    "backward_kernel": (EVERY, SPAN, STEPS, SPAN, STEPS),
}
CHANNELS = {"backward_kernel": 16}  # of a program, else 32
MEMORY = re.compile(r"LD|ST|SHFL|RED|ATOM")


def machine_code(ptx: str) -> str:
    """Return nvdisasm's output for the assembled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        ptxas, _ = aot.run_ptxas(ptx, folder)
        disassemble = [str(ptxas.with_name("nvdisasm")), "-c", f"{folder}/kernel.cubin"]
        return subprocess.run(disassemble, check=True, capture_output=True, text=True).stdout


def loops(code: str) -> list[list[str]]:
    """Each loop's own instructions, without those of loops inside, in order of their beginnings."""
    labels: dict[str, int] = {}
    code_lines: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code_lines)
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            code_lines.append(match[1])
    ends: dict[int, int] = {}
    for place, line in enumerate(code_lines):
        target = re.match(r"BRA\b.*?(\.L_x_\d+)", line)
        if target and labels[target[1]] < place:  # the one after the end goes to itself
            ends[labels[target[1]]] = max(place, ends.get(labels[target[1]], 0))
    return [
        [
            code_lines[place]
            for place in range(begin, end + 1)
            if not any(begin < inner <= place <= last for inner, last in ends.items())
        ]
        for begin, end in sorted(ends.items())
    ]


def measure(capability: int) -> list[Row]:
    """The kernels with a loop over tokens, in order of their launches."""
    rows: list[Row] = []
    for kernel in aot.compile_call(
        aot.MAIN["selective scan, bf16, d_state 16"], capability, frozenset(LOOPS)
    ):
        loop_bodies, tokens = loops(machine_code(kernel.ptx)), LOOPS[kernel.name]
        if len(loop_bodies) != len(tokens):
            raise LookupError(f"{kernel.name} has {len(loop_bodies)} loops where LOOPS knows {len(tokens)}")
        share = 32 / CHANNELS.get(kernel.name, 32) * kernel.num_warps
        registers = -(-kernel.registers // 8) * 8
        rows.append({
            "target": f"sm_{capability}",
            "kernel": kernel.name + (", pre-pass" if kernel.name == "forward_kernel" and not rows else ""),
            "instructions": share * sum(
                len(body) / count for body, count in zip(loop_bodies, tokens, strict=True)
            ),
            "memory": share * sum(
                sum(bool(MEMORY.match(line)) for line in body) / count
                for body, count in zip(loop_bodies, tokens, strict=True)
            ),
            "registers": kernel.registers, "spilled_bytes": kernel.spills, "shared_bytes": kernel.shared,
            "warps": min(65536 // (32 * registers), 32 * kernel.num_warps),
        })  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    heads = ("target", "kernel", "instructions", "memory", "registers", "spilled bytes", "shared bytes",
             "warps a multiprocessor")  # fmt: skip
    lines = ([f"{v:.0f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)
    return report.markdown_table(heads, lines, left=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--publish", action="store_true", help="replace benchmarks/results/instructions.*")
    options = parser.parse_args()
    rows = [row for capability in (80, 90) for row in measure(capability)]
    print(table(rows))
    if options.publish:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        environment = report.environment() | {"compilers": aot.versions(), "versions": versions}
        result = {"benchmark": "instructions", "environment": environment, "rows": rows}
        write_atomically(RESULTS / "instructions.json", json.dumps(result, indent=1) + "\n")
        text = f"{(__doc__ or '').strip()}\n\n{aot.versions()}\n\n{table(rows)}"
        write_atomically(RESULTS / "instructions.md", text)


if __name__ == "__main__":
    main()
