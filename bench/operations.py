"""What the GPU and its host do in one training step: operations, busy seconds, synchronisations, copies from the host.

    python -m bench.operations --model smollm2-135m --tokens 64K --documents packed --plan "recipe=sweep" --plan ""
    python -m bench.operations --model llama3.2-1b --tokens 32K --plan "checkpoint=none; kernel=cudnn+flash"

Each --plan runs in turn: warm-up steps, --repeats steps without a profiler, whose median counts, and one step under
torch's profiler. An operation is a kernel, a copy or a fill of memory. Ranges that a program names, such as FSDP2's or
the optimizer's, are on the GPU's track as well and are left out. `busy` is the time in which at least one operation
runs; `kernel_seconds` adds up all of them. Synchronisations are those within the step. Without --documents the sequence
is one document; `packed` are unequal ones of 4K tokens on average.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import ithaca
from bench.block import read_documents
from bench.points import Row, free_memory, packed, peaks, points_command_line, print_table, run_points
from bench.record import read_plan
from bench.step import Steps, read_source
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.planner.hardware import causal_mfu, peak_flops
from ithaca.profile.spans import covered

STEP = "bench.operations step"  # the range that the profiler records
SYNCHRONISATIONS = {
    "stream_synchronisations": ("cudaStreamSynchronize", "cuStreamSynchronize"),
    "device_synchronisations": ("cudaDeviceSynchronize", "cuCtxSynchronize"),
    "event_synchronisations": ("cudaEventSynchronize", "cuEventSynchronize"),
}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
MOST_NAMES = 25  # kinds of operations that are recorded, those that take longest


def count(events: Iterable[Any]) -> Row:
    """Figures of the events of a profile in which a step ran under the name `STEP`."""
    everything = list(events)
    host = [event for event in everything if event.device_type == DeviceType.CPU]
    named = {event.name for event in host if event.is_user_annotation} | {STEP}
    (step,) = (event.time_range for event in host if event.name == STEP)
    calls = Counter(event.name for event in host if step.start <= event.time_range.start <= step.end)
    gpu = [
        event
        for event in everything
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and event.name not in named
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in gpu]
    kinds = Counter(event.name for event in gpu)
    times: Counter[str] = Counter()
    for event in gpu:
        times[event.name] += event.time_range.end - event.time_range.start
    return {
        "operations": len(gpu),
        "launches": sum(calls[name] for name in LAUNCHES),
        "busy_seconds": covered(spans) / 1e6,
        "kernel_seconds": sum(times.values()) / 1e6,
        **{word: sum(calls[name] for name in names) for word, names in SYNCHRONISATIONS.items()},
        "host_to_device_copies": sum(number for name, number in kinds.items() if "HtoD" in name),
        "device_to_host_copies": sum(number for name, number in kinds.items() if "DtoH" in name),
        "longest": [
            {"name": name[:120], "seconds": time / 1e6, "operations": kinds[name]}
            for name, time in times.most_common(MOST_NAMES)
        ],
        "most": [{"name": name[:120], "operations": number} for name, number in kinds.most_common(MOST_NAMES)],
    }


def measure(model: str, layers: int | None, bounds: tuple[int, ...], plan: ithaca.Plan, repeats: int) -> Row:
    """The figures of a step of a model over documents with these bounds."""
    free_memory()
    steps, tokens = Steps(read_source(model, layers, "auto"), plan), bounds[-1]
    steps.model.allocate(1, tokens)
    batch = steps.batch(tokens, bounds)
    first = steps.run(batch).item()
    steps.run(batch)
    seconds = statistics.median(steps.timed(batch) for _ in range(repeats))
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]) as profiled:
        began = steps.now()
        with record_function(STEP):
            steps.run(batch)
        wall = steps.now() - began
    return {
        "model": model,
        "layers": steps.model.spec.layers,
        "tokens": tokens,
        "documents": len(bounds) - 1,
        "plan": {name: value for name, value in vars(steps.model.plan).items() if value is not None},
        "kernel": steps.model.kernel.name,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu_causal": _mfu(steps, batch, tokens / seconds),
        "wall_seconds_profiled": wall,
        **count(profiled.events() or ()),
        **peaks(),
        "first_loss": first,
    }


def _mfu(steps: Steps, batch: ithaca.Batch, rate: float) -> float | None:
    """Causal MFU; None without a GPU that a table describes."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(steps.model.mesh.device)
    peak = peak_flops(properties.name, properties.total_memory)
    return causal_mfu(steps.model.spec, batch.attended, rate, peak) if peak else None


HEADER = ("", "seconds", "tokens/s", "operations", "busy s", "profiled s", "stream syncs", "all syncs", "HtoD copies")


def cells(row: Row) -> list[str]:
    """One line of the table."""
    if "error" in row:
        return [row["point"], *["–"] * (len(HEADER) - 1)]
    return [
        row["point"],
        f"{row['seconds']:.4f}",
        f"{row['tokens_per_second']:.0f}",
        str(row["operations"]),
        f"{row['busy_seconds']:.4f}",
        f"{row['wall_seconds_profiled']:.4f}",
        str(row["stream_synchronisations"]),
        str(sum(row[word] for word in SYNCHRONISATIONS)),
        str(row["host_to_device_copies"]),
    ]


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", default="64K", type=parse_tokens)
    parser.add_argument("--documents", help="'packed', or lengths as 64x1K+700, which replace --tokens")
    parser.add_argument("--plan", action="append", help="a Plan, as shown above; may be repeated")
    parser.add_argument("--repeats", default=5, type=int)
    args = parser.parse_args()
    use_expandable_segments()
    if args.smoke:
        args.model, args.tokens, args.repeats = "tiny", 256, 1
    bounds = (0, args.tokens)
    if args.documents:
        bounds = packed(args.tokens) if args.documents == "packed" else read_documents(args.documents)
    plans = args.plan or ["recipe=sweep", "checkpoint=none"]
    points = [
        (text or "the default Plan", partial(measure, args.model, args.layers, bounds, read_plan(text), args.repeats))
        for text in plans
    ]
    stem = f"operations-{args.model}-{format_tokens(bounds[-1])}"
    rows = run_points(stem, points, args, lambda row: "  ".join(cells(row)))
    print_table(f"{args.model}, {bounds[-1]} tokens in {len(bounds) - 1} documents", HEADER, [*map(cells, rows)])


if __name__ == "__main__":
    main()
