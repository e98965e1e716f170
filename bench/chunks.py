"""The chunk curve: speed and memory of `fpdt` and `sweep` over the length of a chunk, as a table and a picture.

    python -m bench.chunks --limit 220
    python -m bench.chunks --only fpdt --name again

One layer of Llama3-8B at 1M tokens, rank 0 of 8 Ulysses ranks whose messages come back to it, with embedding, loss and
optimizer, as in bench.block. Each point is a step, timed alone; a short step before it builds its kernels.
Predicted seconds and bytes stand beside. FPDT's authors found chunks of 64K best.

On an H200 a step takes about 7.5 s (`sweep`) and 9.5 s (`fpdt`), and a point some seconds more to make its model: the
twelve points about 170 s.
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.block import measure
from bench.points import Row, file_name, points_command_line, print_table, run_points
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.parallel.axes import Axes
from ithaca.parallel.mesh import Mesh
from ithaca.plans.plan import Plan
from ithaca.rehearsal.rehearse import loopback_mesh
from ithaca.rehearsal.scene import Scene

RECIPES = {"fpdt": "#c0392b", "sweep": "#2c6fbb"}  # with the colors of their lines
CHUNKS = "8K,16K,32K,64K,128K,256K"
HEADER = ("", "seconds", "predicted", "tokens/s", "reserved", "predicted", "allocated")
SPEED, MEMORY = ("seconds", "seconds_predicted"), ("peak_bytes", "peak_bytes_predicted")


def play_point(plan: Plan, args: Namespace, grid: Mesh) -> Row:
    """A step of one Plan, after a short one."""
    assert plan.chunk is not None
    scene = Scene(
        model=args.model, plan=plan, tokens=args.tokens, axes=grid.axes, layers=1, hold_absent=False, once=True
    )
    return measure(scene, grid, args.repeats) | {"chunk": plan.chunk}


def cells(row: Row) -> list[str]:
    """One line of the table."""
    if "error" in row:
        return [row["point"], *["–"] * (len(HEADER) - 1)]
    predicted = row["seconds_predicted"], row["peak_bytes_predicted"]
    return [
        row["point"],
        f"{row['seconds']:.3f}",
        f"{predicted[0]:.3f}" if predicted[0] else "–",
        f"{row['tokens_per_second_per_gpu']:.0f}",
        format_bytes(row["peak_bytes"]),
        format_bytes(predicted[1]) if predicted[1] else "–",
        format_bytes(row["peak_bytes_allocated"]),
    ]


def best(rows: list[Row], name: str) -> Row | None:
    """The row with the fewest seconds, measured or predicted."""
    return min((row for row in rows if row[name]), key=lambda row: row[name], default=None)


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draw speed and memory over the chunk, measured and predicted, with the fastest chunk of each marked."""
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 3.8))
    for recipe, color in RECIPES.items():
        found = [row for row in rows if row.get("recipe") == recipe]
        for name, style in zip(SPEED, ("o-", "--"), strict=True):
            label = f"{recipe}, {'measured' if name == 'seconds' else 'predicted'}"
            some = [row for row in found if row[name]]
            speed.plot(
                [row["chunk"] for row in some], [_rate(row, name) for row in some], style, color=color, label=label
            )
            if row := best(found, name):
                filled = color if name == "seconds" else "none"
                speed.plot(row["chunk"], _rate(row, name), "*", color=color, markerfacecolor=filled, markersize=15)
        for name, style in zip(MEMORY, ("o-", "--"), strict=True):
            some = [row for row in found if row[name]]
            memory.plot([row["chunk"] for row in some], [row[name] / 2**30 for row in some], style, color=color)
    chunks = sorted({row["chunk"] for row in rows if "chunk" in row})
    for axes, label in ((speed, "tokens/s of a rank, one layer"), (memory, "peak reserved, GiB")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(chunks, [format_tokens(chunk) for chunk in chunks])
        axes.set_xlabel("chunk (★ fastest: filled measured, hollow predicted)" if axes is speed else "chunk")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    speed.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _rate(row: dict[str, Any], name: str) -> float:
    return row["tokens_per_second_per_gpu"] * row["seconds"] / row[name]


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tokens", default="1M", type=parse_tokens)
    parser.add_argument("--ranks", default=8, type=int, help="Ulysses ranks; one of them runs")
    parser.add_argument("--chunks", default=CHUNKS, help="lengths of chunks, with commas between them")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", default=1, type=int)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.tokens, args.ranks, args.chunks = "tiny", 512, 4, "64,128,256"
    grid = loopback_mesh(Axes(ulysses=args.ranks))
    # From long chunks to short ones: if the time is over, the flat end of the curve is missing
    chunks = sorted(map(parse_tokens, args.chunks.split(",")), reverse=True)
    points = [
        (
            f"{recipe} {format_tokens(chunk)}",
            partial(play_point, Plan(recipe=recipe, chunk=chunk, kernel=args.kernel), args, grid),
        )
        for chunk in chunks
        for recipe in RECIPES
    ]
    length = format_tokens(args.tokens)
    stem = f"chunks-{args.model}-{length}-{args.ranks}"
    rows = run_points(stem, points, args, lambda row: "  ".join(cells(row)))
    title = f"One layer of {args.model}, {length} tokens, rank 0 of {args.ranks}, messages looped back"
    print_table(title, HEADER, [*map(cells, rows)])
    for recipe in RECIPES:
        found = [row for row in rows if row.get("recipe") == recipe]
        fastest = [best(found, name) for name in SPEED]
        words = [format_tokens(row["chunk"]) if row else "–" for row in fastest]
        print(f"{recipe}: fastest with chunks of {words[0]}, predicted {words[1]}")
    if any("error" not in row for row in rows):
        draw(rows, title, args.out / f"{file_name(stem, args)}.png")


if __name__ == "__main__":
    main()
