"""Tables, lengths and sizes as text; lengths in pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print columns to the right; the first, and those without a heading, to the left."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        print(f"\n{title}")
    for line in lines if any(head) else lines[1:]:
        cells = enumerate(zip(line, widths, head, strict=True))
        print("  ".join(c.rjust(w) if i and name else c.ljust(w) for i, (c, w, name) in cells).rstrip())


def tokens(n: int) -> str:
    """1,048,576 as 1M, 1,024 as 1K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return f"{n:,}"


def fits_text(fits: Mapping[str, Any]) -> str:
    """Say which length is the longest that fits, and whether it was measured or extrapolated."""
    if fits["measured"] is None:
        return f"< {tokens(fits['failed'])}"
    n = fits["extrapolated"]
    n = n // 1024 * 1024 if n >= 8192 else n
    return f"{'>' if fits['at_least'] else '~'} {tokens(n)}"


def ticks_of_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Make the axis of tokens logarithmic, with a tick for each length."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, map(tokens, lengths))
    axes.minorticks_off()


def plain_ticks(axes: Axes, unit: str = "") -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis upwards."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}" + unit))
    axes.yaxis.set_minor_formatter(NullFormatter())
