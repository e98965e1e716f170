"""One whole training step on one GPU: forward, backward, clipping and AdamW, in bf16 with fp32 shards.

    python -m bench.step --model llama3.2-1b --tokens 32K --checkpoint full

Prints seconds, tokens/s, causal MFU (of 989 TFLOP/s, no credit for recomputation) and peak memory, and records them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import ithaca
from bench.bounds import matmul_tflops, median_seconds
from bench.record import record
from ithaca.sizes import format_bytes, format_tokens, parse_tokens

PEAK = 989e12


def measure(model_name: str, tokens: int, plan: ithaca.Plan, repeats: int) -> dict[str, Any]:
    model = ithaca.apply(ithaca.load_model(model_name, "bfloat16"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, model.spec.vocab, (1, tokens))
    batch = model.shard(ids, ids)
    losses = []

    def step() -> None:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()
    torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, repeats)
    flops = model.spec.flops_per_token(batch.attended) * tokens
    return {
        "model": model_name,
        "tokens": tokens,
        "recipe": plan.recipe,
        "checkpoint": plan.checkpoint,
        "kernel": model.kernel.name,
        "kernels_seen": attention_kernels(step),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu_causal": flops / seconds / PEAK,
        "peak_bytes_allocated": torch.cuda.max_memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "losses": [round(loss.item(), 4) for loss in (losses[0], losses[-1])],
    }


def attention_kernels(step) -> list[str]:
    """The attention operations that a step really ran, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    torch.cuda.synchronize()
    return sorted({event.key for event in profile.key_averages() if "attention" in event.key})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--tokens", default="32K", type=parse_tokens)
    parser.add_argument("--checkpoint", default="full", help="several, parted by commas")
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--out", default="bench/results", type=Path)
    parser.add_argument("--commit", help="of a tree that was copied without its history")
    args = parser.parse_args()
    bound = matmul_tflops()
    results = []
    for checkpoint in args.checkpoint.split(","):
        plan = ithaca.Plan(recipe="dense", checkpoint=checkpoint)
        results.append({**measure(args.model, args.tokens, plan, args.repeats), "matmul_tflops": bound})
        torch.cuda.empty_cache()
    name = f"step-{args.model}-{format_tokens(args.tokens)}-dense"
    file = record(name, results, args.out, args.commit)
    print(f"{args.model}, {format_tokens(args.tokens)} tokens, matmul bound {bound:.0f} TFLOP/s -> {file}")
    for row in results:
        print(
            f"  {row['checkpoint']:10} {row['seconds']:.3f} s  {row['tokens_per_second']:.0f} tokens/s  "
            f"{100 * row['mfu_causal']:.1f} % causal MFU  peak {format_bytes(row['peak_bytes'])}  {row['kernels_seen']}"
        )


if __name__ == "__main__":
    main()
