"""The command line of `adjoint doctor`; torch is imported only to examine the machine."""

from __future__ import annotations

import json

from adjoint.tools.doctor import model_support
from adjoint.train.flags import Flags


def main(argv: list[str]) -> int:
    """`adjoint doctor [NAME]`: exit code 0, or 1 if no backend computes a scan right, or if the model is not
    known to be supported."""
    parser = Flags(
        prog="adjoint doctor",
        description="Without a name: report what this machine has and which code runs what: versions, "
        "devices, MIG slices, the scan backends and why one is not usable, settings of threads, network "
        "interfaces; check every usable backend against the reference in float64. "
        "Under torchrun also the address and interface of each process. "
        "With a model's name: say which class it is and whether `adjoint.wrap` supports it.",
        epilog="Without a name it takes a few seconds, and the first time some more to build the C++ "
        "kernels; on a GPU minutes, as each Triton kernel is compiled. Exit code 0, or 1 if no backend works "
        "or the model is not known to be supported.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        help='a model\'s name ("Nemotron 3"), a class, a model_type, a folder with a config.json, or a model '
        "of the Hugging Face hub",
    )
    parser.add("--json", "print it as JSON, for programs and bug reports", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.name is not None:
        answer = model_support.look_up(arguments.name)
        print(model_support.as_json(answer) if arguments.json else "\n".join(model_support.lines(answer)))
        return 0 if answer.is_supported else 1

    from adjoint.tools.doctor import installation

    report = installation.examine()
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        installation.show(report)
    return 0 if report["works"] else 1
