"""The disks of a run's tapes: measured before the first step, and a warning if a step needs more than they give.

Measuring takes a second at most, and as many bytes as the tapes do, up to 256 MiB of each node's disks. They are free
again at once. It happens only in the folders that the Plan names. A short measurement may be faster than a long step
is: some disks have a fast cache in front. A file system without direct access is not measured, because the page cache
would answer; neither is one that has hardly any free space.
"""

import math
from dataclasses import dataclass, replace

from ithaca.assemble import Model
from ithaca.base.errors import PlanError
from ithaca.config import Config
from ithaca.data.mixture import Data
from ithaca.parallel.agree import least, on_this_node, together
from ithaca.parallel.mesh import Mesh
from ithaca.planner.answer.slow_disk import slow_disk, slow_disk_warning
from ithaca.planner.documents import file_documents
from ithaca.planner.hardware import Machine
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.schedule.job import Job
from ithaca.tape.devices import count_devices
from ithaca.tape.file import PART, TapeFile, free_space
from ithaca.tape.rate import write_and_read
from ithaca.tape.spec import BLOCK, disk_bytes

MOST = 256 * 2**20  # bytes that are written and read on each node
SECONDS = 0.4  # for either


@dataclass(frozen=True)
class DiskRates:
    """Bytes a second of all disks of the slowest node together."""

    read: float
    write: float


def measure_disks(grid: Mesh, folders: tuple[str, ...], needed: int) -> DiskRates | None:
    """Measure the disks of some folders, all ranks of a node at once. Collective.

    `needed`: bytes of a rank's tapes. None if a rank has no direct access or no free space to measure in.
    """
    ranks = on_this_node(grid.group, 1)[1]
    found = together(grid.group, lambda: _measure(folders, measured_bytes(folders, needed, ranks)))
    node = {way: on_this_node(grid.group, int(rate))[0] for way, rate in found.items()}
    read, write, *own = least(grid.group, node["read"], node["write"], *map(int, found.values()))
    return DiskRates(read, write) if all(own) else None


def measured_bytes(folders: tuple[str, ...], needed: int, ranks: int) -> int:
    """Bytes that a rank measures with: those of its tapes, at least a stripe for each folder; 0 without space."""
    most = MOST // ranks
    fewest = min(PART * len(folders), most)
    size = min(max(needed, fewest), most, min(map(free_space, folders)) // ranks)
    return size // BLOCK * BLOCK if size >= fewest else 0


def _measure(folders: tuple[str, ...], size: int) -> dict[str, float]:
    unknown = {"read": 0.0, "write": 0.0}
    if not size:
        return unknown
    try:
        file = TapeFile(folders, size)
    except PlanError:  # other programs take space as well
        return unknown
    try:
        return write_and_read(file, size, SECONDS) if file.direct else unknown
    finally:
        file.close()


def check_disks(model: Model, config: Config, data: Data) -> tuple[float, list[str]]:
    """Return the seconds in which a step's tapes are written to disk and read, and a warning if computing waits.

    Without tapes on disk nothing is measured. Collective.
    """
    plan, grid = model.plan, model.mesh
    if not plan.on_disk:
        return 0.0, []
    rows, passes = _passes(config)
    job = _pass_job(model, rows, config, data)
    rates = measure_disks(grid, plan.folders, disk_bytes(job.tapes, job.tiles))
    if rates is None:
        return 0.0, []
    copied = job.costs.work(job).disk
    seconds = _node_ranks(grid) * (copied.into / rates.read + copied.out / rates.write)
    warning = warn_of_slow_disks(job, grid, rates, passes)
    return passes * seconds, [warning] if warning else []


def warn_of_slow_disks(job: Job, grid: Mesh, rates: DiskRates, passes: int) -> str | None:
    """A warning if a step would wait for the disks; None if not, or if this device's speeds are not known."""
    gpu = known_gpu(grid.device)
    if gpu is None:
        return None
    disks, node = count_devices(job.plan.folders), _node_ranks(grid)
    gpu = replace(gpu, disk_read=rates.read / disks, disk_write=rates.write / disks)
    machine = Machine(nodes=grid.size // node, gpus=node, inside=gpu.inside, across=gpu.across)
    slow = slow_disk(job, gpu, machine, disks, passes)
    return slow_disk_warning(slow, job) if slow else None


def _passes(config: Config) -> tuple[int, int]:
    """Sequences in a pass, over all ranks, and the passes of a step."""
    batch = config.train.batch
    assert batch is not None
    rows = config.train.micro_batch or batch
    return rows, batch // rows


def _pass_job(model: Model, rows: int, config: Config, data: Data) -> Job:
    """A pass over `rows` sequences, packed with documents as the data are."""
    grid, tokens, sequences = model.mesh, config.train.tokens, math.ceil(rows / model.mesh.data_ranks)
    assert tokens is not None
    try:
        lengths = file_documents(data, config.data.packing, config.data.too_long).lengths(tokens)
    except PlanError:  # more documents than the planner counts
        lengths = (tokens,)
    return Job(
        spec=model.spec,
        plan=replace(model.plan, kernel=model.kernel.name),
        tokens=sequences * tokens,
        axes=grid.axes,
        documents=sequences * lengths,
        itemsize=model.dtype.itemsize,
    )


def _node_ranks(grid: Mesh) -> int:
    return grid.node_ranks or grid.size
