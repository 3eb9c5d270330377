"""Write the table of classes and releases of docs/models.md: try each class of tests/hf/hf_models.py under
each release of transformers that `scripts/versions.py` has a row for. Takes some minutes per release.

python -m scripts.model_releases [transformers-5.15 …]
"""

from __future__ import annotations

import json
import os
import re
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
    """Return rows of classes with the same outcomes: the releases that are exact, and those that refuse."""
    releases = sorted(outcomes, key=lambda release: [int(n) for n in release.split(".")])
    reasons: list[str] = []
    classes_by_cells: dict[tuple[str, str], list[str]] = {}
    for name in MODELS:
        releases_by_mark: dict[str, list[str]] = {EXACT: []}
        for release in releases:
            outcome = outcomes[release].get(name, ABSENT)
            if outcome == ABSENT:
                continue
            if outcome != EXACT:
                reason = short_reason(outcome)
                if reason not in reasons:
                    reasons.append(reason)
                outcome = f"({'abcdefghij'[reasons.index(reason)]})"
            releases_by_mark.setdefault(outcome, []).append(release)
        exact = ranges(releases_by_mark.pop(EXACT), releases)
        refused = ", ".join(f"{ranges(each, releases)} {mark}" for mark, each in releases_by_mark.items())
        classes_by_cells.setdefault((exact, refused), []).append(name)
    rows = [["class", "exact", "refused"], ["---"] * 3]
    everywhere = classes_by_cells.pop((ranges(releases, releases), ""), [])
    for cells, names in classes_by_cells.items():
        short = ", ".join(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in names)
        rows.append([short, *cells])
    if everywhere:
        rows.append(
            [
                "all others of [the first table](models_classes.md#models-of-transformers)",
                ranges(releases, releases),
                "",
            ]
        )
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    notes = "".join(f"- ({'abcdefghij'[k]}) {reason}\n" for k, reason in enumerate(reasons))
    tried = f"Tried: {', '.join(releases)}. A range is of these; a release that a row does not name lacks"
    tried += " the class."
    return f"{tried}\n\n{text}\n{notes}"


def short_reason(reason: str) -> str:
    """Return a reason up to its first colon outside of parentheses, without the release's own number."""
    clause = re.match(r"(?:\([^)]*\)|:(?! )|[^:(])*", reason)
    assert clause is not None
    return re.sub(r"transformers [\d.]+", "transformers", clause[0])


def ranges(chosen: list[str], releases: list[str]) -> str:
    """Return releases as text, neighbours in `releases` joined: "5.6, 5.15 to 5.24"."""
    runs: list[list[str]] = []
    for release in chosen:
        if runs and releases.index(release) == releases.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


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
