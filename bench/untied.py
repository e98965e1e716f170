"""Untied Ulysses over its dial U, the query heads of a round: memory and speed of one block, as a table and a picture.

    python -m bench.untied --tokens 1M --ranks 8

One rank of several on one GPU, whose messages come back to itself: time has no link between GPUs in it. Beside it, in
the same run, `alst` (all heads in one round, otherwise the same) and `sweep`. Peaks are what torch has allocated at
most, with the block's weights and gradients; block inputs are on the host under each of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.block import measure
from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.model.source import load_model
from ithaca.parallel.head_split import split_heads, usable_rounds
from ithaca.plans.plan import Plan


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Memory and speed against U; the recipes without rounds as lines across."""
    untied = [row for row in rows if row["recipe"] == "untied"]
    heads = [row["heads"] for row in untied]
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, name, label in (
        (memory, "peak_gib", "peak allocated, GiB"),
        (speed, "tokens_per_second", "tokens/s of a rank, one block"),
    ):
        axes.plot(heads, [row[name] for row in untied], "o-", color="#c0392b", label="untied")
        for row, color in zip((row for row in rows if row["recipe"] != "untied"), ("#7f8c8d", "#2c6fbb"), strict=True):
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
    parser.add_argument("--ranks", default=8, type=int)
    parser.add_argument("--repeats", default=1, type=int)
    args = parser.parse_args()
    spec = load_model(args.model).spec
    spec = replace(spec, layers=1, rope_layers=spec.rope_layers[:1])
    plans = [Plan(recipe="alst"), Plan(recipe="sweep")]
    rounds = usable_rounds(split_heads(spec.heads, spec.kv_heads, args.ranks))
    plans += [Plan(recipe="untied", heads=heads) for heads in rounds]
    bound, rows = matmul_tflops(), []
    for plan in plans:
        row = measure(spec, (0, args.tokens), plan.settled(), args.ranks, args.repeats, with_bare=False)
        row |= {
            "heads": plan.heads,
            "peak_gib": row["peak_bytes_allocated"] / 2**30,
            "peak_d": row["peak_bytes_allocated"] / row["d_bytes"],
            "tokens_per_second": args.tokens / args.ranks / row["seconds"],
            "matmul_tflops": bound,
        }
        rows.append(row)
        print(
            f"  {plan.recipe:6} U {plan.heads or '–':>3}  {row['seconds']:.3f} s "
            f"({row['seconds_forward']:.3f} + {row['seconds_backward']:.3f})  "
            f"{100 * row['mfu_causal']:.1f} % causal MFU  "
            f"peak {row['peak_gib']:.2f} GiB allocated, {row['peak_bytes'] / 2**30:.2f} reserved",
            flush=True,
        )
    length = format_tokens(args.tokens)
    name = f"untied-{args.model}-{length}-{args.ranks}"
    title = f"One block of {args.model}, {length} tokens, a rank of {args.ranks}, looped back"
    draw(rows, title, args.out / f"{name}.png")
    print(f"matmul bound {bound:.0f} TFLOP/s -> {record(name, rows, args.out, args.commit)}")


if __name__ == "__main__":
    main()
