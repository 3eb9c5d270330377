"""`adjoint cluster env`: what a node has, and how to start Ray on it so that each slice is a worker."""

from __future__ import annotations

import json
import shlex
import sys

from adjoint.cluster import devices
from adjoint.train.flags import Flags


def main(argv: list[str]) -> int:
    """``adjoint cluster …``; returns the exit code."""
    options = _parser().parse_args(argv)
    inventory = devices.visible(devices.find())
    if options.json:
        print(json.dumps(inventory.as_dict(), indent=1))
    elif options.start is not None:
        for note in inventory.notes:
            print(f"not used: {note}" if inventory.devices else note, file=sys.stderr)
        print(inventory.ray_start(*shlex.split(options.start)))
    else:
        print(text(inventory))
    return 0


def text(inventory: devices.Inventory) -> str:
    """Return the text of `adjoint cluster env`: a line for a node without GPUs, else a table and commands."""
    if not inventory.devices:
        why = "; ".join(inventory.notes) or "no GPU is visible"
        return f"{why}. Shards run on the CPU: ray start --head --num-gpus=0"
    lines = [f"GPU  {'kind':30}  {'memory':9}  UUID"]
    for device in inventory.devices:
        kind, size = f"{device.name} {device.profile}".strip(), f"{device.memory_bytes // devices.MIB} MiB"
        lines.append(f"{device.gpu:<3}  {kind:30}  {size:9}  {device.uuid}")
    lines += [f"not used: {note}" for note in inventory.notes]
    lines += ["", "# the first node; the others take --address=HOST:6379 in place of --head"]
    return "\n".join([*lines, inventory.ray_start()])


def _parser() -> Flags:
    parser = Flags(prog="adjoint cluster", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    env = commands.add_parser(
        "env",
        help="this node's GPUs and MIG slices, and the command that starts Ray with them",
        description="List this node's GPUs and MIG slices, and print the command that starts Ray on it: Ray "
        "does not count MIG slices by itself. CUDA_VISIBLE_DEVICES is respected.",
    )
    form = env.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument(
        "--start",
        metavar="ARGUMENTS",
        help="print only the command, with these arguments of ray start, for a shell to run: "
        """eval "$(adjoint cluster env --start='--address=10.0.0.1:6379')\"""",
    )
    return parser
