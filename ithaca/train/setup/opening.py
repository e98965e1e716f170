"""Everything that a run, or a stage of it, is made of, opened on all ranks in one fixed order."""

from dataclasses import dataclass

from ithaca.assemble import Model, apply
from ithaca.config import Config
from ithaca.data.mixture import Data
from ithaca.data.packing import Rows
from ithaca.data.windows import Windows
from ithaca.parallel.agree import from_first, together
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.origin import Origin, find_origin
from ithaca.train.setup.stages import Span, span_of
from ithaca.train.setup.start import FreeMemory, check_data, check_vocabulary, open_data, open_rows, open_source, settle
from ithaca.train.step_profile import StepProfile, open_profile
from ithaca.train.tasks import Tasks, open_tasks
from ithaca.train.validation import open_validation


@dataclass(frozen=True)
class Opened:
    """What the steps of a run, or of a stage, need."""

    config: Config
    model: Model
    data: Data
    rows: Rows
    why: list[str]  # the planner's lines about a Plan that it chose
    origin: Origin | None  # the run that a new run starts from
    held_out: Windows | None  # what to validate on
    profile: StepProfile
    span: Span
    tasks: Tasks | None  # to run between its steps


def open_run(config: Config, run: RunFolder, grid: Mesh, memory: FreeMemory, given: Origin | None) -> Opened:
    """Open the stage that a run is in, or all of a run without stages. Collective."""
    origin = from_first(grid.group, lambda: find_origin(run, given, config))
    resumed = from_first(grid.group, run.has_checkpoints)
    described = run.model if resumed else origin.model if origin else None
    config, (plan, axes, why) = from_first(grid.group, lambda: settle(config, run, grid, memory, described, resumed))
    if axes != config.mesh:
        grid = mesh(**vars(axes), device=grid.device.type)
    data, held = open_data(config, run, grid)
    check_data(data, grid)
    held_out = open_validation(config, run, grid, data, held)
    span = from_first(grid.group, lambda: span_of(config, run.last_checkpoint()))
    rows = together(grid.group, lambda: open_rows(config, data, span))
    source = together(grid.group, lambda: open_source(config, described, resumed, data))
    if held_out:
        together(grid.group, lambda: check_vocabulary(source, held_out.data))
    tasks = together(grid.group, lambda: open_tasks(config, source))
    profile = open_profile(config, run.path, grid, source)
    with profile.building():
        model = apply(source, plan, grid)
    return Opened(config, model, data, rows, why, origin, held_out, profile, span, tasks)
