"""Write adjoint/tools/command_flags.py: the flags of each command, besides the keys of configurations.

    python -m scripts.command_flags --write

The commands' parsers import torch; `adjoint.tools.early_checks` reads the file before that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from adjoint.tools import export
from adjoint.tools.compare import command as compare
from adjoint.tools.eval import command as evaluation
from adjoint.tools.plan import command as plan
from adjoint.tools.sweep import command as sweep
from adjoint.train.flags import Flags

FILE = Path(__file__).parents[1] / "adjoint" / "tools" / "command_flags.py"
HEAD = '''"""Flags of each command, besides the keys of configurations.

Written by `python -m scripts.command_flags --write`. A flag's value is the number of its own values, as
argparse's `nargs` has it: 0, None for one, or "?" for one at most.
"""

'''


def text() -> str:
    """Return what the file should hold."""
    parsers: dict[str, argparse.ArgumentParser] = {
        "train": Flags(),  # whose flags `adjoint.train.config` has without torch
        "sweep": sweep._parser(),
        "compare": compare._parser(),
        "plan": plan._parser(),
        "eval": evaluation._parser(),
        "export": export._parser(),
    }
    lines = ["FLAGS: dict[str, dict[str, str | int | None]] = {"]
    for command, parser in parsers.items():
        lines.append(f'    "{command}": {{')
        options = {option: action.nargs for action in parser._actions for option in action.option_strings}
        lines += [f'        "{option}": {json.dumps(nargs)},' for option, nargs in options.items()]
        lines.append("    },")
    return HEAD + "\n".join(lines).replace("null", "None") + "\n}\n"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", action="store_true", required=True)
    arguments.parse_args()
    FILE.write_text(text(), encoding="utf-8")
