"""Steps of a model with a tensor in host memory and on disk, in one process: seconds, predicted and measured; losses.

    python -m bench.disk --model llama3.2-1b --tokens 256K --folder /scratch
    python -m bench.disk --tokens 64K --tokens 256K --folder /nvme0,/nvme1 --move o --move kv

First the disks are measured alone: writing, reading, and both at once. Each length then runs with the tensor in host
memory and with it on disk, from the same weights and tokens: a shorter step to warm up, then --repeats steps, of which
the medians count. Predictions use the measured rates of the disks and the planner's rates of this GPU, or those of
--hardware. The slowdown is the step with the disk over the step without; on a CPU it is predicted for an H200 and means
nothing. The first losses must be the same bits.
"""

import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ithaca
from bench.points import Row, cluster_here, free_memory, points_command_line, run_points
from bench.record import read_plan
from bench.step import Steps, read_source
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.sizes import format_tokens, parse_bytes, parse_tokens
from ithaca.planner.hardware import Cluster
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.places import split_folders
from ithaca.schedule.job import Job
from ithaca.tape.devices import count_devices
from ithaca.tape.file import TapeFile
from ithaca.tape.rate import write_and_read

SMOKE = {"model": "tiny", "tokens": [256], "size": 2**20, "repeats": 1, "plan": ithaca.Plan(recipe="sweep", chunk=64)}
WARM = 8  # a step that builds the kernels has one token in so many
TILE = 32 * 2**20  # bytes of a read or write while both run


def disk_rates(folders: tuple[str, ...], size: int) -> dict[str, Any]:
    """Bytes a second of writing, of reading, and of both together while both run."""
    file = TapeFile(folders, size)
    try:
        alone = write_and_read(file, size)
        return {**alone, "both": _both(file, size), "direct": file.direct, "devices": count_devices(folders)}
    finally:
        file.close()


def _both(file: TapeFile, size: int) -> float:
    """One half of the file is read while the other is written."""
    half = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE

    def all_of(move: Callable[[int, memoryview], None], start: int) -> None:
        memory = memoryview(mmap.mmap(-1, min(TILE, half)))
        for place in range(start, start + half, len(memory)):
            move(place, memory[: start + half - place])

    lanes = [threading.Thread(target=all_of, args=lane) for lane in ((file.read, 0), (file.write, half))]
    began = time.perf_counter()
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return 2 * half / (time.perf_counter() - began)


def predicted(cluster: Cluster, model: ithaca.Model, tokens: int) -> dict[str, Any]:
    """The planner's seconds of a step, and of what its passes compute and copy."""
    plan = replace(model.plan, kernel=model.kernel.name)
    job = Job(spec=model.spec, plan=plan, tokens=tokens, itemsize=model.dtype.itemsize)
    found = predict_seconds(job, cluster.gpu, cluster.machine, max(count_devices(plan.folders), 1))
    copied = job.costs.work(job).disk
    return {
        "seconds_predicted": found.step,
        "passes_predicted": [vars(each) for each in found.passes],
        "disk_bytes_read": copied.into,
        "disk_bytes_written": copied.out,
    }


def measure(args: Any, cluster: Cluster, tokens: int, plan: ithaca.Plan) -> Row:
    """Medians of steps under a Plan, and what was predicted."""
    torch.manual_seed(0)
    steps = Steps(read_source(args.model, args.layers, "bfloat16" if torch.cuda.is_available() else "float32"), plan)
    steps.step(steps.batch(max(tokens // WARM, plan.chunk or 1)))
    steps.model.allocate(1, tokens)
    batch = steps.batch(tokens)
    taken = [steps.step(batch) for _ in range(args.repeats)]
    return {
        "tokens": tokens,
        "plan": {name: value for name, value in vars(steps.model.plan).items() if value is not None},
        "kernel": steps.model.kernel.name,
        "layers": steps.model.spec.layers,
        **{name: statistics.median(step[name] for step in taken) for name in taken[0]},
        "every_step": [step["seconds"] for step in taken],
        **predicted(cluster, steps.model, tokens),
        "losses": steps.losses,
        "tapes": steps.model.describe_tapes(),
    }


def compare(args: Any, cluster: Cluster, rates: dict[str, Any], tokens: int, move: str) -> Row:
    """One length with a tensor in host memory and on disk."""
    rows = {}
    for place in ("host", "disk"):
        moved = {move: place, "disk": args.folder if place == "disk" else None}
        rows[place] = measure(args, cluster, tokens, replace(args.plan, **moved))
        free_memory()
    host, disk = rows["host"], rows["disk"]
    slower = {key: disk[key] / host[key] for key in ("seconds", "seconds_predicted")}
    return {
        "model": args.model,
        "tokens": tokens,
        "move": move,
        "disk_rates": rates,
        **rows,
        "slowdown": slower["seconds"],
        "slowdown_predicted": slower["seconds_predicted"],
        "prediction_error": slower["seconds_predicted"] / slower["seconds"] - 1,
        "same_first_loss": host["losses"][0] == disk["losses"][0],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(host["losses"], disk["losses"], strict=True)),
    }


def say(row: Row) -> str:
    lines = [
        f"{row['model']}, {format_tokens(row['tokens'])} tokens, {row['move']} in host memory and on disk "
        f"(writes {row['disk_rates']['write'] / 1e9:.2f} GB/s, reads {row['disk_rates']['read'] / 1e9:.2f}, "
        f"both at once {row['disk_rates']['both'] / 1e9:.2f})"
    ]
    for place in ("host", "disk"):
        found = row[place]
        lines.append(
            f"  {place}: {found['seconds']:.2f} s measured (forward {found['forward']:.2f}, backward "
            f"{found['backward']:.2f}), {found['seconds_predicted']:.2f} s predicted; first loss "
            f"{found['losses'][0]:.6f}"
        )
    same = "the same" if row["same_first_loss"] else "DIFFERENT"
    return "\n".join(
        [
            *lines,
            f"  slowdown {row['slowdown']:.3f} measured, {row['slowdown_predicted']:.3f} predicted "
            f"({row['prediction_error']:+.1%}); first losses {same}, all within {row['largest_loss_difference']:.2g}",
        ]
    )


def points(args: Any) -> Iterator[tuple[str, Callable[[], Row]]]:
    folders = split_folders(args.folder)
    rates = disk_rates(folders, args.size)
    there = cluster_here(args.hardware)
    each = {f"disk_{way}": rates[way] / rates["devices"] for way in ("read", "write")}
    cluster = replace(there, gpu=replace(there.gpu, **each))
    for tokens in args.tokens:
        for move in args.move:
            yield (
                f"{format_tokens(tokens)}-{move}",
                lambda tokens=tokens, move=move: compare(args, cluster, rates, tokens, move),
            )


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", action="append", type=parse_tokens, help="may be repeated; default: 256K")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk, or several: /nvme0,/nvme1")
    parser.add_argument("--move", action="append", help="the tensor that moves: o (default), x, kv, …; may be repeated")
    parser.add_argument("--plan", default="recipe=sweep; x=host; zero=2", type=read_plan, help="the rest of the Plan")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--size", default="4GiB", type=parse_bytes, help="bytes with which the disks are measured")
    parser.add_argument("--hardware", type=Path, help="rates of this GPU, as `ithaca plan --measure` writes them")
    args = parser.parse_args()
    vars(args).update(SMOKE if args.smoke else {})
    args.tokens, args.move = args.tokens or [parse_tokens("256K")], args.move or ["o"]
    use_expandable_segments()
    run_points("disk", points(args), args, say)


if __name__ == "__main__":
    main()
