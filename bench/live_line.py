"""What the live line costs: steps with marks and a thread that reads them, beside steps without, in turns.

    python -m bench.live_line                                             one layer of Llama3-8B, 1M tokens, rank 0 of 8
    python -m bench.live_line --model llama3.2-1b --layers 16 --ranks 1 --tokens 32K      steps of a second, all layers

Two steps warm up; then a step with marks and one without take turns, and which comes first changes with every pair. The
share is the mean of the differences of the pairs over the mean step without marks; beside it stand the standard error
of that share and the marks' own host time: their number times the median of a mark, which a GPU's host queues beside
its other work. Messages between ranks come back to the rank that sends them.
"""

import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import ithaca
from bench.record import command_line, read_plan, record
from bench.step import read_source
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.optimizer.adamw import clip
from ithaca.parallel.axes import Axes
from ithaca.rehearsal.kernel_bound import synchronize
from ithaca.rehearsal.rehearse import loopback_mesh
from ithaca.schedule.marks import FORWARD, OPTIMIZER, Event, StepMarks, make_marks
from ithaca.train.report.live_line import LiveLine
from ithaca.train.report.report import Progress

MARKS = 10_000  # of which the time of one is the median


class Watched:
    """A model whose steps are marked or not."""

    def __init__(self, model: ithaca.Model, tokens: int):
        self.model, self.optimizer = model, ithaca.make_optimizer(model, learning_rate=0.0)
        ids = torch.randint(0, model.spec.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
        model.allocate(1, tokens)
        self.batch = model.shard(ids, ids)

    def seconds(self, marks: StepMarks | None) -> float:
        """Time a step, between one synchronisation before it and one after it."""
        synchronize(self.model.mesh.device)
        began = time.perf_counter()
        with marks.step(1, [1.0]) if marks else nullcontext():
            self.model(self.batch, marks=marks).backward()
            if marks:
                marks.mark(OPTIMIZER)
            clip(self.model, 1.0, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            synchronize(self.model.mesh.device)
        return time.perf_counter() - began


class Counted(StepMarks):
    """Marks that are counted, those that find no event included."""

    count = 0

    def _mark(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        super()._mark(*args, **kwargs)


def count_marks(watched: Watched) -> int:
    """The marks of a step."""
    marks = Counted(None)
    watched.seconds(marks)
    return marks.count


def mark_seconds(device: torch.device) -> float:
    """The median time of a mark on the host, over marks that all find an event."""
    make_event: type[Event] | None = torch.cuda.Event if device.type == "cuda" else None
    marks, taken = StepMarks(make_event), []
    with marks.step(1, [1.0]):
        mark = marks.begin_pass(lambda: None)  # pyrefly: ignore
        for number in range(MARKS):
            began = time.perf_counter()
            mark(FORWARD, 0, number)
            taken.append(time.perf_counter() - began)
            if device.type == "cuda" and number % 64 == 0:
                synchronize(device)
                marks.last()
    return statistics.median(taken)


def compare(watched: Watched, pairs: int) -> dict[str, Any]:
    """Seconds of steps with and without marks, in turns, and what they say."""
    device = watched.model.mesh.device
    for _ in range(2):
        watched.seconds(None)
    taken: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for marked in (pair % 2 == 0, pair % 2 == 1):
                taken[marked].append(_timed(watched, marked, Path(folder)))
    differences = [with_ - without for with_, without in zip(taken[True], taken[False], strict=True)]
    mean, number, one = statistics.mean(taken[False]), count_marks(watched), mark_seconds(device)
    error = statistics.stdev(differences) / pairs**0.5 if pairs > 1 else None
    return {
        "seconds_without": taken[False],
        "seconds_with": taken[True],
        "share": statistics.mean(differences) / mean,
        "standard_error_of_share": None if error is None else error / mean,
        "marks": number,
        "seconds_of_a_mark": one,
        "share_of_marks_on_the_host": number * one / mean,
    }


def _timed(watched: Watched, marked: bool, folder: Path) -> float:
    """A step, with a live line beside it if it is marked."""
    if not marked:
        return watched.seconds(None)
    progress = Progress(folder / "log", 0, 1)
    line = LiveLine(marks := make_marks(watched.model.mesh.device), progress, watched.model.mesh.device)
    try:
        return watched.seconds(marks)
    finally:
        line.close()
        progress.close()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8, help="Ulysses ranks that share the sequence")
    parser.add_argument("--tokens", default="1M", type=parse_tokens)
    parser.add_argument("--plan", default="recipe=sweep", type=read_plan)
    parser.add_argument("--pairs", default=6, type=int)
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is a GPU")
    args = parser.parse_args()
    grid = loopback_mesh(Axes(ulysses=args.ranks), args.device)
    source = read_source(args.model, args.layers, "float32" if grid.device.type == "cpu" else "bfloat16")
    found = compare(Watched(ithaca.apply(source, args.plan, grid), args.tokens), args.pairs)
    row = {"model": args.model, "layers": args.layers, "ranks": args.ranks, "tokens": args.tokens, **found}
    record(f"live-line-{args.model}-{format_tokens(args.tokens)}-{args.ranks}", [row], args.out, args.commit)
    error = found["standard_error_of_share"]
    print(
        f"{args.model}, {args.layers} layers, {format_tokens(args.tokens)} tokens, rank 0 of {args.ranks}: "
        f"{statistics.mean(found['seconds_without']):.3f} s without marks; with them {100 * found['share']:+.3f} % "
        f"(standard error {100 * (error or 0):.3f} %); {found['marks']} marks of "
        f"{1e6 * found['seconds_of_a_mark']:.1f} µs are {100 * found['share_of_marks_on_the_host']:.4f} %"
    )


if __name__ == "__main__":
    main()
