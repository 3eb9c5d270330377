"""Write the table of classes and releases of docs/models.md: try each class of tests/hf/hf_models.py under
each release of transformers that `scripts/versions.py` has a row for. Takes some minutes per release.

python -m scripts.model_releases [transformers-5.15 …]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

from benchmarks.report import ROOT, put_table
from scripts.model_classes import LIMIT, try_model
from tests.hf.hf_models import MODELS, make

sys.path.append(str(ROOT / "scripts"))  # where versions.py looks for its neighbours
import versions

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "releases.json"
EXACT, ABSENT = "✓", "–"
IN_THIS_PROCESS = "--here"


def try_classes() -> dict[str, str]:
    """Return the outcome of each class under the release that is installed: `EXACT`, `ABSENT` or a reason."""
    import transformers

    warnings.simplefilter("ignore")
    outcome = {}
    for name in MODELS:
        if not hasattr(transformers, name):
            outcome[name] = ABSENT
            continue
        try:
            _, error = try_model(make(name, skips=False))
        except Exception as failure:  # of transformers' own code, without us
            error = f"refused: does not run unwrapped ({type(failure).__name__})"
        is_exact = not error.startswith("refused") and float(error) <= LIMIT
        outcome[name] = EXACT if is_exact else error.removeprefix("refused: ")
        print(name, outcome[name], file=sys.stderr, flush=True)
    return outcome


def try_release(row: str) -> dict[str, str]:
    """Return `try_classes` of a row of scripts/versions.py."""
    placed = versions.place(row)
    if placed is None:
        sys.exit(f"{row} cannot be installed on this machine")
    python, environment = placed
    environment = os.environ | environment | {"ADJOINT_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, "-m", "scripts.model_releases", IN_THIS_PROCESS]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """Return rows of classes with the same outcome under every release, a column per release."""
    releases = sorted(outcomes, key=lambda release: [int(n) for n in release.split(".")])
    reasons: list[str] = []
    classes_by_cells: dict[tuple[str, ...], list[str]] = {}
    for name in MODELS:
        cells = []
        for release in releases:
            outcome = outcomes[release].get(name, ABSENT)
            if outcome not in (EXACT, ABSENT):
                if outcome not in reasons:
                    reasons.append(outcome)
                outcome = f"refused ({'abcdefghij'[reasons.index(outcome)]})"
            cells.append(outcome)
        classes_by_cells.setdefault(tuple(cells), []).append(name)
    rows = [["class", *releases], ["---"] * (1 + len(releases))]
    for cells, names in classes_by_cells.items():
        short = ", ".join(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in names)
        rows.append([short, *cells])
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    notes = "".join(f"- ({'abcdefghij'[k]}) {reason}\n" for k, reason in enumerate(reasons))
    return f"{text}\n{notes}"


def main() -> None:
    if sys.argv[1:] == [IN_THIS_PROCESS]:
        print(json.dumps(try_classes()))
        return
    rows = sys.argv[1:] or [
        name for name, row in versions.ROWS.items() if name.startswith("transformers-") and not row.python
    ]
    outcomes = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in rows:
        print(f"== {row}", file=sys.stderr, flush=True)
        outcomes[row.removeprefix("transformers-")] = try_release(row)
        RESULTS.write_text(json.dumps(outcomes, indent=1) + "\n")
    put_table(PAGE, "releases table", table(outcomes))


if __name__ == "__main__":
    main()
