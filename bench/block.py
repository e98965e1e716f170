"""A few layers of a model on one GPU: time, memory and causal MFU of a Plan, and the lower bound of its time.

    python -m bench.block --tokens 256K,512K                        the sweep against its lower bound
    python -m bench.block --tokens 256K,1M --no-bare --repeats 1    memory: by how many d the peak grows
    python -m bench.block --tokens 1M --ranks 8 --recipe sweep,untied
    python -m bench.block --tokens 32K --plan "recipe=sweep; x=device; o=device; residual=device" --no-bare
    python -m bench.block --documents 256K,64x4K,192K+64x1K         time against Σ length²
    python -m bench.block --tokens 5M --ranks 8 --once --hold --plan "recipe=sweep; lse=host; optimizer=host; chunk=32K"
    python -m bench.block --model llama2-7b --tokens 4M --ranks 8 --once --hold --plan "recipe=sweep; lse=host; heads=8"

Each result is a rehearsal (ithaca/rehearsal): this process runs one rank, and its messages come back to it. A step is a
step of these layers with embedding, loss and optimizer. Memory is that of a model with these layers only or, with
--hold, that of the whole model. Results of commit 651f103b5e06 and before are smaller: they are of blocks alone.

Seconds are medians of --repeats rehearsals; before a step that is timed alone (--once), a short one builds its kernels,
which those of commit 217f30e and before lack. `attention` is the time of attention kernels within the step. `bare`, the
lower bound of forward and backward, is the time of their attention kernels and matrix products alone. 1 d is one hidden
state of this rank's tokens. Causal MFU is relative to the GPU's own peak, without credit for recomputation.
"""

import gc
import statistics
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from bench.bounds import matmul_tflops
from bench.record import command_line, read_plan, record
from ithaca.attention.documents import attended_length
from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.mesh import Mesh
from ithaca.planner.documents import parse_documents
from ithaca.plans.plan import Plan
from ithaca.rehearsal.rehearse import loopback_mesh, run_scene
from ithaca.rehearsal.scene import Scene

