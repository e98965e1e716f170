"""A training run from its configuration to its last checkpoint, stage by stage. Every rank calls `train`."""

import gc
from pathlib import Path

from ithaca.base.allocator import use_expandable_segments
from ithaca.base.errors import IthacaError, LostRankError
from ithaca.base.shell import continue_command
from ithaca.config import Config
from ithaca.parallel.agree import together
from ithaca.parallel.hangs import Roll, answering
from ithaca.parallel.joining import JOIN_SECONDS
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.train.folder.run_folder import RunFolder, check_shared
from ithaca.train.loop import TrainingRun
from ithaca.train.ranks.elastic import leave
from ithaca.train.ranks.stop import write_error
from ithaca.train.report.sinks import check_report
from ithaca.train.setup.opening import open_run
from ithaca.train.setup.origin import Origin
from ithaca.train.setup.stages import OtherStage
from ithaca.train.setup.start import FreeMemory, free_memory


def train(config: Config, path: Path, launched: bool = False, origin: Origin | None = None) -> None:
    """Train in a run folder on this job's ranks, from its last checkpoint on if it has one.

    `launched`: a launcher of ours started this rank, and ends it at a second Ctrl-C (stop.py). `origin`: the run whose
    checkpoint a new run starts from.
    """
    use_expandable_segments()
    device, longer = None if config.train.device == "auto" else config.train.device, config.run.timeout or 0
    share = config.run.share_gpus
    grid = mesh(**vars(config.mesh), device=device, timeout=max(longer, JOIN_SECONDS), share_gpus=share)

    def end(lost: LostRankError) -> None:
        again = f"; continue from the last checkpoint with {continue_command(path)}"
        leave(str(lost) if launched else f"error: {lost}{again}")  # our launcher restarts the run

    with answering(grid.group, end) as roll:
        _train(config, RunFolder(path), grid, launched, roll, origin)


def _train(config: Config, run: RunFolder, grid: Mesh, launched: bool, roll: Roll, given_origin: Origin | None) -> None:
    lock = together(grid.group, lambda: run.hold() if grid.rank == 0 else None)
    refused = False
    try:
        together(grid.group, lambda: check_report(config.run.report) if grid.rank == 0 else None)
        check_shared(run, lock, grid)
        memory = free_memory(grid)
        while _train_stage(config, run, grid, memory, launched, roll, given_origin):
            gc.collect()  # the model of the stage before, with its tapes and its optimizer
            memory = free_memory(grid)
    except IthacaError as error:
        refused = not isinstance(error, LostRankError)
        raise
    finally:
        if lock:
            run.release(refused)


def _train_stage(
    config: Config, run: RunFolder, grid: Mesh, memory: FreeMemory, launched: bool, roll: Roll, given: Origin | None
) -> bool:
    """Train the stage that the run is in, or all of a run without stages. Return whether another stage follows."""
    found = open_run(config, run, grid, memory, given)
    try:
        training = TrainingRun(
            found.config,
            run,
            found.model,
            found.data,
            found.rows,
            found.why,
            found.origin,
            found.held_out,
            found.profile,
            found.span,
            found.tasks,
        )
    except OtherStage as other:
        for text in other.args if grid.rank == 0 else ():
            write_error(f"warning: {text}")
        return True
    return not training.go(launched, roll) and not found.span.is_last
