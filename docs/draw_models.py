"""Writes the table of docs/models.md anew: every class of tests/hf_models.py, tried.

python -m docs.draw_models
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import adjoint
from tests.hf_models import (
    FAMILIES,
    REFUSED,
    errors,
    float64_throughout,
    held,
    loss_and_gradients,
    make,
    make_batch,
    reason,
)

TABLE = Path(__file__).with_name("models.md")
HEAD = ["family", "class", "its cache holds", "gradient by chunks"]


def tried(name: str) -> tuple[str, str]:
    """What the cache holds, and the largest relative error of a parameter's gradient or why it is refused."""
    model, inputs = make(name), make_batch(29)
    wrapped = copy.deepcopy(model)  # before the first run: some keep tensors of it
    with float64_throughout():
        expected = loss_and_gradients(model, **inputs)
        try:
            adjoint.wrap(wrapped, adjoint.Exact(chunk_size=8))
            found = errors(loss_and_gradients(wrapped, **inputs), expected)
        except ValueError as error:
            return "", f"refused: {reason(error)}".replace("<", "&lt;")
    return held(wrapped), f"{found.worst:.0e}"


def main() -> None:
    warnings.simplefilter("ignore")
    classes = [(family, name) for family, of in FAMILIES.items() for name in of]
    rows = [HEAD, ["---"] * len(HEAD)]
    for family, name in [*classes, *(("refused", name) for name in REFUSED)]:
        print(name, flush=True)
        rows.append([family, f"`{name}`", *tried(name)])
    text = TABLE.read_text()
    before = text[: text.index("| family")] if "| family" in text else text
    after = text[text.rindex("|\n") + 2 :] if "| family" in text else ""
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    TABLE.write_text(before + table + after)


if __name__ == "__main__":
    main()