TIMES = ("seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "attention_seconds")


def measure(scene: Scene, grid: Mesh, repeats: int) -> dict[str, Any]:
    """The report of a rehearsal, with medians of its times over `repeats` of them."""
    if scene.once:
        _run_scene(replace(scene, tokens=scene.warm_tokens, documents=None, bare=False), grid)
    reports = [_run_scene(replace(scene, bare=False), grid) for _ in range(repeats - 1)]
    reports.append(_run_scene(scene, grid))
    report = reports[-1] | {name: statistics.median(each[name] for each in reports) for name in TIMES}
    for rate in ("tokens_per_second_per_gpu", "mfu_causal"):
        if report[rate] is not None:
            report[rate] *= reports[-1]["seconds"] / report["seconds"]
    if scene.bare:
        report["over_bare"] = (report["forward_seconds"] + report["backward_seconds"]) / report["bare_seconds"]
    bounds = scene.documents or (0, scene.tokens)
    dtype = torch.bfloat16 if grid.gpu else torch.float32
    job = scene.job(read_spec(find_config(scene.model)[0]), dtype, report["kernel"])
    return report | {
        "documents": len(bounds) - 1,
        "attended": attended_length(bounds),
        "d_bytes": job.hidden(job.layout.local),
        "repeats": repeats,
    }


def _run_scene(scene: Scene, grid: Mesh) -> dict[str, Any]:
    gc.collect()  # modules under FSDP2 refer to each other
    if grid.gpu:
        torch.cuda.empty_cache()
    return run_scene(scene, grid)


def add_slopes(rows: list[dict[str, Any]]) -> None:
    """Add to each row the growth of its peak since the shorter row before it, in d."""
    for shorter, longer in pairwise(rows):
        growth = longer["d_bytes"] - shorter["d_bytes"]
        if shorter["plan"] == longer["plan"] and growth > 0:
            longer["slope_d"] = (longer["peak_bytes_allocated"] - shorter["peak_bytes_allocated"]) / growth
            lengths = " to ".join(format_tokens(row["tokens"]) for row in (shorter, longer))
            print(f"  {longer['recipe']}, {lengths}: the peak grows by {longer['slope_d']:.3f} d")


def compare_layouts(rows: list[dict[str, Any]]) -> None:
    """Add to each row the times that Σ length² and the first layout of its Plan predict."""
    for row in rows:
        first = next(each for each in rows if each["plan"] == row["plan"])
        row["work_share"] = row["attended"] * row["tokens"] / (first["attended"] * first["tokens"])
        attention = first["attention_seconds"] * row["work_share"]
        row["attention_seconds_expected"] = attention
        row["seconds_expected"] = first["seconds"] - first["attention_seconds"] + attention
        print(
            f"  {row['recipe']}, {row['documents']} documents, Σ length² {100 * row['work_share']:.2f} % of the "
            f"first layout's: step {row['seconds']:.3f} s, {row['seconds'] / row['seconds_expected']:.3f} × expected; "
            f"attention {row['attention_seconds']:.3f} s, {row['attention_seconds'] / attention:.3f} × expected"
        )


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    text = (
        f"  {row['recipe']:7} {format_tokens(row['tokens']):>5} in {row['documents']:3} documents  "
        f"{row['seconds']:.3f} s (forward {row['forward_seconds']:.3f}, backward {row['backward_seconds']:.3f}, "
        f"optimizer {row['optimizer_seconds']:.3f}; attention {row['attention_seconds']:.3f})  "
    )
    if row["mfu_causal"] is not None:
        text += f"{100 * row['mfu_causal']:.1f} % causal MFU  "
    text += f"peak {format_bytes(row['peak_bytes_allocated'])} allocated, {format_bytes(row['peak_bytes'])} reserved"
    if "over_bare" in row:
        text += f"  {row['over_bare']:.3f} × bare {row['bare_seconds']:.3f} s"
    return text


def read_documents(text: str) -> tuple[int, ...]:
    """'192K+64x1K' -> the bounds of these documents."""
    return (0, *accumulate(parse_documents(text)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", default=1, type=int)
    parser.add_argument("--tokens", default="256K", help="one length, or several with commas between them")
    parser.add_argument("--documents", help="layouts of documents in place of --tokens, as 64x4K,192K+64x1K")
    parser.add_argument("--ranks", default=1, type=int, help="ranks that share a sequence; one of them runs")
    parser.add_argument("--ring", default=1, type=int, help="ring ranks among them; the others are Ulysses ranks")
    parser.add_argument("--recipe", default="sweep", help="one recipe, or several with commas between them")
    parser.add_argument("--plan", action="append", type=read_plan, help="a Plan in place of --recipe, as shown above")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--once", action="store_true", help="time one step, after a short one that builds its kernels")
    parser.add_argument("--hold", action="store_true", help="hold the memory of layers that do not run")
    parser.add_argument("--no-bare", action="store_true", help="do not time the kernels and products alone")
    parser.add_argument("--name", help="name of the file of results")
    args = parser.parse_args()
    if args.ranks % args.ring:
        raise SystemExit(f"--ring {args.ring} does not divide --ranks {args.ranks}: --ring 1 does")
    axes = Axes(ring=args.ring, ulysses=args.ranks // args.ring)
    plans = args.plan or [Plan(recipe=recipe) for recipe in args.recipe.split(",")]
    layouts = [read_documents(text) for text in (args.documents or args.tokens).split(",")]
    recipes = "-".join(dict.fromkeys(plan.recipe for plan in plans))
    name = args.name or f"block-{args.model}-{format_tokens(layouts[0][-1])}-{recipes}"
    grid = loopback_mesh(axes)
    bound, rows = matmul_tflops(grid.device), []
    for plan in plans:
        for bounds in layouts:
            scene = Scene(
                model=args.model,
                plan=plan,
                tokens=bounds[-1],
                axes=axes,
                documents=bounds,
                layers=args.layers,
                hold_absent=args.hold,
                bare=not args.no_bare,
                once=args.once,
            )
            rows.append(measure(scene, grid, args.repeats) | {"matmul_tflops": bound})
            print(line(rows[-1]), flush=True)
            record(name, rows, args.out, args.commit)  # after each: the next may run out of memory or time
    add_slopes(rows)
    if args.documents:
        compare_layouts(rows)
    print(f"Results in {record(name, rows, args.out, args.commit)}")


if __name__ == "__main__":
    main()
