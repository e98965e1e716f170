"""Whole training steps of a model on one GPU: forward, backward, clipping and AdamW, in bf16 with fp32 shards.

    python -m bench.step --model llama3.2-1b --tokens 512K --plan "recipe=sweep" --plan "recipe=sweep; o=recompute"

Each --plan runs in turn: two steps over --warm tokens to warm up, then --repeats steps over all tokens, of which the
medians count. Prints and records seconds, tokens/s, causal MFU (of the GPU's own peak, without credit for
recomputation) and the peaks of GPU and host memory. `--layers 4` runs a preset's sizes with fewer layers. One rank of
many, on one GPU: `ithaca rehearse` and bench.block.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

import ithaca
from bench.bounds import matmul_tflops
from bench.record import command_line, read_plan, record
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.base.allocator import ALLOCATOR_VARIABLES, use_expandable_segments
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.optimizer.adamw import clip
from ithaca.planner.hardware import causal_mfu, peak_flops
from ithaca.rehearsal.kernel_bound import synchronize


class Steps:
    """A model with its optimizer, for steps over batches of any length."""

    def __init__(self, source: ModelSource, plan: ithaca.Plan):
        self.model = ithaca.apply(source, plan)
        self.optimizer = ithaca.make_optimizer(self.model, learning_rate=1e-5)
        self.losses: list[float] = []

    def batch(self, tokens: int, documents: tuple[int, ...] | None = None) -> ithaca.Batch:
        """One sequence of random tokens; `documents`: the bounds of its documents."""
        ids = torch.randint(0, self.model.spec.vocab, (1, tokens))
        lengths = torch.tensor(documents or (0, tokens)).diff()
        return self.model.shard(ids, ids, torch.arange(len(lengths)).repeat_interleave(lengths)[None])

    def run(self, batch: ithaca.Batch) -> torch.Tensor:
        """Run a step with no synchronisation of ours and return its loss."""
        loss = self.model(batch)
        loss.backward()
        clip(self.model, 1.0, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed(self, batch: ithaca.Batch) -> float:
        """Seconds of a step, between one synchronisation before it and one after it."""
        began = self.now()
        self.run(batch)
        return self.now() - began

    def step(self, batch: ithaca.Batch) -> dict[str, float]:
        """Run a step and return the seconds of its parts and of all."""
        marks = [self.now()]
        loss = self.model(batch)
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        clip(self.model, 1.0, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.now())
        self.losses.append(loss.item())
        parts = zip(("forward", "backward", "optimizer"), (end - start for start, end in pairwise(marks)), strict=True)
        return {**dict(parts), "seconds": marks[-1] - marks[0]}

    def use(self, kernel: str) -> None:
        """Attend with another kernel from now on."""
        model = self.model
        chosen = choose_kernel(kernel, model.mesh.device, model.dtype, model.spec.head_size)
        model.kernel = chosen

    def now(self) -> float:
        synchronize(self.model.mesh.device)
        return time.perf_counter()


def _reset_host_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # Linux sets the highest resident size to the current one


def _host_peak() -> int:
    """The highest resident size of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def measure(
    source: ModelSource, tokens: int, plan: ithaca.Plan, warm: int, repeats: int, kernels: list[str]
) -> Iterator[dict[str, Any]]:
    """Time and memory of steps over `tokens` tokens, with each of some kernels on one model."""
    before = psutil.Process().memory_info().rss
    steps = Steps(source, plan)
    seen = {name: _warm_up(steps, name, warm) for name in kernels}
    began = steps.now()
    steps.model.allocate(1, tokens)
    allocated = {"reserve_seconds": steps.now() - began, "host_bytes_before": before}
    batch = steps.batch(tokens)
    for name in kernels:
        yield _timed(steps, name, batch, repeats) | {"kernels_seen": seen[name]} | allocated


def _warm_up(steps: Steps, kernel: str, tokens: int) -> list[str]:
    """Run two steps with a kernel; the names of their attention operations."""
    steps.use(kernel)
    steps.step(steps.batch(tokens))
    return attention_operations(steps, tokens)


