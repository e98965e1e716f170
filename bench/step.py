"""Whole training steps on one GPU: forward, backward, clipping and AdamW, in bf16 with fp32 shards.

    python -m bench.step --model llama3.2-1b --tokens 512K --plan "recipe=sweep" --plan "recipe=sweep; o=recompute"

Each --plan is measured in turn: after steps over --warm tokens, which meet the same tiles, one step over all of them
(or the median of --repeats). Prints seconds, tokens/s, causal MFU (of 989 TFLOP/s, no credit for recomputation), and
the peaks of GPU and host memory, and records them. `--layers 4` takes the model's sizes with fewer layers.
"""

import gc
import os
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

import ithaca
from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.base.allocator import ALLOCATOR_VARIABLES, use_expandable_segments
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.config import build
from ithaca.model.presets import PRESETS
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import read_spec

PEAK = 989e12


class Steps:
    """A model with its optimizer, stepped over batches of any length."""

    def __init__(self, source: ModelSource, plan: ithaca.Plan):
        self.model = ithaca.apply(source, plan)
        self.optimizer = ithaca.make_optimizer(self.model, learning_rate=1e-5)
        self.losses: list[float] = []

    def batch(self, tokens: int) -> ithaca.Batch:
        ids = torch.randint(0, self.model.spec.vocab, (1, tokens))
        return self.model.shard(ids, ids)

    def step(self, batch: ithaca.Batch) -> dict[str, float]:
        """Seconds of each part."""
        marks = [_now()]
        loss = self.model(batch)
        marks.append(_now())
        loss.backward()
        marks.append(_now())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(_now())
        self.losses.append(loss.item())
        parts = zip(("forward", "backward", "optimizer"), (end - start for start, end in pairwise(marks)), strict=True)
        return {**dict(parts), "seconds": marks[-1] - marks[0]}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _forget_host_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the highest resident size begins anew


def _host_peak() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def measure(source: ModelSource, tokens: int, plan: ithaca.Plan, warm: int, repeats: int) -> dict[str, Any]:
    before = psutil.Process().memory_info().rss
    steps = Steps(source, plan)
    steps.step(steps.batch(warm))
    seen = attention_kernels(steps, warm)
    began = _now()
    steps.model.allocate(1, tokens)
    reserve_seconds = _now() - began
    batch = steps.batch(tokens)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _forget_host_peak()
    taken = [steps.step(batch) for _ in range(repeats)]
    seconds = statistics.median(step["seconds"] for step in taken)
    spec = steps.model.spec
    return {
        "layers": spec.layers,
        "parameters": spec.parameters(),
        "tokens": tokens,
        "plan": {name: value for name, value in vars(steps.model.plan).items() if value is not None},
        "kernel": steps.model.kernel.name,
        "kernels_seen": seen,
        **{name: statistics.median(step[name] for step in taken) for name in ("forward", "backward", "optimizer")},
        "seconds": seconds,
        "reserve_seconds": reserve_seconds,
        "tokens_per_second": tokens / seconds,
        "mfu_causal": spec.flops_per_token(batch.attended) * tokens / seconds / PEAK,
        "peak_bytes_allocated": torch.cuda.max_memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": _host_peak(),
        "host_bytes_before": before,
        "tape_bytes_on_host": steps.model.host_bytes(1, tokens),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        "tapes": steps.model.describe_tapes(),
        "losses": [round(loss, 4) for loss in (steps.losses[0], steps.losses[-1])],
    }


def attention_kernels(steps: Steps, tokens: int) -> list[str]:
    """The attention operations that a step really ran, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps.step(steps.batch(tokens))
    return sorted({event.key for event in profile.key_averages() if "attention" in event.key})


def read_plan(text: str) -> ithaca.Plan:
    """'recipe=sweep; chunk=16K' as a configuration has it."""
    pairs = (item.partition("=") for item in text.split(";") if item.strip())
    return build(ithaca.Plan, {key.strip(): value.strip() for key, _, value in pairs}, "plan.")


def read_source(name: str, layers: int | None) -> ModelSource:
    source = ithaca.load_model(name, "bfloat16")
    if layers is None:
        return source
    spec = read_spec({**PRESETS[name], "num_hidden_layers": layers})
    return replace(source, spec=spec, weights=RandomWeights(spec, 0))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", default="32K", type=parse_tokens)
    parser.add_argument("--warm", type=parse_tokens, help="not given: all tokens")
    parser.add_argument("--plan", action="append", type=read_plan)
    parser.add_argument("--repeats", default=1, type=int)
    parser.add_argument("--name", default="", help="what the file is called beside model and tokens")
    args = parser.parse_args()
    use_expandable_segments()
    bound, results = matmul_tflops(), []
    layers = f"-{args.layers}-layers" if args.layers else ""
    name = f"step-{args.model}{layers}-{format_tokens(args.tokens)}{args.name and '-'}{args.name}"
    for plan in args.plan or [ithaca.Plan()]:
        source = read_source(args.model, args.layers)
        result = measure(source, args.tokens, plan, args.warm or args.tokens, args.repeats)
        results.append({"model": args.model, **result, "matmul_tflops": bound})
        record(name, results, args.out, args.commit)  # after each: a later one may run out of memory or time
        _tell(results[-1])
        gc.collect()  # FSDP2's modules know each other
        torch.cuda.empty_cache()


def _tell(row: dict[str, Any]) -> None:
    plan = {
        key: value
        for key, value in row["plan"].items()
        if key in ("recipe", "checkpoint", "chunk", "x", "o", "optimizer")
    }
    words = ", ".join(f"{key}={value}" for key, value in plan.items())
    print(
        f"{row['model']}, {format_tokens(row['tokens'])} tokens, {words}\n"
        f"  {row['seconds']:.2f} s (forward {row['forward']:.2f}, backward {row['backward']:.2f}, "
        f"optimizer {row['optimizer']:.2f})  {row['tokens_per_second']:.0f} tokens/s  "
        f"{100 * row['mfu_causal']:.1f} % causal MFU  GPU {format_bytes(row['peak_bytes'])} "
        f"({format_bytes(row['peak_bytes_allocated'])} allocated)  host {format_bytes(row['host_bytes'])}, "
        f"of it tapes {format_bytes(row['tape_bytes_on_host'])}",
        flush=True,
    )


if __name__ == "__main__":
    main()
