"""Do messages hide behind attention? Real NCCL ranks that share one GPU, and the trace of one step of rank 0.

    python -m bench.overlap --model llama3-8b --layers 2 --tokens 128K --ranks 4 --ulysses 2 --ring 2
    python -m bench.overlap --smoke           on a CPU over gloo: whether the script runs

Needs a NCCL that lets ranks share a GPU (docs/doctor.md). Ranks that share a chip take turns, or run side by side under
NVIDIA's MPS, so seconds mean nothing here. What the trace shows of rank 0:

    order                       launches of attention kernels (A) and of messages (M) by the host, in turn.
                                A message hides behind attention only if it was launched before it
    messages_between_attention  messages launched after the first attention kernel and before the last
    waits                       synchronisations of the host between these two launches: each is a gap between chunks
    hidden                      seconds of messages that lie under attention of the same rank, of all their seconds
"""

import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ithaca
from bench.points import points_command_line
from bench.record import record
from bench.step import read_source
from ithaca.base.sizes import parse_tokens
from ithaca.optimizer.adamw import clip
from ithaca.profile.lanes import Event, span_of
from ithaca.profile.spans import overlap, union

ATTENTION = ("flash", "fmha", "cudnn", "sdpa")  # in the names of attention kernels
MESSAGE = "nccldevkernel"
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


def kind(name: str) -> str:
    """'A' for an attention kernel, 'M' for a message between ranks, '' for anything else."""
    low = name.lower()
    return "M" if MESSAGE in low else "A" if any(word in low for word in ATTENTION) else ""


def read_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The figures of a trace."""
    events = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel" and kind(event["name"])]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    begun = {call["args"].get("correlation"): call["ts"] for call in calls if "Launch" in call["name"]}
    launched = sorted((begun[kernel["args"]["correlation"]], kind(kernel["name"])) for kernel in kernels)
    attention = [at for at, what in launched if what == "A"]
    first, last = (attention[0], attention[-1]) if attention else (0.0, 0.0)
    waits = [call["name"] for call in calls if call["name"].endswith(WAITS) and first < call["ts"] < last]
    messages = sorted(span_of(kernel) for kernel in kernels if kind(kernel["name"]) == "M")
    busy = union(span_of(kernel) for kernel in kernels if kind(kernel["name"]) == "A")
    seconds = sum(end - start for start, end in messages)
    within = [what for at, what in launched if first <= at <= last]
    return {
        "order": " ".join(f"{what}{sum(1 for _ in run)}" for what, run in groupby(what for _, what in launched)),
        "attention_kernels": len(attention),
        "messages": len(messages),
        "messages_between_attention": within.count("M"),
        "waits": len(waits),
        "message_seconds": seconds / 1e6,
        "hidden": overlap(messages, busy) / seconds if seconds else None,
    }


def work(rank: int, port: int, args: Any, out: Path) -> None:
    """One rank: two steps to warm up, then one under the profiler, whose trace rank 0 writes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks)}
    grid = ithaca.mesh(ulysses=args.ulysses, ring=args.ring, share_gpus=True)
    plan = ithaca.Plan(recipe="sweep", chunk=args.chunk)
    model = ithaca.apply(read_source(args.model, args.layers, "auto"), plan, grid)
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-5)
    rows = grid.data_ranks
    model.allocate(rows, args.tokens)
    ids = torch.randint(0, model.spec.vocab, (rows, args.tokens), generator=torch.Generator().manual_seed(0))
    batch = model.shard(ids, ids)

    def step() -> None:
        model(batch).backward()
        clip(model, 1.0, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * grid.gpu]) as profiled:
        step()
        if grid.gpu:
            torch.cuda.synchronize()
    if rank == 0:
        profiled.export_chrome_trace(str(out))
    dist.barrier()


def run(args: Any) -> dict[str, Any]:
    """Run all ranks; return the figures of rank 0's trace."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = trial.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "trace.json")
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=work, args=(rank, port, args, out)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if codes := [rank.exitcode for rank in ranks if rank.exitcode]:
            raise SystemExit(f"ranks ended with codes {codes}")
        return read_trace(json.loads(out.read_text())["traceEvents"])


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", default=2, type=int)
    parser.add_argument("--tokens", default="128K", type=parse_tokens)
    parser.add_argument("--chunk", default="16K", type=parse_tokens)
    parser.add_argument("--ranks", default=4, type=int)
    parser.add_argument("--ulysses", default=2, type=int)
    parser.add_argument("--ring", default=2, type=int)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.tokens, args.chunk, args.ranks, args.ring = "tiny", 256, 64, 2, 1
    shape = {name: getattr(args, name) for name in ("model", "layers", "tokens", "chunk", "ranks", "ulysses", "ring")}
    found = run(args)
    name = f"overlap-{args.ranks}-ranks{'-smoke' * args.smoke}{args.name and f'-{args.name}'}"
    record(name, [shape | found], args.out, args.commit)
    for word, value in found.items():
        print(f"{word}: {value}")


if __name__ == "__main__":
    main()