def _timed(steps: Steps, kernel: str, batch: ithaca.Batch, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` steps with a kernel."""
    steps.use(kernel)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _reset_host_peak()
    taken = [steps.step(batch) for _ in range(repeats)]
    seconds = statistics.median(step["seconds"] for step in taken)
    spec, tokens = steps.model.spec, batch.layout.tokens
    return {
        "layers": spec.layers,
        "parameters": spec.parameters(),
        "tokens": tokens,
        "plan": {name: value for name, value in vars(steps.model.plan).items() if value is not None},
        "kernel": steps.model.kernel.name,
        **{name: statistics.median(step[name] for step in taken) for name in ("forward", "backward", "optimizer")},
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu_causal": _causal_mfu(steps, batch, tokens / seconds),
        "peak_bytes_allocated": torch.cuda.max_memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": _host_peak(),
        "tape_bytes_on_host": steps.model.host_bytes(1, tokens),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        "tapes": steps.model.describe_tapes(),
        "losses": [round(loss, 4) for loss in (steps.losses[0], steps.losses[-1])],
    }


def _causal_mfu(steps: Steps, batch: ithaca.Batch, tokens_per_second: float) -> float | None:
    """Causal MFU; None for a GPU that no table describes."""
    properties = torch.cuda.get_device_properties(steps.model.mesh.device)
    peak = peak_flops(properties.name, properties.total_memory)
    return causal_mfu(steps.model.spec, batch.attended, tokens_per_second, peak) if peak else None


def attention_operations(steps: Steps, tokens: int) -> list[str]:
    """Names of the attention operations that a step runs, from the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps.step(steps.batch(tokens))
    return sorted({event.key for event in profile.key_averages() if "attention" in event.key})


def read_source(name: str, layers: int | None, dtype: str = "bfloat16") -> ModelSource:
    """The model in bf16 or another dtype; with `layers`, random weights for its first layers."""
    source = ithaca.load_model(name, dtype)
    if layers is None:
        return source
    spec = source.spec.with_layers(layers)
    return replace(source, spec=spec, weights=RandomWeights(spec, 0))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", default="32K", type=parse_tokens)
    parser.add_argument("--warm", type=parse_tokens, help="tokens of the warm-up steps; default: all")
    parser.add_argument("--plan", action="append", type=read_plan, help="a Plan, as shown above; may be repeated")
    parser.add_argument("--kernels", help="attention kernels that take turns on one model, as flash4,cudnn+flash")
    parser.add_argument("--repeats", default=1, type=int)
    parser.add_argument("--name", default="", help="added to the name of the file of results")
    args = parser.parse_args()
    use_expandable_segments()
    bound, results = matmul_tflops(torch.device("cuda")), []
    layers = f"-{args.layers}-layers" if args.layers else ""
    name = f"step-{args.model}{layers}-{format_tokens(args.tokens)}{args.name and '-'}{args.name}"
    for plan in args.plan or [ithaca.Plan()]:
        source = read_source(args.model, args.layers)
        kernels = args.kernels.split(",") if args.kernels else [plan.kernel]
        for row in measure(source, args.tokens, plan, args.warm or args.tokens, args.repeats, kernels):
            results.append({"model": args.model, **row, "matmul_tflops": bound})
            record(name, results, args.out, args.commit)  # after each: the next may run out of memory or time
            print(_lines(results[-1]), flush=True)
        gc.collect()  # modules under FSDP2 refer to each other
        torch.cuda.empty_cache()


def _lines(row: dict[str, Any]) -> str:
    plan = {
        key: value
        for key, value in row["plan"].items()
        if key in ("recipe", "checkpoint", "chunk", "x", "o", "optimizer")
    }
    words = ", ".join(f"{key}={value}" for key, value in plan.items())
    mfu = "" if row["mfu_causal"] is None else f"{100 * row['mfu_causal']:.1f} % causal MFU  "
    return (
        f"{row['model']}, {format_tokens(row['tokens'])} tokens, {row['kernel']}, {words}\n"
        f"  {row['seconds']:.2f} s (forward {row['forward']:.2f}, backward {row['backward']:.2f}, "
        f"optimizer {row['optimizer']:.2f})  {row['tokens_per_second']:.0f} tokens/s  "
        f"{mfu}GPU {format_bytes(row['peak_bytes'])} "
        f"({format_bytes(row['peak_bytes_allocated'])} allocated)  host {format_bytes(row['host_bytes'])}, "
        f"of it tapes {format_bytes(row['tape_bytes_on_host'])}"
    )


if __name__ == "__main__":
    main()
