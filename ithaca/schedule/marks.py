"""Progress of a step: schedules mark the parts of a pass as they begin; a reader asks what the device has reached.

The host runs far ahead of a GPU, so the host's own progress says little. A mark records an event on the current
stream, and counts when `query` says that the GPU has passed it. Nothing waits for the GPU. On a CPU a mark counts at
once.

    cost   an event from a pool for each mark: one for each layer and chunk, forward and backward. Events are used again
           only after they have passed. When all are pending, marks are dropped: the progress is then less exact for a
           while, and a fast step, which needs no live line, records few marks

Training threads mark; one other thread reads. They share deques, whose ends are safe to use from both.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from time import perf_counter
from typing import NamedTuple, Protocol

import torch

from ithaca.parallel.balance import Bounds, ring_work
from ithaca.parallel.layout import Layout
from ithaca.schedule.costs import block_products, local_tokens
from ithaca.schedule.job import Job

FORWARD, LOSS, REBUILD, BACKWARD, OPTIMIZER = "forward", "loss", "rebuilding x", "backward", "optimizer"
EVENTS = 256  # more than the marks among the thousand operations that a GPU's queue holds

# (phase, layer, chunk): this part of a pass begins; layer and chunk may be left out. Head rounds run over the chunks
# several times; theirs are numbered one round after the other
Mark = Callable[..., None]


def no_mark(phase: str, layer: int | None = None, chunk: int | None = None) -> None:
    """Mark nothing, in a pass whose progress is not shown."""


class Event(Protocol):
    """The part of `torch.cuda.Event` that marks use."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


@dataclass(frozen=True)
class PassWork:
    """FLOPs of a pass, in the order in which its parts are marked. Without chunks, a layer has one."""

    layers: int
    forward: tuple[float, ...]  # of each chunk, in one layer; of all head rounds, one after the other
    loss: float
    backward: tuple[float, ...]
    rounds: int = 1

    @cached_property
    def total(self) -> float:
        return self.layers * (sum(self.forward) + sum(self.backward)) + self.loss

    def share(self, phase: str, layer: int | None, chunk: int | None) -> float:
        """Return the share of the pass's work that is done when this part begins."""
        return self._done(phase, layer or 0, chunk) / self.total

    def _done(self, phase: str, layer: int, chunk: int | None) -> float:
        if phase == FORWARD:
            return layer * sum(self.forward) + sum(self.forward[: chunk or 0])
        forward = self.layers * sum(self.forward)
        if phase == LOSS:
            return forward
        if phase == OPTIMIZER:
            return self.total
        later = () if chunk is None else self.backward[chunk + 1 :]  # backward takes the last round and chunk first
        return forward + self.loss + (self.layers - 1 - layer) * sum(self.backward) + sum(later)


def pass_work(job: Job, layout: Layout, bounds: Bounds) -> PassWork:
    """Return the work of a pass over documents with these bounds, as the schedule's cost counts it."""
    spec, work, tokens = job.spec, job.costs.work(job), local_tokens(job)
    pairs = [max(period) for period in ring_work(layout, bounds, keys_stay=True).periods]
    rows = [layout.chunks.rows_in(chunk) for chunk in range(layout.chunks.count)]
    loss = 6.0 * spec.vocab * spec.hidden * tokens
    linear, attention = 2.0 * sum(block_products(job)) * tokens, work.attention / spec.layers
    # Rounds differ in heads, and the last one alone runs output projection and MLP
    heads = [max(map(len, split.q)) for group in job.rounds for split in group] if job.plan.sweeps else [1]
    projecting = block_products(job)[0] / sum(block_products(job))
    shares = [part / sum(heads) for part in heads]
    linear_shares = [projecting * share for share in shares]
    linear_shares[-1] += 1 - projecting

    def over_chunks(linear: float, attention: float) -> tuple[float, ...]:
        return tuple(
            linear * linear_share * row / sum(rows) + attention * share * pair / sum(pairs)
            for share, linear_share in zip(shares, linear_shares, strict=True)
            for row, pair in zip(rows, pairs, strict=True)
        )

    linear_backward = (work.linear - loss) / spec.layers - linear
    attention_backward = (2.5 + work.attention_runs - 1) * attention
    forward, backward = over_chunks(linear, attention), over_chunks(linear_backward, attention_backward)
    return PassWork(spec.layers, forward, loss, backward, len(heads))


@dataclass(frozen=True, eq=False)
class Step:
    """A step that is marked. Compared by identity, so that marks of an earlier step do not count for this one."""

    number: int
    passes: Sequence[float]  # the work of each, in any unit
    began: float = field(default_factory=perf_counter)


class Reached(NamedTuple):
    """A part of a step that has begun."""

    step: Step
    number: int  # of the pass, from 0
    work: Callable[[], PassWork]
    phase: str
    layer: int | None
    chunk: int | None

    def share(self) -> float:
        """Return the share of the step's work that is done when this part begins."""
        passes, within = self.step.passes, self.work().share(self.phase, self.layer, self.chunk)
        return (sum(passes[: self.number]) + passes[self.number] * within) / sum(passes)


class StepMarks:
    """The marks of a run's steps. `make_event` is None where a mark counts at once, as on a CPU."""

    def __init__(self, make_event: Callable[[], Event] | None, events: int = EVENTS):
        self._free = deque(make_event() for _ in range(events)) if make_event else None
        self._pending: deque[tuple[Event, Reached]] = deque()
        self._step: Step | None = None
        self._passes, self._in_pass = 0, no_mark  # begun in this step; the mark of the last one
        self._last: Reached | None = None

    @contextmanager
    def step(self, number: int, passes: Sequence[float]) -> Iterator[None]:
        """Mark the body as a step of passes with so much work each. After it, also by an error, none is under way."""
        self._passes, self._in_pass, self._step = 0, no_mark, Step(number, passes)
        try:
            yield
        finally:
            self._step = None

    def begin_pass(self, work: Callable[[], PassWork]) -> Mark:
        """Return the function that marks the parts of the step's next pass. Only the reader calls `work`."""
        step = self._step
        if step is None or self._passes == len(step.passes):
            return no_mark  # a pass outside the training steps
        self._in_pass, self._passes = partial(self._mark, step, self._passes, cache(work)), self._passes + 1
        return self._in_pass

    def mark(self, phase: str) -> None:
        """Mark a phase after the passes of a step, such as the optimizer."""
        self._in_pass(phase)

    def _mark(
        self,
        step: Step,
        number: int,
        work: Callable[[], PassWork],
        phase: str,
        layer: int | None = None,
        chunk: int | None = None,
    ) -> None:
        reached = Reached(step, number, work, phase, layer, chunk)
        if self._free is None:
            self._last = reached
            return
        try:
            event = self._free.popleft()
        except IndexError:
            return
        event.record()
        self._pending.append((event, reached))

    def last(self) -> Reached | None:
        """Return the last part of the current step that the device has begun; None between steps. One reader only."""
        while self._pending and self._pending[0][0].query():
            event, self._last = self._pending.popleft()
            assert self._free is not None
            self._free.append(event)
        last = self._last
        return last if last is not None and self.runs(last.step) else None

    def runs(self, step: Step) -> bool:
        """Return whether a step is under way."""
        return self._step is step

    def close(self) -> None:
        """Forget all marks. The reader must have ended."""
        self._step, self._last, self._in_pass = None, None, no_mark
        self._pending.clear()


def make_marks(device: torch.device) -> StepMarks:
    """Return marks for steps on a device."""
    return StepMarks(torch.cuda.Event if device.type == "cuda" else None)
