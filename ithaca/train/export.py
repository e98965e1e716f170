"""The model of a run as a Hugging Face folder: `ithaca export RUN DIR`. One process, on the CPU.

Weights are read from the checkpoint one by one and written file by file, so memory holds one output file (2 GB) and
one weight, however large the model is.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ithaca.base.errors import ConfigError, ModelError, suggestion
from ithaca.model.save import check_vacant, write_folder
from ithaca.model.source import DTYPES, describe_model
from ithaca.train.checkpoint import none_is_sound
from ithaca.train.checkpoint_files import CheckpointFolder, Described
from ithaca.train.run_folder import RunFolder

WEIGHT = "weight/"  # the prefix of weights in a checkpoint (snapshot.training_state)


def export(path: Path, folder: Path, dtype: str | None) -> int:
    """Write the weights of the newest sound checkpoint; return its step."""
    run = RunFolder(path)
    if not run.begun():
        raise ConfigError(f"'{path}' is not a run folder: it has no config.toml")
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is not supported: {suggestion(dtype, DTYPES)}")
    folder = folder.resolve()  # a link or '.' is written where it leads
    check_vacant(folder)
    if not run.has_checkpoints():
        raise ModelError(f"'{path}' has no checkpoint yet: train it further, ithaca train --run {path}")
    source = describe_model(run.model)
    held = "torch.float64" if run.saved_config().model.dtype == "float64" else "torch.float32"
    wanted: Described = {f"{WEIGHT}{name}": [list(shape), held] for name, shape in source.spec.shapes()}
    files = CheckpointFolder(run.checkpoints)
    step = _newest_sound(files, wanted)
    dtypes = {
        name: DTYPES[dtype] if dtype else source.weights.stored_dtype(name) or DTYPES["float32"]
        for name, _ in source.spec.shapes()
    }
    write_folder(source, dtypes, _weights(files, step, wanted), folder, rename_dtype=dtype is not None)
    return step


def _newest_sound(files: CheckpointFolder, wanted: Described) -> int:
    """Return the step of the newest sound checkpoint. Nothing is renamed: the run may be training."""
    steps = files.steps()
    for step in reversed(steps):
        damage = files.damage(step, wanted)
        if damage is None:
            return step
        print(f"The checkpoint of step {step} is damaged ({damage}): trying the previous one")
    raise none_is_sound(files.folder, len(steps))


def _weights(files: CheckpointFolder, step: int, wanted: Described) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in files.read(step, wanted):
        yield name.removeprefix(WEIGHT), tensor
