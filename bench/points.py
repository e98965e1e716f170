"""What benchmarks of many points share: the loop over the points, their memory, this GPU for the planner, the table.

All points run in one process, and their results are recorded after each. A point that fails is recorded with its error,
and the next one runs. With --limit SECONDS none begins after that time.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.record import command_line, record
from ithaca.attention.documents import Pieces
from ithaca.base.sizes import parse_bytes
from ithaca.planner.hardware import MEASURED_ON, RUNTIME, Cluster, nearest, read_gpus
from ithaca.tape.budget import host_budget

HOST = parse_bytes("120GB")  # host memory that is assumed where there is no GPU
SHORTEST_DOCUMENT = 64  # tokens
Row = dict[str, Any]


def points_command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks and those of benchmarks of many points."""
    parser = command_line(doc)
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no other point after this time")
    parser.add_argument("--smoke", action="store_true", help="a tiny form of everything, to try the script on a CPU")
    parser.add_argument("--only", metavar="TEXT", help="run only the points whose names contain this")
    parser.add_argument("--name", default="", help="added to the name of the file of results")
    return parser


def file_name(stem: str, args: argparse.Namespace) -> str:
    """The name of the file of results."""
    return "-".join(word for word in (stem, args.name, "smoke" * args.smoke) if word)


def run_points(
    stem: str, points: Iterable[tuple[str, Callable[[], Row]]], args: argparse.Namespace, say: Callable[[Row], str]
) -> list[Row]:
    """Run the points one by one and return their rows; `say` makes a line of a row without error."""
    began, rows = vars(args).setdefault("began", time.perf_counter()), []  # tables of one run share the limit
    for name, work in points:
        if args.only and args.only not in name:
            continue
        if args.limit is not None and time.perf_counter() - began > args.limit:
            row = {"point": name, "error": f"not run: --limit {args.limit:g} s were over"}
        else:
            row = {"point": name, **attempt(work)}
        rows.append(row)
        record(file_name(stem, args), rows, args.out, args.commit)
        print(f"{name}: {row['error']}" if "error" in row else say(row), flush=True)
    return rows


def attempt(work: Callable[[], Row]) -> Row:
    """What `work` returns, or its error as a row. The memory that it leaves is given back."""
    try:
        return work()
    except Exception as problem:  # whatever it is, the other points can still run
        return {"error": describe(problem), "out_of_memory": isinstance(problem, torch.OutOfMemoryError)}
    finally:
        free_memory()


def describe(problem: Exception) -> str:
    """An error in one line."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0][:300]}"


def free_memory() -> None:
    """Give the memory of what is not used any more back to the device, and start to look for peaks again."""
    gc.collect()  # modules under FSDP2 refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """The most bytes of the GPU that were allocated and reserved since `free_memory`; 0 on a CPU."""
    if not torch.cuda.is_available():
        return {"peak_bytes_allocated": 0, "peak_bytes": 0}
    return {"peak_bytes_allocated": torch.cuda.max_memory_allocated(), "peak_bytes": torch.cuda.max_memory_reserved()}


def cluster_here(hardware: Path | None = None) -> Cluster:
    """This machine with its one GPU, as a run would describe it to the planner; without a GPU, one H200."""
    known = read_gpus(hardware)
    if not torch.cuda.is_available():
        return Cluster(1, known[MEASURED_ON], HOST, node_gpus=1)
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    gpu = nearest(properties.name, properties.total_memory, known)
    return Cluster(1, replace(gpu, memory=float(min(total, free + RUNTIME))), host_budget()[0], node_gpus=1)


def packed(tokens: int, mean: int = 4096, seed: int = 0) -> tuple[int, ...]:
    """Bounds of documents of unequal lengths, exponentially distributed about a mean, the same for the same seed."""
    draw, bounds = random.Random(seed), [0]
    while tokens - bounds[-1] > 2 * SHORTEST_DOCUMENT:
        length = max(round(draw.expovariate(1 / mean)), SHORTEST_DOCUMENT)
        bounds.append(min(bounds[-1] + length, tokens))
    if bounds[-1] < tokens:
        bounds.append(tokens)
    return tuple(bounds)


def attention_flops(pieces: Pieces, heads: int, head_size: int) -> int:
    """FLOPs of the forward pass of attention; backward counts as 2.5 times as many."""
    sides = zip(pairwise(pieces.q_bounds), pairwise(pieces.k_bounds), strict=True)
    pairs = sum((q_stop - q_start) * (k_stop - k_start) for (q_start, q_stop), (k_start, k_stop) in sides)
    return (2 if pieces.causal else 4) * pairs * heads * head_size


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below each other, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        cells = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  " + "  ".join([f"{row[0]:{widths[0]}}", *cells]))
