"""The profile of a step inside a run (`run.profile_step`), on the first rank; the other ranks wait for it.

    step N         under torch's profiler: lanes and trace
    step N + 1     with the memory log, which slows the host down more: device memory by owner
    the run folder profile-step-N/, as of `ithaca profile`, when a few steps more are done or the run ends

Both leave results unchanged. While memory is logged, operations are launched one by one, also under
`plan.cuda_graph`: a replay allocates nothing. The seconds of both steps stand beside the median of their neighbours.
Steps before and after count apart: after the first use of torch's profiler a process may be slower (docs/LOG.md).
"""

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ithaca.base.errors import ConfigError, RunError
from ithaca.base.sizes import format_seconds
from ithaca.config import Config
from ithaca.model.source import ModelSource
from ithaca.parallel.mesh import Mesh
from ithaca.profile.files import write_profile
from ithaca.profile.memory_log import MemoryLog
from ithaca.profile.operations import find_operation
from ithaca.profile.profile import describe_model, lanes_part, memory_part
from ithaca.profile.record import Phases, Recording, record_lanes
from ithaca.profile.timeline import peak_bytes
from ithaca.rehearsal.memory_meter import mark_gradients
from ithaca.rehearsal.rehearse import with_allocator

if TYPE_CHECKING:
    from ithaca.train.loop import TrainingRun

NEIGHBOURS = 3  # steps before and after that the profiled ones are compared with


class StepProfile:
    """Profiles one step of a run. Without a step, and on other ranks, it does nothing."""

    def __init__(self, step: int | None, folder: Path, device: torch.device, dtype: torch.dtype):
        self.step, self.folder = step, folder / f"profile-step-{step}"
        self._log = MemoryLog(device, dtype, find_operation) if step else None
        self._recording: Recording | None = None
        self._phases: Phases | None = None
        self._peak: dict[str, int] = {}
        self._seconds: dict[int, float] = {}

    def building(self) -> AbstractContextManager[object]:
        """Record the allocations of the body, which live during the whole run."""
        return self._log or nullcontext()

    def begin(self, run: "TrainingRun") -> None:
        """Print a line if the run is past the step and has no profile of it."""
        if self.step and run.done >= self.step and not self.folder.exists():
            run.progress.say(f"Step {self.step} is not profiled: the run has done {run.done} steps already")

    @contextmanager
    def watch(self, run: "TrainingRun") -> Iterator[None]:
        """Watch the body, which is the run's next step, if it is one of the two."""
        number, device = run.done + 1, run.mesh.device
        if self._log is not None and number == self.step:
            with record_lanes(device, run.model.engine) as self._recording:
                yield
        elif self._log is None or self._recording is None or number != self.step + 1:  # pyrefly: ignore
            yield
        else:
            mark_gradients(run.model.decoder)
            self._log.restart()
            before, self._phases = run.marks, Phases(self._log.now_seconds, run.marks)
            run.marks = self._phases
            try:
                with run.model.eager(), self._log:
                    yield
            finally:
                run.marks = before
            self._peak = with_allocator(peak_bytes(self._log), device)

    def add(self, run: "TrainingRun", metrics: dict[str, Any]) -> None:
        """Note the seconds of a step; write the profile when its neighbours are done."""
        if not self.step or abs(metrics["step"] - self.step) > NEIGHBOURS + 1:
            return
        self._seconds[metrics["step"]] = metrics["seconds"]
        if metrics["step"] == self.step + 1 + NEIGHBOURS:
            self.finish(run)

    def finish(self, run: "TrainingRun") -> None:
        """Write what was recorded and say where; nothing if that is done."""
        if self._recording is None and not self._peak:
            return
        overhead = self._overhead()
        report = describe_run(run) | {"overhead": overhead, "step": self.step}
        if self._recording:
            report |= {"seconds_with_profiler": self._seconds[self.step], **lanes_part(self._recording.lanes, None)}  # pyrefly: ignore
        if self._log and self._phases and self._peak:
            report["seconds_with_memory_log"] = self._seconds[self.step + 1]  # pyrefly: ignore
            report |= memory_part(self._log, self._peak, run_job(run), self._phases)
        try:
            self.folder.mkdir(exist_ok=True)
            files = write_profile(self.folder, report, self._recording)["files"]
            run.progress.say(f"{overhead}. Profile of rank 0: {files['page']}")
        except (OSError, RunError) as problem:
            run.progress.warn(f"the profile of step {self.step} could not be written ({problem}); training continues")
        self._recording, self._peak = None, {}

    def _overhead(self) -> str:
        """The seconds of the profiled steps beside those of their neighbours."""
        assert self.step
        near = {
            "before": range(self.step - NEIGHBOURS, self.step),
            "after": range(self.step + 2, self.step + 2 + NEIGHBOURS),
        }
        medians = [
            f"{format_seconds(statistics.median(found))} {when}"
            for when, steps in near.items()
            if (found := [self._seconds[number] for number in steps if number in self._seconds])
        ]
        took = {self.step: "under torch's profiler", self.step + 1: "while memory was logged"}
        parts = [
            f"step {number} took {format_seconds(self._seconds[number])} {how}"
            for number, how in took.items()
            if number in self._seconds
        ]
        beside = f"; the median of its neighbours is {' and '.join(medians)}" if medians else ""
        text = f"{', '.join(parts)}{beside}"
        return text[0].upper() + text[1:]


def open_profile(config: Config, folder: Path, grid: Mesh, source: ModelSource) -> StepProfile:
    """Return the profile that a run's options ask for, on the first rank."""
    step = config.run.profile_step if grid.rank == 0 else None
    return StepProfile(step, folder, grid.device, source.compute_dtype(grid.device))


def check_step(step: int | None, steps: int) -> None:
    """Raise an error if a run has no such step, or none after it."""
    if step is not None and not 1 <= step < steps:
        possible = f"1 to {steps - 1} work" if steps > 1 else "2 steps or more are needed"
        raise ConfigError(
            f"run.profile_step is {step}, and train.steps is {steps}: memory is logged in the step after it, so "
            f"{possible}"
        )


def describe_run(run: "TrainingRun") -> dict[str, Any]:
    """The report's entries that describe the run."""
    axes, options = run.mesh.axes, run.config.train
    return {
        **describe_model(run.model),
        "model": run.config.model.source,
        "tokens": options.tokens,
        "batch": options.batch,
        "ranks": run.mesh.size,
        "mesh": axes.grid,
        "layers": run.model.spec.layers,
        "model_layers": run.model.spec.layers,
        "looped_back": False,
    }


def run_job(run: "TrainingRun") -> Any:
    """The first rank's part of a step, for predictions."""
    rows, tokens = run.pass_size()
    sequences = -(-rows // run.mesh.data_ranks)
    return replace(run.model.reservation.job(sequences * tokens), passes=run.config.train.batch // rows)  # pyrefly: ignore
