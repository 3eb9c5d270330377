"""Draw docs/grid.png: the tiles of five stages on five chunks and the arrows between them, as the engine has
them.

python -m scripts.grid_picture
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from adjoint.engine.grid import Grid, Tile, make_grid
from adjoint.methods import Exact, LayerLocal, Truncated

SEQLEN, CHUNK, LAYERS = 20, 4, 3
STATEFUL = [False, *[True] * LAYERS, False]
NAMES = ["embedding", *(f"layer {k}" for k in range(LAYERS)), "head"]
COLOURS = {"y": "tab:blue", "S": "tab:green", "dy": "tab:red", "dS": "tab:orange", "spill": "tab:purple"}
WORDS = {
    "y": "y",
    "S": "state",
    "dy": "cotangent of y",
    "dS": "adjoint state",
    "spill": "cotangent that spills over",
}
PANELS = [
    ("Forward, every method", Exact(CHUNK), ("forward",)),
    ("Backward of Exact: dy from above, dS from the right", Exact(CHUNK), ("backward",)),
    (
        "Backward of Truncated(window=4): dy with a halo, no dS",
        Truncated(4, CHUNK),
        ("backward", "windowed"),
    ),
    (
        "Backward of LayerLocal(window=4), chunk 2 in full",
        LayerLocal(4, CHUNK),
        ("backward", "windowed"),
    ),
]


PICTURE = Path(__file__).parents[1] / "docs" / "grid.png"


def arrows(grid: Grid, kinds: tuple[str, ...]) -> set[tuple[str, Tile, Tile]]:
    """Return all arrows between tiles of these kinds: the value's name, its writer, its reader."""
    tiles = [t for t in (*grid.forward_tiles(), *grid.backward_tiles()) if t.kind in kinds]
    writer = {key: t for t in tiles for key in grid.writes(t)}
    return {(key[0], writer[key], t) for t in tiles for key in grid.reads(t) if key in writer}


def draw(axes: Axes, title: str, grid: Grid, kinds: tuple[str, ...]) -> None:
    """Draw the tiles and arrows of one panel. Where arrows go past layers, those to one chunk are drawn in
    full, the others faintly."""
    boxes = {}
    for k, name in enumerate(NAMES):
        axes.text(-0.75, k, name, ha="right", va="center", fontsize=10)
        for c in range(grid.chunks):
            boxes[k, c] = FancyBboxPatch(
                (c - 0.24, k - 0.14), 0.48, 0.28, "round,pad=0.02", fc="0.93", ec="0.5", lw=0.8, zorder=3
            )
            axes.add_patch(boxes[k, c])
    drawn = sorted(arrows(grid, kinds), key=str)
    far = any(abs(a.stage - b.stage) > 1 for _, a, b in drawn)
    for value, a, b in drawn:
        x, y = (a.chunk, a.stage), (b.chunk, b.stage)
        steps = abs(a.stage - b.stage)
        # an arrow that goes past a box bends around it; two between the same boxes pass on either side
        bend = {"spill": -0.25}.get(value, 0.0) if steps <= 1 else 0.3 if a.chunk == b.chunk else 0.12
        faint = far and b.chunk != grid.chunks // 2
        axes.add_patch(
            FancyArrowPatch(
                x,
                y,
                arrowstyle="-|>",
                mutation_scale=9,
                color=COLOURS[value],
                alpha=0.2 if faint else 1.0,
                lw=1.0,
                patchA=boxes[a.stage, a.chunk],
                patchB=boxes[b.stage, b.chunk],
                shrinkA=1,
                shrinkB=1,
                connectionstyle=f"arc3,rad={bend}",
                zorder=2,  # behind the boxes that it passes
            )
        )
    axes.set_xlim(-1.9, grid.chunks - 0.4)
    axes.set_ylim(-0.6, len(NAMES) - 0.4)
    axes.set_xticks(range(grid.chunks), [f"chunk {c}" for c in range(grid.chunks)], fontsize=10)
    axes.set_yticks([])
    axes.set_title(title, fontsize=10.5)
    axes.spines[:].set_visible(False)


def main() -> None:
    figure = Figure(figsize=(11, 7.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(hspace=0.08)  # between the chunks of one panel and the title of the next
    for axes, (title, method, kinds) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        draw(axes, title, make_grid(method.engine_spec(SEQLEN, CHUNK), SEQLEN, STATEFUL, reach=1), kinds)
    handles = [figure.axes[0].plot([], [], color=COLOURS[value], label=WORDS[value])[0] for value in COLOURS]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=11)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
