"""The model of a run as a Hugging Face folder: `ithaca export RUN DIR`. One process, on the CPU.

Weights are read from the checkpoint one by one and written file by file, so memory holds one output file (2 GB) and
one weight, however large the model is. The run may be training meanwhile: a lease keeps the checkpoint that is read.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ithaca.base.disk import reason
from ithaca.base.errors import ConfigError, ModelError, RunError, suggestion
from ithaca.base.shell import continue_command
from ithaca.checkpoint.files import CheckpointFolder, Described, cause, none_is_sound
from ithaca.checkpoint.lease import GoneError, Lease
from ithaca.checkpoint.snapshot import WEIGHT
from ithaca.model.save import check_vacant, write_folder
from ithaca.model.source import DTYPES, describe_model
from ithaca.train.folder.record import check_model
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.stages import checkpoint_model


def export(path: Path, folder: Path, dtype: str | None, best: bool = False) -> int:
    """Write the weights of the newest sound checkpoint, or of the best one; return its step."""
    run = RunFolder(path)
    if not run.begun():
        raise ConfigError(f"'{path}' is not a run folder: it has no config.toml")
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is not supported: {suggestion(dtype, DTYPES)}")
    try:
        folder = folder.resolve()  # a link or '.' is written where it leads
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        raise ModelError(f"'{folder}' is a link that leads nowhere: name a new folder") from None
    check_vacant(folder)
    if not run.has_checkpoints():
        raise ModelError(f"'{path}' has no checkpoint yet: train it further, {continue_command(path)}")
    source = describe_model(run.model)
    held = "torch.float64" if run.saved_config().model.dtype == "float64" else "torch.float32"
    wanted: Described = {f"{WEIGHT}{name}": [list(shape), held] for name, shape in source.spec.shapes()}
    dtypes = {
        name: DTYPES[dtype] if dtype else source.weights.stored_dtype(name) or DTYPES["float32"]
        for name, _ in source.spec.shapes()
    }
    files, damaged = CheckpointFolder(run.checkpoints), dict[int, str]()
    while True:
        only = best_step(path, files) if best else None
        with contextlib.suppress(GoneError), newest_sound(files, wanted, damaged, only) as (step, lease):
            manifest = files.manifest(step) or {}
            source = checkpoint_model(run.model, manifest)
            check_model(manifest, source.spec)
            write_folder(source, dtypes, _weights(files, step, lease, wanted), folder, rename_dtype=dtype is not None)
            return step


def best_step(path: Path, files: CheckpointFolder) -> int:
    """Return the step of a run's checkpoint with the lowest validation loss."""
    best = files.best()
    if best is None:
        raise ConfigError(
            f"'{path}' has no checkpoint with a validation loss, so --best names none: leave it out to take the last "
            f"checkpoint, or train further with --set data.validation=FILE"
        )
    for step in files.steps():
        if files.manifest(step) is None:
            text = f"The manifest of step {step} is damaged, so its validation loss is not known and --best skips it"
            print(text, file=sys.stderr)  # stdout may be JSON
    return best[0]


@contextlib.contextmanager
def newest_sound(
    files: CheckpointFolder, wanted: Described, damaged: dict[int, str], only: int | None = None
) -> Iterator[tuple[int, Lease]]:
    """Yield the step of the newest sound checkpoint, and a lease on it. Add the damage of others to `damaged`.

    `only`: this checkpoint, or none. Nothing is renamed: the run may be training. It may delete a checkpoint before it
    is leased, which raises GoneError.
    """
    while left := [step for step in files.steps() if step not in damaged and only in (None, step)]:
        step = left[-1]
        with files.lease(step) as lease:
            if lease.note:
                print(f"The disk of '{files.folder}' has no locks ({lease.note}): do not train in this run meanwhile")
            damage = files.damage(step, wanted)
            lease.check()
            if damage is None:
                yield step, lease
                return
        damaged[step] = damage
        if only is None:
            print(f"The checkpoint of step {step} is damaged ({damage}): trying the previous one")
    raise none_is_sound(files.folder, damaged) if damaged else RunError(f"'{files.folder}' has no checkpoint any more")


def _weights(files: CheckpointFolder, step: int, lease: Lease, wanted: Described) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a leased checkpoint. Raise GoneError if one may be of another checkpoint."""
    try:
        for name, tensor in files.read(step, wanted):
            lease.check()
            yield name.removeprefix(WEIGHT), tensor
            del tensor  # the caller's is the only one now
    except RunError:
        lease.check()
        raise
    except (OSError, RuntimeError, CheckpointException) as problem:
        lease.check()
        why = reason(cause(problem), files.folder)
        raise RunError(f"the checkpoint of step {step} in '{files.folder}' could not be read ({why})") from None
