"""Untied Ulysses over its option `heads`: memory and speed of one layer, as a table and a picture.

    python -m bench.untied --tokens 1M --ranks 8

Each result is a rehearsal, as in bench.block: a step of one layer with embedding, loss and optimizer, on one rank whose
messages come back to it, so time has no links between GPUs in it. `alst` (all heads in one round, otherwise the same)
and `sweep` run beside it. Peaks are torch's allocations. All three keep block inputs in host memory.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.block import line, measure
from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import split_heads, usable_rounds
from ithaca.plans.plan import Plan
from ithaca.rehearsal.rehearse import loopback_mesh
from ithaca.rehearsal.scene import Scene


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw memory and speed of `untied` over U; the other recipes are horizontal lines."""
    untied = [row for row in rows if row["recipe"] == "untied"]
    others = [row for row in rows if row["recipe"] != "untied"]
    heads = [row["heads"] for row in untied]
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, name, label in (
        (memory, "peak_gib", "peak allocated, GiB"),
        (speed, "tokens_per_second_per_gpu", "tokens/s of a rank, one layer"),
    ):
        axes.plot(heads, [row[name] for row in untied], "o-", color="#c0392b", label="untied")
        for row, color in zip(others, ("#7f8c8d", "#2c6fbb"), strict=True):
            axes.axhline(row[name], color=color, linestyle="--", label=row["recipe"])
        axes.set_xticks(heads)
        axes.set_xlabel("U, query heads of a round")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    memory.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tokens", default="1M", type=parse_tokens)
    parser.add_argument("--ranks", default=8, type=int, help="Ulysses ranks; one of them runs")
    parser.add_argument("--repeats", default=1, type=int)
    args = parser.parse_args()
    spec = read_spec(find_config(args.model)[0])
    rounds = usable_rounds(split_heads(spec.heads, spec.kv_heads, args.ranks))
    plans = [Plan(recipe="alst"), Plan(recipe="sweep"), *(Plan(recipe="untied", heads=heads) for heads in rounds)]
    grid = loopback_mesh(Axes(ulysses=args.ranks))
    bound, rows = matmul_tflops(grid.device), []
    for plan in plans:
        scene = Scene(model=args.model, plan=plan, tokens=args.tokens, axes=grid.axes, layers=1, hold_absent=False)
        row = measure(scene, grid, args.repeats)
        row |= {
            "heads": plan.heads,
            "peak_gib": row["peak_bytes_allocated"] / 2**30,
            "peak_d": row["peak_bytes_allocated"] / row["d_bytes"],
            "matmul_tflops": bound,
        }
        rows.append(row)
        print(f"{line(row)}  U {plan.heads or '–'}", flush=True)
    length = format_tokens(args.tokens)
    name = f"untied-{args.model}-{length}-{args.ranks}"
    print(f"Results in {record(name, rows, args.out, args.commit)}")
    title = f"One layer of {args.model}, {length} tokens, rank 0 of {args.ranks}, messages looped back"
    draw(rows, title, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
