"""Write adjoint/tools/command_flags.py: the flags of each command, and the keys of configurations.

    python -m scripts.command_flags --write

The commands' parsers import torch; `adjoint.tools.early_checks` reads the file before that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adjoint.tools import export
from adjoint.tools.compare import command as compare
from adjoint.tools.eval import command as evaluation
from adjoint.tools.plan import command as plan
from adjoint.tools.sweep import command as sweep
from adjoint.train import config

FILE = Path(__file__).parents[1] / "adjoint" / "tools" / "command_flags.py"
HEAD = '''"""Flags of each command, and keys of configurations.

Written by `python -m scripts.command_flags --write`. A flag's value is the number of its own values: "" for
none, "1", or "?" for one at most. KEY_PREFIXES has the beginning of the keys that a command takes as flags.
"""

'''


def text() -> str:
    """Return what the file should hold."""
    parsers: dict[str, argparse.ArgumentParser] = {
        "train": config._parser("adjoint train"),
        "sweep": sweep._parser(),
        "compare": compare._parser(),
        "plan": plan._parser(),
        "eval": evaluation._parser(),
        "export": export._parser(),
    }
    keys = [*config.known_keys()]
    lines = ["FLAGS: dict[str, dict[str, str]] = {"]
    for command, parser in parsers.items():
        lines.append(f'    "{command}": {{')
        options = {option: action for action in parser._actions for option in action.option_strings}
        if command in ("sweep", "plan"):
            options |= {"--config": parsers["train"]._option_string_actions["--config"]}
            options |= {"--print_config": parsers["train"]._option_string_actions["--print_config"]}
            options |= {"--resume": parsers["train"]._option_string_actions["--resume"]}
        for option, action in options.items():
            if option.removeprefix("--") not in keys or command != "train":
                lines.append(f'        "{option}": "{_number(action)}",')
        lines.append("    },")
    lines += ["}", "KEY_PREFIXES: dict[str, str] = {"]
    lines += [f'    "{name}": "{prefix}",' for name, prefix in PREFIXES.items()]
    lines += ["}", "KEYS = (", *(f'    "{key}",' for key in keys), ")"]
    return HEAD + "\n".join(lines) + "\n"


PREFIXES = {"train": "", "sweep": "", "plan": "", "compare": "method."}


def _number(action: Any) -> str:
    return "" if action.nargs == 0 else "?" if action.nargs == "?" else "1"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", action="store_true", required=True)
    arguments.parse_args()
    FILE.write_text(text(), encoding="utf-8")
