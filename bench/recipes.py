"""Is the Plan that the planner picks the fastest? Every way to run some models at some lengths, on one GPU.

    python -m bench.recipes --dry-run              points, candidates and predictions; needs no GPU
    python -m bench.recipes                        run them all: about twelve minutes on an H200
    python -m bench.recipes --points fresh --hardware rates.toml --limit 300

At each point every candidate runs that fits by prediction: `dense` with each way to checkpoint, `sweep` with everything
on the device, as the planner places it, and with its defaults (in host memory). Candidates that come to the same Plan
run once. Left out are candidates whose predicted time is above 3 times the best one's, and those that would pin more
host memory than --pinned allows, because pinning takes longer than the steps. Packed sequences have unequal documents
of 4K tokens on average. The points `tuned` may be used to tune predictions; `fresh` and `host` never were.
Two constants were changed after `graphs` had run, so `graphs-again` has new points.

Seconds are medians of whole steps (forward, backward, clipping, AdamW; bf16 with fp32 shards). Peaks are what torch's
allocator reserved. Steps of small models wait for the host, whose speed changes with whatever else its machine does:
seven steps of one setting took 0.085 to 0.124 s beside an H200. A prediction that is bound by the host rests on the
fastest step of `--measure`, and is compared with the fastest step.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from bench.points import (
    Row,
    attempt,
    cluster_here,
    file_name,
    free_memory,
    packed,
    peaks,
    points_command_line,
    print_table,
    run_points,
)
from bench.step import Steps, read_source
from ithaca.attention.documents import attended_length
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.sizes import format_bytes, format_tokens, parse_bytes, parse_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.planner.hardware import CPU, Cluster, causal_mfu
from ithaca.planner.search import search
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory
from ithaca.tape.spec import Budget

TOO_SLOW = 3.0  # times the best prediction: such a candidate is left out
BUILD = 1.0  # seconds to build a model, assumed for the estimate
PIN = 0.65 / 2**30  # seconds to pin a byte of host memory, measured on the machine of the H200
COMPILE = 45.0  # seconds to load torch and compile kernels, assumed for the estimate
STEPS = ((0.15, (4, 20)), (0.3, (2, 7)), (0.8, (1, 3)), (1.3, (1, 2)), (float("inf"), (1, 1)))
"""Predicted seconds below which so many steps warm up and so many are timed."""
ON_DEVICE = {"x": "device", "o": "device", "residual": "device"}
DOCUMENTS_KNOWN = "documents" in {field.name for field in fields(Job)}


@dataclass(frozen=True)
class Point:
    """A model, some or all of its layers, and a sequence of one document or of many."""

    model: str
    tokens: int
    packed: bool = False
    layers: int | None = None

    @property
    def name(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.model}{layers}, {format_tokens(self.tokens)}{' packed' * self.packed}"

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds of the documents."""
        mean = 4096 if self.tokens >= 8192 else self.tokens // 4
        return packed(self.tokens, mean, seed=self.tokens) if self.packed else (0, self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the documents."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @property
    def spec(self) -> Spec:
        spec = read_spec(find_config(self.model)[0])
        return spec.with_layers(self.layers) if self.layers else spec


def _points(model: str, layers: int | None, one: str, many: str) -> list[Point]:
    """Points of a model: lengths of one document, and lengths of packed sequences."""
    return [
        Point(model, parse_tokens(length), is_packed, layers)
        for is_packed, lengths in ((False, one), (True, many))
        for length in lengths.split()
    ]


POINTS: dict[str, list[Point]] = {
    "fresh": [
        *_points("smollm2-135m", None, "6K 24K 48K", "16K 48K 96K 192K"),
        *_points("smollm2-135m", 4, "", "256K"),
        *_points("llama3.2-1b", None, "8K 24K", "16K 48K 128K"),
        *_points("llama3.2-1b", 8, "48K", ""),
        *_points("llama3.2-3b", 8, "4K 24K", "8K"),
        *_points("llama3.2-3b", 4, "", "64K"),
        *_points("qwen3-8b", 4, "4K 16K", "32K"),
        *_points("llama3-8b", 4, "8K", "32K"),
        *_points("llama3-8b", 2, "64K", "128K"),
        *_points("llama3-8b", 1, "", "256K"),
    ],
    "tuned": [
        *_points("smollm2-135m", None, "4K 8K 16K 32K 64K", "8K 32K 64K 128K 256K"),
        *_points("smollm2-135m", 2, "256K", ""),
        *_points("llama3.2-1b", None, "4K 16K 32K", "8K 64K"),
        *_points("llama3.2-1b", 8, "64K", ""),
        *_points("llama3.2-1b", 4, "", "256K"),
        *_points("llama3.2-3b", 8, "8K 32K", "16K"),
        *_points("llama3.2-3b", 4, "", "128K"),
        *_points("llama3-8b", 4, "4K 16K 32K", "64K"),
        *_points("llama3-8b", 2, "128K", "256K"),
    ],
    # Steps that wait for the host; chosen after `fresh` had shown that one number of the host did not predict them
    "host": [
        *_points("smollm2-135m", None, "3K 9K 14K", "11K 20K"),
        *_points("llama3.2-1b", None, "2K 6K", ""),
        *_points("llama3.2-3b", 8, "2K", ""),
    ],
    # Steps that would wait for the host, and are launched as CUDA graphs: two points of `fresh`, and new ones
    "graphs": [
        *_points("smollm2-135m", None, "5K 6K 7K 10K", "6K 12K 16K 18K"),
        *_points("llama3.2-1b", None, "3K", "4K"),
    ],
    # The same question, chosen after the constants of the optimizer and of captures had followed from `graphs`
    "graphs-again": [
        *_points("smollm2-135m", None, "2K 3584 11K", "5K 7K 9K 14K"),
        *_points("llama3.2-1b", None, "2560", "3K 5K"),
    ],
}
SMOKE = {
    "tuned": _points("tiny", None, "256", ""),
    "fresh": _points("tiny", 2, "", "512"),
    "host": _points("tiny", 1, "128", ""),
    "graphs": _points("tiny", 1, "", "128"),
    "graphs-again": _points("tiny", 1, "96", ""),
}


@dataclass(frozen=True)
class Candidate:
    """A Plan for a point, with what is predicted for it."""

    name: str
    plan: Plan
    key: tuple[Any, ...]  # equal for Plans that run in the same way
    seconds: float
    peak: int
    host: int  # bytes of host memory for tapes
    fits: bool
    waits: bool  # for the host, which launches operations more slowly than the GPU runs them

    def steps(self, smoke: bool) -> tuple[int, int]:
        """How many steps warm up, and how many are timed."""
        if smoke:
            return 1, 1
        return next(counts for most, counts in STEPS if self.seconds < most)

    @property
    def estimate(self) -> float:
        """Seconds that this candidate will take."""
        return BUILD + PIN * self.host + sum(self.steps(False)) * self.seconds


def job_of(point: Point, plan: Plan) -> Job:
    """A point under a Plan."""
    known: dict[str, Any] = {}
    if point.packed:
        # A planner that knows no documents takes equal sequences with as many pairs of tokens instead
        known = {"documents": point.lengths} if DOCUMENTS_KNOWN else {"sequence": round(attended_length(point.bounds))}
    return Job(spec=point.spec, plan=plan, tokens=point.tokens, **known)


def _search(point: Point, cluster: Cluster, recipe: str | None = None) -> Plan | None:
    """The Plan that the planner picks."""
    known: dict[str, Any] = {}
    if DOCUMENTS_KNOWN and point.packed:
        documents = import_module("ithaca.planner.documents").Documents
        known = {"documents": documents("packed", np.array(point.bounds), packed=False)}
    answer = search(point.spec, cluster, point.tokens, recipe, **known)
    return answer.plan if answer else None


def candidate(name: str, point: Point, plan: Plan, cluster: Cluster) -> Candidate:
    """A Plan with its predictions."""
    job = job_of(point, plan)
    memory, settled = step_memory(job), job.plan
    seconds = predict_seconds(job, cluster.gpu, cluster.machine)
    options = vars(replace(settled, x=None, o=None, disk=None)) | {"chunk": job.layout.tiles.size, "tile": job.tile}
    return Candidate(
        name,
        plan,
        (*options.values(), settled.placement(point.spec.layers)),
        seconds.step,
        memory.total,
        memory.host,
        Budget(memory.total, memory.host, memory.disk).within(cluster.budget),
        seconds.launching > seconds.computing,
    )


def candidates(point: Point, cluster: Cluster) -> list[Candidate]:
    """The picked Plan, then all others that run in another way."""
    picked = _search(point, cluster)
    plans: dict[str, Plan | None] = {"picked": picked}
    zero = picked.zero if picked else Plan().zero
    for options in RECIPES["dense"].tries:
        if options["x"] == "device":
            plans[f"dense {options['checkpoint']}"] = Plan(recipe="dense", zero=zero, **options)
    plans |= {
        "sweep device": Plan(recipe="sweep", zero=zero, **ON_DEVICE),
        "sweep planned": _search(point, cluster, "sweep"),
        "sweep host": Plan(recipe="sweep", zero=zero),
    }
    found: dict[tuple[Any, ...], Candidate] = {}
    for name, plan in plans.items():
        if plan is not None:
            new = candidate(name, point, plan, cluster)
            same = found.get(new.key)
            found[new.key] = replace(same, name=f"{same.name} = {name}") if same else new
    return [*found.values()]


def left_out(one: Candidate, among: list[Candidate], pinned: int) -> str | None:
    """Why a candidate does not run; None if it does."""
    best = min((other.seconds for other in among if other.fits), default=0.0)
    if not one.fits:
        return "does not fit by prediction"
    if one.name.startswith("picked"):
        return None
    if one.seconds > TOO_SLOW * best:
        return f"predicted to take {one.seconds / best:.1f} times as long as the best"
    if one.host > pinned:
        return f"would pin {format_bytes(one.host)} of host memory"
    return None


def run_candidate(point: Point, one: Candidate, smoke: bool) -> Row:
    """Median seconds and peak of a candidate's steps."""
    began = time.perf_counter()
    steps = Steps(read_source(point.model, point.layers, "auto"), one.plan)
    steps.model.allocate(1, point.tokens)
    batch = steps.batch(point.tokens, point.bounds)
    free_memory()
    built = time.perf_counter() - began
    warm, repeats = one.steps(smoke)
    losses = [steps.run(batch).item() for _ in range(warm)]
    seconds = [steps.timed(batch) for _ in range(repeats)]
    return {
        "seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "all_seconds": seconds,
        **peaks(),
        "kernel": steps.model.kernel.name,
        "build_seconds": built,
        "first_loss": losses[0],
    }


def run_point(point: Point, kind: str, cluster: Cluster, args: argparse.Namespace) -> Row:
    """Every candidate of a point, predicted and measured."""
    rows, every = [], candidates(point, cluster)
    for one in every:
        reason = left_out(one, every, args.pinned)
        measured: Row = {"left_out": reason} if reason else attempt(partial(run_candidate, point, one, args.smoke))
        rows.append(_described(one) | measured)
        if "seconds" in measured:
            compared = measured["fastest_seconds" if one.waits else "seconds"]
            rows[-1]["step_error"] = _error(rows[-1]["seconds_predicted"], compared)
            rows[-1]["peak_error"] = _error(rows[-1]["peak_predicted"], measured["peak_bytes"])
    ran = [row for row in rows if "seconds" in row]
    best = min(ran, key=lambda row: row["seconds"], default=None)
    picked = next((row for row in ran if row["name"].startswith("picked")), None)
    attended = attended_length(point.bounds)
    return {
        "set": kind,
        "model": point.model,
        "layers": point.spec.layers,
        "tokens": point.tokens,
        "documents": len(point.bounds) - 1,
        "candidates": rows,
        "best": best and best["name"],
        "picked": picked and picked["name"],
        "picked_over_best": best and picked and picked["seconds"] / best["seconds"],
        "mfu_causal": None
        if picked is None or args.smoke
        else causal_mfu(point.spec, attended, point.tokens / picked["seconds"], cluster.gpu.flops),
    }


def _described(one: Candidate) -> Row:
    return {
        "name": one.name,
        "plan": {name: value for name, value in vars(one.plan.settled()).items() if value is not None},
        "seconds_predicted": one.seconds,
        "peak_predicted": one.peak,
        "host_bytes_predicted": one.host,
        "waits_for_host": one.waits,
    }


def _error(predicted: float | None, measured: float) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def _worst(ran: list[Row], key: str) -> float | None:
    """The largest error, with its sign."""
    known: list[float] = [one[key] for one in ran if one[key] is not None]
    return max(known, key=abs, default=None)


def _percent(number: float | None) -> str:
    return "–" if number is None else f"{100 * number:+.1f} %"


def _line(row: Row) -> str:
    parts = [
        f"{one['name']} {one['seconds']:.4f} s ({_percent(one['step_error'])})"
        if "seconds" in one
        else f"{one['name']} – ({one.get('error') or one['left_out']})"
        for one in row["candidates"]
    ]
    return f"{row['point']}: " + "; ".join(parts)


def print_results(rows: list[Row]) -> None:
    """The table, and the worst figures of each set of points."""
    lines = []
    for row in (row for row in rows if row.get("picked")):
        ran = [one for one in row["candidates"] if "seconds" in one]
        picked = next(one for one in ran if one["name"] == row["picked"])
        best = next(one for one in ran if one["name"] == row["best"])
        worst = [_worst(ran, key) for key in ERRORS]
        lines.append(
            [
                f"{row['set']}: {row['point']}",
                f"{picked['plan']['recipe']} {picked['plan'].get('checkpoint', '')}",
                f"{picked['seconds']:.4f}",
                f"{best['seconds']:.4f}",
                f"{row['picked_over_best']:.3f}",
                "" if best is picked else best["name"],
                *(_percent(picked[key]) for key in ERRORS),
                *map(_percent, worst),
            ]
        )
    header = ["", "picked", "s", "best s", "picked/best", "if another", "step", "peak", "worst step", "worst peak"]
    print_table("Picked and best; errors of predictions for the picked Plan, and the worst of all", header, lines)
    for kind in dict.fromkeys(row.get("set") for row in rows if row.get("picked")):
        print(_summary(str(kind), [row for row in rows if row.get("set") == kind and row.get("picked")]))


ERRORS = ("step_error", "peak_error")


def _summary(kind: str, rows: list[Row]) -> str:
    ran = [one for row in rows for one in row["candidates"] if "seconds" in one]
    picked = [one for row in rows for one in row["candidates"] if one["name"] == row["picked"]]
    worst = [_percent(_worst(group, key)) for group in (picked, ran) for key in ERRORS]
    ratios = [row["picked_over_best"] for row in rows]
    return (
        f"{kind}: {len(rows)} points, {sum(ratio <= 1.05 for ratio in ratios)} within 5 % of the best, worst "
        f"{max(ratios):.3f}; picked: step {worst[0]}, peak {worst[1]}; all {len(ran)} candidates: step {worst[2]}, "
        f"peak {worst[3]}"
    )


def dry_run(points: list[tuple[str, Point]], cluster: Cluster, pinned: int) -> None:
    """Print candidates and predictions, and how long the run will take."""
    lines, total = [], COMPILE
    for kind, point in points:
        every = candidates(point, cluster)
        for one in every:
            reason = left_out(one, every, pinned)
            total += 0.0 if reason else one.estimate
            figures = [f"{one.seconds:.3f}", f"{one.peak / 2**30:.1f}", f"{one.host / 2**30:.1f}"]
            lines.append([f"{kind}: {point.name}", one.name, *figures, reason or f"{one.estimate:.1f} s"])
    print_table("Predictions", ["", "candidate", "seconds", "GiB", "host GiB", "takes"], lines)
    if not DOCUMENTS_KNOWN:
        print("This planner knows no documents: predictions for packed sequences are those of equal documents")
    print(f"{len(points)} points: about {total:.0f} s")


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--points", default="fresh,tuned", help="of fresh, tuned, host, graphs and graphs-again")
    parser.add_argument("--pinned", default="1.5GiB", type=parse_bytes, help="host memory that a candidate may pin")
    parser.add_argument("--hardware", help="a file that ithaca plan --measure wrote")
    parser.add_argument("--dry-run", action="store_true", help="print predictions and the time of a run, and stop")
    args = parser.parse_args()
    table = SMOKE if args.smoke else POINTS
    points = [(kind, point) for kind in args.points.split(",") for point in table[kind]]
    if args.only:
        points = [(kind, point) for kind, point in points if args.only in point.name]
    use_expandable_segments()
    cluster = cluster_here(args.hardware)
    if args.smoke:
        cluster = replace(cluster, gpu=replace(cluster.gpu, name=CPU))  # without CUDA graphs
    if args.dry_run:
        dry_run(points, cluster, args.pinned)
        return
    work = [(point.name, partial(run_point, point, kind, cluster, args)) for kind, point in points]
    rows = run_points("recipes", work, args, _line)
    print_results(rows)
    print(f"Results in {args.out / (file_name('recipes', args) + '.json')}")


if __name__ == "__main__":
    main()
